"""What a simulated run is made of: lengths, speeds, delays and failures, assumed or read from a finished run.

    engine   a step of n sequences, in which each gets a token, takes `decode_base + n * decode_each` seconds;
             reading a prompt delays the steps by `prefill` seconds a token
    policy   a pass over a batch takes `training` seconds a token, a forward pass a third of it

Draws depend on the seed of a run and on the name of what is drawn, not on the order of events. So two
simulations of one seed sample the same lengths, whatever the staleness.
"""

import math
from dataclasses import dataclass, fields, replace
from random import Random
from statistics import fmean
from typing import ClassVar, Protocol

from nemorl.config.experiment import Experiment
from nemorl.plan.step_time import RunPlan


class Distribution(Protocol):
    @property
    def mean(self) -> float: ...

    def draw(self, random: Random) -> float: ...


@dataclass(frozen=True)
class LogNormal:
    """`sigma` 0 is constant, and 1 a long tail: one in a hundred draws is 6 times the mean."""

    mean: float
    sigma: float = 0.0

    def draw(self, random: Random) -> float:
        if self.sigma == 0 or self.mean == 0:
            return self.mean
        return self.mean * math.exp(self.sigma * random.gauss(0, 1) - self.sigma**2 / 2)

    def __str__(self) -> str:
        spread = f", log-normal with sigma {self.sigma:g}" if self.sigma else ""
        return f"{self.mean:.4g}{spread}"


@dataclass(frozen=True)
class Observed:
    values: tuple[float, ...]  # at least one, each as likely

    @property
    def mean(self) -> float:
        return fmean(self.values)

    def draw(self, random: Random) -> float:
        return self.values[random.randrange(len(self.values))]

    def __str__(self) -> str:
        return f"{self.mean:.4g} on average, of {len(self.values)} observed"


@dataclass(frozen=True)
class Workload:
    """Seconds and tokens of a run. The help of each field is its line in the output."""

    HELP: ClassVar[dict[str, str]] = {
        "prompt_tokens": "tokens of a prompt",
        "turn_tokens": "tokens sampled in a turn",
        "turns": "turns of a conversation",
        "environment": "seconds of the environment after a turn",
        "decode_base": "seconds of an engine's step, plus",
        "decode_each": "seconds for each sequence in it",
        "prefill": "seconds to read a token of a prompt",
        "training": "seconds to train on a token, by the whole policy",
        "update": "seconds of an optimizer step in addition",
        "loading": "seconds to load a batch",
        "refit": "seconds of a weight update, in which engines pause",
        "engine_failures": "seconds between failures of one engine",
        "engine_start": "seconds until a lost engine has restarted",
        "worker_failures": "seconds between failures of one rollout worker",
        "worker_start": "seconds until a lost rollout worker has restarted",
        "environment_failures": "share of the calls of environments that fail",
    }
    prompt_tokens: Distribution
    turn_tokens: Distribution
    turns: Distribution = LogNormal(1)
    environment: Distribution = LogNormal(0)
    decode_base: float = 0.02
    decode_each: float = 1e-4
    prefill: float = 5e-5
    training: float = 1e-4
    update: float = 0.5
    loading: float = 0.5
    refit: float = 5.0
    engine_failures: float = math.inf
    engine_start: float = 120.0
    worker_failures: float = math.inf
    worker_start: float = 30.0
    environment_failures: float = 0.0

    def step_seconds(self, sequences: int) -> float:
        """Of an engine with this number of sequences."""
        return self.decode_base + sequences * self.decode_each

    @property
    def assumptions(self) -> list[tuple[str, str]]:
        """The help and the value of each field."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = ((name, f"{v:.4g}" if isinstance(v, float) else str(v)) for name, v in values)
        return [(self.HELP[name], "none" if text == "inf" else text) for name, text in shown]


# Tokens per second that one GPU trains, forward and backward: a model of 8 billion parameters on an H100 at
# 40% of its peak.
TRAINED_PER_GPU = 8000.0


def default_workload(experiment: Experiment) -> Workload:
    """Assumptions for a config without a trace."""
    generation, policy = experiment.generation, experiment.policy
    has_turns = not all(one.has_one_turn for one in experiment.env.environments.values())
    longest = min(generation.max_new_tokens, policy.max_sequence_length)
    prompt = min(256, max(1, policy.max_sequence_length // 4))
    return Workload(
        prompt_tokens=LogNormal(prompt),
        turn_tokens=LogNormal(longest / 4, sigma=1.0),
        turns=LogNormal(4 if has_turns else 1),
        environment=LogNormal(1.0, sigma=1.0) if has_turns else LogNormal(0),
        training=1 / (TRAINED_PER_GPU * policy.layout.world_size),
    )


def planned_workload(plan: RunPlan) -> Workload:
    """Lengths and speeds of the plan of time (docs/plan_time.md); the rest is as assumed without it.

    Raises `UnplannedRun`.
    """
    assumed, lengths, engine = default_workload(plan.experiment), plan.lengths, plan.engine
    running = max(4.0, engine.concurrency(lengths))
    few, many = (engine.decode_step(batch, lengths.context).seconds for batch in (running / 4, running))
    each = max(0.0, (many - few) / (running * 3 / 4))
    sequences = plan.experiment.algorithm.sequences_per_update
    turns = assumed.turns.mean
    return replace(
        assumed,
        prompt_tokens=LogNormal(lengths.prompt),
        turn_tokens=LogNormal(lengths.uncut / turns, lengths.sigma),
        decode_base=many - running * each,
        decode_each=each,
        prefill=engine.prefill(1, lengths.prompt).seconds,
        training=plan.training.update(sequences).seconds / (sequences * lengths.sequence),
        update=plan.attained.call,
        loading=plan.attained.step,
        refit=plan.refit_cost.seconds,
    )


def with_failures(workload: Workload, experiment: Experiment, seconds: float) -> Workload:
    """The same with engines that fail; `seconds` on average between failures of one device."""
    return replace(workload, engine_failures=seconds / experiment.generation.ranks_per_replica)
