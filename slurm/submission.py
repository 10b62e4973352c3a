"""What is handed to Slurm: the words for `sbatch`, and what is kept of them in the run folder."""

import fcntl
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from nemorl.config.experiment import Experiment
from nemorl.config.load import to_yaml
from nemorl.observe.files import JsonLinesWriter, read_json_lines, write_atomically

from .errors import OptionError
from .jobs import call
from .ports import DEFAULT as DEFAULT_PORTS
from .ports import VARIABLE as PORTS
from .ports import read_range
from .records import max_restarts
from .rendezvous import FOLDER

SCRIPT = Path(__file__).with_name("nemorl.sbatch")
RECORD = "submissions.jsonl"
LOCK = "submit.lock"
SHORT_SECONDS = 20 * 60


@dataclass(frozen=True)
class Options:
    """What is asked of Slurm."""

    nodes: int
    gpus_per_node: int = 0
    cpu_nodes: int = 0  # a second component, for processes that need no GPU
    time: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    account: str | None = None
    at_once: int | None = None  # tasks of a sweep
    more: tuple[str, ...] = ()  # further options of sbatch
    cpu_more: tuple[str, ...] = ()  # for the CPU nodes

    def words(self, name: str, folder: Path, tasks: int) -> list[str]:
        """Options of `sbatch`. A job gets whole nodes, since it fills them. Raises `OptionError`."""
        log = "%A_%a.log" if tasks else "%j.log"
        # The launcher wants PATH and NEMORL_…, whatever a site sets in SBATCH_EXPORT.
        both = ["--exclusive", "--mem=0", "--ntasks-per-node=1", "--export=ALL"]
        if self.time is not None:
            both += [f"--time={self.time}", *signal_words(limit_seconds(self.time))]
        both += [f"--account={self.account}"] * (self.account is not None)
        first = [
            f"--job-name={name}",
            f"--output={str(folder).replace('%', '%%')}/{log}",
            f"--nodes={self.nodes}",
            *both,
        ]
        first += [f"--partition={self.partition}"] * (self.partition is not None)
        first += [f"--gpus-per-node={self.gpus_per_node}"] * (self.gpus_per_node > 0)
        first += [f"--array=0-{tasks - 1}" + (f"%{self.at_once}" if self.at_once else "")] * (tasks > 0)
        if arrays := [option for option in self.more if re.match("-a|--ar", option)]:
            raise OptionError(f"--sbatch={arrays[0]}: its tasks would share one run folder: take --sweep")
        first += self.more
        if not self.cpu_nodes:
            return first
        partition = self.cpu_partition or self.partition
        second = [f"--nodes={self.cpu_nodes}", *both, "--requeue"]
        second += [f"--partition={partition}"] * (partition is not None)
        return [*first, ":", *second, *self.cpu_more]


def limit_seconds(time: str) -> int:
    """A time limit as Slurm writes them; 0 for none. Raises `OptionError`."""
    if time.lower() in ("unlimited", "infinite"):
        return 0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        raise OptionError(
            f"--time {time}: give minutes, such as 30, or hours:minutes:seconds, such as 4:00:00, or "
            "days-hours, such as 2-12"
        )
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    # Of one or two numbers the first are minutes, or hours behind days.
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def signal_words(limit: int) -> list[str]:
    """A short limit, in seconds, wants its signal later than the script says: it would come at the start."""
    if not 0 < limit < SHORT_SECONDS or "SBATCH_SIGNAL" in os.environ:
        return []
    return [f"--signal=USR1@{max(10, limit // 4)}"]


@dataclass(frozen=True)
class Submission:
    """One call of `sbatch`."""

    command: tuple[str, ...]
    variables: Mapping[str, str]  # NEMORL_…, in the environment of the command
    folder: str  # where it is submitted
    run_dirs: tuple[str, ...]  # of the sweep's tasks, or the only one
    job: str = ""
    submitted: str = ""
    cpu_nodes: int = 0
    tasks: bool = field(default=False)  # whether it is a sweep
    options: tuple[str, ...] = ()  # of `nemorl slurm submit`, for another submission of the same run

    def __str__(self) -> str:
        words = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*words, shlex.join(self.command)])

    def submit(self) -> Self:
        """Hand it to Slurm; the same with the number of its job. Raises `SlurmError`."""
        told = call(self.command, environment={**_without_job(os.environ), **self.variables})
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        known = {**asdict(self), "job": told.stdout.strip().partition(";")[0], "submitted": now}
        return type(self).read(known)

    @classmethod
    def read(cls, tree: Mapping[str, Any]) -> Self:
        """From JSON."""
        lists = {name: tuple(tree.get(name, ())) for name in ("command", "run_dirs", "options")}
        return cls(**{**tree, **lists})

    def keep(self, run_dir: Path) -> None:
        """Add it to the run folder's list, and each task of a sweep to that of its own folder."""
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        writer = JsonLinesWriter(run_dir / FOLDER / RECORD)
        writer.append(asdict(self))
        writer.close()
        for index, folder in enumerate(self.run_dirs if self.tasks else ()):
            self.task(index).keep(Path(folder))

    def task(self, index: int) -> Self:
        """A task of a sweep, as if it had been submitted by itself."""
        own = f"{self.job}_{index}"
        return replace(self, job=own, run_dirs=(self.run_dirs[index],), tasks=False)

    @property
    def log(self) -> Path:
        """Where Slurm writes what the job says, or a task."""
        pattern = next(word for word in reversed(self.command) if word.startswith("--output="))
        words = {"%%": "%", "%j": self.job, "%A_%a": self.job}
        return self._from_here(
            re.sub("|".join(words), lambda found: words[found[0]], pattern.partition("=")[2])
        )

    @property
    def folders(self) -> list[Path]:
        """The `run_dirs`, as they are found from the current folder, which need not be that of `submit`."""
        return [self._from_here(run_dir) for run_dir in self.run_dirs]

    @property
    def again(self) -> str:
        """The command that goes on with the run."""
        config, task = Path(self.command[-1]), self.job.partition("_")[2]
        config = config / f"{task}.yaml" if task else config
        command = shlex.join(["nemorl", "slurm", "submit", "--resume", str(config), *self.options])
        # The paths in the configuration are of there too.
        return command if Path.cwd() == Path(self.folder) else f"cd {shlex.quote(self.folder)} && {command}"

    def _from_here(self, path: str) -> Path:
        whole = Path(self.folder, path)
        return whole.relative_to(Path.cwd()) if whole.is_relative_to(Path.cwd()) else whole


@contextmanager
def alone(run_dir: Path) -> Iterator[None]:
    """Whoever else submits for this folder waits meanwhile, so that both look for the other's job first."""
    (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
    with (run_dir / FOLDER / LOCK).open("a") as file:
        with suppress(OSError):  # a file system that has no locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def latest(run_dir: Path) -> Submission | None:
    """The newest of a run folder."""
    lines = read_json_lines(run_dir / FOLDER / RECORD)
    return Submission.read(lines[-1]) if lines else None


def submission(
    experiment: Experiment,
    options: Options,
    run_dirs: Sequence[Path],
    *,
    container: str | None,
    mounts: str | None,
    sweep: bool,
    again: Sequence[str] = (),
) -> Submission:
    """The call for an experiment; what it reads is written by `write_configs`.

    `again` are options of `nemorl slurm submit` that say the same another time. Raises `OptionError`.
    """
    folder = experiment.run_dir / FOLDER
    # The name is for lists of jobs, where spaces and the like would be in the way.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", experiment.run_dir.name) or "nemorl"
    words = options.words(name, folder, len(run_dirs) if sweep else 0)
    config = folder / ("tasks" if sweep else "config.yaml")
    variables = {name: value for name, value in os.environ.items() if name.startswith("NEMORL_")}
    max_restarts()
    read_range(variables.get(PORTS) or DEFAULT_PORTS)
    if container:
        variables["NEMORL_CONTAINER"] = container
    else:
        variables |= _programs(variables.get("NEMORL_ENV"))
    if mounts:
        variables["NEMORL_MOUNTS"] = mounts
    return Submission(
        ("sbatch", "--parsable", *words, str(SCRIPT), str(config)),
        variables,
        str(Path.cwd()),
        tuple(map(str, run_dirs)),
        cpu_nodes=options.cpu_nodes,
        tasks=sweep,
        options=tuple(again),
    )


def write_configs(run_dir: Path, experiments: Sequence[Experiment], *, sweep: bool) -> None:
    """The configuration as submitted, so that a later start runs the same whatever becomes of the file."""
    folder = run_dir / FOLDER
    (folder / "tasks" if sweep else folder).mkdir(parents=True, exist_ok=True)
    for index, experiment in enumerate(experiments):
        path = folder / "tasks" / f"{index}.yaml" if sweep else folder / "config.yaml"
        write_atomically(path, _yaml(experiment))


def image(container: str) -> str:
    """As pyxis wants it: the path of a file from the root, since it takes others for names of a registry.

    Raises `OptionError` where an image is a file that is not there.
    """
    if not (container.startswith(("/", ".")) or container.endswith(".sqsh")):
        return container
    if not Path(container).is_file():
        raise OptionError(
            f"--container {container}: there is no such file. Name a .sqsh file (`enroot import` makes one), "
            "or an image of a registry as pyxis writes them, nvcr.io#nvidia/pytorch:25.10-py3"
        )
    return str(Path(container).absolute())


def _yaml(experiment: Experiment) -> str:
    """Whole, but without the number of GPUs where nobody gave one: the nodes then say it."""
    text = to_yaml(experiment)
    given = "gpus_per_node" in experiment.cluster.model_fields_set
    return text if given else re.sub(r"(?m)^  gpus_per_node: 0\n", "", text, count=1)


def _programs(given: str | None) -> dict[str, str]:
    """The environment whose `nemorl` runs on the nodes: what is given, or this one. Raises `OptionError`."""
    if given is None:  # an installation that is in no environment is found by PATH
        return {"NEMORL_ENV": sys.prefix} if Path(sys.prefix, "bin", "nemorl").exists() else {}
    if not Path(given, "bin", "nemorl").exists():
        raise OptionError(
            f"NEMORL_ENV = {given}: there is no bin/nemorl in it. Name the folder of an environment with "
            "nemorl, which the nodes see too, or unset it to take the one of this command"
        )
    return {"NEMORL_ENV": given}


def _without_job(environment: Mapping[str, str]) -> dict[str, str]:
    """Submitting from inside a job must not hand on what that job is."""
    keep = ("SLURM_CONF",)
    return {k: v for k, v in environment.items() if k in keep or not k.startswith(("SLURM_", "NEMORL_"))}
