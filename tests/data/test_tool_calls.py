"""Turns as models of each family write them, and what is read from them."""

from typing import get_args

import pytest

from nemorl.config.policy import TokenizerConfig
from nemorl.data.tool_calls import FORMATS
from nemorl.trajectories import Reply, ToolCall

# Two calls, add(a=1, b="x") and stop(), where the family has several, with what is around them.
TWO_CALLS = {
    "hermes": 'Well.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\n'
    '<tool_call>{"name": "stop"}</tool_call>',
    "qwen3_coder": "Well.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    "mistral": 'Well.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": "x"}}, '
    '{"name": "stop", "arguments": {}}]',
    "deepseek": "Well.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama3": '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}; {"name": "stop"}',
    "pythonic": '<|python_start|>[add(a=1, b="x"), stop()]<|python_end|>',
    "harmony": "<|channel|>commentary<|message|>Well.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.add <|constrain|>json<|message|>{"a": 1, "b": "x"}<|call|>'
    "<|start|>assistant to=functions.stop<|channel|>commentary json<|message|>{}",
}
CALLS = (ToolCall("call00000", "add", {"a": 1, "b": "x"}), ToolCall("call00001", "stop", {}))
WHOLE_TURN = {"llama3", "pythonic"}  # where calls are the whole turn


def test_every_format_can_be_named_in_a_config():
    names = get_args(TokenizerConfig.model_fields["tool_format"].annotation)
    assert set(names) == {"auto", *FORMATS}
    assert set(TWO_CALLS) == set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_and_the_rest_is_content(name):
    content = "" if name in WHOLE_TURN else "Well."
    assert FORMATS[name].parse(TWO_CALLS[name]) == Reply(content, None, CALLS)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"harmony"}))
def test_reasoning_is_apart(name):
    one = FORMATS[name]
    opening, closing = one.think
    read = one.parse(f"{opening}\nI [could] call.\n{closing}\n\n{TWO_CALLS[name]}")
    assert (read.reasoning, read.tool_calls) == ("I [could] call.", CALLS)
    assert one.parse(f"Why?{closing}Yes.", in_reasoning=True) == Reply("Yes.", "Why?")
    assert one.parse("cut off", in_reasoning=True) == Reply("", "cut off")
    # A mention later in the text is text.
    assert one.parse(f"I write {opening}.") == Reply(f"I write {opening}.")


def test_channels_of_harmony_are_reasoning_and_content():
    turn = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It is 3."
    assert FORMATS["harmony"].parse(turn) == Reply("It is 3.", "Hm.")
    assert FORMATS["harmony"].parse("no channel") == Reply("no channel")


MALFORMED = {
    "hermes": '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>',
    "qwen3_coder": "<tool_call><function=add><parameter=a>1</parameter></tool_call>",
    "mistral": '[TOOL_CALLS][{"name": "add", }]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{a}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "llama3": '{"name": "add", "parameters": {"a": }}',
    "pythonic": "[add(a=1, b=x)]",
    "harmony": "<|channel|>commentary to=functions.add<|message|>{a",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_malformed_call_is_an_error_for_the_model(name):
    read = FORMATS[name].parse(MALFORMED[name])
    assert read.tool_calls == ()
    (error,) = read.call_errors
    assert error.startswith("Tool call 1 cannot be read: ")
    assert error.endswith(f"Write {FORMATS[name].example}.")
    assert read.content == ("{a" if name == "harmony" else MALFORMED[name])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", ["", "3", "[1, 2]", '{"a": 1}', "f(x) = [g(x)] is", "a < b", "{", "["])
def test_an_answer_is_no_call(name, text):
    assert FORMATS[name].parse(text) == Reply(text)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("3", "no JSON object with the `name` of a tool"),
        ('{"arguments": {}}', "no JSON object with the `name` of a tool"),
        ('{"name": "add", "arguments": [1]}', "the arguments of `add` are no JSON object"),
        ("[" * 100_000, "invalid JSON"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(call, says):
    (error,) = FORMATS["hermes"].parse(f"<tool_call>{call}</tool_call>").call_errors
    assert says in error


def test_arguments_may_be_json_in_json_and_hold_marks():
    text = r'<tool_call>{"name": "echo", "arguments": "{\"text\": \"</tool_call>\"}"}</tool_call>'
    assert FORMATS["hermes"].parse(text) == Reply(
        "", None, (ToolCall("call00000", "echo", {"text": "</tool_call>"}),)
    )


def test_calls_beyond_what_a_template_writes_are_errors():
    read = FORMATS["llama3"].parse(TWO_CALLS["llama3"], "t1", max_calls=1)
    assert read == Reply("", None, (ToolCall("t10000000", "add", CALLS[0].arguments),), read.call_errors)
    assert read.call_errors == ("Tool call 2 was ignored: a turn has at most 1.",)


def test_the_new_form_of_mistral_names_the_tool_before_its_arguments():
    text = '[TOOL_CALLS]add[ARGS]{"a": 1, "b": "x"}[TOOL_CALLS]stop[CALL_ID]abcdefghi[ARGS]{}'
    assert FORMATS["mistral"].parse(text).tool_calls == CALLS


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "<parameter=a>", "[a(", "<|start|>", "[TOOL_CALLS]", "<think>"]
)
def test_a_long_repetition_is_read_in_linear_time(name, piece):
    # A quadratic search would take minutes, and stop all conversations of a worker.
    assert FORMATS[name].parse(piece * 50_000).tool_calls == ()
