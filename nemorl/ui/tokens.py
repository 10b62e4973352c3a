"""One stored trajectory: turns, the text of each token, what engine and trainer computed for it, and rewards.

Texts come from the tokenizer of the run, if a folder still has the one with the checksum of the run. What
cannot be read is a note, and the rest is shown.
"""

import hashlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from nemorl.data.trained import read_trained
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.groups import GroupSummary, TrajectorySummary
from nemorl.rollout.stored import (
    TRAINING,
    RolloutFiles,
    SampledBy,
    StoredGroup,
    StoredRolloutError,
    validation_series,
)
from nemorl.trajectories import Trajectory

from .errors import UiError
from .trajectories import Row

UNKNOWN_CHARACTER = "\ufffd"  # of bytes that are no character yet
MAX_CHARACTER_TOKENS = 8  # that the bytes of one character may have
_OF_TRAINER = ("logprobs", "values", "returns", "entropies", "reference_logprobs")
Arrays = dict[str, NDArray[Any]]


class TokenTexts:
    """Texts of single tokens in their sequence, which add up to the text of the whole."""

    def __init__(self, file: Path) -> None:
        """`file` is a tokenizer.json. Raises OSError or ValueError."""
        from tokenizers import Tokenizer  # without transformers, whose import takes seconds

        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises no narrower class
            raise ValueError(f"{file} cannot be read: {error}") from error
        added = self._tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        # Many decoders change the first token of a text, so each is decoded after a plain one.
        self._first = next(filter(None, map(self._encoded, ("a", "0"))), [])
        self._opening = self.decode(self._first)
        self._alone: dict[int, str] = {}

    def _encoded(self, text: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)[-1:]
        except Exception:  # noqa: BLE001 - tokenizers raises no narrower class; the vocabulary may lack it
            return []

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def decode_all(self, sequences: Sequence[Sequence[int]]) -> list[str]:
        return list(self._tokenizer.decode_batch(list(map(list, sequences)), skip_special_tokens=False))

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token; of the tokens of one character the first has it, the others are empty."""
        found = [self._piece(number) for number in ids]
        place = 0
        while place < len(found):
            if UNKNOWN_CHARACTER in found[place]:
                for end in range(place + 2, min(place + MAX_CHARACTER_TOKENS, len(found)) + 1):
                    text = self._after_first(ids[place:end])
                    if UNKNOWN_CHARACTER not in text:
                        found[place:end] = [text, *[""] * (end - place - 1)]
                        place = end - 1
                        break
            place += 1
        return found

    def _piece(self, number: int) -> str:
        if number not in self._alone:
            self._alone[number] = self._after_first([number])
        return self._alone[number]

    def _after_first(self, ids: Sequence[int]) -> str:
        text = self.decode([*self._first, *ids])
        return text.removeprefix(self._opening) if text.startswith(self._opening) else self.decode(ids)


class Tokenizers:
    """The tokenizers of runs, which are loaded once."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[Path, int], TokenTexts] = {}
        self._lock = threading.Lock()

    def of(self, run: Path) -> tuple[TokenTexts | None, str]:
        """That of a run, or None and a note of why it is missing."""
        try:
            checksum = RolloutFiles(RunPaths(run).trajectories).origin().tokenizer
        except StoredRolloutError:
            checksum = ""
        problems = []
        with self._lock:
            for file in _tokenizer_files(run):
                try:
                    content = file.read_bytes()
                    if checksum and hashlib.sha256(content).hexdigest() != checksum:
                        problems.append(f"{file} is not the tokenizer of the run (another checksum)")
                        continue
                    key = file, file.stat().st_mtime_ns
                    if key not in self._loaded:
                        self._loaded[key] = TokenTexts(file)
                    return self._loaded[key], ""
                except FileNotFoundError:
                    continue
                except (OSError, ValueError) as error:
                    problems.append(str(error))
        problem = "; ".join(problems) or "policy.model_path in config.yaml leads to no tokenizer.json"
        return None, f"Tokens are shown as numbers: {problem}. Start nemorl ui where the run was started."


def _tokenizer_files(run: Path) -> Iterator[Path]:
    """Where the tokenizer of a run may be; relative paths are of the folder in which the run was started."""
    named: list[Path] = []
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        policy = yaml.safe_load(RunPaths(run).config.read_text(encoding="utf-8"))["policy"]
        of_tokenizer = (policy.get("tokenizer") or {}).get("path")
        named = [Path(str(of_tokenizer or policy["model_path"]))]
    with suppress(StoredRolloutError):
        named.append(Path(RolloutFiles(RunPaths(run).trajectories).origin().model))
    folders = [base / path for path in dict.fromkeys(named) for base in (Path.cwd(), *run.resolve().parents)]
    for folder in dict.fromkeys([*folders, run / "hf"]):
        yield folder / "tokenizer.json"


@dataclass(frozen=True)
class Segment:
    """Tokens of the prompt, of a turn of the policy, or of what the environment answered (given)."""

    role: str  # prompt, policy or given
    start: int
    end: int
    stop: str = ""
    reward: float | None = None  # given in this turn, weighted
    rewards: dict[str, float] = field(default_factory=dict)  # before weights
    seconds: float | None = None  # of generation; None where it is unknown
    flags: tuple[str, ...] = ()  # of the turn


@dataclass(frozen=True)
class RewardPart:
    name: str
    value: float  # before its weight
    weight: float | None  # None if the run does not say
    product: float | None


@dataclass(frozen=True)
class TrajectoryView:
    """What is shown of a trajectory; `arrays` are [T], NaN where a quantity is unknown.

    `logprob` is the engine's, `trainer_logprob` the trainer's before its updates, `gap` the second minus the
    first and `ratio` exp(gap). `mask` is what may train, `trained` what had a weight in the loss.
    """

    row: Row  # of the index
    rewards: list[RewardPart]
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None
    branch: int = 0  # of a sample with several token sequences
    branches: int = 1
    texts: list[str] | None = None  # of the tokens; None without a tokenizer
    special: list[int] = field(default_factory=list)  # ids of special tokens among them
    conversation: dict[str, Any] | None = None  # of samples.jsonl, where no tokens are stored
    temperature: float | None = None
    notes: list[str] = field(default_factory=list)
    arrays: Arrays = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """All but the arrays."""
        return {name: value for name, value in vars(self).items() if name != "arrays"}


def view_trajectory(run: Path, row: Row, tokenizers: Tokenizers, branch: int = 0) -> TrajectoryView:
    """The trajectory of a row of the index, with the tokens of one of its sequences where they are stored."""
    notes: list[str] = []
    origin: SampledBy | None = None
    try:
        origin = series_files(run, row).origin()
    except StoredRolloutError as error:
        notes.append(f"weights of rewards are unknown: {error}")
    parts = _reward_parts(row, origin)
    temperature = None if origin is None else origin.temperature
    try:
        group, summary = stored_group(run, row)
    except UiError as error:
        notes.append(f"{error.message}. {error.fix}" if error.fix else error.message)
        return TrajectoryView(row, parts, notes=notes, temperature=temperature)
    branches = summary.sequences
    if not 0 <= branch < len(branches):
        raise UiError(404, f"no branch {branch}", str(branch), f"it has branches 0 to {len(branches) - 1}")
    place = branches[branch].row
    trajectory = group.sequences[place]
    trained: Arrays = {}
    if row["phase"] == "training":
        try:
            trained = read_trained(RunPaths(run).trajectories, row["step"], f"{row['group']}/{place}")
        except OSError as error:
            notes.append(f"what the trainer computed is left out: {error}")
        if any(len(array) != trajectory.num_tokens for array in trained.values()):
            notes.append("what the trainer computed is left out: it is of another number of tokens")
            trained = {}
    texts, note = tokenizers.of(run)
    ids = trajectory.tokens.tolist()
    if min(ids, default=0) < 0:
        texts, note = None, "Tokens are shown as numbers: some are negative"
    return TrajectoryView(
        row,
        parts,
        list(segments(trajectory)),
        error=trajectory.error,
        branch=branch,
        branches=len(branches),
        texts=None if texts is None else texts.pieces(ids),
        special=[] if texts is None else sorted(texts.special.intersection(ids)),
        temperature=temperature,
        notes=[*notes, *([note] if note else [])],
        arrays=_arrays(trajectory, group.advantages[place], trained),
    )


def _arrays(trajectory: Trajectory, advantages: NDArray[np.float32], trained: Arrays) -> Arrays:
    sampled, mask = trajectory.versions >= 0, trajectory.loss_mask

    def known(values: NDArray[Any], where: NDArray[np.bool_]) -> NDArray[np.float32]:
        return np.where(where, values, np.nan).astype(np.float32)

    arrays: Arrays = {
        "tokens": trajectory.tokens,
        "version": trajectory.versions,
        "mask": mask.astype(np.uint8),
        "logprob": known(trajectory.logprobs, sampled),
    }
    if "mask" in trained:
        arrays["trained"] = trained["mask"].astype(np.uint8)
    if "logprobs" in trained:
        arrays["trainer_logprob"] = known(trained["logprobs"], mask)
        arrays["gap"] = arrays["trainer_logprob"] - arrays["logprob"]
        with np.errstate(over="ignore"):
            arrays["ratio"] = np.exp(arrays["gap"])
    arrays["advantage"] = known(trained.get("advantages", advantages), sampled)
    shown = {"values": "value", "returns": "return", "entropies": "entropy"}
    shown |= {"reference_logprobs": "reference_logprob"}
    arrays |= {shown[name]: known(trained[name], mask) for name in shown if name in trained}
    return arrays


def _reward_parts(row: Row, origin: SampledBy | None) -> list[RewardPart]:
    weights = {} if origin is None else origin.reward_weights
    parts = []
    for column, value in row.items():
        name = column.removeprefix("rewards.")
        if name != column and value == value:  # NaN: it did not apply
            weight = weights.get(name)
            parts.append(RewardPart(name, value, weight, None if weight is None else weight * value))
    return parts


def segments(trajectory: Trajectory) -> Iterator[Segment]:
    """The turns of the policy, and what is before, between and after them."""
    before = 0
    for turn in trajectory.turns:
        if turn.start > before:
            yield Segment("given" if before else "prompt", before, turn.start)
        known = (str(turn.stop), turn.reward, turn.rewards, turn.seconds or None, turn.flags)
        yield Segment("policy", turn.start, turn.end, *known)
        before = turn.end
    if before < trajectory.num_tokens:
        yield Segment("given" if before else "prompt", before, trajectory.num_tokens)


def series_files(run: Path, row: Row) -> RolloutFiles:
    """The files that have a row's trajectory, if it is stored."""
    series = TRAINING if row["phase"] == "training" else validation_series(row["validation_set"])
    return RolloutFiles(RunPaths(run).trajectories, series)


def stored_group(
    run: Path, row: Row, files: RolloutFiles | None = None
) -> tuple[StoredGroup, TrajectorySummary]:
    """The group of a row with its token sequences, and the row's trajectory in it. Raises UiError."""
    files = series_files(run, row) if files is None else files
    step, name = row["step"], f"{row['step']}/{row['group']}/{row['sample']}"
    if not row.get("stored", False):
        fix = "Set logger.trajectories: all to store those of all"
        raise UiError(404, f"the tokens of {name} were not stored", name, fix)
    place_of_files = f"{files.folder}/{files.series}_{step:06d}-*"
    try:
        groups: list[GroupSummary] = files.groups(step)
        place = next((n for n, group in enumerate(groups) if group.group == row["group"]), None)
        if place is None:
            problem = f"the index has {name} as stored, but no complete file {place_of_files} has its group"
            raise UiError(404, problem, place_of_files, "Restore the file, or read another step")
        group = files.group(step, place)
    except StoredRolloutError as error:
        raise UiError(404, str(error), place_of_files, "Restore the file, or read another step") from error
    members = group.summary.trajectories
    if row["sample"] >= len(members):
        fix = f"it has samples 0 to {len(members) - 1}"
        raise UiError(404, f"group {row['group']} has no sample {row['sample']}", place_of_files, fix)
    return group, members[row["sample"]]
