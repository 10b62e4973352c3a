"""All checks of an experiment before it starts, with a trial of the user's own functions."""

import asyncio
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict, Unpack

import yaml
from rich.console import Console

from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.advantages import CustomAdvantageConfig
from nemorl.config.algorithm.losses import CustomLossConfig
from nemorl.config.base import counted
from nemorl.config.data import ArithmeticDataset, DatasetConfig, GeneratorDataset, SeedsDataset, TasksDataset
from nemorl.config.environment import (
    ByTaskEnvConfig,
    CodeEnvConfig,
    CustomEnvConfig,
    EnvConfig,
    FunctionRewardConfig,
    ProgramEnvConfig,
    ServerPlacement,
    ToolsEnvConfig,
    environments_in,
)
from nemorl.config.experiment import Experiment
from nemorl.config.facts import acted_on, metric_names, models_of, reward_names
from nemorl.config.generation import EndpointConfig
from nemorl.config.library_datasets import AviaryDataset, VerifiersDataset
from nemorl.config.library_environments import OpenRLHFEnvConfig
from nemorl.config.load import Loaded, examine
from nemorl.config.terminal_environment import TerminalEnvConfig
from nemorl.errors import ABSENT, ConfigError, NemorlError, Problem, Problems
from nemorl.models.hub import commits_in, with_local_models
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.addresses import address_problems, node_problems, server_problems
from nemorl.plan.machine import Machine, gpu_problems, is_this_machine
from nemorl.plan.problems import Plan, has_weights, plan_run
from nemorl.plan.recompute import Chosen, settled, with_settings_of
from nemorl.rewards.find import GIVEN, RewardError, find_reward
from nemorl.rewards.functions import BUILT_IN

if TYPE_CHECKING:
    from nemorl.data.tokenizer import Tokenizer
    from nemorl.trajectories import Task

_SEARCHED_TASKS = 1000  # of a dataset, for the first one of an environment
_SILENT_SECONDS = 3.0  # of a call of the user's code, before it is mentioned
_MAX_NAME_BYTES = 255
_MAX_PATH_BYTES = 4000  # of the 4096 that Linux allows; the rest is for the files in the folder
_SAMPLE = {"completions": ["4"], "prompts": ["2+2="], "sampled_ids": [[1, 2]], "answer": ["4"]}


Where: TypeAlias = Literal["here", "unknown", "elsewhere"]
Weights: TypeAlias = Literal["required", "optional", "absent"]


class Sampled:
    """The tasks that a run samples and the policy's tokenizer, loaded when they are first needed.

    What cannot be read, which other checks report, is left out.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment

    @cached_property
    def of_datasets(self) -> "list[tuple[str, Sequence[Task]]]":
        """With the path of each dataset in the config."""
        from nemorl.data.datasets import DatasetError, load_tasks  # with numpy

        data, of_datasets = self._experiment.data, []
        trained = [("data.train", data.train)] if self._experiment.algorithm.online else []
        for path, dataset in (*trained, *data.held_out):
            with suppress(DatasetError):
                of_datasets.append((path, load_tasks(dataset, data)))
        return of_datasets

    @cached_property
    def tokenizer(self) -> "Tokenizer | None":
        from nemorl.data.tokenizer import TokenizerError, load_tokenizer

        with suppress(TokenizerError):
            return load_tokenizer(self._experiment.policy)
        return None

    def first(self, environment: str = "") -> "Task | None":
        """The first task, or the first one of an environment among the first tasks of each source."""
        from nemorl.data.datasets import DatasetError, source_sizes

        env = self._experiment.env
        for _, tasks in self.of_datasets:
            sizes = source_sizes(tasks)
            for end, size in zip(accumulate(sizes), sizes, strict=True):
                with suppress(DatasetError):
                    for index in range(end - size, end - size + min(size, _SEARCHED_TASKS)):
                        task = tasks[index]
                        with suppress(ValueError):  # which the start of the run reports
                            if not environment or env.name_for(task.columns) == environment:
                                return task
        return None


@dataclass(frozen=True)
class Inspected:
    """What the checks of an experiment found."""

    loaded: Loaded
    experiment: Experiment | None  # with local models; None where the checks of model and machine did not run
    plan: Plan | None  # None with it
    unverified: tuple[Problem, ...]  # as of `Ready`
    remarks: tuple[Problem, ...]  # as of `Ready`


@dataclass(frozen=True)
class Ready:
    experiment: Experiment
    plan: Plan
    unverified: tuple[Problem, ...] = ()  # what this machine lacks, where the run may start on another
    remarks: tuple[Problem, ...] = ()  # what was chosen, and of trials of the user's agents


class Checks(TypedDict, total=False):
    """Arguments of `inspect` by name."""

    training: bool
    serving: bool
    sampling: bool
    replay: Path | None
    new_run: bool
    resumes: bool
    where: Where
    weights: Weights


def prepare(path: Path, overrides: Sequence[str], machine: Machine, **how: Unpack[Checks]) -> Ready:
    """Load and check an experiment; of `how`, see `inspect`. Raises `ConfigError` with all problems."""
    found = inspect(path, overrides, machine, **how)
    if found.loaded.problems or found.experiment is None or found.plan is None:
        raise ConfigError(str(path), found.loaded.problems)
    return Ready(found.experiment, found.plan, found.unverified, found.remarks)


def inspect(
    path: Path,
    overrides: Sequence[str],
    machine: Machine,
    *,
    training: bool = True,
    serving: bool = False,
    sampling: bool = False,
    replay: Path | None = None,
    new_run: bool = False,
    resumes: bool = False,
    where: Where = "here",
    weights: Weights = "required",
    text: str | None = None,
) -> Inspected:
    """Load and check an experiment, and list its problems; `text` is checked in place of the file's.

    `new_run` requires a run folder without a run, `resumes` the algorithm of the run in it, `serving` an
    address to listen on and no tasks, `sampling` an algorithm that samples, `replay` stored groups in that
    run folder to train on. What this machine lacks is a problem where the run starts `here`, and
    in `unverified` otherwise; rewards are not called `elsewhere`. Weights that are `absent`, or are
    `optional` and not there, are not downloaded; they, tokenizers and data that this machine lacks are in
    `unverified`, and ids on the hub stay in the experiment. Raises `ConfigError` for a file that cannot be
    read.
    """
    plans: list[Plan] = []
    located: list[Experiment] = []
    unverified: list[Problem] = []
    remarks: list[Problem] = []

    def further_checks(experiment: Experiment) -> Problems:
        recorded = RunPaths(experiment.run_dir).config
        commits = commits_in(recorded.read_text(encoding="utf-8")) if resumes and recorded.exists() else {}
        named = experiment
        experiment, absent = with_local_models(experiment, commits, weights=weights == "required")
        is_complete = weights == "required" or (weights == "optional" and _have_weights(experiment))
        chosen = settled(experiment, machine, training=training)
        if chosen.experiment is not experiment:
            field = (
                "recompute" if experiment.policy.recompute.name == "auto" else "offload_activations.layers"
            )
            remarks.append(Problem(f"policy.{field}", "auto", _settled(chosen, machine)))
        located.append(chosen.experiment if is_complete else with_settings_of(named, chosen.experiment))
        experiment = chosen.experiment
        yield from absent
        plans.append(plan_run(experiment, machine, training=training))
        fields = {problem.field for problem in absent}
        for problem in plans[0].problems:
            if problem.is_absent and not is_complete:
                unverified.append(problem)
            elif problem.field not in fields:
                yield problem
        sampled = Sampled(experiment)
        yield from _reward_problems(experiment, sampled, calls=where != "elsewhere")
        yield from _custom_part_problems(experiment, sampled, remarks)
        yield from _unnamed_environments(experiment.env, sampled)
        yield from _tool_problems(experiment, sampled)
        yield from _task_folder_problems(experiment.env, sampled)
        yield from _run_folder_problems(experiment, new_run)
        if where != "elsewhere":
            unverified.extend(gpu_problems(experiment, machine))
            unverified.extend(node_problems(experiment.cluster))
            unverified.extend(server_problems(experiment))
            unverified.extend(_sandbox_problems(experiment))
            yield from _mcp_problems(experiment, unverified)
        if where == "here":
            yield from (problem for problem in unverified if not problem.is_absent)
        if resumes:
            yield from _other_algorithm(experiment)
        if is_this_machine(experiment, machine):
            listening = experiment.generation.endpoint or (EndpointConfig() if serving else None)
            yield from address_problems(experiment.generation, listening, experiment.env, experiment.logger)
        if replay is not None:
            from nemorl.rollout.replay import replay_problems
            from nemorl.rollout.stored import RolloutFiles

            if not absent:
                yield from replay_problems(experiment, RolloutFiles(RunPaths(replay).trajectories))
        if sampling and not experiment.algorithm.online:
            fix = "it trains without sampling; set an online algorithm, such as grpo"
            yield Problem("algorithm.name", experiment.algorithm.name, fix)
        if training or serving or sampling:
            return
        if experiment.data.validation is None and not experiment.data.validation_sets:
            yield Problem("data.validation", ABSENT, "an evaluation requires tasks; set a dataset")
        if experiment.policy.head == "scalar":
            fix = "an evaluation samples, and a scalar head cannot; evaluate it with algorithm.validation"
            yield Problem("policy.head", "scalar", f"{fix} during training")

    loaded = examine(path, overrides, further_checks, text=text, training=training or sampling)
    experiment, plan = (located[0], plans[0]) if plans else (None, None)
    return Inspected(loaded, experiment, plan, tuple(unverified), tuple(remarks))


def _have_weights(experiment: Experiment) -> bool:
    """False if the folder of a model has a config.json and no weights."""
    folders = {spec.config.model_path for spec in models_of(experiment)}
    if (draft := experiment.generation.draft_model) is not None:
        folders.add(draft.model_path)
    return all(has_weights(folder) for folder in folders if (folder / "config.json").is_file())


def _settled(choice: Chosen, machine: Machine) -> str:
    experiment, offload = choice.experiment, choice.experiment.policy.offload_activations
    chosen = f"the memory plan chooses to recompute {experiment.policy.recompute.described}"
    if offload is not None:
        chosen += f" and to offload activations of {offload.described}"
    if choice.reason:
        chosen += f": {choice.reason}"
    if is_this_machine(experiment, machine):
        return chosen
    if machine.gpus and experiment.cluster.gpus_per_node:
        return f"{chosen}, for GPUs as those of this machine"
    return "chosen where the run starts, by the memory of the GPUs there; without GPUs nothing is recomputed"


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
    return occupied(run_dir) if new_run else None


def occupied(run_dir: Path) -> str | None:
    """Why a new run cannot start in a folder that contains one. Raises OSError."""
    if RunPaths(run_dir).has_steps:
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


def _custom_part_problems(experiment: Experiment, sampled: Sampled, remarks: list[Problem]) -> Problems:
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
    for (path, one), name in zip(environments_in(env), env.environments, strict=True):
        if isinstance(one, CustomEnvConfig | OpenRLHFEnvConfig | CodeEnvConfig | ProgramEnvConfig):
            found: list[Problem] = []
            problems = _environment_problems(experiment, one, sampled, name, found)
            yield from _of_section(path, problems)
            remarks += _of_section(path, iter(found))


def _unnamed_environments(env: EnvConfig, sampled: Sampled) -> Problems:
    """The first task of each dataset that names no environment; tasks that are read while they are sampled
    end the run then."""
    if not isinstance(env, ByTaskEnvConfig):
        return
    from nemorl.data.datasets import reads

    for path, tasks in sampled.of_datasets:
        for task in () if reads(tasks) else tasks:
            try:
                env.name_for(task.columns)
            except ValueError as error:
                yield Problem("env.key", env.key, f"task {task.index} of {path}: {error}")
                break


def _task_folder_problems(env: EnvConfig, sampled: Sampled) -> Problems:
    """Tasks of each dataset whose folders cannot be run."""
    terminals = {
        name: (path, one)
        for (path, one), name in zip(environments_in(env), env.environments, strict=True)
        if isinstance(one, TerminalEnvConfig)
    }
    if not terminals:
        return
    from nemorl.data.datasets import reads
    from nemorl.environments.task_folder import folder_of

    for dataset, tasks in sampled.of_datasets:
        refused: dict[str, list[str]] = {}
        for task in () if reads(tasks) else tasks:
            name = None
            with suppress(ValueError):  # which another check reports
                name = env.name_for(task.columns)
            if name not in terminals:
                continue
            path, terminal = terminals[name]
            try:
                folder_of(task, terminal)
            except ValueError as error:
                refused.setdefault(path, []).append(str(error))
        for path, reasons in refused.items():
            problem = f"{counted(len(reasons), 'task')} of {dataset} cannot be run:"
            fix = "remove their folders, or set a sandbox of containers"
            yield Problem(f"{path}.name", "terminal", f"{problem} {reasons[0]}; {fix}")


def _of_section(path: str, problems: Problems) -> Problems:
    """Problems of `env`, with the path of the section that they are of."""
    return (replace(problem, field=path + problem.field.removeprefix("env")) for problem in problems)


def _environment_problems(
    experiment: Experiment,
    env: CustomEnvConfig | OpenRLHFEnvConfig | CodeEnvConfig | ProgramEnvConfig,
    sampled: Sampled,
    name: str,
    remarks: list[Problem],
) -> Problems:
    task = sampled.first(name)
    if isinstance(env, CustomEnvConfig | OpenRLHFEnvConfig | ProgramEnvConfig):
        from nemorl.rollout.custom_environment import Trial, custom_environment_problems, program_problems

        seconds = experiment.cluster.deadlines.environment
        trial = Trial(task, seconds, sampled.tokenizer, experiment.data.chat, remarks)
        if isinstance(env, CustomEnvConfig):
            with _mentioned("env.factory", env.factory, seconds):
                found = list(custom_environment_problems(env, trial))
        elif isinstance(env, OpenRLHFEnvConfig):
            with _mentioned("env.agent", env.agent, seconds):
                found = list(custom_environment_problems(env, trial))
        else:
            with _mentioned("env.command", " ".join(env.command), seconds):
                found = list(program_problems(env, trial))
        yield from found
    elif task is not None:
        from nemorl.environments.code import read_tests

        try:
            read_tests(task, env.tests_key)
        except ValueError as error:
            yield Problem("env.tests_key", env.tests_key, str(error))


def _sandbox_problems(experiment: Experiment) -> Problems:
    for path, env in environments_in(experiment.env):
        if isinstance(env.placement, ServerPlacement):
            continue
        match env:
            case CodeEnvConfig(sandbox=sandbox) | TerminalEnvConfig(sandbox=sandbox):
                section = "sandbox"
            case ToolsEnvConfig(python=sandbox) if sandbox is not None:
                section = "python"
            case _:
                continue
        from nemorl.environments.sandbox import sandbox_problems

        for problem in sandbox_problems(sandbox, experiment.cluster.deadlines.environment):
            yield replace(problem, field=f"{path}.{section}.{problem.field}")


def _mcp_problems(experiment: Experiment, unverified: list[Problem]) -> Problems:
    """Tools of MCP servers with the name of another; servers that do not answer go to `unverified`."""
    if "RAY_ADDRESS" in os.environ:  # workers on other machines connect
        return
    for path, env in environments_in(experiment.env):
        if not isinstance(env, ToolsEnvConfig) or not env.mcp or isinstance(env.placement, ServerPlacement):
            continue
        from nemorl.environments.tools import mcp_problems

        with _mentioned(f"{path}.mcp", ", ".join(one.label for one in env.mcp), env.call_seconds):
            same, lost = asyncio.run(mcp_problems(env))
        yield from (replace(problem, field=f"{path}.{problem.field}") for problem in same)
        unverified += [replace(problem, field=f"{path}.{problem.field}") for problem in lost]


def _tool_problems(experiment: Experiment, sampled: Sampled) -> Problems:
    """A chat template that does not offer tools to an environment that has them."""
    has_tools = any(env.has_tools for _, env in environments_in(experiment.env))
    if not (experiment.data.chat and has_tools) or sampled.tokenizer is None:
        return
    from nemorl.data.tokenizer import EXAMPLE_TOOLS, ChatPrompts, TemplateError

    try:
        ChatPrompts(sampled.tokenizer).with_tools(EXAMPLE_TOOLS)
    except TemplateError as error:
        template = experiment.policy.tokenizer.chat_template
        yield Problem("policy.tokenizer.chat_template", template and str(template), str(error))


@contextmanager
def _mentioned(field: str, value: str, seconds: float) -> Iterator[None]:
    """Say that the user's code is being called where that takes long."""
    line = f"{field} = {value}: waiting for its answer, at most {seconds:g} s for each call"
    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    timer = threading.Timer(_SILENT_SECONDS, lambda: console.print(line, markup=False))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _reward_problems(experiment: Experiment, sampled: Sampled, *, calls: bool) -> Problems:
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
        elif calls and (task := sampled.first()) is not None:
            from nemorl.rewards.compose import smoke_test_reward  # with numpy

            seconds = config.deadline or experiment.cluster.deadlines.environment
            with _mentioned(field, config.function, seconds):
                reason = smoke_test_reward(config, task, experiment.data.chat, seconds)
            if reason is not None:
                problem = f"it failed on every test answer to the first task: {reason}"
                yield Problem(field, config.function, problem)


def _columns(dataset: DatasetConfig) -> set[str] | None:
    """Columns of a dataset; None where a file cannot be read, which the checks of the data report."""
    if isinstance(dataset, ArithmeticDataset):
        return {"prompt"}
    if isinstance(dataset, SeedsDataset):
        return {"seed"}
    if isinstance(dataset, VerifiersDataset):
        return {"verifiers_taskset", "verifiers_data"}
    if isinstance(dataset, AviaryDataset):
        return {"aviary_dataset", "aviary_options", "aviary_index"}
    if not isinstance(dataset, TasksDataset | GeneratorDataset):
        return {"question", "metadata", "reasoning_gym_task", "reasoning_gym_options"}
    from nemorl.data.rows import DatasetError, first_row

    with suppress(DatasetError):
        return set(first_row(dataset))
    return None
