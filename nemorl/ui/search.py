"""Texts of stored trajectories: the answers of some rows, and those that contain a text or token ids.

A search reads files, newest steps first, for a limited time. It says how far it looked and where to continue.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.stored import RolloutFiles, StoredRolloutError
from nemorl.trajectories import Trajectory

from .errors import UiError
from .tokens import Tokenizers, TokenTexts, series_files, stored_group
from .trajectories import Query, Row, TrajectoryTable

SEARCH_SECONDS = 2.0
MAX_FOUND = 200  # in one answer
MAX_ANSWER = 20_000  # characters of a text that is shown next to others
_AROUND = 60  # characters on each side of what was found


@dataclass(frozen=True)
class Answer:
    """What follows the prompt in a trajectory; None, with the reason, if it is not stored."""

    row: Row
    text: str | None
    problem: str = ""
    prompt: str | None = None


@dataclass(frozen=True)
class Match:
    row: Row
    token: int  # the first one of what was found; -1 in a text without tokens
    before: str
    text: str
    after: str


@dataclass(frozen=True)
class Found:
    matches: list[Match]
    looked: int  # trajectories that were read by this search and those that it continues
    total: int  # stored trajectories of the rows that were searched
    next: int | None  # where to continue; None at the end
    notes: list[str] = field(default_factory=list)


def answers(run: Path, table: TrajectoryTable, rows: Sequence[Row], tokenizers: Tokenizers) -> list[Answer]:
    """The texts of rows, cut at MAX_ANSWER characters; token ids where there is no tokenizer."""
    if table.source == "samples":
        lines = [table.sample(row["row"]) for row in rows]
        return [
            Answer(row, str(line.get("completion", ""))[:MAX_ANSWER], prompt=str(line.get("prompt", "")))
            for row, line in zip(rows, lines, strict=True)
        ]
    texts, _ = tokenizers.of(run)
    of_series: dict[str, RolloutFiles] = {}  # which keep the step that was read last
    found = []
    for row in rows:
        files = series_files(run, row)
        files = of_series.setdefault(files.series, files)
        try:
            group, summary = stored_group(run, row, files)
        except UiError as error:
            found.append(Answer(row, None, error.message))
            continue
        sequences = [group.sequences[sequence.row] for sequence in summary.sequences]
        prompt, text = [], []
        for sequence in sequences:
            start = sequence.turns[0].start if sequence.turns else sequence.num_tokens
            prompt.append(_text(texts, sequence.tokens[:start]))
            text.append(_text(texts, sequence.tokens[start:]))
        found.append(Answer(row, "\n\n".join(text)[:MAX_ANSWER], prompt=prompt[0][:MAX_ANSWER]))
    return found


def search(
    run: Path,
    table: TrajectoryTable,
    query: Query,
    sought_text: str,
    tokenizers: Tokenizers,
    start: int = 0,
    seconds: float = SEARCH_SECONDS,
) -> Found:
    """Find a text, without regard to case, or token ids written as `ids: 5 17`, in the rows of a filter.

    `start` is where an earlier search ended. Raises UiError.
    """
    deadline = time.monotonic() + seconds
    if not sought_text.strip():
        raise UiError(400, "nothing to search for", "text", "give a text, or token ids such as ids: 5 17")
    if table.source == "samples":
        return _search_samples(table, query, sought_text, start, deadline)
    matching = table.matching(query.filter)[1] & table.column("stored")
    numbers = np.flatnonzero(matching)
    # The rows of a step and series are read together: they share files.
    steps = table.column("step")[numbers]
    sets = table.column("phase")[numbers].astype(np.int64) * 65536 + table.column("validation_set")[numbers]
    numbers = numbers[np.lexsort((numbers, sets, -steps))]
    sought = _Sought.of(sought_text, run, tokenizers)
    matches: list[Match] = []
    notes: list[str] = []
    place = start
    while place < len(numbers) and len(matches) < MAX_FOUND:
        rows = table.rows(numbers[place : place + 512])
        first = rows[0]
        of_step = [
            row
            for row in rows
            if all(row[name] == first[name] for name in ("step", "phase", "validation_set"))
        ]
        place += len(of_step)
        try:
            matches += sought.in_rows(series_files(run, first), of_step)
        except StoredRolloutError as error:
            notes.append(str(error))
        if time.monotonic() > deadline:
            break
    return Found(matches, place, len(numbers), place if place < len(numbers) else None, notes[:5])


def _search_samples(table: TrajectoryTable, query: Query, text: str, start: int, deadline: float) -> Found:
    numbers = np.flatnonzero(table.matching(query.filter)[1])[::-1]
    pattern, place = re.compile(re.escape(text), re.IGNORECASE), start
    matches: list[Match] = []
    while place < len(numbers) and len(matches) < MAX_FOUND and time.monotonic() <= deadline:
        number = int(numbers[place])
        completion = str(table.sample(number).get("completion", ""))
        if (match := pattern.search(completion)) is not None:
            matches.append(_match(table.rows([number])[0], -1, completion, *match.span()))
        place += 1
    return Found(matches, place, len(numbers), place if place < len(numbers) else None)


@dataclass(frozen=True)
class _Sought:
    ids: NDArray[np.int32] | None
    pattern: re.Pattern[str] | None
    texts: TokenTexts | None

    @classmethod
    def of(cls, text: str, run: Path, tokenizers: Tokenizers) -> "_Sought":
        texts, note = tokenizers.of(run)
        if (given := re.fullmatch(r"\s*ids?:\s*(.*)", text)) is not None:
            words = given[1].replace(",", " ").split()
            if not words or not all(word.isdecimal() and len(word) < 10 for word in words):
                raise UiError(400, f"{given[1]!r} are no token ids", "text", "write, for example, ids: 5 17")
            return cls(np.array(list(map(int, words)), np.int32), None, texts)
        if texts is None:
            raise UiError(409, note, str(RunPaths(run).config), "or search for token ids, such as ids: 5 17")
        return cls(None, re.compile(re.escape(text), re.IGNORECASE), texts)

    def in_rows(self, files: RolloutFiles, rows: Sequence[Row]) -> list[Match]:
        """The first place in each trajectory, of rows of one step. Raises StoredRolloutError."""
        step = rows[0]["step"]
        places = {group.group: place for place, group in enumerate(files.groups(step))}
        sequences: list[tuple[Row, Trajectory]] = []
        for group in dict.fromkeys(row["group"] for row in rows):
            if group not in places:
                continue  # its file is missing
            stored = files.group(step, places[group])
            members = stored.summary.trajectories
            for row in rows:
                if row["group"] == group and row["sample"] < len(members):
                    branches = members[row["sample"]].sequences
                    sequences += [(row, stored.sequences[branch.row]) for branch in branches]
        found = self._ids_in(sequences) if self.pattern is None else self._text_in(sequences)
        return list({match.row["row"]: match for match in reversed(list(found))}.values())[::-1]

    def _ids_in(self, sequences: Sequence[tuple[Row, Trajectory]]) -> Iterator[Match]:
        ids = self.ids
        assert ids is not None
        for row, trajectory in sequences:
            tokens = trajectory.tokens
            starts = np.flatnonzero(tokens[: len(tokens) - len(ids) + 1] == ids[0])
            for start in starts.tolist():
                if np.array_equal(tokens[start : start + len(ids)], ids):
                    end = start + len(ids)
                    spans = (tokens[max(0, start - 16) : start], tokens[start:end], tokens[end : end + 16])
                    yield Match(row, start, *(_text(self.texts, span) for span in spans))
                    break

    def _text_in(self, sequences: Sequence[tuple[Row, Trajectory]]) -> Iterator[Match]:
        assert self.texts is not None
        assert self.pattern is not None
        decoded = self.texts.decode_all([trajectory.tokens.tolist() for _, trajectory in sequences])
        for (row, trajectory), text in zip(sequences, decoded, strict=True):
            if (match := self.pattern.search(text)) is None:
                continue
            ends = np.cumsum([len(piece) for piece in self.texts.pieces(trajectory.tokens.tolist())])
            token = int(np.searchsorted(ends, match.start(), side="right"))
            yield _match(row, min(token, trajectory.num_tokens - 1), text, *match.span())


def _match(row: Row, token: int, text: str, start: int, end: int) -> Match:
    return Match(
        row, token, text[max(0, start - _AROUND) : start], text[start:end], text[end : end + _AROUND]
    )


def _text(texts: TokenTexts | None, tokens: NDArray[np.int32]) -> str:
    ids = tokens.tolist()
    return " ".join(map(str, ids)) if texts is None else texts.decode(ids)
