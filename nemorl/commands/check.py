"""`nemorl check`: all checks of an experiment before it starts, with a trial of the user's own functions."""

import json
import os
import tempfile
import threading
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import yaml

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.algorithm.losses import CustomLossConfig
from nemorl.config.data import ArithmeticDataset, DatasetConfig, JsonlDataset
from nemorl.config.environment import CustomEnvConfig, FunctionRewardConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import acted_on, metric_names, models_of, reward_names
from nemorl.config.generation import EndpointConfig
from nemorl.config.load import ORIGIN as COMMAND_LINE
from nemorl.config.load import load_experiment
from nemorl.errors import ABSENT, ConfigError, NemorlError, Problem, Problems, UsageError
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.machine import Machine, gpu_problems, is_this_machine, read_machine
from nemorl.plan.problems import Plan, address_problems, node_problems, plan_run, server_problems
from nemorl.rewards.find import GIVEN, RewardError, find_reward
from nemorl.rewards.functions import BUILT_IN

from .terminal import Commands, ExitCode, add_command, complain, notes, plan_table, say

if TYPE_CHECKING:
    from nemorl.trajectories import Task

_SILENT_SECONDS = 3.0  # of a call of the user's code, before it is mentioned
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4000  # of the 4096 that Linux allows; the rest is for the files in the folder
_SAMPLE = {"completions": ["4"], "prompts": ["2+2="], "sampled_ids": [[1, 2]], "answer": ["4"]}


def register(commands: Commands) -> None:
    check = add_command(commands, "check", _check, "check experiment files and list all problems")
    words_help = "experiment files (YAML), and fields to set in each of them"
    check.add_argument("words", nargs="+", metavar="CONFIG|a.b=value", help=words_help)
    here_help = "treat missing GPUs, nodes and servers as errors, since the run will start on this machine"
    check.add_argument("--here", action="store_true", help=here_help)


def _check(arguments: Namespace) -> int:
    overrides = [word for word in arguments.words if "=" in word and not os.path.exists(word)]
    paths = [Path(word) for word in arguments.words if word not in overrides]
    if not paths:
        raise UsageError(f"{', '.join(overrides)}: name the experiment file in which to set these fields")
    machine, code = read_machine(), ExitCode.WELL
    for path in paths:
        try:
            ready = prepare(path, overrides, machine, where="here" if arguments.here else "unknown")
        except ConfigError as error:
            if error.source == COMMAND_LINE:  # which is the same for every file
                raise
            complain(str(error))
            code = ExitCode.REFUSED
            continue
        say("\n".join([f"{path}: OK", *describe_unverified(ready)]))
        notes().print(plan_table(ready.plan))
    return code


@dataclass(frozen=True)
class Ready:
    experiment: Experiment
    plan: Plan
    unverified: tuple[Problem, ...] = ()  # what this machine lacks, where the run may start on another


def describe_unverified(ready: Ready) -> list[str]:
    later = "will be verified on the target machine"
    return [f"  {p.field} = {p.value}: {later} ({p.fix.partition(';')[0]})" for p in ready.unverified]


def prepare(
    path: Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    training: bool = True,
    serving: bool = False,
    new_run: bool = False,
    resumes: bool = False,
    where: Literal["here", "unknown", "elsewhere"] = "here",
) -> Ready:
    """Load and check an experiment. Raises `ConfigError` with all problems.

    `new_run` requires a run folder without a run, `resumes` the algorithm of the run in it, `serving` an
    address to listen on and no tasks. What this machine lacks is a problem where the run starts `here`, and
    in `Ready.unverified` otherwise; rewards are not called `elsewhere`.
    """
    plans: list[Plan] = []
    unverified: list[Problem] = []

    def further_checks(experiment: Experiment) -> Problems:
        plans.append(plan_run(experiment, machine, training=training))
        yield from plans[0].problems
        yield from _reward_problems(experiment, calls=where != "elsewhere")
        yield from _custom_part_problems(experiment)
        yield from _run_folder_problems(experiment, new_run)
        if where != "elsewhere":
            unverified.extend(gpu_problems(experiment, machine))
            unverified.extend(node_problems(experiment.cluster))
            unverified.extend(server_problems(experiment))
        if where == "here":
            yield from unverified
        if resumes:
            yield from _other_algorithm(experiment)
        if is_this_machine(experiment, machine):
            listening = experiment.generation.endpoint or (EndpointConfig() if serving else None)
            yield from address_problems(experiment.generation, listening)
        if training or serving:
            return
        if experiment.data.validation is None and not experiment.data.validation_sets:
            yield Problem("data.validation", ABSENT, "an evaluation requires tasks; set a dataset")
        if experiment.policy.head == "scalar":
            fix = "an evaluation samples, and a scalar head cannot; evaluate it with algorithm.validation"
            yield Problem("policy.head", "scalar", f"{fix} during training")

    experiment = load_experiment(path, overrides, further_checks)
    return Ready(experiment, plans[0], tuple(unverified))


def _run_folder_problems(experiment: Experiment, new_run: bool) -> Problems:
    try:
        problem = _unusable(experiment, new_run)
    except OSError as error:
        problem = f"the folder cannot be used ({error.strerror}); set another folder"
    if problem is not None:
        yield Problem("run_dir", str(experiment.run_dir), problem)


def _unusable(experiment: Experiment, new_run: bool) -> str | None:
    """Why the run cannot write into its folder. Leaves nothing behind."""
    run_dir = experiment.run_dir
    absolute = run_dir.absolute()
    names = [os.fsencode(part) for part in absolute.parts]
    if not str(run_dir).isprintable():
        return "the path contains unprintable characters; remove them"
    if (longest := max(map(len, names))) > _MAX_NAME_BYTES:
        problem = f"a name in the path has {longest} bytes, and at most {_MAX_NAME_BYTES} are allowed"
        return f"{problem}; shorten it"
    if (length := len(os.fsencode(absolute))) > _MAX_PATH_BYTES:
        return f"the path has {length} bytes and may have {_MAX_PATH_BYTES}; shorten it"
    if run_dir.exists() and not run_dir.is_dir():
        return "this is a file; set a folder, which need not exist yet"
    for spec in models_of(experiment):
        if run_dir.resolve().is_relative_to(spec.config.model_path.resolve()):
            return f"this is in the model folder of {spec.section}.model_path; set another folder"
    existing = next(path for path in (run_dir, *absolute.parents) if path.exists())
    if not existing.is_dir():
        return f"{existing} is a file, not a folder; set another folder"
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        return f"{existing} is not writable ({error.strerror}); set another folder"
    if new_run and RunPaths(run_dir).has_steps:
        return "the folder contains a run; continue it with --resume, or set another folder"
    return None


def _other_algorithm(experiment: Experiment) -> Problems:
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


def _custom_part_problems(experiment: Experiment) -> Problems:
    algorithm, env, rewards = experiment.algorithm, experiment.env, experiment.rewards
    for part in ("advantage", "loss") if isinstance(algorithm, OnlineConfig) else ():
        config = getattr(algorithm, part)
        if not isinstance(config, CustomAdvantageConfig | CustomLossConfig):
            continue
        from nemorl.algorithms.custom import smoke_test_advantage, smoke_test_loss  # brings torch: seconds

        try:
            if isinstance(config, CustomAdvantageConfig):
                smoke_test_advantage(config, reward_names(env, rewards))
            else:
                smoke_test_loss(config, metric_names(algorithm, env, rewards, experiment.data))
        except NemorlError as error:
            yield Problem(f"algorithm.{part}.function", config.function, str(error))
    if isinstance(env, CustomEnvConfig):
        from nemorl.data.tokenizer import TokenizerError, load_tokenizer
        from nemorl.rollout.custom_environment import custom_environment_problems

        tokenizer, seconds = None, experiment.cluster.deadlines.environment
        with suppress(TokenizerError):  # which other checks report
            tokenizer = load_tokenizer(experiment.policy)
        with _mentioned("env.factory", env.factory, seconds):
            found = list(custom_environment_problems(env, _first_task(experiment), seconds, tokenizer))
        yield from found


@contextmanager
def _mentioned(field: str, value: str, seconds: float) -> Iterator[None]:
    """Say that the user's code is being called where that takes long."""
    line = f"{field} = {value}: waiting for its answer, at most {seconds:g} s for each call"
    timer = threading.Timer(_SILENT_SECONDS, lambda: notes().print(line, markup=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reward_problems(experiment: Experiment, *, calls: bool) -> Problems:
    """`calls=False` calls only built-in functions: those of the user may need what this machine lacks."""
    for place, config in enumerate(experiment.rewards):
        if not isinstance(config, FunctionRewardConfig):
            continue
        field, arguments = f"rewards.{place}.function", f"rewards.{place}.arguments"
        try:
            found = find_reward(config)
        except RewardError as error:
            yield Problem(field, config.function, str(error))
            continue
        given = GIVEN[found.signature] | {"answer"}
        lacking: dict[tuple[str, str], list[str]] = {}  # datasets, by what they lack and what they have
        for path, dataset in acted_on(experiment.data, experiment.algorithm):
            columns = _columns(dataset)
            if columns is None:
                continue
            if missing := sorted(found.needs - given - columns):
                names = ", ".join(missing), ", ".join(sorted(given | columns))
                lacking.setdefault(names, []).append(path)
        for (missing_names, names_there), paths in lacking.items():
            have = f"the tasks of {' and '.join(paths)} have the columns {names_there}"
            default = "" if config.function in BUILT_IN else "give it a default, or "
            fix = f"it requires {missing_names}, and {have}; {default}set it in {arguments}"
            yield Problem(field, config.function, fix)
        if lacking:
            continue
        if config.function in BUILT_IN:  # one call shows arguments that it does not accept
            if found.needs <= _SAMPLE.keys():
                sample = {name: value for name, value in _SAMPLE.items() if name in found.takes}
                try:
                    found.function(**sample | config.arguments)
                except (TypeError, ValueError) as error:
                    fix = f"`{config.function}` does not accept these: {error}"
                    yield Problem(arguments, config.arguments, fix)
        elif calls and (task := _first_task(experiment)) is not None:
            from nemorl.rewards.compose import smoke_test_reward  # with numpy

            seconds = config.deadline or experiment.cluster.deadlines.environment
            with _mentioned(field, config.function, seconds):
                reason = smoke_test_reward(config, task, experiment.data.chat, seconds)
            if reason is not None:
                problem = f"it failed on every test answer to the first task: {reason}"
                yield Problem(field, config.function, problem)


def _first_task(experiment: Experiment) -> "Task | None":
    """None where nothing is sampled, and where the data cannot be read, which other checks report."""
    from nemorl.data.datasets import DatasetError, load_tasks  # with numpy

    with suppress(DatasetError):
        for _, dataset in acted_on(experiment.data, experiment.algorithm):
            return load_tasks(dataset, experiment.data)[0]
    return None


def _columns(dataset: DatasetConfig) -> set[str] | None:
    """Columns of a dataset; None where a file cannot be read, which the checks of the data report."""
    if isinstance(dataset, ArithmeticDataset):
        return {"prompt"}
    if not isinstance(dataset, JsonlDataset):
        return {"question", "metadata", "reasoning_gym_task", "reasoning_gym_options"}
    try:
        with dataset.path.open(encoding="utf-8") as lines:
            first = json.loads(next((line for line in lines if line.strip()), ""))
    except (OSError, ValueError):
        return None
    return set(first) if isinstance(first, dict) else None
