"""`nemorl check`: whether experiments would start.

Functions of the user's own that an algorithm names: tried before a run, so that none fails in a step.

The rewards of an experiment, tried before a run: none fails after the first samples.

All that can be checked before a run, in one go: configuration, model, files and machine.
"""

import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml

from nemorl.config.algorithm import CustomLossConfig, OnlineConfig
from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.checks.metrics import metrics, reward_names
from nemorl.config.data import ArithmeticDataset, DatasetConfig, JsonlDataset
from nemorl.config.environment import CustomEnvConfig, FunctionRewardConfig
from nemorl.config.experiment import Experiment
from nemorl.config.facts import acted_on
from nemorl.config.generation import EndpointConfig
from nemorl.config.load import ORIGIN as COMMAND_LINE
from nemorl.config.load import load_experiment
from nemorl.errors import ABSENT, ConfigError, NemorlError, Problem
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.machine import Machine, is_this_machine, read_machine
from nemorl.plan.problems import Plan, address_problems, node_problems, plan_run
from nemorl.rewards.find import GIVEN, FoundReward, RewardError, find_reward
from nemorl.rewards.functions import BUILT_IN

from .terminal import ExitCode, complain, notes, plan_table, say


def custom_function_problems(experiment: Experiment) -> Iterator[Problem]:
    """Advantages and losses that are not there, cannot be called, or do not answer as they must."""
    algorithm = experiment.algorithm
    if not isinstance(algorithm, OnlineConfig):
        return
    if isinstance(algorithm.advantage, CustomAdvantageConfig):
        from nemorl.algorithms.custom import smoke_test_advantage  # brings torch, which takes seconds

        try:
            smoke_test_advantage(algorithm.advantage, reward_names(experiment.env, experiment.rewards))
        except NemorlError as error:
            yield Problem("algorithm.advantage.function", algorithm.advantage.function, str(error))
    if isinstance(algorithm.loss, CustomLossConfig):
        from nemorl.algorithms.policy_losses import smoke_test_loss as try_out_loss  # brings torch as well

        try:
            taken = metrics(algorithm, experiment.env, experiment.rewards, experiment.data)
            try_out_loss(algorithm.loss, taken)
        except NemorlError as error:
            yield Problem("algorithm.loss.function", algorithm.loss.function, str(error))


def environment_problems(experiment: Experiment) -> Iterator[Problem]:
    """A custom environment that cannot be found or constructed, or in which an episode fails."""
    if not isinstance(experiment.env, CustomEnvConfig):
        return
    from nemorl.data.datasets import load_tasks  # with numpy
    from nemorl.data.json_lines import DatasetError
    from nemorl.rollout.custom_environment import custom_environment_problems

    task = None
    with suppress(DatasetError):  # reported by the checks of the data
        for _, dataset in acted_on(experiment.data, experiment.algorithm):
            task = load_tasks(dataset, experiment.data)[0]
            break
    yield from custom_environment_problems(experiment.env, task, experiment.cluster.deadlines.environment)


_TRIED = {"completions": ["4"], "prompts": ["2+2="], "sampled_ids": [[1, 2]], "answer": ["4"]}


def reward_problems(experiment: Experiment) -> Iterator[Problem]:
    """Functions that are not there, or that ask for columns which the tasks do not have."""
    for place, config in enumerate(experiment.rewards):
        if not isinstance(config, FunctionRewardConfig):
            continue
        field = f"rewards.{place}.function"
        try:
            found = find_reward(config)
        except RewardError as error:
            yield Problem(field, config.function, str(error))
            continue
        yield from _tried(config, found, f"rewards.{place}.arguments")
        for path, dataset in acted_on(experiment.data, experiment.algorithm):
            columns = _columns(dataset)
            if columns is None:
                continue
            given = GIVEN[found.signature] | {"answer"}
            missing = sorted(found.needs - given - columns)
            if missing:
                fix = (
                    f"it asks for {', '.join(missing)}, and the tasks of {path} have the columns "
                    f"{', '.join(sorted(given | columns))}: give it a default, or bind it in "
                    f"rewards.{place}.arguments"
                )
                yield Problem(field, config.function, fix)


def _tried(config: FunctionRewardConfig, found: FoundReward, field: str) -> Iterator[Problem]:
    """A built-in reward is called once, which shows whether it can do with its arguments."""
    if config.function not in BUILT_IN or not found.needs <= _TRIED.keys():
        return
    given = {name: value for name, value in _TRIED.items() if name in found.takes}
    try:
        found.function(**given | config.arguments)
    except (TypeError, ValueError) as error:
        yield Problem(field, config.arguments, f"`{config.function}` cannot do with this: {error}")


def _columns(dataset: DatasetConfig) -> set[str] | None:
    """Columns of a dataset's own; None where a file cannot be read, which is told of elsewhere."""
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


@dataclass(frozen=True)
class Ready:
    """An experiment that nothing speaks against, and what it will start."""

    experiment: Experiment
    plan: Plan


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
    starts: bool = True,
) -> Ready:
    """Load and check an experiment; `new_run` wants its run folder to be free, `resumes` the algorithm of the
    run in it, `measuring` without training wants tasks to measure on, `serving` an address to listen on, also
    where the experiment names none, `starts` what a run over several nodes joins.

    Raises `ConfigError` with everything that is wrong.
    """
    plans: list[Plan] = []

    def further_checks(experiment: Experiment) -> Iterator[Problem]:
        plans.append(plan_run(experiment, machine, training=training))
        yield from plans[0].problems
        yield from reward_problems(experiment)
        yield from custom_function_problems(experiment)
        yield from environment_problems(experiment)
        yield from _run_folder(experiment, new_run)
        if starts:
            yield from node_problems(experiment.cluster)
        if resumes:
            yield from _other_algorithm(experiment)
        if is_this_machine(experiment, machine):
            listening = experiment.generation.endpoint or (EndpointConfig() if serving else None)
            yield from address_problems(experiment.generation, listening)
        data = experiment.data
        if measuring and not training and data.validation is None and not data.validation_sets:
            fix = "an evaluation measures on these tasks: name a dataset"
            yield Problem("data.validation", ABSENT, fix)
        if measuring and not training and experiment.policy.head == "scalar":
            fix = "an evaluation samples, and this model says numbers: let algorithm.validation measure it"
            yield Problem("policy.head", "scalar", fix)

    experiment = load_experiment(path, overrides, further_checks)
    return Ready(experiment, plans[0])


def _run_folder(experiment: Experiment, new_run: bool) -> Iterator[Problem]:
    run_dir = experiment.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        yield Problem("run_dir", str(run_dir), "this is a file: name a folder, which need not exist yet")
    elif new_run and RunPaths(run_dir).has_steps:
        fix = "the folder holds a run already: go on with --resume, or name another folder"
        yield Problem("run_dir", str(run_dir), fix)
    elif (problem := _not_writable(run_dir)) is not None:
        yield Problem("run_dir", str(run_dir), problem)


def _other_algorithm(experiment: Experiment) -> Iterator[Problem]:
    """Another algorithm than the one that wrote the checkpoints would leave models of theirs behind."""
    paths, algorithm = RunPaths(experiment.run_dir), experiment.algorithm
    if not any(paths.checkpoints.glob("step_*")):  # the run begins anew
        return
    try:
        then = yaml.safe_load(paths.config.read_text(encoding="utf-8"))["algorithm"]
        name, had_critic = then["name"], then.get("critic") is not None
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return  # the folder does not tell any more; what a checkpoint lacks is refused when it is read
    fix = "or begin a new run in another run_dir from an export of its weights (`nemorl models export`)"
    if name != algorithm.name:
        there = f"the run in {paths.root} was trained with `{name}`, and goes on with it only"
        yield Problem("algorithm.name", algorithm.name, f"{there}: set `{name}`, {fix}")
    elif had_critic and not algorithm.keeps_critic:
        there = f"the run in {paths.root} was trained with a critic, and goes on with one only"
        yield Problem("algorithm.critic", None, f"{there}: set the advantage back, {fix}")


def _not_writable(run_dir: Path) -> str | None:
    """Why nothing can be written into a folder, or where it is to be made. Leaves nothing behind."""
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"nothing can be written in {there} ({error.strerror}): name a folder where that is allowed"


HELP = "say whether experiments would start, and list all that speaks against it"


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument(
        "words",
        nargs="+",
        metavar="CONFIG|a.b=value",
        help="experiment files (YAML), and fields that are set in each of them before it is looked at",
    )


def run(arguments: Namespace) -> int:
    """Every file is looked at, also after one that is refused. Raises NemorlError where there is none."""
    overrides = [word for word in arguments.words if "=" in word and not Path(word).exists()]
    paths = [Path(word) for word in arguments.words if word not in overrides]
    if not paths:
        raise NemorlError(f"{', '.join(overrides)}: name an experiment file too, in which these are set")
    machine = read_machine()
    refused = 0
    for path in paths:
        try:
            ready = prepare(path, overrides, machine, starts=False)
        except ConfigError as error:
            if error.source == COMMAND_LINE:  # which is the same for every file
                raise
            complain(str(error))
            refused += 1
            continue
        say(f"{path}: OK")
        notes().print(plan_table(ready.plan))
    return ExitCode.REFUSED if refused else ExitCode.WELL
