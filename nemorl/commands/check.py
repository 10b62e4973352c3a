"""`nemorl check`, and all checks of an experiment before it starts."""

import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from nemorl.config.experiment import Experiment
from nemorl.config.facts import models_of
from nemorl.config.generation import EndpointConfig
from nemorl.config.load import ORIGIN as COMMAND_LINE
from nemorl.config.load import load_experiment
from nemorl.errors import ABSENT, ConfigError, NemorlError, Problem
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.machine import Machine, gpu_problems, is_this_machine, read_machine
from nemorl.plan.problems import Plan, address_problems, node_problems, plan_run, server_problems

from .terminal import ExitCode, complain, notes, plan_table, say
from .trials import custom_function_problems, environment_problems, reward_problems


@dataclass(frozen=True)
class Ready:
    """An experiment without problems, and what it will start."""

    experiment: Experiment
    plan: Plan
    unverified: tuple[Problem, ...] = ()  # what this machine lacks, where the run may start on another


def prepare(
    path: Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    training: bool = True,
    measuring: bool = True,
    serving: bool = False,
    new_run: bool = False,
    resumes: bool = False,
    where: Literal["here", "unknown", "elsewhere"] = "here",
) -> Ready:
    """Load and check an experiment. Raises `ConfigError` with all problems.

    `new_run` requires a run folder without a run, `resumes` the algorithm of the run in it, `measuring`
    without training tasks to measure on, `serving` an address to listen on. `where` the run starts: what this
    machine lacks is a problem `here` and in `Ready.unverified` otherwise; rewards are not called `elsewhere`.
    """
    plans: list[Plan] = []
    unverified: list[Problem] = []

    def further_checks(experiment: Experiment) -> Iterator[Problem]:
        plans.append(plan_run(experiment, machine, training=training))
        yield from plans[0].problems
        yield from reward_problems(experiment, calls=where != "elsewhere")
        yield from custom_function_problems(experiment)
        yield from environment_problems(experiment)
        yield from _run_folder_problems(experiment, new_run)
        unverified.extend(_missing_here(experiment, machine) if where != "elsewhere" else ())
        if where == "here":
            yield from unverified
        if resumes:
            yield from _other_algorithm(experiment)
        if is_this_machine(experiment, machine):
            listening = experiment.generation.endpoint or (EndpointConfig() if serving else None)
            yield from address_problems(experiment.generation, listening)
        data = experiment.data
        if measuring and not training and data.validation is None and not data.validation_sets:
            yield Problem("data.validation", ABSENT, "an evaluation requires tasks; set a dataset")
        if measuring and not training and experiment.policy.head == "scalar":
            fix = (
                "an evaluation samples, and a scalar head cannot; evaluate it with algorithm.validation "
                "during training"
            )
            yield Problem("policy.head", "scalar", fix)

    experiment = load_experiment(path, overrides, further_checks)
    return Ready(experiment, plans[0], tuple(unverified))


def _missing_here(experiment: Experiment, machine: Machine) -> Iterator[Problem]:
    """What the run needs and this machine does not have: GPUs, nodes, servers that answer."""
    yield from gpu_problems(experiment, machine)
    yield from node_problems(experiment.cluster)
    yield from server_problems(experiment)


_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4000  # of the 4096 that Linux allows; the rest is for the files in the folder


def _run_folder_problems(experiment: Experiment, new_run: bool) -> Iterator[Problem]:
    run_dir = experiment.run_dir
    try:
        problem = _unusable(run_dir, experiment) or _not_writable(run_dir)
        if problem is None and new_run and RunPaths(run_dir).has_steps:
            problem = "the folder contains a run; continue it with --resume, or set another folder"
    except OSError as error:
        problem = f"the folder cannot be used ({error.strerror}); set another folder"
    if problem is not None:
        yield Problem("run_dir", str(run_dir), problem)


def _unusable(run_dir: Path, experiment: Experiment) -> str | None:
    """Why a path cannot be a run folder, whatever its permissions."""
    names = [os.fsencode(part) for part in run_dir.absolute().parts]
    if not str(run_dir).isprintable():
        return "the path contains unprintable characters; remove them"
    if (longest := max(map(len, names))) > _MAX_NAME_BYTES:
        return (
            f"a name in the path has {longest} bytes, and at most {_MAX_NAME_BYTES} are allowed; shorten it"
        )
    if (length := len(os.fsencode(run_dir.absolute()))) > _MAX_PATH_BYTES:
        return f"the path has {length} bytes and may have {_MAX_PATH_BYTES}; shorten it"
    if run_dir.exists() and not run_dir.is_dir():
        return "this is a file; set a folder, which need not exist yet"
    for spec in models_of(experiment):
        model = spec.config.model_path.resolve()
        if run_dir.resolve() == model or model in run_dir.resolve().parents:
            return f"this is in the model folder of {spec.section}.model_path; set another folder"
    return None


def _other_algorithm(experiment: Experiment) -> Iterator[Problem]:
    """A run continues with the algorithm that wrote its checkpoints: another one has other models."""
    paths, algorithm = RunPaths(experiment.run_dir), experiment.algorithm
    if not any(paths.checkpoints.glob("step_*")):  # the run starts over
        return
    try:
        then = yaml.safe_load(paths.config.read_text(encoding="utf-8"))["algorithm"]
        name, had_critic = then["name"], then.get("critic") is not None
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return  # what a checkpoint lacks is reported when it is read
    fix = "or start a new run in another run_dir from exported weights (`nemorl models export`)"
    if name != algorithm.name:
        problem = f"the run in {paths.root} was trained with `{name}` and continues only with it"
        yield Problem("algorithm.name", algorithm.name, f"{problem}; set `{name}`, {fix}")
    elif had_critic and not algorithm.keeps_critic:
        problem = f"the run in {paths.root} was trained with a critic and continues only with one"
        yield Problem("algorithm.critic", None, f"{problem}; set the advantage back, {fix}")


def _not_writable(run_dir: Path) -> str | None:
    """Why nothing can be written into a folder, or where it will be created. Leaves nothing behind."""
    existing = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing} is not writable ({error.strerror}); set another folder"


HELP = "check experiments and list every problem"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="CONFIG|a.b=value",
        help="experiment files (YAML), and fields to set in each of them before the check",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="the run will start on this machine: missing GPUs, nodes and servers are errors",
    )


def run(arguments: Namespace) -> int:
    """Check every file, also after one with problems. Raises NemorlError if there is none."""
    overrides = [word for word in arguments.words if "=" in word and not os.path.exists(word)]
    paths = [Path(word) for word in arguments.words if word not in overrides]
    if not paths:
        raise NemorlError(f"{', '.join(overrides)}: name the experiment file in which to set these fields")
    machine = read_machine()
    refused = 0
    for path in paths:
        try:
            ready = prepare(path, overrides, machine, where="here" if arguments.here else "unknown")
        except ConfigError as error:
            if error.source == COMMAND_LINE:  # which is the same for every file
                raise
            complain(str(error))
            refused += 1
            continue
        say(f"{path}: OK")
        for line in describe_unverified(ready):
            say(line)
        notes().print(plan_table(ready.plan))
    return ExitCode.REFUSED if refused else ExitCode.WELL


def describe_unverified(ready: Ready) -> list[str]:
    """What only the machine on which the run starts can verify, a line each."""
    return [
        f"  {problem.field} = {problem.value}: will be verified on the target machine "
        f"({problem.fix.partition(';')[0]})"
        for problem in ready.unverified
    ]
