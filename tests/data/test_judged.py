"""Pairs, judged answers, judged steps and conversations, from files and from sums."""

import json
from pathlib import Path
from typing import Any

import pytest

from nemorl.config.data import (
    ArithmeticDataset,
    ConversationsDataset,
    DataConfig,
    FeedbackDataset,
    PreferenceDataset,
    StepsDataset,
    TasksDataset,
)
from nemorl.data.datasets import (
    DatasetError,
    load_dialogues,
    load_feedback,
    load_pairs,
    load_steps,
    load_tasks,
)
from nemorl.trajectories import Message

SUMS = ArithmeticDataset(name="arithmetic", digits=1, size=20, seed=3)
DATA = DataConfig(train=SUMS, prompt_template="Q: {prompt}", system_prompt="Be right.")
PLAIN = DataConfig(train=SUMS, chat=False)
ASKED = (Message("system", "Be right."), Message("user", "Q: hi"))


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation in which user and assistant take turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def file_of(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_pairs_of_texts_and_of_turns(tmp_path: Path) -> None:
    rows = (
        {"prompt": "hi", "chosen": "hello", "rejected": "no", "gap": 2},
        {
            "prompt": said("hi"),
            "chosen": said("_", "a", "b", "c")[1:],
            "rejected": said("_", "no")[1:],
            "gap": 1,
        },
    )
    dataset = PreferenceDataset(name="preference", path=file_of(tmp_path, *rows), margin_key="gap")
    first, second = load_pairs(dataset, DATA)
    assert first.opening == second.opening == ASKED
    assert (first.chosen, first.rejected) == ((Message("assistant", "hello"),), (Message("assistant", "no"),))
    assert [m.content for m in second.chosen] == ["a", "b", "c"]
    assert (first.margin, second.margin) == (2.0, 1.0)
    # The same file as tasks to sample, and as answers judged one by one.
    assert [(t.messages, t.answer) for t in load_tasks(dataset, DATA)] == [(ASKED, "hello"), (ASKED, "c")]
    assert [(f.completion[-1].content, f.good) for f in load_feedback(dataset, DATA)] == [
        ("hello", True), ("no", False), ("c", True), ("no", False),
    ]  # fmt: skip


def test_pairs_of_conversations_share_their_beginning(tmp_path: Path) -> None:
    row = {"chosen": said("hi", "yo", "go", "fine"), "rejected": said("hi", "yo", "go", "no")}
    dataset = PreferenceDataset(name="preference", path=file_of(tmp_path, row), prompt_key=None)
    (pair,) = load_pairs(dataset, PLAIN)
    assert [m.content for m in pair.opening] == ["hi", "yo", "go"]
    assert (pair.chosen, pair.rejected) == ((Message("assistant", "fine"),), (Message("assistant", "no"),))


def test_conversations_open_before_the_first_turn_and_learn_the_rest(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"messages": said("hi", "yo", "go", "fine")})
    dataset = ConversationsDataset(name="conversations", path=path)
    (dialogue,) = load_dialogues(dataset, DATA)
    assert dialogue.opening == ASKED
    assert [m.role for m in dialogue.exchange] == ["assistant", "user", "assistant"]
    (task,) = load_tasks(dataset, DATA)
    assert [m.content for m in task.messages] == ["Be right.", "Q: hi", "yo", "go"]
    assert task.answer == "fine"


def test_feedback_and_steps(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "hi", "completion": "yo", "label": 1})
    (judged,) = load_feedback(FeedbackDataset(name="feedback", path=path), DATA)
    assert (judged.opening, judged.completion, judged.good) == (ASKED, (Message("assistant", "yo"),), True)
    path = file_of(tmp_path, {"prompt": "hi", "completions": ["a", "b"], "labels": [True, 0.25]})
    (steps,) = load_steps(StepsDataset(name="steps", path=path), DATA)
    assert (steps.steps, steps.labels) == (("a\n", "b\n"), (1.0, 0.25))


def test_sums_know_what_is_better() -> None:
    pairs, feedback, steps = (load(SUMS, PLAIN) for load in (load_pairs, load_feedback, load_steps))
    for pair, judged, walked in zip(pairs, feedback, steps, strict=True):
        left, right = map(int, pair.opening[0].content.rstrip("=").split("+"))
        answer = f"{left + right:02d}"
        assert pair.chosen[0].content == answer
        assert pair.rejected[0].content != answer
        assert len(pair.rejected[0].content) == 2
        assert judged.good == (judged.completion[0].content == answer)
        said_so_far = "".join(walked.steps)
        assert walked.labels == tuple(answer.startswith(said_so_far[:end]) for end in (1, 2))
    assert sum(one.good for one in feedback) == 10
    # Of a sloppy judge some pairs are the other way round, and only those.
    sloppy = load_pairs(SUMS.model_copy(update={"wrong_answers": 0.5}), PLAIN)
    turned = [a.chosen == b.rejected for a, b in zip(sloppy, pairs, strict=True) if a.chosen != b.chosen]
    right = [a.chosen == b.chosen for a, b in zip(sloppy, pairs, strict=True)]
    assert 3 <= len(turned) <= 17
    assert len(turned) + sum(right) == 20
    for ours, theirs in zip(sloppy, pairs, strict=True):
        assert theirs.chosen in (ours.chosen, ours.rejected)


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "no answer": ("preference", {"prompt": "hi", "chosen": "a"}, "key `rejected` is missing"),
    "a margin in words": (
        "preference",
        {"prompt": "hi", "chosen": "a", "rejected": "b", "gap": "much"},
        "key `gap`: expected a number, not 'much'",
    ),
    "a user's answer": (
        "preference",
        {"prompt": "hi", "chosen": said("no"), "rejected": "b", "gap": 1},
        "key `chosen`: the exchange must begin and end with an assistant's message, not user",
    ),
    "no last word": ("conversations", {"messages": said("hi", "yo", "go")}, "not assistant, user"),
    "nobody answers": ("conversations", {"messages": said("hi")}, "not nothing"),
    "no judgement": (
        "feedback",
        {"prompt": "hi", "completion": "a", "label": "good"},
        "key `label`: expected true or false, not 'good'",
    ),
    "steps in one text": (
        "steps",
        {"prompt": "hi", "completions": "a b", "labels": [True]},
        "key `completions`: expected a list of texts",
    ),
    "a label short": (
        "steps",
        {"prompt": "hi", "completions": ["a", "b"], "labels": [True]},
        "key `labels`: expected 2 labels, one per step",
    ),
    "more than sure": (
        "steps",
        {"prompt": "hi", "completions": ["a"], "labels": [1.5]},
        "key `labels`: expected true, false or a number from 0 to 1, not 1.5",
    ),
}


@pytest.mark.parametrize(("kind", "row", "message"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_read_is_named_with_its_line(
    tmp_path: Path, kind: str, row: dict[str, Any], message: str
) -> None:
    path = file_of(tmp_path, row)
    load: dict[str, Any] = {
        "preference": lambda: load_pairs(
            PreferenceDataset(name="preference", path=path, margin_key="gap"), DATA
        ),
        "conversations": lambda: load_dialogues(ConversationsDataset(name="conversations", path=path), DATA),
        "feedback": lambda: load_feedback(FeedbackDataset(name="feedback", path=path), DATA),
        "steps": lambda: load_steps(StepsDataset(name="steps", path=path), DATA),
    }
    with pytest.raises(DatasetError) as refused:
        load[kind]()
    assert f"{path}, line 1: " in str(refused.value)
    assert message in str(refused.value)


def test_tasks_without_answers_are_not_learned(tmp_path: Path) -> None:
    path = file_of(tmp_path, {"prompt": "hi"})
    with pytest.raises(DatasetError, match="task 0 has no answer to train on"):
        load_dialogues(TasksDataset(name="jsonl", path=path, answer_key=None), DATA)
    with pytest.raises(DatasetError, match="a dataset `jsonl` has no pairs of answers"):
        load_pairs(TasksDataset(name="jsonl", path=path), DATA)
