"""Plain texts: from every kind of file, joined, cut, closed, and the same under two tokenizers."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemorl.algorithms.offline import load_offline_data
from nemorl.config.algorithm import AlignedDistillationConfig, SftConfig
from nemorl.config.data import DataConfig, TextsDataset
from nemorl.config.load import load_experiment
from nemorl.config.policy import PolicyConfig
from nemorl.data.aligned import Vocabulary, align
from nemorl.data.datasets import DatasetError, Text, joined, load_dialogues, load_tasks, row_errors
from nemorl.data.examples import Encoder, ExampleError
from nemorl.data.rows import count_rows, read_rows
from nemorl.data.tokenizer import ChatPrompts, Prompts, Tokenizer, load_tokenizer
from tests.data.test_aligned import save_pieces, spans
from tests.data.tokenizers import ENDOFTEXT
from tests.required import require_module

pyarrow = require_module("pyarrow")
datasets = require_module("datasets")

TEXTS = ["ab 12", "é\u2028a", "1", "abab, a", "12 12"]


@pytest.fixture(scope="module")
def tokenizers(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Tokenizer]:
    """Bytes, and pieces as of SentencePiece."""
    folder = save_pieces(tmp_path_factory.mktemp("pieces"))
    return tokenizer, load_tokenizer(PolicyConfig(model_path=folder))


def texts_of(**options: Any) -> list[str]:
    dataset = TextsDataset.model_validate({"name": "texts"} | options)
    return [str(text.content) for text in load_dialogues(dataset, DataConfig(train=dataset))]  # type: ignore[union-attr]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, dict[str, object]]:
    """The same texts in every kind of place, with rows that have none."""
    rows: list[dict[str, object]] = [{"text": text} for text in TEXTS]
    rows[2:2] = [{"text": ""}, {"text": None}]
    table = pyarrow.table({"text": [row["text"] for row in rows]})
    parts = tmp_path / "parts"
    (parts / "b").mkdir(parents=True)
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "texts.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS[:2], "", *TEXTS[2:]]) + "\n", encoding="utf-8")
    with pyarrow.ipc.new_stream(str(tmp_path / "stream.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    with pyarrow.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    (parts / "a.jsonl").write_text("\n".join(map(json.dumps, rows[:3])), encoding="utf-8")
    with pyarrow.ipc.new_stream(str(parts / "b" / "c.arrow"), table.schema) as writer:
        writer.write_table(table.slice(3))
    (parts / "b" / "README.md").write_text("No texts.")
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    return {
        "lines": {"path": tmp_path / "texts.jsonl"},
        "text": {"path": tmp_path / "texts.txt"},
        "stream": {"path": tmp_path / "stream.arrow"},
        "file": {"path": tmp_path / "file.arrow"},
        "pattern": {"path": parts, "files": "**/*[lw]"},
        "hugging face": {"path": tmp_path, "files": "texts.jsonl", "split": "train"},
        "save_to_disk": {"path": tmp_path / "saved", "split": "train"},
    }


def test_every_kind_of_place_gives_the_same_texts(places: dict[str, dict[str, object]]) -> None:
    for name, place in places.items():
        assert texts_of(**place) == TEXTS, name


def test_rows_of_arrow_files_are_counted_and_skipped(places: dict[str, dict[str, object]]) -> None:
    for name in ("stream", "file"):
        dataset = TextsDataset.model_validate({"name": "texts"} | places[name])
        assert count_rows(dataset, 100, 60.0) == 7
        for skip in (0, 1, 2, 5, 7):
            rows = list(read_rows(dataset, skip))
            assert [place.rpartition(" ")[2] for place, _ in rows] == [str(n + 1) for n in range(skip, 7)]
        assert rows == []
        assert [row["text"] for _, row in read_rows(dataset, 4)] == TEXTS[2:]  # type: ignore[index]


def test_as_tasks_they_have_no_prompt(places: dict[str, dict[str, object]]) -> None:
    dataset = TextsDataset.model_validate({"name": "texts"} | places["lines"])
    tasks = load_tasks(dataset, DataConfig(train=dataset))
    assert [(task.messages, task.answer) for task in tasks] == [((), text) for text in TEXTS]


def test_texts_are_joined_until_they_have_the_characters() -> None:
    """Each sample but the last has `size` characters or more, and without its last text fewer."""
    draws = random.Random(3)
    for size in (1, 7, 20, 1000):
        texts = ["x" * draws.randint(1, 15) for _ in range(50)]
        assert "\n".join(joined(texts, size)) == "\n".join(texts)
        found = [text.split("\n") for text in joined(texts, size)]
        for parts in found[:-1]:
            assert sum(map(len, parts)) >= size > sum(map(len, parts[:-1]))
        assert size > sum(map(len, found[-1][:-1]))
        starts = np.cumsum([0, *map(len, found)])
        assert starts[-1] == len(texts)


def test_a_dataset_joins_its_texts(places: dict[str, dict[str, object]]) -> None:
    assert texts_of(**places["stream"], min_characters=6) == ["ab 12\né\u2028a", "1\nabab, a", "12 12"]


def test_all_tokens_of_a_text_are_trained_but_the_first(tokenizer: Tokenizer) -> None:
    for prompts in (Prompts(tokenizer), ChatPrompts(tokenizer)):
        encoder = Encoder(tokenizer, prompts, 4)
        closed, cut, open_ = encoder.dialogues(
            [Text("ab a", False, True), Text("12 12", True, True), Text("ab", False, False)], "completion"
        )
        assert closed.tokens.tolist() == [*tokenizer.encode("ab a"), ENDOFTEXT]
        assert closed.loss_mask.tolist() == [False, True, True]
        assert cut.tokens.tolist() == [*tokenizer.encode("12 12"), ENDOFTEXT]
        assert open_.tokens.tolist() == tokenizer.encode("ab")
        (shorter,) = Encoder(tokenizer, prompts, 2).dialogues([Text("12 12", True, True)], "all")
        assert shorter.tokens.tolist() == tokenizer.encode("12 12")[:2]
    with pytest.raises(ExampleError, match="example 1: the text has 3 tokens, more than 2: set `truncate`"):
        Encoder(tokenizer, prompts, 2).dialogues([Text("1", False, True), Text("ab a", False, True)], "all")


def test_cut_texts_are_aligned_as_far_as_both_go(tokenizers: tuple[Tokenizer, Tokenizer]) -> None:
    """Of `ab 12ab`, the policy has 4 tokens of 4 (`ab`, ` `, `12`, `ab`), the teacher 3 of 5."""
    both = [Encoder(one, Prompts(one), size) for one, size in zip(tokenizers, (4, 3), strict=True)]
    mine, other = (one.text(Text("ab 12ab", True, False)) for one in both)
    assert (mine.num_tokens, other.num_tokens) == (4, 3)
    aligned, read = align(mine, Vocabulary.of(tokenizers[0]), other, Vocabulary.of(tokenizers[1]), "all")
    texts = [spans(one, of) for one, of in zip((aligned, read), tokenizers, strict=True)]
    assert texts[0] == [b" "]  # nothing predicts the first token, and the teacher has only a part of `12`
    assert [text.replace("\N{LOWER ONE EIGHTH BLOCK}".encode(), b" ") for text in texts[1]] == [b" "]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_key": "body"}, "key `body` is missing; the keys are ['text'] (option `data.*.text_key`)"),
        ({"files": "*.jsonl"}, "`*.jsonl` is of a folder, and "),
    ],
)
def test_wrong_options_are_named(
    places: dict[str, dict[str, object]], options: dict[str, object], message: str
) -> None:
    dataset = TextsDataset.model_validate({"name": "texts"} | places["lines"] | options)
    errors = row_errors(dataset, DataConfig(train=dataset))
    assert message in errors[0]


def test_wrong_rows_are_named(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "a"}\n{"text": 3}')
    with pytest.raises(DatasetError, match="line 2: key `text`: expected a text, not 3"):
        texts_of(path=path)
    path.write_text('{"text": ""}')
    with pytest.raises(
        DatasetError, match=r"no row of .*texts\.jsonl has a text \(option `data\.\*\.text_key`"
    ):
        texts_of(path=path)
    with pytest.raises(
        DatasetError, match=r"no file in the folder .* matches `\*\.arrow`: correct the pattern"
    ):
        texts_of(path=tmp_path, files="*.arrow")
    (tmp_path / "broken.arrow").write_bytes(b"ARROW1")
    with pytest.raises(DatasetError, match=r"cannot read the dataset .*broken\.arrow"):
        texts_of(path=tmp_path / "broken.arrow")


EXPERIMENT = """\
run_dir: {folder}/run
policy: {{model_path: {policy}, precision: float32, max_sequence_length: 5, micro_batch_tokens: 64}}
data:
  train: {{name: texts, path: {texts}, truncate: true, end_token: false}}
  chat: false
algorithm: {{name: {algorithm}, num_steps: 1, batch_size: 1}}
"""
TEACHER = "teachers: {{main: {{model_path: {teacher}}}}}\n"


def test_texts_are_encoded_once_by_each_tokenizer(
    tokenizers: tuple[Tokenizer, Tokenizer], tmp_path: Path
) -> None:
    """Whatever is trained on of conversations, all of a text is; each side is cut to 5 tokens."""
    texts, file = tmp_path / "texts.txt", tmp_path / "experiment.yaml"
    texts.write_text("ab ab 12 ab\n1\n", encoding="utf-8")
    values = {"folder": tmp_path, "policy": tokenizers[0].name, "teacher": tokenizers[1].name, "texts": texts}
    file.write_text(EXPERIMENT.format(**values, algorithm="sft"))
    experiment = load_experiment(file)
    assert isinstance(experiment.algorithm, SftConfig)
    units = load_offline_data(experiment, experiment.algorithm).units
    tokens = tokenizers[0].encode("ab ab 12 ab")
    assert [unit.examples[0].tokens.tolist() for unit in units] == [tokens[:5], tokenizers[0].encode("1")]
    assert [unit.examples[0].num_trained for unit in units] == [4, 0]

    file.write_text(EXPERIMENT.format(**values, algorithm="aligned_distillation") + TEACHER.format(**values))
    experiment = load_experiment(file)
    assert isinstance(experiment.algorithm, AlignedDistillationConfig)
    assert experiment.algorithm.train_on == "completion"
    (first, second) = load_offline_data(experiment, experiment.algorithm).units
    assert first.examples[0].tokens.tolist() == tokens[:5]
    assert first.read[0].tokens.tolist() == tokenizers[1].encode("ab ab 12 ab")[:5]
    mine, other = (
        spans(one, of) for one, of in zip((first.examples[0], first.read[0]), tokenizers, strict=True)
    )
    assert mine == other
    assert b"".join(mine) == b" ab 12"  # 5 tokens of either: ab| a|b| |12 and ab| ab| |1|2
    assert second.examples[0].chunks is not None
    assert second.examples[0].chunks.tolist() == [-1]  # nothing predicts it
