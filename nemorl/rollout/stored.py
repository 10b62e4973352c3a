"""Groups in files: token arrays as safetensors, all else as JSON. Nothing is unpickled.

    trajectories/rollout.json              what sampled them
    trajectories/step_000012.safetensors   arrays of all sequences end to end, [N] tokens
    trajectories/step_000012.json          the groups, and the fields of each sequence that are no arrays

The JSON file is written last: without it there is nothing.
"""

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nemorl.config.experiment import Experiment
from nemorl.config.facts import reward_weights
from nemorl.errors import RunError
from nemorl.observe.files import write_atomically, write_failed
from nemorl.trajectories import Float32Array, StopReason, Trajectory, Turn

from .groups import GroupSummary

FORMAT = 1
Advantage = float | tuple[float, ...]  # of a sequence, or of each of its turns
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
    format: int = FORMAT

    @classmethod
    def of(cls, experiment: Experiment) -> "SampledBy":
        policy = experiment.policy
        tokenizer = ((policy.tokenizer.path or policy.model_path) / "tokenizer.json").read_bytes()
        weights = reward_weights(experiment.env, experiment.rewards)
        temperature = experiment.generation.sampling.temperature
        data = experiment.data.train.model_dump(mode="json")
        return cls(str(policy.model_path), sha256(tokenizer).hexdigest(), temperature, weights, data)


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
class _Step:
    step: int
    groups: tuple[GroupSummary, ...]
    sequences: tuple[tuple[_Sequence, ...], ...]  # of each group


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
    """The folder `trajectories` of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._parsed: _Step | None = None  # the last step that was read

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

    def write(self, step: int, groups: Sequence[StoredGroup]) -> None:
        """Write the groups of a step. Raises WriteError."""
        self._parsed = None
        flat = [(t, a) for group in groups for t, a in zip(group.sequences, group.advantages, strict=True)]
        arrays = {name: np.concatenate([getattr(t, name) for t, _ in flat]) for name in _ARRAYS}
        arrays["advantages"] = np.concatenate([advantage for _, advantage in flat])
        for number, (trajectory, _) in enumerate(flat):
            if trajectory.routed_experts is not None:
                arrays[f"routed_experts.{number}"] = trajectory.routed_experts
        summaries = [replace(group.summary, reference=None) for group in groups]
        of_groups = [[asdict(_Sequence.of(t)) for t in group.sequences] for group in groups]
        content = {"step": step, "groups": list(map(asdict, summaries)), "sequences": of_groups}
        path = self._path(step)
        temporary = path.with_suffix(".safetensors.tmp")
        try:
            save_file(arrays, temporary)
            os.replace(temporary, path.with_suffix(".safetensors"))
        except (OSError, SafetensorError) as error:
            failure = error if isinstance(error, OSError) else OSError(str(error))
            raise write_failed(path.with_suffix(".safetensors"), failure) from error
        write_atomically(path, json.dumps(content, default=float) + "\n")

    def steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step_")) for path in self.folder.glob("step_*.json"))

    def remove_after(self, step: int) -> None:
        """Remove later steps, which a run takes again."""
        self._parsed = None
        for number in self.steps():
            if number > step:
                for suffix in (".json", ".safetensors"):
                    self._path(number).with_suffix(suffix).unlink(missing_ok=True)

    def summaries(self) -> Iterator[tuple[int, GroupSummary]]:
        """All groups in their order, with their step. Raises StoredRolloutError."""
        for step in self.steps():
            yield from ((step, summary) for summary in self._step(step).groups)

    def group(self, step: int, place: int) -> StoredGroup:
        """A group of a step, by its place there. Raises StoredRolloutError."""
        content = self._parsed
        if content is None or content.step != step:  # the groups of a step are read one by one
            content = self._step(step)
        before = sum(map(len, content.sequences[:place]))
        lengths = [sequence.num_tokens for of_group in content.sequences for sequence in of_group]
        starts = [0, *accumulate(lengths)]
        path = self._path(step).with_suffix(".safetensors")
        sequences, advantages = [], []
        try:
            with safe_open(path, "np") as arrays:
                for number, sequence in enumerate(content.sequences[place], start=before):
                    span = slice(starts[number], starts[number + 1])
                    of_tokens = {name: arrays.get_slice(name)[span] for name in _ARRAYS}
                    key = f"routed_experts.{number}"
                    experts = arrays.get_tensor(key) if key in arrays.keys() else None  # noqa: SIM118
                    known = {each.name: getattr(sequence, each.name) for each in fields(sequence)}
                    del known["num_tokens"]
                    sequences.append(Trajectory(**of_tokens, **known, routed_experts=experts))
                    advantages.append(arrays.get_slice("advantages")[span])
        except (OSError, SafetensorError, ValueError) as error:
            raise StoredRolloutError(f"{path} cannot be read: {error}") from error
        return StoredGroup(step, content.groups[place], tuple(sequences), tuple(advantages))

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.json"

    def _step(self, step: int) -> _Step:
        content: _Step = _read(self._path(step), TypeAdapter(_Step))
        self._parsed = content
        return content


def _read(path: Path, kind: TypeAdapter[Any]) -> Any:
    try:
        return kind.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise StoredRolloutError(f"{path} cannot be read: {first}") from error


@dataclass(frozen=True)
class TrajectoryLog:
    """Writes groups of a run's steps."""

    files: RolloutFiles
    fetch: Callable[[Any], Awaitable[Sequence[Trajectory]]]  # the sequences behind a group's reference
    num_samples: int  # of each step: complete groups, until there are as many

    async def write(
        self, step: int, groups: Sequence[GroupSummary], advantages: Mapping[tuple[Any, int], Advantage]
    ) -> None:
        """`advantages`: of sequences by reference and row, as far as they are known. Raises WriteError."""
        stored: list[StoredGroup] = []
        fetched: dict[Any, Sequence[Trajectory]] = {}  # groups that ended together share a reference
        left = self.num_samples
        for group in groups:
            if left <= 0:
                break
            left -= group.num_samples
            if group.reference not in fetched:
                fetched[group.reference] = await self.fetch(group.reference)
            first, end = group.trajectories[0].sequences[0].row, group.trajectories[-1].row + 1
            sequences = tuple(fetched[group.reference][first:end])
            of_sequences = (advantages.get((group.reference, row)) for row in range(first, end))
            spread_out = tuple(map(spread, sequences, of_sequences))
            stored.append(StoredGroup(step, group.moved(-first), sequences, spread_out))
        if stored:
            await asyncio.to_thread(self.files.write, step, stored)
