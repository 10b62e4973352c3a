"""The workload of a finished run, from its metrics and samples."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from nemorl.config.algorithm import OnlineBase
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import UsageError
from nemorl.observe.metrics import StepMetrics, read_metrics, read_samples
from nemorl.observe.run_folder import RunPaths

from .simulation import predict
from .workload import LogNormal, Observed, Workload, default_workload

logger = logging.getLogger(__name__)

_STEPS = 5  # of a calibrating simulation
_ROUNDS = 6  # each brings the simulated seconds of sampling closer to the measured ones
_MAX_VALUES = 1000  # of an observed distribution
_DROPPED = ("dropped/too_old", "dropped/aborted", "dropped/cut_off", "dropped/deadline")  # long ones first
_MAX_DROPPED = 0.1  # share of the groups


def traced_workload(experiment: Experiment, run_dir: Path) -> Workload:
    """The workload of the run in `run_dir`, for an experiment that may differ from it.

    Lengths and delays of the environment are those of its samples. The speed of engines is that with which
    sampling takes as long in a simulation of the same run. Training is assumed to scale with the number of
    the policy's processes. Raises UsageError for a run that cannot be read this way.
    """
    paths = RunPaths(run_dir)
    if not paths.config.exists():
        raise UsageError(f"--trace {run_dir}: expected the folder of a run, with a config.yaml")
    traced = load_experiment(paths.config, ())
    config = traced.algorithm
    if not isinstance(config, OnlineBase) or not traced.generation.has_engines:
        raise UsageError(f"--trace {run_dir}: expected a run that samples with engines")
    steps = [step for step in read_metrics(paths.metrics) if "time/training" in step.values]
    # The first one compiles and warms up, and engines are not ahead of training until more have passed.
    steps = steps[min(1 + config.max_staleness, len(steps) - 1) :] if steps else steps
    samples = [sample for sample in read_samples(paths.samples) if sample.phase == "training"]
    if not steps:
        raise UsageError(f"--trace {run_dir}: {paths.metrics.name} has no step of training")
    if not samples:
        problem = f"{paths.samples.name} has no samples of training (logger.samples_per_step)"
        raise UsageError(f"--trace {run_dir}: {problem}")
    if not all("trajectory_seconds/generation" in step.values for step in steps):
        raise UsageError(
            f"--trace {run_dir}: it has no trajectory_seconds/generation; take a run of this version"
        )
    dropped = sum(_mean(steps, name) for name in _DROPPED)
    if (share := dropped / (dropped + config.num_prompts_per_step)) > _MAX_DROPPED:
        problem = f"it dropped {share:.0%} of its groups, among which long answers are more frequent"
        logger.warning("--trace %s: %s; the predicted lengths are too short", run_dir, problem)
    turns = max(1.0, _mean(steps, "turns/mean"))
    stages = {n for step in steps for n in step.values if n.startswith("time/") and n != "time/step"}
    rest = max(0.0, _mean(steps, "time/step") - sum(_mean(steps, name) for name in stages))
    training = _mean(steps, "time/training") / max(1.0, _mean(steps, "tokens/trained"))
    workload = replace(
        default_workload(traced),
        prompt_tokens=Observed(_values([float(max(1, s.prompt_tokens)) for s in samples])),
        turn_tokens=_scaled([s.sampled_tokens for s in samples], _mean(steps, "length/mean") / turns),
        turns=LogNormal(turns),
        environment=_scaled(
            [s.seconds_environment for s in samples], _mean(steps, "trajectory_seconds/environment") / turns
        ),
        training=training,
        update=0.0,  # a part of the seconds of a token
        loading=_mean(steps, "time/loading") + rest,
        refit=_mean(steps, "time/refit"),
    )
    workload = _calibrated(traced, workload, steps)
    processes = experiment.policy.layout.world_size / traced.policy.layout.world_size
    return replace(workload, training=training / processes)


def _calibrated(traced: Experiment, workload: Workload, steps: Sequence[StepMetrics]) -> Workload:
    # Without staleness the longest trajectories decide about a step, and ahead of training the average ones.
    ahead = traced.samples_ahead
    measured = _mean(steps, "trajectory_seconds/generation" if ahead else "time/generation")
    for _ in range(_ROUNDS):
        simulated = predict(traced, workload, traced.seed, _STEPS)
        slower = measured / max(simulated.sampling if ahead else simulated.stages["generation"], 1e-9)
        workload = replace(
            workload,
            decode_base=workload.decode_base * slower,
            decode_each=workload.decode_each * slower,
            prefill=workload.prefill * slower,
        )
    return workload


def _mean(steps: Sequence[StepMetrics], name: str) -> float:
    """0 for what no step has."""
    return fmean([step.values.get(name, 0.0) for step in steps])


def _scaled(values: Sequence[float], mean: float) -> Observed:
    """The distribution of `values` with another mean: samples are few, and metrics are of all."""
    ordered = _values(values)
    scale = mean / fmean(ordered) if any(ordered) else 0.0
    return Observed(tuple(value * scale for value in ordered))


def _values(values: Sequence[float]) -> tuple[float, ...]:
    """At most `_MAX_VALUES`, evenly taken from all in order of size."""
    ordered = sorted(values)
    if len(ordered) <= _MAX_VALUES:
        return tuple(ordered)
    return tuple(ordered[len(ordered) * i // _MAX_VALUES] for i in range(_MAX_VALUES))
