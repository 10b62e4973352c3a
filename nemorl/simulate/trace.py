"""The workload of a finished run, from its metrics and samples."""

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

_STEPS = 5  # of a calibrating simulation
_ROUNDS = 4  # each brings the simulated stages closer to the measured ones
_MAX_VALUES = 1000  # of an observed distribution


def traced_workload(experiment: Experiment, run_dir: Path) -> Workload:
    """The workload of the synchronous run in `run_dir`, for an experiment that may differ from it.

    Lengths are those of its samples. Where a stage is the time of many processes together, as generation is,
    their speed is that with which a simulation of the same run takes the same time. Training is assumed to
    scale with the number of the policy's processes. Raises UsageError for a run that cannot be read this way.
    """
    paths = RunPaths(run_dir)
    if not paths.config.exists():
        raise UsageError(f"--trace {run_dir}: expected the folder of a run, with a config.yaml")
    traced = load_experiment(paths.config, ())
    config = traced.algorithm
    if not isinstance(config, OnlineBase) or not traced.generation.has_engines:
        raise UsageError(f"--trace {run_dir}: expected a run that samples with engines")
    if config.max_staleness:
        problem = f"algorithm.max_staleness is {config.max_staleness}, so its sampling overlapped training"
        raise UsageError(f"--trace {run_dir}: {problem}; take a run of the same with max_staleness 0")
    steps = [step for step in read_metrics(paths.metrics) if "time/training" in step.values]
    steps = steps[1:] if len(steps) > 1 else steps  # the first one compiles and warms up
    samples = [sample for sample in read_samples(paths.samples) if sample.phase == "training"]
    if not steps or not samples:
        raise UsageError(f"--trace {run_dir}: it has no step with samples (logger.samples_per_step)")
    turns = max(1.0, _mean(steps, "turns/mean"))
    lengths = _values([max(1.0, s.sampled_tokens / turns) for s in samples])
    ratio = _mean(steps, "length/mean") / turns / fmean(lengths)  # samples are few, the metric is of all
    stages = {n for step in steps for n in step.values if n.startswith("time/") and n != "time/step"}
    rest = max(0.0, _mean(steps, "time/step") - sum(_mean(steps, name) for name in stages))
    training = _mean(steps, "time/training") / max(1.0, _mean(steps, "tokens/trained"))
    start = default_workload(traced)
    workload = replace(
        start,
        prompt_tokens=Observed(_values([float(max(1, s.prompt_tokens)) for s in samples])),
        turn_tokens=Observed(tuple(value * ratio for value in lengths)),
        turns=LogNormal(turns),
        environment=LogNormal(_mean(steps, "time/environment") / turns),
        training=training,
        update=0.0,  # a part of the seconds of a token
        loading=_mean(steps, "time/loading") + rest,
        refit=_mean(steps, "time/refit"),
    )
    workload = _calibrated(traced, workload, steps)
    processes = experiment.policy.layout.world_size / traced.policy.layout.world_size
    return replace(workload, training=training / processes)


def _calibrated(traced: Experiment, workload: Workload, steps: Sequence[StepMetrics]) -> Workload:
    generation, environment = _mean(steps, "time/generation"), _mean(steps, "time/environment")
    for _ in range(_ROUNDS):
        simulated = predict(traced, workload, traced.seed, _STEPS).stages
        slower = generation / max(simulated["generation"], 1e-9)
        delay = environment / simulated["environment"] if simulated["environment"] > 0 else 0.0
        workload = replace(
            workload,
            decode_base=workload.decode_base * slower,
            decode_each=workload.decode_each * slower,
            prefill=workload.prefill * slower,
            environment=LogNormal(workload.environment.mean * delay),
        )
    return workload


def _mean(steps: Sequence[StepMetrics], name: str) -> float:
    """0 for what no step has."""
    return fmean([step.values.get(name, 0.0) for step in steps])


def _values(values: Sequence[float]) -> tuple[float, ...]:
    """At most `_MAX_VALUES`, evenly taken from all in order of size."""
    ordered = sorted(values)
    if len(ordered) <= _MAX_VALUES:
        return tuple(ordered)
    return tuple(ordered[len(ordered) * i // _MAX_VALUES] for i in range(_MAX_VALUES))
