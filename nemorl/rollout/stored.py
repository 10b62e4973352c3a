"""Groups in files: token arrays as safetensors, all else as JSON. Nothing is unpickled.

    trajectories/rollout.json                what sampled them
    trajectories/step_000012-0.safetensors   arrays of all sequences end to end, [N] tokens
    trajectories/step_000012-0.json          the groups, and the fields of each sequence that are no arrays

The rollout workers share a step: each writes a part of its groups, numbered by the last digits. The JSON file
of a part is written last: without it there is nothing. Those of a validation begin with its name in place of
`step`.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from glob import escape
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from nemorl.cluster.errors import ClusterError
from nemorl.config.environment import environments_in
from nemorl.config.experiment import Experiment
from nemorl.config.facts import reward_weights
from nemorl.data.trained import save_arrays
from nemorl.errors import RunError
from nemorl.observe.files import WriteError, write_atomically, write_failed
from nemorl.trajectories import Float32Array, StopReason, Trajectory, Turn

from .groups import GroupSummary

logger = logging.getLogger(__name__)

FORMAT = 2
TRAINING = "step"  # series
_NAME = re.compile(r"(.+)_(\d{6})-.+")  # of a file of a step: series, and number
Advantage = float | tuple[float, ...]  # of a sequence, or of each of its turns
SequenceKey = tuple[Any, int]  # reference of the list that has a sequence, and its row
_ARRAYS = ("tokens", "loss_mask", "logprobs", "versions")  # routed experts have a file of several shapes


class StoredRolloutError(RunError):
    """Stored groups that cannot be read; the message names the file."""


@dataclass(frozen=True)
class SampledBy:
    """What sampled stored groups, and what training on them has to share with it."""

    model: str
    tokenizer: str  # checksum
    temperature: float
    reward_weights: dict[str, float]
    data: dict[str, Any] = field(default_factory=dict)  # section `data.train`
    filters: dict[str, float] = field(default_factory=dict)  # top_k, top_p and min_p, where they leave out
    turn_flags: dict[str, Any] = field(default_factory=dict)  # those of each environment, by its section
    format: int = FORMAT

    @classmethod
    def of(cls, experiment: Experiment) -> "SampledBy":
        policy = experiment.policy
        tokenizer = (policy.tokenizer_folder / "tokenizer.json").read_bytes()
        weights = reward_weights(experiment.env, experiment.rewards)
        sampling = experiment.generation.sampling
        data = experiment.data.train.model_dump(mode="json")
        return cls(
            *(str(policy.model_path), sha256(tokenizer).hexdigest(), sampling.temperature, weights, data),
            filters=sampling.model_dump(exclude={"temperature"}, exclude_defaults=True),
            turn_flags={
                path: {name: flag.model_dump(mode="json") for name, flag in one.turn_flags.items()}
                for path, one in environments_in(experiment.env)
                if one.turn_flags
            },
        )


@dataclass(frozen=True)
class _Sequence:
    """A trajectory without its arrays."""

    num_tokens: int
    turns: tuple[Turn, ...]
    rewards: dict[str, float]
    reward: float
    stop: StopReason
    group: int
    task: int
    error: str | None
    seconds_generation: float
    seconds_environment: float
    player: str = ""
    fork: int = 0

    @classmethod
    def of(cls, trajectory: Trajectory) -> "_Sequence":
        names = [each.name for each in fields(cls)]
        return cls(**{name: getattr(trajectory, name) for name in names})


@dataclass(frozen=True)
class _Part:
    """A file of a step."""

    step: int
    places: tuple[int, ...]  # of its groups in the step
    groups: tuple[GroupSummary, ...]
    sequences: tuple[tuple[_Sequence, ...], ...]  # of each group


@dataclass(frozen=True)
class _Place:
    """Where a group of a step is."""

    path: Path  # of the part's JSON file
    part: _Part
    number: int  # in the part


@dataclass(frozen=True)
class StoredGroup:
    step: int
    summary: GroupSummary  # without a reference
    sequences: tuple[Trajectory, ...]
    advantages: tuple[Float32Array, ...] = field(default=())  # [T] of each sequence, NaN where unknown


def spread(trajectory: Trajectory, advantage: Advantage | None) -> Float32Array:
    """[T] from an advantage of the sequence, or of each turn; 0 where nothing was sampled, NaN if unknown."""
    if advantage is None:
        return np.full(trajectory.num_tokens, np.nan, dtype=np.float32)
    values = np.zeros(trajectory.num_tokens, dtype=np.float32)
    of_turns = [advantage] * len(trajectory.turns) if isinstance(advantage, int | float) else advantage
    for turn, value in zip(trajectory.turns, of_turns, strict=True):
        values[turn.start : turn.end] = value
    return values


class RolloutFiles:
    """The folder `trajectories` of a run, and the groups of one series in it."""

    def __init__(self, folder: Path, series: str = TRAINING) -> None:
        """`series`: the groups of training, or a name by `validation_series`."""
        self.folder, self.series = folder, series
        self._parsed: tuple[int, list[_Place]] | None = None  # the last step that was read

    def begin(self, origin: SampledBy) -> None:
        """Create the folder. Raises WriteError."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_failed(self.folder, error) from error
        write_atomically(self._origin_file, json.dumps(asdict(origin), indent=2) + "\n")

    @property
    def _origin_file(self) -> Path:
        return self.folder / "rollout.json"

    def origin(self) -> SampledBy:
        """Raises StoredRolloutError if there are no stored groups, or those of another format."""
        if not self._origin_file.is_file():
            raise StoredRolloutError(f"{self.folder} holds no stored groups")
        found: SampledBy = _read(self._origin_file, TypeAdapter(SampledBy))
        if found.format != FORMAT:
            raise StoredRolloutError(f"{self._origin_file}: format {found.format} is not {FORMAT}")
        return found

    def write(
        self, step: int, groups: Sequence[StoredGroup], part: int = 0, places: Sequence[int] | None = None
    ) -> None:
        """Write a part of a step: groups with their places in it, by default from 0 on. Raises WriteError."""
        self._parsed = None
        flat = [(t, a) for group in groups for t, a in zip(group.sequences, group.advantages, strict=True)]
        arrays = {name: np.concatenate([getattr(t, name) for t, _ in flat]) for name in _ARRAYS}
        arrays["advantages"] = np.concatenate([advantage for _, advantage in flat])
        for number, (trajectory, _) in enumerate(flat):
            if trajectory.routed_experts is not None:
                arrays[f"routed_experts.{number}"] = trajectory.routed_experts
        content = {
            "step": step,
            "places": list(range(len(groups)) if places is None else places),
            "groups": [asdict(replace(group.summary, reference=None)) for group in groups],
            "sequences": [[asdict(_Sequence.of(t)) for t in group.sequences] for group in groups],
        }
        path = self.folder / f"{self.series}_{step:06d}-{part}.json"
        of_arrays = path.with_suffix(".safetensors")
        try:
            save_arrays(of_arrays, arrays)
        except OSError as error:
            raise write_failed(of_arrays, error) from error
        write_atomically(path, json.dumps(content, default=float) + "\n", durable=False)

    def steps(self) -> list[int]:
        named = (_NAME.fullmatch(path.name) for path in self.folder.glob("*.json"))
        return sorted({int(name[2]) for name in named if name is not None and name[1] == self.series})

    def remove_after(self, step: int) -> None:
        """Remove later steps of all series, which a run takes again."""
        self._parsed = None
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if (name := _NAME.fullmatch(path.name)) is not None and int(name[2]) > step:
                path.unlink(missing_ok=True)

    def summaries(self) -> Iterator[tuple[int, GroupSummary]]:
        """All groups in their order, with their step. Raises StoredRolloutError."""
        self._parsed = None
        for step in self.steps():
            yield from ((step, group) for group in self.groups(step))

    def groups(self, step: int) -> list[GroupSummary]:
        """The groups of a step in their order. Raises StoredRolloutError."""
        return [place.part.groups[place.number] for place in self._places(step)]

    def group(self, step: int, place: int) -> StoredGroup:
        """A group of a step, by its place there. Raises StoredRolloutError."""
        found = self._places(step)[place]
        part, number = found.part, found.number
        before = sum(map(len, part.sequences[:number]))
        lengths = [sequence.num_tokens for of_group in part.sequences for sequence in of_group]
        starts = [0, *accumulate(lengths)]
        path = found.path.with_suffix(".safetensors")
        sequences, advantages = [], []
        try:
            with safe_open(path, "np") as arrays:
                for row, sequence in enumerate(part.sequences[number], start=before):
                    span = slice(starts[row], starts[row + 1])
                    of_tokens = {name: arrays.get_slice(name)[span] for name in _ARRAYS}
                    key = f"routed_experts.{row}"
                    experts = arrays.get_tensor(key) if key in arrays.keys() else None  # noqa: SIM118
                    known = {each.name: getattr(sequence, each.name) for each in fields(sequence)}
                    del known["num_tokens"]
                    sequences.append(Trajectory(**of_tokens, **known, routed_experts=experts))
                    advantages.append(arrays.get_slice("advantages")[span])
        except (OSError, SafetensorError, ValueError) as error:
            raise StoredRolloutError(f"{path} cannot be read: {error}") from error
        return StoredGroup(step, part.groups[number], tuple(sequences), tuple(advantages))

    def _places(self, step: int) -> list[_Place]:
        """The groups of a step in their order. The groups of a step are read one by one, so it is kept."""
        if self._parsed is None or self._parsed[0] != step:
            found: dict[int, _Place] = {}
            for path in sorted(self.folder.glob(f"{escape(self.series)}_{step:06d}-*.json")):
                part: _Part = _read(path, _part())
                found |= {place: _Place(path, part, number) for number, place in enumerate(part.places)}
            self._parsed = step, [found[place] for place in sorted(found)]
        return self._parsed[1]


@cache
def _part() -> TypeAdapter[_Part]:
    """Built once: that takes longer than to read a small file."""
    return TypeAdapter(_Part)


def validation_series(validation_set: str) -> str:
    return f"validation.{validation_set}" if validation_set else "validation"


def _read(path: Path, kind: TypeAdapter[Any]) -> Any:
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise StoredRolloutError(f"{path} cannot be read: {first}") from error


Fetch = Callable[[Any], Awaitable[Sequence[Trajectory]]]  # the sequences behind a group's reference


@dataclass(frozen=True)
class StepPart:
    """The groups of a step that one process writes, with references of their sequences."""

    step: int
    series: str
    number: int
    places: Sequence[int]  # of the groups in the step
    groups: Sequence[GroupSummary]
    advantages: Sequence[Sequence[Advantage | None]]  # of the sequences of each group; None if unknown

    async def write(self, folder: Path, fetch: Fetch) -> None:
        """Raises WriteError, and what `fetch` raises."""
        stored: list[StoredGroup] = []
        fetched: dict[Any, Sequence[Trajectory]] = {}  # groups that ended together share a reference
        for group, advantages in zip(self.groups, self.advantages, strict=True):
            if group.reference not in fetched:
                fetched[group.reference] = await fetch(group.reference)
            rows = sequence_rows(group)
            sequences = tuple(fetched[group.reference][row] for row in rows)
            spread_out = tuple(map(spread, sequences, advantages))
            stored.append(StoredGroup(self.step, group.moved(-rows.start), sequences, spread_out))
        files = RolloutFiles(folder, self.series)
        await asyncio.to_thread(files.write, self.step, stored, self.number, self.places)


def sequence_rows(group: GroupSummary) -> range:
    """Rows of its sequences in the list behind its reference."""
    return range(group.trajectories[0].sequences[0].row, group.trajectories[-1].row + 1)


class PartWriter(Protocol):
    """A process that writes parts of steps: a rollout worker, or the driver."""

    @property
    def node(self) -> str:
        """ID of its node in a run over several, as that of a group."""

    async def write_part(self, folder: Path, part: StepPart, /) -> None: ...


@dataclass
class LocalWriter:
    """Writes in this process."""

    fetch: Fetch
    node: str = ""

    async def write_part(self, folder: Path, part: StepPart) -> None:
        await part.write(folder, self.fetch)


@dataclass(frozen=True)
class TrajectoryLog:
    """Writes groups of a run's steps, where their trajectories are."""

    files: RolloutFiles
    writers: Callable[[], Sequence[PartWriter]]  # those that can write now
    num_samples: float  # of each step: complete groups, until there are as many

    def kept(self, groups: Sequence[GroupSummary]) -> list[GroupSummary]:
        """The groups of a step whose trajectories are to be written."""
        kept, left = [], self.num_samples
        for group in groups:
            if left <= 0:
                break
            left -= group.num_samples
            kept.append(group)
        return kept

    async def write(
        self,
        step: int,
        kept: Sequence[GroupSummary],
        advantages: Mapping[SequenceKey, Advantage],
        series: str = TRAINING,
    ) -> bool:
        """False, after a warning, where that fails. `advantages`: of sequences, as far as they are known."""
        folder = self.files.folder.absolute()  # other processes may have another current folder
        writers = self.writers()
        of_groups = [[advantages.get((g.reference, row)) for row in sequence_rows(g)] for g in kept]
        work = []
        for number, (writer, places) in enumerate(zip(writers, _shares(kept, writers), strict=True)):
            groups, known = [kept[place] for place in places], [of_groups[place] for place in places]
            if places:
                work.append(writer.write_part(folder, StepPart(step, series, number, places, groups, known)))
        try:
            await asyncio.gather(*work)
        except (ClusterError, WriteError) as error:
            what = "Trajectories" if series == TRAINING else f"Trajectories of the {series}"
            logger.warning("%s of step %d were not stored: %s", what, step, error)
            return False
        return True


def _shares(groups: Sequence[GroupSummary], writers: Sequence[PartWriter]) -> list[list[int]]:
    """The places of the groups that each writer writes: equally many, those of its node first."""
    shares: list[list[int]] = [[] for _ in writers]
    for place, group in enumerate(groups):
        near = [number for number, writer in enumerate(writers) if writer.node == group.node]
        shares[min(near or range(len(writers)), key=lambda number: len(shares[number]))].append(place)
    return shares
