"""Does an asynchronous run outlive a random fault every few seconds, and how long does each recovery take?

    python benchmarks/chaos.py [--seconds 600] [--pause 3 8] [--seed 0]

`nemorl train` on a tiny model at `max_staleness` 2, with environments in actors and a reward behind a server
that a thread here restarts. From its third step on, for the given time, a drawn
process gets SIGKILL or SIGSTOP every few seconds; the seed decides times, processes and signals. Then the run
itself gets SIGTERM, and is resumed for a few more steps. Checked are its exit statuses, the rise of the
reward, that each task was trained on once or given up, the bound on the age, the weights in the engines, and
that no process and no shared memory is left.

Times of detection and return are those of the run's log. A fault of a process that has not returned from an
earlier one counts, but has no times of its own; with longer pauses there are few of these.
"""

import argparse
import ctypes
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import yaml
from common import OUT, publish, table_of
from faults import (
    TARGETS,
    Fault,
    draw_faults,
    newest_process,
    read_times,
    recovery_times,
    states_below,
    strike,
)
from reward_server import RewardServer

from nemorl.commands.terminal import ExitCode
from nemorl.models.create import create_tiny_model
from nemorl.observe.metrics import StepMetrics, read_metrics, read_samples
from nemorl.observe.run_folder import RunPaths
from nemorl.rollout.groups import DropReason
from nemorl.run.checkpoints import Progress

PROMPTS, SAMPLES, STALENESS = 4, 4, 2
PAUSE = 3.0, 8.0  # least and most seconds between two faults
COMPLETION_SECONDS = 300.0  # in which the run makes its last steps
CLEANUP_SECONDS = 30.0  # in which what the run has started ends with it
NO_END = 100_000  # steps, of a run that is stopped
MEASURED_STEPS = 10  # at each end of the run, for the rise of the reward
_SET_CHILD_SUBREAPER = 36  # of prctl(2)
MEMORY = Path("/dev/shm")


def experiment(folder: Path, memory: Path, server: RewardServer) -> dict[str, Any]:
    processes = {target.group: target.processes for target in TARGETS}
    return {
        "run_dir": str(folder / "run"),
        "policy": {
            "model_path": str(folder / "model"),
            "precision": "float32",
            "max_sequence_length": 16,
            "micro_batch_tokens": 128,
            "layout": {"tensor_parallel_size": processes["policy"]},
            "optimizer": {"name": "adam", "lr": 1e-3},
        },
        "generation": {"max_new_tokens": 6, "max_batch_size": 32, "replicas": processes["generation"]},
        "data": {
            "chat": False,
            "shuffle": False,  # so that a task's number is that of its group
            "train": {"name": "arithmetic", "digits": 3, "size": 100_000, "offset": 20},
            "validation": {"name": "arithmetic", "digits": 3, "size": 20},
        },
        "env": {
            "name": "single_turn",
            "placement": {"name": "actors", "num_actors": processes["environment"]},
        },
        "rewards": [
            server.reward,
            {"kind": "local_model", "name": "taste", "model_path": str(folder / "taste"), "weight": 0.01},
        ],
        "algorithm": {
            "name": "grpo",
            "num_steps": NO_END,
            "num_prompts_per_step": PROMPTS,
            "num_generations_per_prompt": SAMPLES,
            "max_staleness": STALENESS,
            "validation": {"period": 10},
        },
        "cluster": {
            "rollout_workers": processes["rollout"],
            "max_model_restarts": 100,
            "max_worker_restarts": 100,
            "deadlines": {
                **{"start": 120, "health": 4, "logprobs": 15, "training": 15, "refit": 15, "checkpoint": 15},
            },
        },
        "checkpointing": {"period": 20, "memory_period": 1, "memory_dir": str(memory)},
        "logger": {"console": "plain", "samples_per_step": PROMPTS * SAMPLES},
    }


def create_models(folder: Path) -> None:
    """A policy, and a reward model that scores its answers in some way."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # the missing head is meant to be new
    logging.disable_progress_bar()
    create_tiny_model(folder / "model", hidden=32, ffn=64, layers=2, heads=4, kv_heads=2)
    taste = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
    taste.save_pretrained(folder / "taste")
    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / "taste")


def adopt_orphans() -> None:
    """Become the parent of all processes below this one that lose theirs, so that none can leave."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass
class History:
    """Every line of metrics that a run has written, also of steps that were discarded later."""

    run: Path
    lines: dict[int, StepMetrics] = field(default_factory=dict)  # by version, which does not repeat

    def read(self) -> int:
        path = RunPaths(self.run).metrics
        steps = read_metrics(path) if path.exists() else []
        self.lines |= {line.version: line for line in steps}
        return len(steps)

    def total(self, name: str) -> int:
        return int(sum(line.values.get(name, 0.0) for line in self.lines.values()))


def account(run: Path, history: History) -> tuple[dict[str, int], list[str]]:
    """What became of the tasks that were admitted, and what is wrong with it."""
    paths = RunPaths(run)
    newest = max(paths.checkpoints.glob("step_*"))
    place = Progress.read(newest).place
    samples = [one for one in read_samples(paths.samples) if one.phase == "training"]
    trained = Counter(one.task for one in samples)
    steps = read_metrics(paths.metrics)
    given_up = int(sum(line.values.get("dropped/given_up", 0) for line in steps))
    counts = {
        "admitted": place.position + len(place.beyond),
        "trained": len(trained),
        "given_up": given_up,
        "steps": len(steps),
        "steps_discarded": len(history.lines) - len(steps),
    }
    counts |= {f"attempts_{reason}": history.total(f"dropped/{reason}") for reason in get_args(DropReason)}
    problems = []
    if [line.step for line in steps] != list(range(1, len(steps) + 1)):
        problems.append("a step is missing or doubled")
    if doubled := sorted(task for task, count in trained.items() if count != SAMPLES):
        problems.append(f"tasks {doubled} were trained on more than once, or in part")
    if len(trained) != PROMPTS * len(steps):
        problems.append(f"{len(steps)} steps trained on {len(trained)} tasks")
    if counts["admitted"] != len(trained) + given_up:
        problems.append(
            f"{counts['admitted']} tasks were admitted, {len(trained)} trained, {given_up} given up"
        )
    return counts, problems


def reward_rise(steps: Sequence[StepMetrics]) -> tuple[float, float, float]:
    """Means of the first and the last steps, and their difference in standard errors."""
    rewards = [line.values["reward/digits"] for line in steps]
    first, last = rewards[:MEASURED_STEPS], rewards[-MEASURED_STEPS:]
    variance = (statistics.variance(first) + statistics.variance(last)) / MEASURED_STEPS
    rise = statistics.mean(last) - statistics.mean(first)
    return statistics.mean(first), statistics.mean(last), rise / max(variance, 1e-12) ** 0.5


def shared_memory() -> set[Path]:
    return set(MEMORY.iterdir())


def in_use(file: Path) -> bool:
    """True if a process has a file open or mapped, or the files of a folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(file) in (process / "maps").read_text():
                return True
            if any(str(file) in os.readlink(link) for link in (process / "fd").iterdir()):
                return True
        except OSError:
            continue
    return False


@dataclass
class Result:
    faults: list[Fault]
    problems: list[str]
    metrics: dict[str, Any]


class ChaosRun:
    """A run in a process of its own, whose steps are followed."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self.folder, self.run, self.config = folder, folder / "run", folder / "chaos.yaml"
        self.config.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.history, self.loads = History(self.run), list[float]()
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.output = folder / "output.log"

    def start(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "nemorl.cli", "train", str(self.config), *arguments]
        with self.output.open("a") as output:
            self.driver = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def follow(self, end: float, num_steps: float = math.inf) -> bool:
        """Until the `end`; False if the run has ended before. True at once after `num_steps`."""
        while self.driver.poll() is None and time.monotonic() < end:
            self.loads.append(os.getloadavg()[0])
            if self.history.read() >= num_steps:
                return True
            time.sleep(min(0.5, max(0.0, end - time.monotonic())))
        return self.driver.poll() is None

    def require(self, num_steps: int) -> None:
        """Wait for a number of steps. Raises ChaosFailed."""
        self.follow(time.monotonic() + COMPLETION_SECONDS, num_steps)
        if (done := self.history.read()) < num_steps:
            self.fail(f"only {done} of {num_steps} steps within {COMPLETION_SECONDS:g} s")

    def end(self, status: int) -> None:
        """Wait for the end of the process. Raises ChaosFailed unless it has this exit status."""
        if self.follow(time.monotonic() + COMPLETION_SECONDS):
            self.fail(f"the run did not end within {COMPLETION_SECONDS:g} s")
        if self.driver.returncode != status:
            self.fail(f"exit status {self.driver.returncode} in place of {status}")

    def fail(self, problem: str) -> None:
        raise ChaosFailed(f"{problem}: {' | '.join(self.output.read_text().splitlines()[-5:])}")


class ChaosFailed(Exception):
    """The run did not outlive its faults."""


def strike_and_stop(run: ChaosRun, server: RewardServer, faults: Sequence[Fault]) -> float:
    """The life of a run; returns the seconds from SIGTERM to its end. Raises ChaosFailed."""
    run.start()
    run.require(3)
    began = time.monotonic()
    for fault in faults:
        if not run.follow(began + fault.due):
            run.fail("the run ended under faults")
        of_run = newest_process(fault, run.run)
        strike(fault, of_run if fault.target.group else server.process.pid)
    run.require(run.history.read() + MEASURED_STEPS)
    run.driver.terminate()
    began = time.monotonic()
    run.end(ExitCode.STOPPED)
    seconds = time.monotonic() - began
    run.start("--resume", f"algorithm.num_steps={run.history.read() + MEASURED_STEPS}")
    run.end(ExitCode.WELL)
    return seconds


def run_under_faults(folder: Path, seconds: float, pause: tuple[float, float], seed: int) -> Result:
    """Run to the end; files of the run are left in the folder."""
    create_models(folder)
    memory = Path(tempfile.mkdtemp(prefix="nemorl-chaos-", dir=MEMORY))
    before, faults, server = shared_memory(), draw_faults(seconds, pause, seed), RewardServer()
    run, problems = ChaosRun(folder, experiment(folder, memory, server)), list[str]()
    seconds_to_stop = math.nan
    adopt_orphans()
    server.supervise()
    try:
        seconds_to_stop = strike_and_stop(run, server, faults)
    except ChaosFailed as failure:
        problems.append(str(failure))
    finally:
        if run.driver.poll() is None:
            run.driver.kill()
        run.driver.wait()
        server.close()
    end = time.monotonic() + CLEANUP_SECONDS
    while (left := list(states_below())) and time.monotonic() < end:
        time.sleep(0.5)
    if left:
        problems.append(f"processes of the run are left: {left}")
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    kept = list(memory.iterdir())
    shutil.rmtree(memory)
    kept += [path for path in shared_memory() - before if not in_use(path) and path.exists()]
    if kept:
        problems.append(f"shared memory is left: {', '.join(map(str, kept))}")
    if problems:  # there may be no checkpoint
        return Result(faults, problems, {})
    steps, history = read_metrics(RunPaths(run.run).metrics), run.history
    counts, of_tasks = account(run.run, history)
    first, last, errors = reward_rise(steps)
    if errors < 3:
        problems.append(f"the reward rose from {first:.3f} to {last:.3f}, {errors:.1f} standard errors")
    if (oldest := max(line.values["version/lag_max"] for line in steps)) > STALENESS:
        problems.append(f"a step trained on samples of age {oldest:g}")
    gaps = [line.values["staleness/gap_0"] for line in steps if "staleness/gap_0" in line.values]
    if max(gaps) > 1e-4:  # rounding, if the engines have the policy's weights
        problems.append(f"engines and policy differ by {max(gaps):.2g} in the logprobs of the same weights")
    metrics = {
        "seconds": seconds,
        "pause": pause,
        "seed": seed,
        "load": statistics.mean(run.loads),
        "reward": {"first": first, "last": last, "standard_errors": errors},
        "tasks": counts,
        "seconds_to_stop": seconds_to_stop,
        "losses_without_fault": read_times(faults, run.run / "logs"),
        "requests_moved": history.total("generation/requests_moved"),
        "requests_failed": history.total("generation/requests_failed"),
    }
    return Result(faults, problems + of_tasks, metrics)


def _spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of faults (default 600)")
    text = "least and most seconds between two faults"
    parser.add_argument("--pause", type=float, nargs=2, default=PAUSE, help=f"{text} (default 3 8)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = OUT / "chaos"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = run_under_faults(folder, options.seconds, tuple(options.pause), options.seed)
    rows = recovery_times(result.faults)
    shown = [
        {
            "fault": row["fault"],
            "faults": row["faults"],
            "measured": row["measured"],
            "detected after, s": _spread(row["detected_seconds"]),
            "back after, s": _spread(row["back_seconds"]),
            "steps discarded": _spread(row["steps_discarded"]),
        }
        for row in rows
    ]
    publish("chaos", {**result.metrics, "recovery": rows, "problems": result.problems},
            table_of("median (largest)", shown))  # fmt: skip
    tasks = result.metrics.get("tasks", {})
    sys.stdout.write("".join(f"{name.replace('_', ' ')}: {count}\n" for name, count in tasks.items()))
    sys.stdout.write(
        f"from SIGTERM to the end of the run: {result.metrics.get('seconds_to_stop', math.nan):.1f} s\n"
    )
    sys.exit("\n".join(f"problem: {problem}" for problem in result.problems) or None)


if __name__ == "__main__":
    main()
