"""A trajectory is shown with the numbers of its files and the text of its tokens, and a search finds it."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from nemorl.algorithms.metrics import rows_of
from nemorl.observe.index import IndexWriter
from nemorl.rollout.groups import GroupSummary, summarize
from nemorl.rollout.stored import RolloutFiles, StoredGroup, spread
from nemorl.ui.errors import UiError
from nemorl.ui.search import answers, search
from nemorl.ui.tokens import Tokenizers, TokenTexts, TrajectoryView, view_trajectory
from nemorl.ui.trajectories import Query, Row, Series, Tables, TrajectoryTable
from tests.data.tokenizers import save_tokenizer
from tests.ui.stored_runs import END, ids, make_run, sampled, save_byte_tokenizer

TRAINING = Series()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run")


def row_of(
    run: Path, step: int, group: int, sample: int, series: Series = TRAINING
) -> tuple[TrajectoryTable, Row]:
    table = Tables().open(run)
    return table, table.rows([table.find(step, group, sample, series)])[0]


def view(run: Path, step: int, group: int, sample: int, series: Series = TRAINING) -> TrajectoryView:
    return view_trajectory(run, row_of(run, step, group, sample, series)[1], Tokenizers())


def test_a_trajectory_has_its_turns_texts_and_rewards(run: Path) -> None:
    found = view(run, 2, 2, 1)
    assert found.notes == []
    assert [(each.role, each.start, each.end, each.stop) for each in found.segments] == [
        ("prompt", 0, 4, ""),
        ("policy", 4, 7, "stop"),
        ("given", 7, 8, ""),
        ("policy", 8, 17, "stop"),
    ]
    assert (found.segments[3].reward, found.segments[3].rewards) == (1.0, {"exact": 1.0})
    assert [each.seconds for each in found.segments] == [None, None, None, 0.5]  # the first turn is of 0 s
    # é has two bytes and 💡 four: the first of the tokens of a character has its text.
    assert found.texts == [*"2+2=no", "<end>", "?", "n", "é", "", " ", "💡", "", "", "", "<end>"]
    assert found.special == [END]
    parts = [(part.name, part.value, part.weight, part.product) for part in found.rewards]
    assert parts == [("exact", 0.0, 2.0, 0.0), ("format", 1.0, 0.5, 0.5)]
    assert (found.temperature, found.row["reward"]) == (0.5, 0.5)


def test_the_arrays_are_those_of_the_files(run: Path) -> None:
    arrays = view(run, 2, 2, 0).arrays  # 2+2= and 2<end>
    nothing = [np.nan] * 4
    assert arrays["tokens"].tolist() == [*ids("2+2=2"), END]
    assert arrays["mask"].tolist() == [0, 0, 0, 0, 1, 1]
    assert arrays["trained"].tolist() == [0, 0, 0, 0, 0, 1]
    assert arrays["version"].tolist() == [-1, -1, -1, -1, 1, 1]
    np.testing.assert_allclose(arrays["logprob"], [*nothing, -0.04, -0.05])
    np.testing.assert_allclose(arrays["trainer_logprob"], [*nothing, 0.21, 0.20], rtol=1e-6)
    np.testing.assert_allclose(arrays["gap"], [*nothing, 0.25, 0.25], rtol=1e-6)
    np.testing.assert_allclose(arrays["ratio"], [*nothing, np.exp(0.25), np.exp(0.25)], rtol=1e-6)
    np.testing.assert_allclose(arrays["value"], [*nothing, -0.08, -0.10], rtol=1e-6)
    np.testing.assert_allclose(arrays["advantage"], [*nothing, 3.0, 3.0])  # as trained: 3 x (2.5 - 1.5)
    assert "entropy" not in arrays


def test_a_sample_of_several_branches_is_shown_by_one(run: Path) -> None:
    folder = run / "trajectories"
    branches = [sampled("2+2=", [text], {"exact": 1.0}, 90, 5) for text in ("4", "four")]
    group = GroupSummary(90, 5, None, (summarize(branches, 0),))
    RolloutFiles(folder).write(
        9, [StoredGroup(9, group, tuple(branches), tuple(spread(b, 0.5) for b in branches))]
    )
    IndexWriter(folder).append(rows_of(9, [group], "training", stored=[90]))
    row = row_of(run, 9, 90, 0)[1]
    first, second = (view_trajectory(run, row, Tokenizers(), branch) for branch in (0, 1))
    assert (first.texts, second.texts) == ([*"2+2=4", "<end>"], [*"2+2=four", "<end>"])
    assert (second.branch, second.branches) == (1, 2)
    assert second.arrays["advantage"][-1] == 0.5
    table = Tables().open(run)
    assert answers(run, table, [row], Tokenizers())[0].text == "4<end>\n\nfour<end>"


def test_a_validation_has_what_the_engine_wrote(run: Path) -> None:
    found = view(run, 3, 1, 0, Series("validation", "easy"))
    assert found.texts == [*"1+1=2", "<end>"]
    assert "trainer_logprob" not in found.arrays


def test_what_is_missing_is_a_note_and_the_rest_is_shown(run: Path) -> None:
    folder = run / "trajectories"
    not_stored = view(run, 2, 3, 0)
    assert not_stored.notes == [
        "the tokens of 2/3/0 were not stored. Set logger.trajectories: all to store those of all"
    ]
    assert (not_stored.arrays, not_stored.rewards[0].product) == ({}, 2.0)

    trained = folder / "step_000002-trained-0.safetensors"
    trained.write_bytes(trained.read_bytes()[:100])
    found = view(run, 2, 2, 0)
    assert "what the trainer computed is left out" in found.notes[0]
    assert "logprob" in found.arrays

    part = folder / "step_000002-0.safetensors"
    part.write_bytes(part.read_bytes()[:100])
    assert "step_000002-0.safetensors cannot be read" in view(run, 2, 2, 0).notes[0]
    (folder / "step_000002-0.json").unlink()
    assert "no complete file" in view(run, 2, 2, 0).notes[0]
    (folder / "rollout.json").unlink()
    missing = view(run, 2, 2, 0)
    assert "weights of rewards are unknown" in missing.notes[0]
    assert missing.rewards[0].product is None
    with pytest.raises(UiError, match="no branch 4"):
        view_trajectory(run, row_of(run, 1, 0, 0)[1], Tokenizers(), branch=4)


def test_another_tokenizer_is_not_used(run: Path) -> None:
    other = run.parent / "model" / "tokenizer.json"
    other.write_text(other.read_text() + "\n")
    found = view(run, 1, 0, 0)
    assert found.texts is None
    assert "another checksum" in found.notes[0]
    other.unlink()
    assert "leads to no tokenizer.json" in view(run, 1, 0, 0).notes[0]


@pytest.mark.parametrize("text", ["plain words", "né 💡💡 日本", "  two  spaces\n\n", "👩‍👩‍👧"])
def test_texts_of_tokens_add_up(tmp_path: Path, text: str) -> None:
    save_byte_tokenizer(tmp_path / "bytes")
    texts = TokenTexts(tmp_path / "bytes" / "tokenizer.json")
    assert "".join(texts.pieces(ids(text))) == text
    assert texts.pieces(ids(text)[-1:])[0] != ""  # the end of a character alone is shown too
    save_tokenizer(tmp_path / "words")
    words = TokenTexts(tmp_path / "words" / "tokenizer.json")
    encoded = words._tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(words.pieces(encoded)) == words.decode(encoded)


def test_a_token_keeps_the_space_that_begins_it(tmp_path: Path) -> None:
    """Decoders of SentencePiece's vocabularies drop it at the beginning of a text."""
    words = {"<unk>": 0, "a": 1, "▁two": 2, "▁words": 3}
    made = Tokenizer(models.WordLevel(words, "<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="never"), decoders.Metaspace()
    made.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(tmp_path / "tokenizer.json")
    assert texts.decode([2, 3]) == "two words"
    assert texts.pieces([2, 3]) == [" two", " words"]


def test_bytes_that_are_no_character_are_shown_as_such(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    pieces = TokenTexts(tmp_path / "tokenizer.json").pieces([0xF0, ord("a"), 0x9F, 0xC3, 0xA9])
    assert pieces == ["\ufffd", "a", "\ufffd", "é", ""]


def test_answers_of_a_group(run: Path) -> None:
    table, row = row_of(run, 1, 0, 0)
    first, second = answers(run, table, table.siblings(row["row"]), Tokenizers())
    assert (first.prompt, first.text) == ("2+2=", "1<end>")
    assert second.text == "no<end>?né 💡<end>"
    unstored = row_of(run, 1, 1, 0)[1]
    assert answers(run, table, [unstored], Tokenizers())[0].problem == "the tokens of 1/1/0 were not stored"


def test_a_search_finds_texts_and_ids(run: Path) -> None:
    table = Tables().open(run)
    found = search(run, table, Query("phase == 'training'"), "É 💡", Tokenizers())
    assert [(each.row["step"], each.row["sample"], each.token) for each in found.matches] == [
        (3, 1, 9),
        (2, 1, 9),
        (1, 1, 9),
    ]
    assert (found.matches[0].before, found.matches[0].text, found.matches[0].after) == (
        "2+2=no<end>?n",
        "é 💡",
        "<end>",
    )
    assert (found.looked, found.total, found.next) == (6, 6, None)

    of_ids = search(run, table, Query(), f"ids: {ord('1')}, {END}", Tokenizers())
    assert [(each.row["step"], each.row["phase"], each.token) for each in of_ids.matches] == [
        (1, "training", 4)
    ]
    assert of_ids.total == 8


def test_a_search_says_where_to_continue(run: Path) -> None:
    table, tokenizers = Tables().open(run), Tokenizers()
    first = search(run, table, Query(), "no", tokenizers, seconds=0)
    assert first.next is not None
    assert first.looked < first.total
    matches, start = list(first.matches), first.next
    while start is not None:
        more = search(run, table, Query(), "no", tokenizers, start, seconds=0)
        matches, start = matches + more.matches, more.next
    assert [each.row["step"] for each in matches] == [3, 2, 1]


def test_searches_name_what_is_wrong(run: Path) -> None:
    table = Tables().open(run)
    with pytest.raises(UiError, match="are no token ids"):
        search(run, table, Query(), "ids: 5 x", Tokenizers())
    with pytest.raises(UiError, match="nothing to search for"):
        search(run, table, Query(), " ", Tokenizers())
    part = run / "trajectories" / "step_000002-0.json"
    part.write_text("{")
    found = search(run, table, Query(), "no", Tokenizers())
    assert [each.row["step"] for each in found.matches] == [3, 1]
    assert "step_000002-0.json cannot be read" in found.notes[0]
