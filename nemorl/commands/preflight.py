"""All that can be checked before a run, in one go: configuration, model, files and machine."""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from nemorl.commands.own_parts import own_part_violations
from nemorl.commands.reward_functions import reward_violations
from nemorl.config.experiment import Experiment
from nemorl.config.generation import EndpointConfig
from nemorl.config.load import load_experiment
from nemorl.errors import ABSENT, Violation
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.machine import Machine, is_this_machine
from nemorl.plan.problems import Plan, address_violations, node_violations, plan_run


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

    def further_checks(experiment: Experiment) -> Iterator[Violation]:
        plans.append(plan_run(experiment, machine, training=training))
        yield from plans[0].violations
        yield from reward_violations(experiment)
        yield from own_part_violations(experiment)
        yield from _run_folder(experiment, new_run)
        if starts:
            yield from node_violations(experiment.cluster)
        if resumes:
            yield from _other_algorithm(experiment)
        if is_this_machine(experiment, machine):
            listening = experiment.generation.endpoint or (EndpointConfig() if serving else None)
            yield from address_violations(experiment.generation, listening)
        data = experiment.data
        if measuring and not training and data.validation is None and not data.validation_sets:
            mend = "an evaluation measures on these tasks: name a dataset"
            yield Violation("data.validation", ABSENT, mend)
        if measuring and not training and experiment.policy.head == "scalar":
            mend = "an evaluation samples, and this model says numbers: let algorithm.validation measure it"
            yield Violation("policy.head", "scalar", mend)

    experiment = load_experiment(path, overrides, further_checks)
    return Ready(experiment, plans[0])


def _run_folder(experiment: Experiment, new_run: bool) -> Iterator[Violation]:
    run_dir = experiment.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        yield Violation("run_dir", str(run_dir), "this is a file: name a folder, which need not exist yet")
    elif new_run and RunPaths(run_dir).has_steps:
        mend = "the folder holds a run already: go on with --resume, or name another folder"
        yield Violation("run_dir", str(run_dir), mend)
    elif (problem := _not_writable(run_dir)) is not None:
        yield Violation("run_dir", str(run_dir), problem)


def _other_algorithm(experiment: Experiment) -> Iterator[Violation]:
    """Another algorithm than the one that wrote the checkpoints would leave models of theirs behind."""
    paths, algorithm = RunPaths(experiment.run_dir), experiment.algorithm
    if not any(paths.checkpoints.glob("step_*")):  # the run begins anew
        return
    try:
        then = yaml.safe_load(paths.config.read_text(encoding="utf-8"))["algorithm"]
        name, had_critic = then["name"], then.get("critic") is not None
    except (OSError, ValueError, yaml.YAMLError, LookupError, TypeError, AttributeError):
        return  # the folder does not tell any more; what a checkpoint lacks is refused when it is read
    mend = "or begin a new run in another run_dir from an export of its weights (`nemorl models export`)"
    if name != algorithm.name:
        there = f"the run in {paths.root} was trained with `{name}`, and goes on with it only"
        yield Violation("algorithm.name", algorithm.name, f"{there}: set `{name}`, {mend}")
    elif had_critic and not algorithm.keeps_critic:
        there = f"the run in {paths.root} was trained with a critic, and goes on with one only"
        yield Violation("algorithm.critic", None, f"{there}: set the advantage back, {mend}")


def _not_writable(run_dir: Path) -> str | None:
    """Why nothing can be written into a folder, or where it is to be made. Leaves nothing behind."""
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=there):
            return None
    except OSError as error:
        return f"nothing can be written in {there} ({error.strerror}): name a folder where that is allowed"
