"""All that can be checked before a run, in one go: configuration, model, files and machine."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import ABSENT, Violation
from nemorl.observe.run_folder import RunPaths
from nemorl.plan.fit import Plan, plan_run
from nemorl.plan.machine import Machine
from nemorl.rewards.functions import BUILT_IN


@dataclass(frozen=True)
class Ready:
    """An experiment that nothing speaks against, and what it will start."""

    experiment: Experiment
    plan: Plan


def prepare(
    path: Path, overrides: Sequence[str], machine: Machine, *, training: bool = True, new_run: bool = False
) -> Ready:
    """Load and check an experiment; `new_run` wants its run folder to be free.

    Raises `ConfigError` with everything that is wrong.
    """
    plans: list[Plan] = []

    def further_checks(experiment: Experiment) -> Iterator[Violation]:
        plans.append(plan_run(experiment, machine, training=training))
        yield from plans[0].violations
        yield from _unknown_rewards(experiment)
        yield from _run_folder(experiment, new_run)
        if not training and experiment.data.validation is None:
            mend = "an evaluation measures on these tasks: name a dataset"
            yield Violation("data.validation", ABSENT, mend)

    experiment = load_experiment(path, overrides, further_checks)
    return Ready(experiment, plans[0])


def _unknown_rewards(experiment: Experiment) -> Iterator[Violation]:
    """A reward of one's own is looked for, not imported: that may take long."""
    for place, reward in enumerate(experiment.rewards):
        module, colon, _ = reward.function.partition(":")
        field = f"rewards.{place}.function"
        if not colon and module not in BUILT_IN:
            known = ", ".join(f"`{name}`" for name in sorted(BUILT_IN))
            mend = f"built in are {known}; one of your own is written `package.module:function`"
            yield Violation(field, reward.function, mend)
        elif colon and importlib.util.find_spec(module.partition(".")[0]) is None:
            mend = f"there is no package `{module.partition('.')[0]}` here: install it, or mend the name"
            yield Violation(field, reward.function, mend)


def _run_folder(experiment: Experiment, new_run: bool) -> Iterator[Violation]:
    run_dir = experiment.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        yield Violation("run_dir", str(run_dir), "this is a file: name a folder, which need not exist yet")
    elif new_run and RunPaths(run_dir).has_steps:
        mend = "the folder holds a run already: go on with --resume, or name another folder"
        yield Violation("run_dir", str(run_dir), mend)
