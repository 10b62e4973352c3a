"""Rates and constants that a run's time is planned with: of a known device, of a file, of this machine, and
fitted to measured runs. Imports torch only where this machine is measured.

A file has two sections, `hardware` with the fields of `Hardware` and `attained` with those of `Attained`; a
constant that it does not name has its default.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from statistics import median

from nemorl.config.algorithm import OnlineBase
from nemorl.config.base import counted, did_you_mean
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.config.yaml import parse_document
from nemorl.errors import ABSENT, ConfigError, Problem, UsageError
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.hub import with_local_models
from nemorl.models.registry import policy_shape
from nemorl.models.shape import ModelShape
from nemorl.observe.files import RunFolderError
from nemorl.observe.metrics import StepMetrics, read_metrics
from nemorl.observe.run_folder import RunPaths

from .costs import Attained
from .generation_time import default_lengths
from .hardware import HARDWARE, Hardware
from .machine import read_machine
from .memory import ProcessMemory, policy_memory
from .problems import model_problem, policy_layout_problems
from .recompute import fitting_recompute
from .step_time import FITTED, SHARES, Measured, RunPlan, StepTime, fit
from .training_time import Lengths

HERE = "here"
# Where the constants of this machine begin: usual values of processes on a CPU.
_ON_CPU = Attained(
    matmul=0.7,
    attention=0.2,
    memory=0.6,
    link=0.1,
    launch=1e-3,
    expert_launch=2e-4,
    decode_layer=4e-4,
    sequence=2e-4,
    step=0.1,
    refit=0.3,
    message=1e-4,
    far_message=1e-4,
    call=0.05,
    refit_call=0.1,
)
_CALLS = {"call": 0.05, "refit_call": 0.1}  # where a fit begins if the constant is 0
# What measured runs of one machine change next to what published ones do.
_OF_MACHINE = (*_CALLS, "attention", "link", "message")
_LEAST_SHARE = 0.01  # of a step: shorter stages are shown, and not fitted
_SIZE, _COPIED = 1024, 2**27  # rows of a matrix product, and bytes of a copy, that are measured
_PATIENCE = 1.5  # seconds for each of three rates
_COUNTS = ("multiprocessors", "memory_bytes", "domain", "cores", "tile", "element_bytes")
_NUM_QUANTILES = 129  # of measured responses
_COMPUTED = ("tokens/trained", "packing/shared", "packing/padding")
_CHOSEN = "generation"  # the stage whose seconds are hidden while engines sample ahead


@dataclass(frozen=True)
class Calibration:
    """What a run's time is planned with."""

    hardware: Hardware
    attained: Attained = Attained()


@dataclass(frozen=True)
class MeasuredRun:
    """A run that was measured: its config, lengths, and seconds of the stages that the plan has."""

    name: str
    experiment: Experiment
    shape: ModelShape
    lengths: Lengths
    seconds: Mapping[str, float]  # medians of steps; `step` is without what the plan does not have
    steps: int
    computed_tokens: int | None = None  # most that a copy computed in an update; None: the run does not say

    def plan(self, calibration: Calibration) -> RunPlan:
        hardware = calibration.hardware
        usable = hardware.shared_by(self.experiment.policy.layout.world_size).usable_bytes
        experiment = fitting_recompute(self.experiment, self.shape, usable, hardware)
        return RunPlan(experiment, self.shape, hardware, self.lengths, calibration.attained)

    def predicted(self, calibration: Calibration) -> dict[str, float]:
        """Seconds by the names of `seconds`. Raises `UnplannedRun`."""
        return self._predicted(self.plan(calibration).step())

    @property
    def memory(self) -> ProcessMemory:
        """Of the policy's fullest process, by the tokens that it computed."""
        return policy_memory(self.experiment, self.shape, self.computed_tokens)

    def measured(self, calibration: Calibration) -> Iterator[Measured]:
        """What `fit` takes of it: each stage that is no small part of a step."""

        @lru_cache(maxsize=1)  # stages ask for the same step
        def step(attained: Attained) -> dict[str, float]:
            return self.predicted(replace(calibration, attained=attained))

        is_ahead = _CHOSEN not in self.seconds and isinstance(self.experiment.algorithm, OnlineBase)
        for stage, seconds in self.seconds.items():
            is_fitted = is_ahead or stage != "step"  # otherwise the sum of stages that are fitted
            if (
                is_fitted
                and seconds > _LEAST_SHARE * self.seconds["step"]
                and step(calibration.attained)[stage]
            ):
                yield Measured(seconds, lambda attained, stage=stage: step(attained)[stage])  # type: ignore[misc]

    def _predicted(self, step: StepTime) -> dict[str, float]:
        stages = {name: cost.seconds for name, cost in step.stages.items()}
        if self.experiment.reference is None:  # the policy's processes compute it in the same stage
            stages["logprobs"] = stages.get("logprobs", 0.0) + stages.pop("reference", 0.0)
        return {name: step.seconds if name == "step" else stages.get(name, 0.0) for name in self.seconds}


def calibrate(runs: Sequence[MeasuredRun], start: Calibration) -> Calibration:
    """The constants with which planned stages are closest to measured ones. Raises `UnplannedRun`."""
    call, refit_call = (getattr(start.attained, name) or value for name, value in _CALLS.items())
    start = replace(start, attained=replace(start.attained, call=call, refit_call=refit_call))
    measured = [one for run in runs for one in run.measured(start)]
    names = [name for name in (*FITTED, *_OF_MACHINE) if getattr(start.attained, name)]
    return replace(start, attained=fit(measured, start.attained, names))


def read_calibration(name: str) -> Calibration:
    """Of a known device, of `here`, or of a file. Raises UsageError and `ConfigError`."""
    if name in HARDWARE:
        return Calibration(HARDWARE[name])
    if name == HERE:
        return measure_machine()
    file = Path(name)
    if not file.is_file():
        known = sorted([*HARDWARE, HERE])
        fix = f"expected one of {', '.join(known)}, or a file that `nemorl plan time -o` wrote"
        raise UsageError(f"--hardware {name}: unknown; {did_you_mean(name, known)}{fix}")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--hardware {name}: cannot be read: {error}; give a YAML file") from error
    document = parse_document(text, name)
    problems = [*document.problems]
    sections: dict[str, dict[str, object]] = {}
    for section, value in document.tree.items():
        if section not in ("hardware", "attained"):
            fix = "unknown section; the sections are `hardware` and `attained`"
            problems.append(Problem(section, value, fix))
        elif not isinstance(value, dict):
            problems.append(Problem(section, value, "expected a section with fields"))
        else:
            sections[section] = value
    for section, kind in (("hardware", Hardware), ("attained", Attained)):
        problems += _problems(section, kind, sections.get(section, {}))
    placed = [
        replace(one, origin=document.origins.get(tuple(one.field.split(".")), name))
        if not one.origin
        else one
        for one in problems
    ]
    if placed:
        raise ConfigError(name, placed)
    return Calibration(
        Hardware(**sections["hardware"]),  # type: ignore[arg-type]
        Attained(**sections.get("attained", {})),  # type: ignore[arg-type]
    )


def _problems(section: str, kind: type, values: Mapping[str, object]) -> Iterator[Problem]:
    known = {field.name: field for field in fields(kind)}
    for name in values.keys() - known.keys():
        fix = f"unknown field; {did_you_mean(name, list(known))}the fields here are {', '.join(known)}"
        yield Problem(f"{section}.{name}", values[name], fix)
    for name, field in known.items():
        path, value = f"{section}.{name}", values.get(name)
        if name not in values:
            if field.default is dataclasses.MISSING:
                yield Problem(path, ABSENT, "this field is required")
        elif fix := _fix(name, value, field.type, may_be_zero=field.default in (0, 0.0) or kind is Attained):
            yield Problem(path, value, fix)


def _fix(name: str, value: object, type_: object, *, may_be_zero: bool) -> str:
    """The problem of a value and what to do; empty if it is sound."""
    if type_ is str or type_ is bool:
        return "" if isinstance(value, type_) else f"expected {'text' if type_ is str else 'true or false'}"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "expected a finite number"
    if type_ is int and not isinstance(value, int):
        return "expected an integer"
    if name in SHARES and not 0 < value <= 1:
        return "expected a share above 0 and at most 1"
    if name == "expert_load" and value < 1:
        return "expected a multiple of the mean, at least 1"
    if value < 0 or not (value or may_be_zero):
        return "expected a number of at least 0" if may_be_zero else "expected a number above 0"
    return ""


def write_calibration(calibration: Calibration, file: Path, notes: Sequence[str] = ()) -> None:
    """A file that `read_calibration` reads. Raises UsageError where it cannot be written."""
    lines = [f"# {note}" for note in (*notes, "Rates are per second; docs/plan_time.md explains the fields.")]
    for section, of in (("hardware", calibration.hardware), ("attained", calibration.attained)):
        lines.append(f"{section}:")
        lines += [f"  {field.name}: {_written(getattr(of, field.name))}" for field in fields(of)]
    try:
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {file}: cannot be written: {error.strerror}; choose another file") from error


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def measure_machine() -> Calibration:
    """Rates of this machine's cores and memory, in less than 10 s; the constants are usual values."""
    import torch

    machine = read_machine()
    threads = torch.get_num_threads()
    torch.set_num_threads(machine.cores)
    try:
        matrix = torch.randn(_SIZE, _SIZE)
        half, source = matrix.bfloat16(), torch.ones(_COPIED, dtype=torch.uint8)
        target = torch.empty_like(source)
        work = 2.0 * _SIZE**3
        operations_float32 = work / _least_seconds(lambda: matrix @ matrix)
        operations = work / _least_seconds(lambda: half @ half)
        copied = _COPIED / _least_seconds(lambda: target.copy_(source))
    finally:
        torch.set_num_threads(threads)
    hardware = Hardware(
        name=HERE,
        device_name="cpu",
        operations=operations,
        operations_fp8=operations,  # computed in bfloat16
        operations_float32=operations_float32,
        multiprocessors=machine.cores,
        memory_bytes=machine.memory_bytes,
        memory_rate=2 * copied,  # read and written
        domain=machine.cores,
        domain_rate=copied,
        network_rate=copied,
        host_rate=copied,
        cores=machine.cores,
        tile=16,
    )
    return Calibration(hardware, _ON_CPU)


def _least_seconds(work: Callable[[], object]) -> float:
    """Of runs for `_PATIENCE` seconds, the first of which is not counted: other processes only slow it."""
    work()
    end, least = time.perf_counter() + _PATIENCE, math.inf
    while least == math.inf or time.perf_counter() < end:
        begin = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begin)
    return least


def read_run(folder: Path, shape: ModelShape | None = None) -> MeasuredRun:
    """A finished run.

    Raises UsageError for one that cannot be compared, or has another model than `shape`.
    """
    paths, option = RunPaths(folder), f"--calibrate {folder}"
    if not paths.config.exists():
        fix = "expected the folder of a run, with a config.yaml; overrides of CONFIG come before --calibrate"
        raise UsageError(f"{option}: {fix}")
    experiment, own = load_planned(paths.config)
    if shape is not None and own != shape:
        path = experiment.policy.model_path
        fix = "its shape is not that of CONFIG's policy; take runs of that model"
        raise UsageError(f"{option}: policy.model_path = {path}: {fix}")
    algorithm = experiment.algorithm
    if not paths.metrics.exists():
        raise UsageError(f"{option}: it has no {paths.metrics.name}; take a run that trained some steps")
    steps = [step for step in read_metrics(paths.metrics) if "time/training" in step.values]
    # The first one compiles and warms up, and engines are not ahead of training until more have passed.
    skipped = 1 + getattr(algorithm, "max_staleness", 0)
    if len(steps) <= skipped:
        fix = f"the first {skipped} of a run are skipped; take a longer run"
        raise UsageError(
            f"{option}: {paths.metrics.name} has {counted(len(steps), 'step')} of training: {fix}"
        )
    computed = _computed_tokens(experiment, steps)
    steps = steps[skipped:]
    _refuse_invalid(steps, isinstance(algorithm, OnlineBase), f"{option}: {paths.metrics.name}")
    lengths = replace(_lengths(experiment, steps), quantiles=_quantiles(paths.trajectories, steps))
    seconds = _seconds(experiment, steps)
    return MeasuredRun(folder.name, experiment, own, lengths, seconds, len(steps), computed)


def load_planned(
    config: Path, overrides: Sequence[str] = (), *, lays_out: bool = True
) -> tuple[Experiment, ModelShape]:
    """An experiment with local folders, and the policy's shape, by config.json alone. Raises ConfigError.

    `lays_out` checks whether the policy's layout divides the model.
    """
    found: list[tuple[Experiment, ModelShape]] = []

    def further_checks(experiment: Experiment) -> Iterator[Problem]:
        located, absent = with_local_models(experiment, weights=False)
        yield from absent
        policy = located.policy
        try:
            shape = policy_shape(policy)
        except (BrokenModelFolder, UnsupportedModel) as error:
            if not any(problem.field == "policy.model_path" for problem in absent):
                yield model_problem("policy", policy.model_path, str(error))
            return
        found.append((located, shape))
        if lays_out:
            yield from policy_layout_problems(located, shape)

    load_experiment(config, overrides, further_checks)
    return found[0]


def _refuse_invalid(steps: Sequence[StepMetrics], is_online: bool, where: str) -> None:
    required = ["time/step", "time/training", "tokens/trained", *(["length/mean"] if is_online else [])]
    for step in steps:
        for name in required:
            if name not in step.values:
                raise UsageError(f"{where}: step {step.step} has no {name}; take a run of this version")
        for name, value in step.values.items():
            if (name in required or name.startswith("time/")) and not (math.isfinite(value) and value >= 0):
                fix = "expected a finite number of at least 0; take another run"
                raise UsageError(f"{where}: {name} = {value} in step {step.step}: {fix}")
        for name in required[:3]:
            if not step.values[name]:
                raise UsageError(
                    f"{where}: {name} = 0 in step {step.step}: nothing was trained; take another run"
                )


def _computed_tokens(experiment: Experiment, steps: Sequence[StepMetrics]) -> int | None:
    """Of one copy in an update, on average over those of the fullest step; padding included."""
    of = [[step.values.get(name, math.nan) for name in _COMPUTED] for step in steps]
    computed = [trained * (1 - shared) / (1 - padding) for trained, shared, padding in of if padding < 1]
    if len(computed) < len(steps) or not all(map(math.isfinite, computed)):
        return None
    updates = getattr(experiment.algorithm, "updates_per_step", 1)
    return math.ceil(max(computed) / updates / experiment.policy.layout.data_parallel_size)


def _lengths(experiment: Experiment, steps: Sequence[StepMetrics]) -> Lengths:
    """The mean lengths of a middle step of the run, with the spread that is assumed for any run."""
    algorithm, longest = experiment.algorithm, experiment.policy.max_sequence_length
    sequences = algorithm.sequences_per_update
    if isinstance(algorithm, OnlineBase):
        sequences = algorithm.trajectories_per_step * getattr(algorithm, "num_epochs", 1)
    assumed = default_lengths(experiment)
    sequence = min(longest, median(step.values["tokens/trained"] for step in steps) / sequences)
    response = median(step.values.get("length/mean", 0.0) for step in steps) or 0.75 * sequence
    prompt = max(1.0, sequence - response)
    has_one_turn = all(one.has_one_turn for one in experiment.env.environments.values())
    limit = longest - prompt
    if algorithm.online and has_one_turn:
        limit = min(limit, experiment.generation.max_new_tokens)
    known = [
        1 - (1 - shared) / (1 - step.values.get("packing/padding", 0.0))
        for step in steps
        if (shared := step.values.get("packing/shared")) is not None
    ]
    return replace(
        assumed,
        prompt=prompt,
        response=max(1.0, min(response, limit)),
        limit=max(1.0, limit),
        shared=median(known) if len(known) == len(steps) else None,
    )


def _quantiles(folder: Path, steps: Sequence[StepMetrics]) -> tuple[float, ...]:
    """Of the responses of a step, each its median over the steps; empty for a run without their index."""
    import numpy as np  # here, since it takes time and `nemorl check` does not need it

    from nemorl.observe.index import TrajectoryIndex

    try:
        columns, rows = TrajectoryIndex(folder).read()
    except RunFolderError:
        return ()
    training = [number for number, phase in enumerate(columns.texts["phase"]) if phase == "training"]
    rows = rows[np.isin(rows["phase"], training)]
    of_steps = [rows["sampled"][rows["step"] == step.step] for step in steps]
    places = np.linspace(0, 1, _NUM_QUANTILES)
    found = [np.quantile(sampled, places) for sampled in of_steps if len(sampled)]
    return tuple(np.median(found, 0).tolist()) if found else ()


def _seconds(experiment: Experiment, steps: Sequence[StepMetrics]) -> dict[str, float]:
    algorithm = experiment.algorithm

    def middle(name: str) -> float:
        return median(step.values.get(f"time/{name}", 0.0) for step in steps)

    planned = {"training"}
    if isinstance(algorithm, OnlineBase):
        planned |= {"refit"} if experiment.generation.has_engines else set()
        planned |= {_CHOSEN} if not experiment.samples_ahead else set()
    planned |= {"logprobs"} if getattr(algorithm, "needs_old_logprobs", False) else set()
    if algorithm.keeps_reference:
        planned |= {"logprobs" if experiment.reference is None else "reference"}
    # What is loaded, and what no stage has, is `other`; the rest is not planned, as environments are not.
    others = [_rest(step, {"loading", "advantages"}) for step in steps]
    known = planned | {"loading", "advantages"} | ({_CHOSEN} if experiment.samples_ahead else set())
    whole = [step.values["time/step"] - sum(_stages(step, known)) for step in steps]
    seconds = {name: middle(name) for name in ("generation", "logprobs", "reference", "training", "refit")}
    kept = {name: value for name, value in seconds.items() if name in planned}
    return kept | {"other": median(others), "step": max(0.0, median(whole))}


def _stages(step: StepMetrics, without: set[str]) -> Iterator[float]:
    """Seconds of a step's stages that are not named."""
    for name, seconds in step.values.items():
        stage = name.removeprefix("time/")
        if stage != name and stage != "step" and stage not in without:
            yield seconds


def _rest(step: StepMetrics, others: set[str]) -> float:
    """Seconds of a step in none of its stages but `others`."""
    return max(0.0, step.values["time/step"] - sum(_stages(step, others)))
