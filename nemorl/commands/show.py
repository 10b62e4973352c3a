"""`nemorl show`: the stored trajectories of a run, and one of them turn by turn."""

from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from nemorl.config.base import counted
from nemorl.config.policy import PolicyConfig, TokenizerConfig
from nemorl.errors import UsageError
from nemorl.observe.run_folder import RunPaths

from .terminal import Commands, ExitCode, add_command, notes, output, say, show_message, table

if TYPE_CHECKING:
    from nemorl.data.tokenizer import Tokenizer
    from nemorl.rollout.groups import TrajectorySummary
    from nemorl.rollout.stored import RolloutFiles, StoredGroup
    from nemorl.trajectories import Trajectory


def register(commands: Commands) -> None:
    show = add_command(commands, "show", _show, "list the stored trajectories of a run, or print one of them")
    show.add_argument("run_dir", type=Path, metavar="RUN", help="run folder")
    one_help = "the trajectory, as in the list: STEP/GROUP/SAMPLE (default: list all)"
    show.add_argument("trajectory", nargs="?", metavar="TRAJECTORY", help=one_help)
    tokens_help = "print each token with mask, logprob, version and advantage"
    show.add_argument("--tokens", action="store_true", help=tokens_help)


def _show(arguments: Namespace) -> int:
    from nemorl.rollout.stored import RolloutFiles, StoredRolloutError  # with numpy

    files = RolloutFiles(RunPaths(arguments.run_dir).trajectories)
    try:
        files.origin()
    except StoredRolloutError as error:
        fix = "runs store trajectories with logger.trajectories, and `nemorl rollout` always"
        raise UsageError(f"{error}; {fix}") from error
    if arguments.trajectory is None:
        return _list(files)
    group, sample = _found(files, arguments.trajectory)
    summary = group.summary.trajectories[sample]
    say(f"step {group.step}, group {group.summary.group}, sample {sample}, task {group.summary.task_index}")
    if path := _path(summary):
        say(path)
    for name, value in summary.rewards.items():
        say(f"reward {name}: {value:g}")
    say(
        f"reward: {summary.reward:g}, ended by {summary.stop}"
        + (f": {summary.error}" if summary.error else "")
    )
    tokenizer = _tokenizer(arguments.run_dir)
    for number, branch in enumerate(summary.sequences):
        if len(summary.sequences) > 1:
            say(f"branch {number}")
        trajectory, advantages = group.sequences[branch.row], group.advantages[branch.row].tolist()
        _print(trajectory, advantages, tokenizer, each_token=arguments.tokens)
    return ExitCode.WELL


def _list(files: "RolloutFiles") -> int:
    stored = list(files.summaries())
    has_paths = any(_path(t) for _, group in stored for t in group.trajectories)
    named = ["path"] if has_paths else []
    rows = table("", ["trajectory", *named, "task", "reward", "turns", "sampled", "tokens", "ended by"])
    for step, group in stored:
        for number, t in enumerate(group.trajectories):
            ended = f"{t.stop}, {t.error}" if t.error else str(t.stop)
            counts = (t.num_turns, t.num_sampled, t.num_tokens)
            name = f"{step}/{group.group}/{number}"
            path = [_path(t)] if has_paths else []
            rows.add_row(name, *path, str(group.task_index), f"{t.reward:g}", *map(str, counts), ended)
    output().print(rows, markup=False)
    return ExitCode.WELL


def _path(summary: "TrajectorySummary") -> str:
    """Player and fork, where its episode has such."""
    named = [f"player {summary.player}"] if summary.player else []
    return ", ".join([*named, f"fork {summary.fork}"] if summary.fork else named)


def _found(files: "RolloutFiles", name: str) -> tuple["StoredGroup", int]:
    parts = name.split("/")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise UsageError(f"{name}: expected STEP/GROUP/SAMPLE, such as 12/768/0")
    step, number, sample = map(int, parts)
    if step not in (steps := files.steps()):
        raise UsageError(f"{name}: no trajectory of step {step} is stored; there are steps {_spans(steps)}")
    stored = files.groups(step)
    for place, group in enumerate(stored):
        if group.group == number and sample < len(group.trajectories):
            return files.group(step, place), sample
    there = _spans([group.group for group in stored])
    raise UsageError(
        f"{name}: no such trajectory; step {step} has the groups {there}, each with samples from 0"
    )


def _spans(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return f"{shown} … {numbers[-1]}" if len(numbers) > 8 else shown or "none"


def _tokenizer(run_dir: Path) -> "Tokenizer | None":
    """That of the run, if it is still there."""
    from nemorl.data.tokenizer import TokenizerError, load_tokenizer

    with suppress(OSError, yaml.YAMLError, LookupError, TypeError):
        policy = yaml.safe_load(RunPaths(run_dir).config.read_text(encoding="utf-8"))["policy"]
        tokenizer = policy.get("tokenizer") or {}
        section = TokenizerConfig(path=tokenizer.get("path"))
        config = PolicyConfig(model_path=Path(policy["model_path"]), tokenizer=section)
        with suppress(TokenizerError):
            return load_tokenizer(config)
    notes().print("the tokenizer of the run was not found: tokens are numbers", markup=False)
    return None


def _print(
    trajectory: "Trajectory", advantages: Sequence[float], tokenizer: "Tokenizer | None", *, each_token: bool
) -> None:
    for role, start, end in _segments(trajectory):
        ids = trajectory.tokens[start:end].tolist()
        text = tokenizer.decode(ids) if tokenizer is not None else " ".join(map(str, ids))
        show_message(role, text, _remark(trajectory, advantages, start, end))
        if not each_token:
            continue
        rows = table("", ["place", "token", "text", "mask", "logprob", "version", "advantage"])
        for place, token in enumerate(ids, start=start):
            shown = repr(tokenizer.decode([token])) if tokenizer is not None else ""
            sampled = trajectory.versions[place] >= 0
            of_sampled = [f"{trajectory.logprobs[place]:.4f}", str(trajectory.versions[place])]
            of_sampled.append(_advantage(advantages[place]))
            of_token = of_sampled if sampled else [""] * 3
            rows.add_row(str(place), str(token), shown, str(int(trajectory.loss_mask[place])), *of_token)
        output().print(rows, markup=False)


def _segments(trajectory: "Trajectory") -> Iterator[tuple[str, int, int]]:
    """The policy's turns, and what is before, between and after them."""
    before = 0
    for turn in trajectory.turns:
        if turn.start > before:
            yield "given" if before else "prompt", before, turn.start
        yield "policy", turn.start, turn.end
        before = turn.end
    if before < trajectory.num_tokens:
        yield "given" if before else "prompt", before, trajectory.num_tokens


def _remark(trajectory: "Trajectory", advantages: Sequence[float], start: int, end: int) -> str:
    """What is known of the tokens of a segment; of those that were not sampled only their number."""
    remarks = [counted(end - start, "token")]
    versions = trajectory.versions[start:end]
    if end > start and (versions >= 0).all():
        first, last = int(versions.min()), int(versions.max())
        trained = int(trajectory.loss_mask[start:end].sum())
        remarks += [f"{trained} trained"] if trained < end - start else []
        remarks.append(f"logprob {float(trajectory.logprobs[start:end].sum()):.4g}")
        remarks.append(f"version {first}" if first == last else f"versions {first} to {last}")
        remarks.append(f"advantage {_advantage(advantages[start])}")
        turn = next(turn for turn in trajectory.turns if turn.start == start)
        remarks += [f"{name} {value:g}" for name, value in turn.rewards.items()]
        remarks += [f"flagged {name}" for name in turn.flags]
    return ", ".join(remarks)


def _advantage(value: float) -> str:
    return "unknown" if value != value else f"{value:.4g}"
