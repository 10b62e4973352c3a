"""Chat templates with the structure of those that the families publish, in few lines.

Kept are the marks, the order of parts, what is dropped from earlier turns, and what is refused; left out are
instructions, built-in tools and dates.
"""

# ruff: noqa: E501
from dataclasses import dataclass

_TOOLS = "{%- for tool in tools %}{{ tool | tojson }}\n{% endfor %}"

# Qwen2.5: all turns stay.
QWEN25 = (
    "{%- if tools %}<|im_start|>system\n# Tools\n" + _TOOLS + "Call as <tool_call>.<|im_end|>\n{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}{% if m.content or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Qwen3: reasoning stays until the next message of the user.
QWEN3 = (
    "{%- if tools %}<|im_start|>system\n# Tools\n" + _TOOLS + "Call as <tool_call>.<|im_end|>\n{% endif %}"
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{%- elif m.role == 'assistant' %}"
    "{%- set content = m.content %}{% set reasoning = '' %}"
    "{%- if m.reasoning_content is string %}{% set reasoning = m.reasoning_content %}"
    "{%- elif '</think>' in content %}"
    "{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last and (loop.last or reasoning) %}"
    "{{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}"
    "{%- else %}{{ content }}{% endif %}"
    "{%- for c in m.tool_calls or [] %}{% if content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{- \'<tool_call>\n{"name": "\' + c.function.name + \'", "arguments": \' }}'
    "{{- c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endif %}"
    "{{- '<|im_end|>\n' }}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Llama 3.1: one call in a turn, without text; results are of `ipython`.
LLAMA3 = (
    "{%- for m in messages %}"
    "{%- if m.tool_calls %}"
    "{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool-calls') }}{% endif %}"
    "{%- set c = m.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}<|eot_id|>'
    "{%- else %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>"
    "{%- if loop.first and tools %}{{ '\n\n' + tools | tojson }}{% endif %}{{ '\n\n' + m.content | trim }}<|eot_id|>"
    "{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)

# Mistral: tools before the last user's message, identifiers of nine letters and digits.
MISTRAL = (
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}"
    "{%- if tools and loop.first %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ m.content }}[/INST]"
    "{%- elif m.tool_calls %}[TOOL_CALLS]["
    "{%- for c in m.tool_calls %}"
    "{%- if c.id is undefined or c.id | length != 9 %}{{ raise_exception('IDs of length 9') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{%- if not loop.last %}, {% endif %}{% endfor %}]</s>"
    "{%- elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- else %}{{ m.content }}</s>{% endif %}"
    "{%- endfor %}"
)

# DeepSeek R1: a turn begins with reasoning, which answers lose once others follow; arguments are text.
DEEPSEEK = (
    "{%- if tools %}{{ tools | tojson }}{% endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{%- elif m.role == 'tool' %}<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>{{ m.content }}"
    "<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    "{%- elif m.tool_calls %}<｜Assistant｜>{{ m.content }}<｜tool▁calls▁begin｜>"
    "{%- for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}"
    "{{ '\n```json\n' + c.function.arguments + '\n```' }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{%- else %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<｜Assistant｜>{{ '<think>\n' }}{% endif %}"
)

# gpt-oss: reasoning of calls stays until an answer; a turn's end token changes once others follow.
HARMONY = (
    "{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{%- set ns = namespace(last_call=none) %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- if '<|channel|>final<|message|>' in m.content %}{{ raise_exception('tags in the content') }}{% endif %}"
    "{%- set f = namespace(future=false) %}"
    "{%- for n in messages[loop.index:] %}{% if n.role == 'assistant' and not n.tool_calls %}"
    "{%- set f.future = true %}{% endif %}{% endfor %}"
    "{%- if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.last_call = c.name %}"
    "{%- if m.thinking and not f.future %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "{%- endif %}<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{- c.arguments | tojson }}<|call|>"
    "{%- elif loop.last and not add_generation_prompt %}"
    "{%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|return|>"
    "{%- else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% set ns.last_call = none %}"
    "{%- endif %}"
    "{%- elif m.role == 'tool' %}"
    "{%- if ns.last_call is none %}{{ raise_exception('no previous tool call') }}{% endif %}"
    "<|start|>functions.{{ ns.last_call }} to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>"
    "{%- else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# Llama 4: a Python list of calls.
LLAMA4 = (
    "{%- for m in messages %}"
    "<|header_start|>{{ 'ipython' if m.role == 'tool' else m.role }}<|header_end|>"
    "{%- if loop.first and tools %}{{ '\n\n' + tools | tojson }}{% endif %}{{ '\n\n' + m.content }}"
    "{%- if m.tool_calls %}<|python_start|>[{% for c in m.tool_calls %}{{ c.function.name }}("
    "{%- for key, value in c.function.arguments.items() %}{{ key }}={{ value | tojson }}"
    "{%- if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|python_end|>"
    "{%- endif %}<|eot|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>{{ '\n\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """A template, its special tokens, and turns in the spelling of the template."""

    template: str
    special: tuple[str, ...]
    call: str  # reasoning, if the family has such, and a call of add(a=1, b="x")
    call_end: str
    answer: str
    end: str
    reasons: bool
    branches: tuple[int, ...]  # turns of each, of: call, answer | call, answer


FAMILIES = {
    "qwen2.5": Family(
        QWEN25, (), 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
        "<|im_end|>", "It is 3.", "<|im_end|>", False, (4,),
    ),
    "qwen3": Family(
        QWEN3, (),
        '<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
        "<|im_end|>", "<think>\nSo.\n</think>\n\nIt is 3.", "<|im_end|>", True, (2, 2),
    ),
    "llama3": Family(
        LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
        '{"name": "add", "parameters": {"a": 1, "b": "x"}}', "<|eot_id|>", "It is 3.", "<|eot_id|>", False, (4,),
    ),
    "mistral": Family(
        MISTRAL, ("[INST]", "[/INST]", "[TOOL_CALLS]", "</s>"),
        '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x"}}]', "</s>", "It is 3.", "</s>", False, (4,),
    ),
    "deepseek": Family(
        DEEPSEEK, ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<｜tool▁calls▁begin｜>"),
        "Hm.\n</think>\n\nWell.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "<｜end▁of▁sentence｜>", "So.\n</think>\n\nIt is 3.", "<｜end▁of▁sentence｜>", True, (2, 2),
    ),
    "gpt-oss": Family(
        HARMONY, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>"),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
        '<|message|>{"a": 1, "b": "x"}',
        "<|call|>", "<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>It is 3.",
        "<|return|>", True, (2, 2),
    ),
    "llama4": Family(
        LLAMA4, ("<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>", "<|eot|>"),
        '<|python_start|>[add(a=1, b="x")]<|python_end|>', "<|eot|>", "It is 3.", "<|eot|>", False, (4,),
    ),
}  # fmt: skip
