"""Tokens of one text under two tokenizers, and projections between their vocabularies."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from nemorl.config.policy import PolicyConfig
from nemorl.data import tokenizer as loading
from nemorl.data.aligned import Projection, Vocabulary, align
from nemorl.data.examples import Encoder, Example
from nemorl.data.tokenizer import load_tokenizer, prompts_of
from nemorl.trajectories import Message
from tests.data.tokenizers import ENDOFTEXT, save_tokenizer

TEXTS = ["12 abab, a", "größer 12€ 日本", "", " leading", "a\n\nb"]


def save_pieces(folder: Path) -> Path:
    """A tokenizer as SentencePiece writes it: words begin with a mark, other characters are bytes."""
    words = ["\N{LOWER ONE EIGHTH BLOCK}", "a", "b", "1", "2", "ab", "\N{LOWER ONE EIGHTH BLOCK}ab"]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "</s>", *bytes_, *words])}
    merges = [("a", "b"), ("\N{LOWER ONE EIGHTH BLOCK}", "ab")]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    prefix = normalizers.Prepend("\N{LOWER ONE EIGHTH BLOCK}")
    backend.normalizer = normalizers.Sequence(
        [prefix, normalizers.Replace(" ", "\N{LOWER ONE EIGHTH BLOCK}")]
    )
    parts = [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    return folder


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> loading.Tokenizer:
    return load_tokenizer(PolicyConfig(model_path=save_tokenizer(tmp_path_factory.mktemp("byte-level"))))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> loading.Tokenizer:
    return load_tokenizer(PolicyConfig(model_path=save_pieces(tmp_path_factory.mktemp("pieces"))))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_write_their_text(byte_level: loading.Tokenizer, pieces: loading.Tokenizer, text: str) -> None:
    for tokenizer, prefix in ((byte_level, ""), (pieces, " " if text else "")):
        written = tokenizer.token_bytes
        assert len(written) == len(tokenizer)
        assert b"".join(written[token] for token in tokenizer.encode(text)).decode() == prefix + text


def example(tokenizer: loading.Tokenizer, text: str, train_on: str = "completion") -> Example:
    encoder = Encoder(tokenizer, prompts_of(tokenizer, chat=False), 100)
    return encoder.dialogue([Message("user", "2+")], [Message("assistant", text)], train_on)  # type: ignore[arg-type]


def spans(one: Example, tokenizer: loading.Tokenizer) -> list[bytes]:
    """The text of each chunk."""
    assert one.chunks is not None
    written = tokenizer.token_bytes
    numbers = range(one.chunks.max() + 1)
    return [b"".join(written[t] for t in one.tokens[one.chunks == number]) for number in numbers]


@pytest.mark.parametrize("text", TEXTS)
def test_chunks_are_the_shortest_common_pieces_of_text(
    byte_level: loading.Tokenizer, pieces: loading.Tokenizer, text: str
) -> None:
    mine, other = example(byte_level, text), example(pieces, text)
    aligned, read = align(mine, Vocabulary.of(byte_level), other, Vocabulary.of(pieces))

    def ends(tokenizer: loading.Tokenizer) -> set[int]:
        written, position, found = tokenizer.token_bytes, 0, set()
        tokens = tokenizer.encode(text)
        for number, token in enumerate(tokens):
            piece = written[token]
            position += len(piece) - (number == 0 and tokenizer is pieces)  # which adds a space
            found.add(position)
        return found - {0}

    assert (
        len(spans(aligned, byte_level)) == len(ends(byte_level) & ends(pieces)) + 1
    )  # and the end of the turn
    mine_read, other_read = (
        b"".join(spans(one, of)[:-1]) for one, of in ((aligned, byte_level), (read, pieces))
    )
    assert (b" " + mine_read if text else b"") == other_read
    assert [*map(len, spans(aligned, byte_level)[1:-1])] == [*map(len, spans(read, pieces)[1:-1])]
    assert aligned.tokens[aligned.chunks == aligned.chunks.max()].tolist() == [ENDOFTEXT]  # type: ignore[union-attr]
    assert read.tokens[read.chunks == read.chunks.max()].tolist() == [1]  # type: ignore[union-attr]
    assert not (aligned.chunks[~aligned.loss_mask] >= 0).any()  # type: ignore[index]


def test_other_texts_are_aligned_as_far_as_they_are_the_same(
    byte_level: loading.Tokenizer, pieces: loading.Tokenizer
) -> None:
    mine, other = example(byte_level, "ab12"), example(pieces, "ab2")
    aligned, read = align(mine, Vocabulary.of(byte_level), other, Vocabulary.of(pieces))
    assert spans(aligned, byte_level) == [b"ab"]
    assert spans(read, pieces) == [b" ab"]


def test_a_prompt_that_is_trained_is_aligned_but_for_the_token_that_nothing_predicts(
    byte_level: loading.Tokenizer, pieces: loading.Tokenizer
) -> None:
    mine, other = (example(one, "ab", "all") for one in (byte_level, pieces))
    aligned, read = align(mine, Vocabulary.of(byte_level), other, Vocabulary.of(pieces), "all")
    assert spans(aligned, byte_level)[0] == b"+"
    assert aligned.chunks is not None
    assert read.chunks is not None
    assert aligned.chunks[0] == read.chunks[0] == -1


def test_a_prompt_of_one_token_is_no_part_of_the_answer(byte_level: loading.Tokenizer) -> None:
    """The teacher's prompt is longer."""
    vocabulary = Vocabulary.of(byte_level)
    mine, other = (
        Example(
            np.array([*prompt, *byte_level.encode("ab"), ENDOFTEXT], np.int32), np.arange(size) >= len(prompt)
        )
        for prompt, size in ((byte_level.encode("a"), 3), (byte_level.encode("aa"), 4))
    )
    aligned, read = align(mine, vocabulary, other, vocabulary)
    assert spans(aligned, byte_level) == spans(read, byte_level) == [b"ab", b"<|endoftext|>"]


def test_projection_has_exact_tokens_and_splits(
    byte_level: loading.Tokenizer, pieces: loading.Tokenizer
) -> None:
    projection = Projection.build(byte_level, pieces, (ENDOFTEXT, 1))
    mine, other = byte_level.token_bytes, pieces.token_bytes

    def row(text: bytes) -> dict[bytes, float]:
        entries = projection.policy_ids == mine.index(text)
        teacher, weights = projection.teacher_ids[entries], projection.weights[entries]
        return {other[token]: float(weight) for token, weight in zip(teacher, weights, strict=True)}

    assert row(b"ab") == {b"ab": 1}
    assert row("é".encode()[:1]) == {"é".encode()[:1]: 1}  # a part of a character, which is a byte there
    assert row(b"12") == pytest.approx({b"1": 1 / 1.1, b"2": 0.1 / 1.1})
    assert row(b"abab") == pytest.approx({b"ab": 1})  # twice the same piece
    assert not projection.exact[projection.policy_ids == mine.index(b"abab")].any()
    ends = projection.teacher_ids[projection.policy_ids == ENDOFTEXT]
    assert ends.tolist() == [1]
    assert not projection.is_identity

    exact = dict(zip(*(ids.tolist() for ids in projection.pairs(likeliest=False)), strict=True))
    assert exact[mine.index(b"ab")] == other.index(b"ab")
    assert mine.index(b"12") not in exact
    likeliest = dict(zip(*(ids.tolist() for ids in projection.pairs(likeliest=True)), strict=True))
    assert likeliest == exact  # each first piece is a token that has its exact counterpart
    assert len(set(exact.values())) == len(exact)


def test_likeliest_pieces_count_where_no_exact_token_does() -> None:
    """Tokens 0 and 1 of the policy begin with 5, of weights 0.7 and 0.9; 2 is 6, and 3 begins with 6."""
    projection = Projection(
        policy_ids=np.array([0, 0, 1, 2, 3, 4], np.int32),
        teacher_ids=np.array([5, 6, 5, 6, 6, 7], np.int32),
        weights=np.array([0.7, 0.3, 0.9, 1.0, 1.0, 0.5], np.float32),
        exact=np.array([False, False, False, True, False, False]),
        policy_size=5,
        teacher_size=8,
    )
    assert [ids.tolist() for ids in projection.pairs(likeliest=False)] == [[2], [6]]
    assert [ids.tolist() for ids in projection.pairs(likeliest=True)] == [[1, 2], [5, 6]]


def test_projection_of_the_same_tokens_is_the_identity(byte_level: loading.Tokenizer) -> None:
    projection = Projection.build(byte_level, byte_level, (ENDOFTEXT, ENDOFTEXT))
    assert projection.is_identity
    assert projection.weights.tolist() == [1.0] * len(byte_level)


def test_the_file_is_written_once_and_again_where_it_is_incomplete(
    byte_level: loading.Tokenizer, pieces: loading.Tokenizer, tmp_path: Path
) -> None:
    def cached() -> Path:
        return Projection.cached(tmp_path / "new", byte_level, pieces, (ENDOFTEXT, 1))

    path = cached()
    complete, written = path.read_bytes(), path.stat().st_mtime_ns
    assert cached() == path
    assert path.stat().st_mtime_ns == written
    assert list(path.parent.iterdir()) == [path]
    for size in (0, 10, len(complete) // 2, len(complete) - 5):
        path.write_bytes(complete[:size])
        assert Projection.load(cached()).weights.size > 0
    assert Projection.cached(tmp_path / "new", byte_level, pieces, (ENDOFTEXT, 0)) != path
