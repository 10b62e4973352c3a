"""`nemorl rewards`: rewards of answers that exist, before a run trains on them."""

import json
from argparse import Namespace
from pathlib import Path

from nemorl.config.base import counted
from nemorl.config.environment import EnvBase
from nemorl.config.load import load_experiment
from nemorl.errors import UsageError

from .terminal import (
    Commands,
    ExitCode,
    add_command,
    add_experiment,
    add_group,
    complain,
    notes,
    output,
    positive_integer,
    say,
    table,
)


def register(commands: Commands) -> None:
    group = add_group(commands, "rewards", "score answers that exist by the rewards of an experiment")
    trying = add_command(group, "try", _try, "score answers by each reward of an experiment")
    add_experiment(trying)
    samples_help = "run folder, whose stored groups or else samples are scored, or a file with objects of "
    samples_help += "`prompt`, `completion` (or `completions` of a group), `answer` and columns, one a line"
    trying.add_argument("--samples", type=Path, required=True, metavar="FILE", help=samples_help)
    limit_help = "score the last N answers (default: 512)"
    trying.add_argument("--limit", type=positive_integer, default=512, metavar="N", help=limit_help)
    json_help = "print parts, values and errors as JSON"
    trying.add_argument("--json", action="store_true", help=json_help)


def _try(arguments: Namespace) -> int:
    from nemorl.rewards.preview import SAMPLES, end_token, preview  # with numpy
    from nemorl.rollout.earlier_answers import answers_at

    experiment = load_experiment(arguments.config, arguments.overrides)
    file: Path = arguments.samples
    try:
        read = answers_at(file, arguments.limit, end_token(experiment.policy.tokenizer_folder))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UsageError(f"--samples {file}: {reason}; name a run folder or a file of JSON lines") from error
    answers, problems = read.answers, read.problems
    for problem in problems:
        complain(f"{file}, {problem}")
    if not answers:
        raise UsageError(f'--samples {file}: no answers; a line is {{"prompt": …, "completion": …}}')
    weights = experiment.env.reward_weights if isinstance(experiment.env, EnvBase) else {}
    found = preview(
        experiment.rewards,
        weights,
        answers,
        chat=experiment.data.chat,
        seconds=experiment.cluster.deadlines.environment,
    )
    failed = [part for part in found.parts if any(part.errors)]
    code = ExitCode.FAILED if failed else ExitCode.WELL
    if arguments.json:
        facts = {**found.as_json(), "source": read.source, "problems": problems}
        say(json.dumps(facts, indent=2, ensure_ascii=False))
        return code
    facts = found.as_json()
    result = table("", ["reward", "weight", "mean", "std", "min", "max", "errors", "seconds", ""])
    for part in [*facts["parts"], {"name": "sum", "weight": "", "seconds": found.seconds, **facts["total"]}]:
        numbers = ["-" if part[key] is None else f"{part[key]:.4g}" for key in ("mean", "std", "min", "max")]
        errors = sum(error is not None for error in part.get("errors", ()))
        result.add_row(
            *(str(part["name"]), str(part["weight"]), *numbers, str(errors) if errors else "-"),
            *(f"{part['seconds']:.3g}", part.get("note", "")),
        )
    output().print(result)
    equal, groups = found.equal_groups
    spread = f"{equal} of {groups} groups without spread"
    if not groups:
        spread = "no group with several answers that have a sum"
    say(f"{counted(len(answers), 'answer')} of {read.source}, {spread}")
    if found.is_partial:
        unknown = f"{SAMPLES} has some answers of each group, so the share without spread is unknown"
        notes().print(f"{unknown}; runs with logger.trajectories: sampled or all record whole groups")
    for part in failed:
        first = next(error for error in part.errors if error is not None)
        complain(f"\n{part.name}: {first}")
        notes().print(part.traceback, markup=False)
    return code
