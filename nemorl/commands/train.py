"""`nemorl train`, `rollout`, `eval`, `report` and `quickstart`: run experiments and report them."""

import os
import shlex
from argparse import Namespace
from pathlib import Path
from statistics import fmean

from nemorl.config.load import load_experiment, to_yaml
from nemorl.errors import ConfigError, NemorlError, RunStopped, UsageError
from nemorl.observe.run_folder import RunPaths
from nemorl.observe.sweep import RECORD
from nemorl.plan.machine import read_machine
from nemorl.run.inspection import prepare
from nemorl.slurm.start import newest_step

from .check import describe_unverified
from .supervise import Supervisor
from .terminal import (
    Commands,
    ExitCode,
    add_command,
    add_experiment,
    notes,
    output,
    plan_table,
    positive_integer,
    say,
    table,
)

# The steps of the quickstart after the model, with the name of the shipped experiment.
_QUICKSTART = {
    "Supervised fine-tuning on data with errors": "quickstart/sft",
    "GRPO: two policy processes, a generation worker, held-out accuracy before and after": "quickstart/grpo",
}


def register(commands: Commands) -> None:
    help_text = "train a tiny model on sums, without a GPU: SFT, then GRPO (under 5 minutes)"
    quickstart = add_command(commands, "quickstart", _quickstart, help_text)
    dir_help = "folder for models/arithmetic and runs/quickstart (default: the current folder); what is "
    dir_help += "complete there is kept, and an interrupted run continues"
    quickstart.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help=dir_help)
    train = add_command(commands, "train", _train, "run an experiment")
    add_experiment(train)
    dry_run = "print the resolved experiment and its plan without starting anything"
    train.add_argument("--dry-run", action="store_true", help=dry_run)
    resume = "continue from the newest complete checkpoint in the run folder"
    train.add_argument("--resume", action="store_true", help=resume)
    supervise = "restart a run whose driver dies, until it is complete (NEMORL_MAX_RESTARTS, 3 by default, "
    supervise += "limits restarts in a row without a new checkpoint)"
    train.add_argument("--supervise", action="store_true", help=supervise)
    replay = "train on the trajectories stored in a run folder, instead of sampling (docs/trajectories.md)"
    train.add_argument("--replay", type=Path, metavar="RUN_DIR", help=replay)
    help_text = "sample with the model of an experiment and store the trajectories; nothing is trained"
    rollout = add_command(commands, "rollout", _rollout, help_text)
    add_experiment(rollout)
    number = "number of prompts, each with algorithm.num_generations_per_prompt samples"
    rollout.add_argument("--n", type=positive_integer, required=True, metavar="N", help=number)
    help_text = "evaluate the model of an experiment on its validation tasks"
    add_experiment(add_command(commands, "eval", _evaluate, help_text))
    report = add_command(
        commands, "report", _report, "recreate report.html of a run, or the results of a sweep"
    )
    report.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run folder, or folder of a sweep")


def _train(arguments: Namespace) -> int:
    if arguments.supervise and arguments.replay is not None:
        raise UsageError("--supervise: it restarts runs that sample; use it without --replay")
    if arguments.supervise and not arguments.dry_run:
        experiment = load_experiment(arguments.config, arguments.overrides)
        words = [str(arguments.config), *arguments.overrides]
        return Supervisor(experiment, words).run(resume=arguments.resume)
    ready = prepare(
        arguments.config,
        arguments.overrides,
        read_machine(),
        new_run=not arguments.resume and not arguments.dry_run,
        resumes=arguments.resume,
        replay=arguments.replay,
        where="unknown" if arguments.dry_run else "here",
        weights="optional" if arguments.dry_run else "required",
    )
    if arguments.dry_run:
        say(to_yaml(ready.experiment).rstrip())
        for line in describe_unverified(ready):
            notes().print(line.strip(), markup=False)
        notes().print(plan_table(ready.plan))
        return ExitCode.WELL
    from nemorl.run.train import train  # torch, Megatron and Ray: not for --help and --dry-run

    try:
        result = train(ready.experiment, resume=arguments.resume, replay=arguments.replay)
    except (ConfigError, RunStopped):  # which say themselves what to do
        raise
    except (NemorlError, KeyboardInterrupt) as error:
        paths = RunPaths(ready.experiment.run_dir)
        step, refused = newest_step(paths.root), any(paths.checkpoints.glob("step_*.corrupt"))
        # Without steps the same command starts the run; --resume is refused if all checkpoints are corrupt.
        if paths.has_steps and (step or not refused):
            words = [str(arguments.config), *arguments.overrides, "--resume"]
            words += [] if arguments.replay is None else ["--replay", str(arguments.replay)]
            place = f"after step {step}" if step else "from the start, as there is no checkpoint yet"
            error.add_note(f"To continue {place}: nemorl train {shlex.join(words)}")
        raise
    say(f"run: {result.run_dir}" + (f"\nweights: {result.hf_dir}" if result.hf_dir else ""))
    return ExitCode.WELL


def _quickstart(arguments: Namespace) -> int:
    from nemorl.models.create import ARITHMETIC, create_tiny_model  # torch

    folder = arguments.dir.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be created ({error.strerror}); give another --dir") from error
    os.chdir(folder)  # the paths of the experiments are relative
    if (runs := Path("runs/quickstart")).exists():
        kept = f"{folder} has a quickstart: what is complete is kept"
        say(f"{kept}. To start over, remove models/arithmetic and {runs}, or give another --dir.")
    model, number = Path("models/arithmetic"), len(_QUICKSTART) + 1
    _heading(f"1/{number}  Create a model of about a million parameters")
    if not model.exists():
        create_tiny_model(model, ARITHMETIC)
    say(f"model: {model}")
    options = {"overrides": [], "dry_run": False, "supervise": False, "replay": None}
    for step, (title, name) in enumerate(_QUICKSTART.items(), start=2):
        _heading(f"{step}/{number}  {title}")
        resume = RunPaths(load_experiment(Path(name)).run_dir).has_steps
        _train(Namespace(config=Path(name), resume=resume, **options))
    return ExitCode.WELL


def _heading(text: str) -> None:
    say(f"\n== {text} ==")


def _evaluate(arguments: Namespace) -> int:
    ready = prepare(arguments.config, arguments.overrides, read_machine(), training=False)
    from nemorl.run.train import evaluate  # Ray and the engine: not before the checks
    from nemorl.run.validation import with_intervals

    evaluation = evaluate(ready.experiment)
    metrics = table("", ["metric", "value", "95 % interval"])
    for name, value, interval in with_intervals(evaluation.metrics):
        between = "" if interval is None else f"{interval.low:.4g} to {interval.high:.4g}"
        metrics.add_row(name, f"{value:.6g}", between)
    say(f"model: {evaluation.model}" + (f" ({evaluation.origin})" if evaluation.origin else ""))
    output().print(metrics)
    say(f"samples: {evaluation.samples}")
    return ExitCode.WELL


def _rollout(arguments: Namespace) -> int:
    words, machine = arguments.overrides, read_machine()
    ready = prepare(arguments.config, words, machine, training=False, sampling=True, new_run=True)
    from nemorl.run.train import rollout  # Ray and the engine: not before the checks

    groups = rollout(ready.experiment, arguments.n)
    members = [t for group in groups for t in group.trajectories]
    rewarded = [t.reward for t in members if t.error is None]  # failures have none
    metrics = table("", ["metric", "value"])
    metrics.add_row("trajectories", str(len(members)))
    metrics.add_row("errors", str(sum(t.error is not None for t in members)))
    metrics.add_row("mean reward", f"{fmean(rewarded):.6g}" if rewarded else "none")
    metrics.add_row("mean sampled tokens", f"{fmean(t.num_sampled for t in members):.6g}")
    metrics.add_row("mean turns", f"{fmean(t.num_turns for t in members):.6g}")
    output().print(metrics)
    paths = RunPaths(ready.experiment.run_dir)
    say(f"samples: {paths.samples}\ntrajectories: {paths.trajectories}")
    return ExitCode.WELL


def _report(arguments: Namespace) -> int:
    from nemorl.observe.report import write_report  # Plotly

    if (arguments.run_dir / RECORD).exists():
        from nemorl.observe.sweep_results import write_results

        say(f"results: {write_results(arguments.run_dir)}")
        return ExitCode.WELL
    say(f"report: {write_report(arguments.run_dir)}")
    return ExitCode.WELL
