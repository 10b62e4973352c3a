"""What is wrong in a run, with the value, its limit and where to look; advice where nothing is wrong."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from nemorl.config.experiment import Experiment
from nemorl.observe.live import Live, LiveStage
from nemorl.observe.timeline import format_seconds

from .runs import LIVING, RunStatus
from .series import MetricsFile

SLOW_FACTOR = 6.0  # times its median that a stage may be open
MIN_CLOSED = 3  # stages that the median is of
MAX_OF_DEADLINE = 0.5
MIN_SECONDS = 5.0  # a stage that is open for less is no alarm, however short the others were
RECENT = 5  # steps whose mean is compared
MAX_WITHOUT_SPREAD, MAX_TRUNCATED = 0.5, 0.25
MAX_OF_GAP = 0.5  # of algorithm.max_logprob_gap, which ends the run
LOW_DISK_BYTES = 2**30
SILENT_ENGINE_SECONDS = 60.0  # with requests, without a step
IDLE = 0.5


@dataclass(frozen=True)
class Alarm:
    title: str
    value: str  # what was measured
    limit: str  # what it is compared with
    fields: tuple[str, ...] = ()  # of the config, that move it
    filter: str = ""  # of the trajectories concerned
    is_fatal: bool = False


@dataclass(frozen=True)
class Advice:
    text: str
    fields: tuple[str, ...] = ()


def alarms(
    status: RunStatus, metrics: MetricsFile, experiment: Experiment | None, free_bytes: int, now: float
) -> list[Alarm]:
    """The gravest first."""
    found: list[Alarm] = []
    fields: tuple[str, ...]
    if status.state in ("failed", "killed", "silent"):
        title = {"failed": "the run failed", "killed": "the run was killed"}
        found.append(Alarm(title.get(status.state, "the run is silent"), status.words, "", is_fatal=True))
    if status.state == "suspended":
        found.append(Alarm("the driver is suspended (SIGSTOP)", "kill -CONT continues it", "", is_fatal=True))
    if status.state in LIVING and status.live is not None:
        found += _of_stages(status.live, metrics, now)
        found += _of_engines(status.live)
        if free_bytes < LOW_DISK_BYTES:
            fields = ("checkpointing.keep", "run_dir")
            found.append(
                Alarm("the disk is nearly full", f"{free_bytes / 2**20:.0f} MB left", "1 GB", fields)
            )
    found += _of_metrics(metrics, experiment)
    return found


def advice(metrics: MetricsFile, experiment: Experiment | None) -> Iterator[Advice]:
    """For a run without alarms."""
    idle = {name: _mean(metrics, f"idle/{name}") for name in ("policy", "generation")}
    ahead = getattr(experiment.algorithm, "max_staleness", None) if experiment is not None else None
    for name, other in (("policy", "generation"), ("generation", "policy")):
        share, busy = idle[name], idle[other]
        if share < IDLE or math.isnan(share) or math.isnan(busy):
            continue
        text = f"Processes of {name} have no work for {_percent(share)} of a step."
        if ahead == 0:
            text += " Sampling ahead of training lets both work at once."
            yield Advice(text, ("algorithm.max_staleness",))
        else:
            fields = ("generation.replicas", "policy.layout.data_parallel_size")
            yield Advice(f"{text} Move devices to {other}, which has none for {_percent(busy)}.", fields)
        return


def stage_median(metrics: MetricsFile, name: str, count: int = 50) -> float | None:
    """Seconds of a stage in a step, among the last ones; None below `MIN_CLOSED` of them."""
    seconds = metrics.last(f"time/{name}", count)
    seconds = seconds[seconds > 0]
    return median(seconds.tolist()) if len(seconds) >= MIN_CLOSED else None


def _of_stages(live: Live, metrics: MetricsFile, now: float) -> Iterator[Alarm]:
    for stage in live.stages:
        seconds = now - stage.started
        if seconds < MIN_SECONDS:
            continue
        usual, words = (
            stage_median(metrics, stage.name),
            f"open for {format_seconds(seconds)}{_progress(stage)}",
        )
        if stage.deadline is not None and seconds > MAX_OF_DEADLINE * stage.deadline:
            limit = f"half of its deadline of {format_seconds(stage.deadline)}"
            fields = (f"cluster.deadlines.{stage.name}",)
            yield Alarm(f"{stage.name} is close to its deadline", words, limit, fields)
        elif usual is not None and seconds > SLOW_FACTOR * usual:
            limit = f"{SLOW_FACTOR:g} times its median of {format_seconds(usual)}"
            yield Alarm(f"{stage.name} takes longer than usual", words, limit)


def _progress(stage: LiveStage) -> str:
    if stage.total is None:
        return ""
    return f", {stage.done:,} of {stage.total:,} {stage.unit}".rstrip()


def _of_engines(live: Live) -> Iterator[Alarm]:
    for engine in live.engines:
        if engine.state == "lost":
            yield Alarm(f"{engine.name} is lost", engine.cause, "")
        elif engine.state == "up" and engine.version is None:
            yield Alarm(f"{engine.name} does not answer", "its process hangs, is suspended or very busy", "")
        elif engine.running and (engine.seconds_since_step or 0.0) > SILENT_ENGINE_SECONDS:
            seconds = format_seconds(engine.seconds_since_step or 0.0)
            value = f"{engine.running:,} requests, and no step for {seconds}"
            yield Alarm(f"{engine.name} makes no progress", value, format_seconds(SILENT_ENGINE_SECONDS))


def _of_metrics(metrics: MetricsFile, experiment: Experiment | None) -> Iterator[Alarm]:
    fields: tuple[str, ...]
    if not metrics.steps:
        return
    first = metrics.steps[-min(RECENT, len(metrics.steps))]
    recent = f"step >= {first}"
    steps = f"mean of the last {min(RECENT, len(metrics.steps))} steps"
    share = _mean(metrics, "group/zero_variance")
    if share >= MAX_WITHOUT_SPREAD:
        fields = ("algorithm.filters", "algorithm.num_generations_per_prompt", "rewards")
        # Their advantages are 0, but for rounding, or a filter has taken them out.
        only = f'{recent} and phase == "training" and (not trains or -1e-6 < advantage < 1e-6)'
        yield Alarm("groups have no spread of rewards", f"{_percent(share)}, {steps}", "50 %", fields, only)
    share = _mean(metrics, "stop/length")
    if share >= MAX_TRUNCATED:
        fields = ("generation.max_new_tokens", "policy.max_sequence_length")
        only = f'{recent} and stop == "length"'
        yield Alarm("answers are truncated", f"{_percent(share)}, {steps}", "25 %", fields, only)
    limit = getattr(experiment.algorithm, "max_logprob_gap", None) if experiment is not None else None
    gap = _mean(metrics, "logprob_gap/mean")
    if limit is not None and gap > MAX_OF_GAP * limit:
        only = f"{recent} and logprob_gap > {MAX_OF_GAP * limit:g}"
        value = f"{gap:.3g}, {steps}"
        words = f"half of algorithm.max_logprob_gap, {limit:g}"
        yield Alarm(
            "engine and trainer differ in logprobs", value, words, ("algorithm.max_logprob_gap",), only
        )
    skipped = _mean(metrics, "updates/skipped")
    if skipped > 0:
        fields = ("policy.optimizer.lr", "policy.max_grad_norm", "policy.guards")
        yield Alarm("updates were skipped", f"{_percent(skipped)}, {steps}", "none", fields)
    for name in metrics.names:
        if name.startswith("reward_errors/") and (errors := _mean(metrics, name)) > 0:
            reward = name.removeprefix("reward_errors/")
            yield Alarm(
                f"the reward {reward} failed", f"{errors:g} trajectories a step", "none", ("rewards",), recent
            )
    failed = _mean(metrics, "environment/errors")
    if failed > 0:
        only = f"{recent} and failed"
        yield Alarm("environments failed", f"{failed:.2g}, {steps}", "none", ("env",), only)
    lost = metrics.last("generation/replicas_lost", RECENT + 1)
    if len(lost) and lost[-1] > lost[0]:
        yield Alarm("engines were lost", f"{lost[-1] - lost[0]:g} in the last {len(lost) - 1} steps", "none")
    bad = sorted({each.name for each in metrics.nonfinite if each.step >= first})
    if bad:
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        yield Alarm(
            "metrics are not finite", f"{', '.join(bad[:4])}{more}", "finite", ("policy.optimizer.lr",)
        )


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mean(metrics: MetricsFile, name: str, count: int = RECENT) -> float:
    values: Sequence[float] = metrics.last(name, count).tolist()
    return sum(values) / len(values) if values else math.nan
