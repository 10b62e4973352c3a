"""Rows with tool calls and tools, as users' data has them, become tasks and examples."""

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from nemorl.config.data import ArithmeticDataset, ConversationsDataset, DataConfig, TasksDataset
from nemorl.config.policy import PolicyConfig
from nemorl.data.datasets import DatasetError, load_dialogues, load_tasks
from nemorl.data.examples import Encoder
from nemorl.data.tokenizer import ChatPrompts, Prompts, TemplateError, TemplateRewrites, load_tokenizer
from nemorl.trajectories import Message, ToolCall
from tests.data.chat_templates import FAMILIES
from tests.data.tokenizers import save_tokenizer

DATA = DataConfig(train=ArithmeticDataset(name="arithmetic"))
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
ARGUMENTS = {"a": 1, "b": "x"}
CALL_ID = "abcdefgh9"


# Templates that drop it, or, like DeepSeek's, begin every turn with it.
REFUSED = {("deepseek", False), ("deepseek", True), ("gpt-oss", True)}


def row(reasoning=None, arguments=None, **more):
    """A conversation with a call, its result and an answer."""
    function = {"name": "add", "arguments": json.dumps(ARGUMENTS) if arguments is None else arguments}
    apart = {} if reasoning is None else {"reasoning_content": reasoning}
    call = {"id": CALL_ID, "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "1+x?"},
        {"role": "assistant", "content": None, "tool_calls": [call], **apart},
        {"role": "tool", "content": "12", "tool_call_id": CALL_ID, "name": "add"},
        {"role": "assistant", "content": "It is 3.", "tool_calls": None, **apart},
    ]
    return {"messages": messages, "tools": [ADD], **more}


def as_the_template_takes_it(given, family):
    """The messages of a row by hand, in transformers' form."""
    messages = [{k: v for k, v in m.items() if v is not None} for m in given["messages"]]
    _, call, _, answer = messages
    call["content"] = ""
    if "｜" not in family.template:  # DeepSeek's takes arguments as text
        call["tool_calls"] = [{**call["tool_calls"][0], "function": {"name": "add", "arguments": ARGUMENTS}}]
    if "thinking" in family.template:
        for turn in (call, answer):
            turn["thinking"] = turn.get("reasoning_content")
    return messages


def dialogue(folder: Path, given, **options):
    path = folder / "rows.jsonl"
    path.write_text(json.dumps(given))
    (loaded,) = load_dialogues(ConversationsDataset(name="conversations", path=path, **options), DATA)
    return loaded


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_assistants_turns_are_learned_in_what_the_template_writes(tmp_path, name, reasons):
    family = FAMILIES[name]
    tokenizer = load_tokenizer(
        PolicyConfig(model_path=save_tokenizer(tmp_path, family.template, family.special))
    )
    given = row("Hm." if reasons and family.reasons else None)
    loaded = dialogue(tmp_path, given)
    encoder = Encoder(tokenizer, ChatPrompts(tokenizer), 4000)
    if (name, reasons) in REFUSED:
        with pytest.raises(TemplateRewrites):
            encoder.dialogues([loaded], "completion")
        return
    (example,) = encoder.dialogues([loaded], "completion")
    whole = tokenizer._backend.apply_chat_template(
        as_the_template_takes_it(given, family), tools=[ADD], tokenize=False
    )
    if not reasons:  # the content of an answer is learned as it is, so without the empty reasoning of Qwen3
        whole = whole.replace("<think>\n\n</think>\n\n", "")
    assert tokenizer.decode(example.tokens) == whole.rstrip("\n")
    # A character of text is learned if it is the assistant's: the call with its end, and the answer.
    learned = tokenizer.decode(example.tokens[example.loss_mask])
    assert learned.endswith(f"It is 3.{family.end}")
    assert '"b": "x"' in learned or 'b="x"' in learned
    assert learned.count("Hm.") == 2 * (reasons and family.reasons)
    assert "12" not in learned
    assert "Adds." not in learned
    assert "Adds." in whole


def test_calls_and_results_are_read_in_their_usual_forms(tmp_path):
    loaded = dialogue(tmp_path, row("Hm."))
    asked, result, said = loaded.exchange
    call = ToolCall(CALL_ID, "add", ARGUMENTS)
    assert asked == Message("assistant", "", (call,), "Hm.")
    assert result == Message("tool", "12", tool_call_id=CALL_ID, name="add")
    assert said == Message("assistant", "It is 3.", reasoning="Hm.")
    assert loaded.tools == (ADD,)
    # Tools as text, another column of tools, and content in parts.
    parts = [{"type": "text", "text": "It is "}, {"type": "text", "text": "3."}]
    other = row(functions=json.dumps([ADD]))
    other["messages"][-1]["content"] = parts
    assert dialogue(tmp_path, other, tools_key="functions") == dialogue(tmp_path, row())
    assert dialogue(tmp_path, row(), tools_key=None).tools == ()


def test_nulls_that_parquet_fills_in_are_not_part_of_calls_and_tools(tmp_path):
    given = row(arguments={"a": 1})
    last = row(arguments={"c": None})["messages"][1]["tool_calls"][0]
    given["messages"][1]["tool_calls"].append(last)
    given["tools"].append({"type": "function", "function": {"name": "other"}})
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([given]), path)
    (loaded,) = load_dialogues(ConversationsDataset(name="conversations", path=path), DATA)
    assert [call.arguments for call in loaded.exchange[0].tool_calls] == [{"a": 1}, {}]
    assert loaded.tools == (ADD, {"type": "function", "function": {"name": "other"}})


def test_prompts_hold_calls_and_offer_tools(tmp_path):
    given = row()
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"prompt": given["messages"][:3], "answer": "3", "tools": [ADD]}))
    (task,) = load_tasks(TasksDataset(name="tasks", path=path), DATA)
    assert task.tools == (ADD,)
    assert task.messages[1].tool_calls == (ToolCall(CALL_ID, "add", ARGUMENTS),)
    assert task.columns["tools"] == [ADD]


WRONG = {
    "no list": ({"tool_calls": 1}, "message 1: `tool_calls` must be a list"),
    "no function": ({"tool_calls": [{"name": "add"}]}, "message 1: tool call 0: `function` is missing"),
    "cut off": (
        {"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
        "message 1: not JSON: Expecting property name",
    ),
    "no name": (
        {"tool_calls": [{"function": {"arguments": "{}"}}]},
        "tool call 0: `name` must be a text and `arguments` a JSON object",
    ),
    "nothing": ({"tool_calls": []}, "`content` must be a text, or null with `tool_calls`"),
    "reasoning": ({"content": "x", "thinking": ["x"]}, "message 1: the reasoning must be a text"),
    "an image": ({"content": [{"type": "image"}]}, "or a list of parts with `text`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_message_is_named(tmp_path, name):
    changed, message = WRONG[name]
    given = row()
    given["messages"][1] = {"role": "assistant", "content": None, **changed}
    with pytest.raises(DatasetError, match=message):
        dialogue(tmp_path, given)


def test_columns_that_are_no_tools_are_refused_with_the_fix(tmp_path):
    fix = r"set `data\.\*\.tools_key` to null"
    for tools in (["hammer"], {"a": 1}, "nail"):
        with pytest.raises(DatasetError, match=fix):
            dialogue(tmp_path, row() | {"tools": tools})


def test_plain_text_has_no_calls(tokenizer, tmp_path):
    encoder = Encoder(tokenizer, Prompts(tokenizer), 4000)
    with pytest.raises(TemplateError, match="plain text has no tool calls"):
        encoder.dialogues([dialogue(tmp_path, row(), tools_key=None)], "completion")
    with pytest.raises(TemplateError, match="there are tools, which plain text cannot offer"):
        encoder.dialogues([dialogue(tmp_path, row())], "completion")
