"""The tokens of one text under two tokenizers: chunks that both have in common, and a map of vocabularies.

policy   │ 2 0 1 │ + │ 3 4 │ = │         a chunk ends where a token ends under both tokenizers
teacher  │ 201   │ + │ 34  │ = │
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Self
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from nemorl.config.auxiliary import teachers_held
from nemorl.config.experiment import Experiment
from nemorl.config.policy import TokenizerConfig
from nemorl.trajectories import BoolArray, Float32Array, Int32Array

from .datasets import Dialogue, Text
from .examples import Encoder, Example, TrainOn
from .tokenizer import Tokenizer, TokenizerError, load_tokenizer, prompts_of

IntArray = NDArray[np.int64]

MAX_PIECES = 4  # tokens of the teacher to which one of the policy is mapped; others would weigh below 1e-3
LATER_SHARE = 0.1  # weight of a piece over that of the one before it
LIKE_EXACT = 0.6  # weight from which a first piece counts as the token itself (NeMo-RL)
UNREADABLE = (OSError, EOFError, BadZipFile, KeyError, ValueError)  # of a file that is not complete
_SCHEME = b"nemorl projection 1"  # another one gives other files


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer for alignment: what each token writes, and which tokens have no text."""

    written: Sequence[bytes]  # [V]
    special: frozenset[int]
    ends: frozenset[int]  # tokens that end a turn

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        return cls(tokenizer.token_bytes, tokenizer.special_token_ids, tokenizer.end_token_ids)


def align(
    policy: Example,
    policy_vocabulary: Vocabulary,
    teacher: Example,
    teacher_vocabulary: Vocabulary,
    train_on: TrainOn = "completion",
) -> tuple[Example, Example]:
    """Both examples with `chunks`, whose numbers are of the same text under either tokenizer.

    The examples are of the same dialogue. Turns are aligned one by one: the trained tokens of the policy's
    n-th run with those of the teacher's n-th. Where both texts differ, as after a template that trims, only
    the beginning that they have in common is aligned. A token that ends the turn under both is a chunk. With
    `all` the one turn is all of the text.
    """
    of_policy, of_teacher = (np.full(e.num_tokens, -1, dtype=np.int32) for e in (policy, teacher))
    number = 0
    both = (policy, policy_vocabulary), (teacher, teacher_vocabulary)
    turns = [_turns(example, vocabulary, train_on) for example, vocabulary in both]
    for mine, other in zip(*turns, strict=False):
        pairs = _common_spans(
            policy.tokens[mine].tolist(),
            policy_vocabulary,
            teacher.tokens[other].tolist(),
            teacher_vocabulary,
        )
        for (start, end), (other_start, other_end) in pairs:
            here = slice(mine.start + start, mine.start + end)
            there = slice(other.start + other_start, other.start + other_end)
            if policy.loss_mask[here].all() and teacher.loss_mask[there].all():
                of_policy[here] = of_teacher[there] = number
                number += 1
    return replace(policy, chunks=of_policy), replace(teacher, chunks=of_teacher)


def _turns(example: Example, vocabulary: Vocabulary, train_on: TrainOn) -> list[slice]:
    """Consecutive trained tokens; the first of a complete text belongs to it, though nothing predicts it."""
    mask = example.loss_mask.copy()
    if train_on == "all" and int(example.tokens[0]) not in vocabulary.special:
        mask[0] = True
    borders = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    return [slice(int(start), int(end)) for start, end in borders.reshape(-1, 2)]


Span = tuple[int, int]


def _common_spans(
    mine: list[int], vocabulary: Vocabulary, other: list[int], other_vocabulary: Vocabulary
) -> list[tuple[Span, Span]]:
    """Tokens [start, end) of both that write the same bytes, as short as possible."""
    ends = bool(mine and other and mine[-1] in vocabulary.ends and other[-1] in other_vocabulary.ends)
    sizes = len(mine) - ends, len(other) - ends
    pieces = [
        [one.written[token] for token in tokens[:size]]
        for tokens, size, one in zip((mine, other), sizes, (vocabulary, other_vocabulary), strict=True)
    ]
    # SentencePiece writes one more space before the first word of a text.
    spaces = [len(text) - len(text.lstrip(b" ")) for text in map(b"".join, pieces)]
    if abs(spaces[0] - spaces[1]) == 1:
        written = pieces[spaces.index(max(spaces))]
        first = next(place for place, piece in enumerate(written) if piece)
        written[first] = written[first][1:]
    texts = [b"".join(written) for written in pieces]
    # By the position in the text, the number of tokens up to it; one without bytes belongs to the next.
    borders = [{0: 0} | _token_counts(written) for written in pieces]
    shared = next((n for n, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    common = sorted(p for p in borders[0].keys() & borders[1].keys() if p <= shared)
    pairs = [
        ((borders[0][start], borders[0][end]), (borders[1][start], borders[1][end]))
        for start, end in pairwise(common)
    ]
    if ends and shared == len(texts[0]) == len(texts[1]):
        pairs.append(((sizes[0], sizes[0] + 1), (sizes[1], sizes[1] + 1)))
    return pairs


def _token_counts(written: Sequence[bytes]) -> dict[int, int]:
    counts, position = {}, 0
    for number, piece in enumerate(written, 1):
        position += len(piece)
        if piece:
            counts[position] = number
    return counts


class AlignedEncoder:
    """Encodes dialogues with the policy's tokenizer and with that of each teacher's folder."""

    def __init__(self, experiment: Experiment) -> None:
        """Load each tokenizer once. Raises TokenizerError."""
        policy, held = experiment.policy, teachers_held(experiment.teachers)
        own = {"tokenizer": TokenizerConfig()}
        sections = [one.worker_config(policy).model_copy(update=own) for one in held.values()]
        self._names = list(held)
        self._encoders = []
        for section in (policy, *sections):
            tokenizer = load_tokenizer(section)
            prompts = prompts_of(tokenizer, experiment.data.chat)
            self._encoders.append(Encoder(tokenizer, prompts, policy.max_sequence_length))
        self._vocabularies = [Vocabulary.of(encoder.tokenizer) for encoder in self._encoders]

    def projections(self, folder: Path) -> dict[str, Path]:
        """Files of the projections on the vocabularies of the teachers, by name. Raises OSError."""
        policy, *teachers = self._encoders
        return {
            name: Projection.cached(
                folder,
                policy.tokenizer,
                one.tokenizer,
                (policy.prompts.end_token_id, one.prompts.end_token_id),
            )
            for name, one in zip(self._names, teachers, strict=True)
        }

    def texts(
        self, dialogues: Iterable[Dialogue | Text], train_on: TrainOn
    ) -> list[list[tuple[Example, Example]]]:
        """Of each dialogue the policy's and the teacher's example, for each teacher. Raises ExampleError."""
        given = list(dialogues)
        mine, *others = [encoder.dialogues(given, train_on) for encoder in self._encoders]
        own, *vocabularies = self._vocabularies
        return [
            [
                align(
                    replace(example, teacher=number),
                    own,
                    one,
                    vocabulary,
                    "all" if isinstance(dialogue, Text) else train_on,
                )
                for number, (one, vocabulary) in enumerate(zip(read, vocabularies, strict=True))
            ]
            for dialogue, example, *read in zip(given, mine, *others, strict=True)
        ]


@dataclass(frozen=True)
class Projection:
    """Weights of the teacher's tokens in place of each token of the policy: a sparse matrix.

    A token that both vocabularies have is mapped to itself, with weight 1. Any other one is mapped to the
    first `MAX_PIECES` tokens into which the teacher's tokenizer splits its text; each has `LATER_SHARE` of
    the weight before it, and all together have 1. Parts of characters that the teacher lacks have none.
    """

    policy_ids: Int32Array  # [E]
    teacher_ids: Int32Array  # [E]
    weights: Float32Array  # [E]
    exact: BoolArray  # [E] True for a token that both have
    policy_size: int  # of the vocabulary
    teacher_size: int

    @classmethod
    def build(cls, policy: Tokenizer, teacher: Tokenizer, ends: tuple[int, int]) -> Self:
        """`ends` are the tokens that end a turn, the policy's and the teacher's."""
        of_policy, of_teacher = policy.token_bytes, teacher.token_bytes
        # Of several tokens that write the same, the last one: SentencePiece's tokens of bytes come first.
        mine, known = ({piece: n for n, piece in enumerate(each)} for each in (of_policy, of_teacher))
        entries: list[tuple[int, int, float, bool]] = []
        for token, piece in enumerate(of_policy):
            if token == ends[0]:
                entries.append((token, ends[1], 1.0, True))
            elif not piece:
                continue
            elif token < len(of_teacher) and of_teacher[token] == piece:
                entries.append((token, token, 1.0, True))
            elif piece in known:
                entries.append((token, known[piece], 1.0, mine[piece] == token))
            else:
                pieces = _split(teacher, of_teacher, known, piece)
                shares = LATER_SHARE ** np.arange(len(pieces), dtype=np.float64)
                summed: dict[int, float] = {}
                for one, share in zip(pieces, shares / max(shares.sum(), 1.0), strict=True):
                    summed[one] = summed.get(one, 0.0) + float(share)
                entries += [(token, one, weight, False) for one, weight in summed.items()]
        return cls(
            policy_ids=np.array([entry[0] for entry in entries], dtype=np.int32),
            teacher_ids=np.array([entry[1] for entry in entries], dtype=np.int32),
            weights=np.array([entry[2] for entry in entries], dtype=np.float32),
            exact=np.array([entry[3] for entry in entries], dtype=np.bool_),
            policy_size=len(of_policy),
            teacher_size=len(of_teacher),
        )

    @classmethod
    def cached(cls, folder: Path, policy: Tokenizer, teacher: Tokenizer, ends: tuple[int, int]) -> Path:
        """The file of the projection in `folder`, which is written where it is missing. Raises OSError."""
        digest = hashlib.blake2b(_SCHEME + repr(ends).encode(), digest_size=16)
        for tokenizer in (policy, teacher):
            for piece in tokenizer.token_bytes:
                digest.update(len(piece).to_bytes(4, "little") + piece)
            digest.update(b"next")
        path = folder / f"{digest.hexdigest()}.npz"
        with suppress(*UNREADABLE):  # then it is written again
            cls.load(path)
            return path
        cls.build(policy, teacher, ends).save(path)
        return path

    def save(self, path: Path) -> None:
        """Write a file that appears complete or not at all. Raises OSError."""
        partial = path.with_name(path.name + ".partial")
        sizes = np.array([self.policy_size, self.teacher_size])
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                np.savez(file, sizes=sizes, **arrays)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises one of UNREADABLE for a file that is missing or incomplete."""
        with np.load(path, allow_pickle=False) as arrays:
            policy_size, teacher_size = map(int, arrays["sizes"])
            columns = {name: arrays[name] for name in _ARRAYS}
            return cls(**columns, policy_size=policy_size, teacher_size=teacher_size)

    @cached_property
    def is_identity(self) -> bool:
        """True if both have the same tokens under the same ids."""
        same = self.policy_size == self.teacher_size and bool((self.weights == 1).all())
        return same and bool((self.policy_ids == self.teacher_ids).all())

    def pairs(self, *, likeliest: bool) -> tuple[IntArray, IntArray]:
        """Ids of the policy and the teacher, one to one, of tokens that count as the same; by the policy's.

        Those that both have; with `likeliest` also a token and its first piece, if the weight of the piece is
        at least `LIKE_EXACT`. Of several tokens of the policy for one of the teacher, the exact one counts,
        then the one of largest weight, then the first.
        """
        counts = np.flatnonzero(self.exact | (likeliest & (self.weights >= LIKE_EXACT)))
        order = np.lexsort((self.policy_ids[counts], -self.weights[counts], ~self.exact[counts]))
        ranked = counts[order]
        _, first = np.unique(self.teacher_ids[ranked], return_index=True)
        chosen = ranked[first]
        chosen = chosen[np.argsort(self.policy_ids[chosen], kind="stable")]
        return self.policy_ids[chosen].astype(np.int64), self.teacher_ids[chosen].astype(np.int64)


_ARRAYS = ("policy_ids", "teacher_ids", "weights", "exact")


def _split(
    teacher: Tokenizer, written: Sequence[bytes], known: Mapping[bytes, int], piece: bytes
) -> list[int]:
    """The first tokens into which the teacher's tokenizer splits a text; none for a part of a character."""
    try:
        tokens = teacher.encode(piece.decode())
    except (UnicodeDecodeError, TokenizerError):
        return []
    if b"".join(written[token] for token in tokens) == b" " + piece:  # which SentencePiece writes first
        first = written[tokens[0]][1:]
        tokens = [*([known.get(first, tokens[0])] if first else []), *tokens[1:]]
    return tokens[:MAX_PIECES]
