"""Answers of an earlier run, for rewards to score again: whole groups where it stored them, else its samples.

A run with `logger.trajectories` has whole groups in trajectories/, whose tokens are decoded; expected answers
and columns come from the dataset of the run. samples.jsonl has some answers of each group.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemorl.config.base import counted
from nemorl.config.experiment import Experiment
from nemorl.config.load import load_experiment
from nemorl.errors import ConfigError, RunError
from nemorl.observe.files import read_end
from nemorl.observe.run_folder import RunPaths
from nemorl.rewards.preview import MAX_ANSWERS, SAMPLES, Answer, end_token, read_answers
from nemorl.trajectories import Task, Trajectory

from .stored import RolloutFiles, StoredGroup, StoredRolloutError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_BYTES = 64 * 2**20  # of the end of a file that are read
MAX_TOKENS = 2_000_000  # of groups that are decoded: seconds


@dataclass(frozen=True)
class Found:
    """`source` says in words where the answers are from, `problems` what was left out."""

    answers: Sequence[Answer]
    source: str
    problems: list[str] = field(default_factory=list)


def answers_at(path: Path, limit: int = MAX_ANSWERS, end: str = "") -> Found:
    """The newest answers of a run folder, or of a file, of which samples.jsonl of a run has the end token.

    Raises OSError and UnicodeDecodeError.
    """
    if path.is_dir():
        return answers_of_run(path, limit, end)
    return answers_of_file(path, limit, end if path.name == SAMPLES else "")


def answers_of_run(run: Path, limit: int = MAX_ANSWERS, end: str = "") -> Found:
    """The newest answers of a run; `end`: the end token where its config.yaml cannot be read.

    Raises OSError where it has neither groups nor samples, and UnicodeDecodeError.
    """
    experiment = _experiment(run)
    end = end if experiment is None else end_token(experiment.policy.tokenizer_folder)
    try:
        return _stored(run, experiment, limit, end)
    except StoredRolloutError:  # of a run that stores none, or whose files are gone
        return answers_of_file(RunPaths(run).samples, limit, end)


def answers_of_file(path: Path, limit: int = MAX_ANSWERS, end: str = "") -> Found:
    """The last answers of a file, as `read_answers` takes them. Raises OSError and UnicodeDecodeError."""
    data, is_cut = read_end(path, MAX_BYTES)
    answers, problems = read_answers(data.decode("utf-8"), limit, end)
    if is_cut:
        problems.append(
            f"only the last {MAX_BYTES >> 20} MB of {path.name} were read; lines count from there"
        )
    return Found(answers, path.name, problems)


def _experiment(run: Path) -> Experiment | None:
    try:
        return load_experiment(RunPaths(run).config)
    except ConfigError:
        return None


def _stored(run: Path, experiment: Experiment | None, limit: int, end: str) -> Found:
    """Raises StoredRolloutError where no group can be read as text."""
    files = RolloutFiles(RunPaths(run).trajectories)
    origin, steps = files.origin(), files.steps()
    folders = [] if experiment is None else [experiment.policy.tokenizer_folder]
    tokenizer = _tokenizer([*folders, Path(origin.model), run / "hf"], origin.tokenizer)
    tasks = _tasks(experiment)
    answers: list[Answer] = []
    first = failed = tokens = 0
    for group in _newest(files, steps):
        members = list(_of_group(group, tokenizer, tasks, end))
        tokens += sum(sequence.num_tokens for sequence in group.sequences)
        if answers and (len(answers) + len(members) > limit or tokens > MAX_TOKENS):
            break
        failed += sum(member.error is not None for member in group.summary.trajectories)
        answers, first = [*members, *answers], group.step
    if not answers:
        raise StoredRolloutError(f"{files.folder} holds no group with an answer")
    which = f"step {steps[-1]}" if first == steps[-1] else f"steps {first} to {steps[-1]}"
    problems = [f"{counted(failed, 'failed sample')} left out"] if failed else []
    return Found(answers, f"whole groups of {which}", problems)


def _newest(files: RolloutFiles, steps: Sequence[int]) -> Iterator[StoredGroup]:
    for step in reversed(steps):
        for place in reversed(range(len(files.groups(step)))):
            yield files.group(step, place)


def _of_group(
    group: StoredGroup, tokenizer: "Tokenizer", tasks: "Sequence[Task] | None", end: str
) -> Iterator[Answer]:
    """The answers of a group; players of one task compete, so each has a group of its own."""
    summary = group.summary
    task: Task | None = None
    with suppress(IndexError, KeyError, RunError, ValueError):  # of another dataset by now
        task = None if tasks is None else tasks[summary.task_index]
    expected = next((text.answer for text in summary.texts), None) if task is None else task.answer
    columns: Mapping[str, Any] = {} if task is None else task.columns
    for member in summary.trajectories:
        if member.error is not None:
            continue
        sequence = group.sequences[member.row]
        prompt, completion = _texts(sequence, tokenizer)
        if task is not None and len(task.messages) == 1:
            prompt = task.messages[0].content
        name = f"{group.step}/{summary.group}" + (f"/{member.player}" if member.player else "")
        yield Answer(prompt, completion.removesuffix(end), expected, name, columns, member.rewards)


def _texts(sequence: Trajectory, tokenizer: "Tokenizer") -> tuple[str, str]:
    ids = sequence.tokens.tolist()
    split = sequence.turns[0].start if sequence.turns else len(ids)
    prompt, completion = (
        tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:split], ids[split:])
    )
    return str(prompt), str(completion)


def _tokenizer(folders: Sequence[Path], checksum: str) -> "Tokenizer":
    """The first one with the checksum of the run. Raises StoredRolloutError."""
    from tokenizers import Tokenizer  # without transformers, whose import takes seconds

    for folder in folders:
        with suppress(OSError):
            content = (folder / "tokenizer.json").read_bytes()
            if sha256(content).hexdigest() == checksum:
                return Tokenizer.from_buffer(content)
    raise StoredRolloutError(f"the tokenizer of the run is not in {', '.join(map(str, folders))}")


def _tasks(experiment: Experiment | None) -> "Sequence[Task] | None":
    from nemorl.data.datasets import DatasetError, load_tasks  # with numpy

    if experiment is None:
        return None
    with suppress(DatasetError, OSError):
        return load_tasks(experiment.data.train, experiment.data)
    return None
