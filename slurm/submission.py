"""Submission: the arguments of `sbatch`, sweeps, and the record of what was submitted in the run folder."""

import fcntl
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from nemorl.config.experiment import Experiment
from nemorl.config.load import to_yaml
from nemorl.config.sweep import Sweep, SweepPoint, read_sweep
from nemorl.errors import UsageError
from nemorl.observe.files import JsonLinesWriter, read_json_lines, write_atomically

from . import OptionError
from .jobs import call, largest_node_cpus
from .node import parse_ports
from .ray_node import PART
from .requirements import NodeSize
from .start import FOLDER, parse_max_restarts

SCRIPT = Path(__file__).with_name("nemorl.sbatch")
SUBMISSIONS = "submissions.jsonl"
LOCK = "submit.lock"
SHORT_LIMIT_SECONDS = 20 * 60
DEFAULT_SIGNAL_SECONDS = 60  # of Slurm, where `--signal` names none
END_SECONDS = 30  # for Ray and the launchers, after the run has ended


@dataclass(frozen=True)
class Options:
    nodes: int
    gpus_per_node: int = 0
    cpu_nodes: int = 0  # a second component, for processes that need no GPU
    time: str | None = None
    partition: str | None = None
    cpu_partition: str | None = None
    account: str | None = None
    container: str | None = None
    mounts: str | None = None
    at_once: int | None = None  # tasks of a sweep
    sbatch: tuple[str, ...] = ()  # further options of sbatch
    cpu_sbatch: tuple[str, ...] = ()  # for the CPU nodes
    stop_seconds: float | None = None  # `checkpointing.stop_seconds`

    def sbatch_arguments(self, name: str, folder: Path, tasks: int) -> list[str]:
        """For a job, or for an array of `tasks`; a job gets whole nodes. Raises `OptionError`."""
        if arrays := [option for option in self.sbatch if re.match("-a|--ar", option)]:
            raise OptionError(f"--sbatch={arrays[0]}: its tasks would share one run folder; use --sweep")
        # The launcher needs PATH and NEMORL_*, whatever a site sets in SBATCH_EXPORT.
        common = ["--exclusive", "--mem=0", "--ntasks-per-node=1", "--export=ALL", *_words(time=self.time)]
        common += self._signal()
        common += _words(account=self.account)
        output = f"{str(folder).replace('%', '%%')}/{'%A_%a.log' if tasks else '%j.log'}"
        first = [*_words(job_name=name, output=output, nodes=self.nodes), *common]
        first += _words(partition=self.partition, gpus_per_node=self.gpus_per_node)
        if tasks:
            first.append(f"--array=0-{tasks - 1}" + (f"%{self.at_once}" if self.at_once else ""))
        first += self.sbatch
        if not self.cpu_nodes:
            return first
        second = [*_words(nodes=self.cpu_nodes), *common, "--requeue"]
        second += _words(partition=self.cpu_partition or self.partition)
        return [*first, ":", *second, *self.cpu_sbatch]

    def _signal(self) -> list[str]:
        """The option for the signal before the time limit; none where the script's, or one given, serves."""
        limit = parse_time_limit(self.time) if self.time is not None else 0
        options = [f"--signal={os.environ['SBATCH_SIGNAL']}"] if "SBATCH_SIGNAL" in os.environ else []
        options += [option for option in self.sbatch if option.startswith("--signal=")]
        if self.stop_seconds is None:
            if options or not 0 < limit < SHORT_LIMIT_SECONDS:
                return []
            # The script's signal, 300 s before the end, would come at the start.
            return [f"--signal=USR1@{max(10, limit // 4)}"]
        needed = math.ceil(self.stop_seconds) + END_SECONDS
        reason = f"checkpointing.stop_seconds = {self.stop_seconds:g} and the job's end take {needed} s"
        if 0 < limit <= needed:
            raise OptionError(f"--time {self.time}: {reason}; raise the limit, or lower stop_seconds")
        if not options:
            return [f"--signal=USR1@{needed}"]
        seconds = options[-1].partition("@")[2]
        if (int(seconds) if seconds.isdecimal() else DEFAULT_SIGNAL_SECONDS) < needed:
            raise OptionError(f"{options[-1]}: {reason}; set USR1@{needed} or earlier, or lower stop_seconds")
        return []

    @property
    def resume_options(self) -> list[str]:
        """Options of `nemorl slurm submit` that the configuration in the run folder does not hold."""
        names = ("nodes", "cpu_nodes", "time", "partition", "cpu_partition", "account", "container", "mounts")
        given = _words(**{name: getattr(self, name) for name in names})
        given += [f"--sbatch={option}" for option in self.sbatch]
        return given + [f"--cpu-sbatch={option}" for option in self.cpu_sbatch]

    def node_sizes(self) -> list[NodeSize]:
        """The most that the requested nodes can have; empty where Slurm does not say how large they are."""
        parts = [("gpu", self.nodes, self.partition, self.gpus_per_node)]
        if self.cpu_nodes:
            parts.append(("cpu", self.cpu_nodes, self.cpu_partition or self.partition, 0))
        sizes: list[NodeSize] = []
        for part, count, partition, gpus in parts:
            if not (cpus := largest_node_cpus(partition)):
                return []
            labels = {PART: part} if self.cpu_nodes or gpus else {}  # else the nodes decide
            numbers = range(len(sizes) + 1, len(sizes) + count + 1)
            sizes += [NodeSize(f"node {number}", cpus, gpus, labels, part) for number in numbers]
        return sizes


def _words(**options: object) -> list[str]:
    """The options that have a value, as `--name=value`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value]


def parse_time_limit(time: str) -> int:
    """Parse one of Slurm's time limits into seconds; 0 for none. Raises `OptionError`."""
    if time.lower() in ("unlimited", "infinite"):
        return 0
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if found is None:
        forms = "minutes, such as 30, or hours:minutes:seconds, such as 4:00:00, or days-hours, such as 2-12"
        raise OptionError(f"--time {time}: expected {forms}")
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    # Of one or two numbers the first is minutes, or hours after days.
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = (*numbers, 0, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def sweep_tasks(config: Path, sweeps: Sequence[str], random: int | None, seed: int | None) -> Sweep:
    """The sweep of a file or of `field=values` words. Raises `OptionError` for these."""
    try:
        return read_sweep(config, sweeps, random=random, seed=seed)
    except UsageError as error:
        raise OptionError(f"--sweep {error}") from error


def sweep_table(tasks: Sequence[SweepPoint], sweep: Path) -> str:
    lines = [["task", "run_dir", *(field for field, _ in tasks[0].values)]]
    lines += [[str(t.index), str(t.run_dir(sweep)), *(value for _, value in t.values)] for t in tasks]
    return "".join("\t".join(line) + "\n" for line in lines)


@dataclass(frozen=True)
class Submission:
    command: tuple[str, ...]
    variables: Mapping[str, str]  # NEMORL_*, in the environment of the command
    folder: str  # the current folder of `submit`
    run_dirs: tuple[str, ...]  # of the tasks of a sweep, or the only one
    job: str = ""
    submitted: str = ""
    cpu_nodes: int = 0
    is_sweep: bool = False
    options: tuple[str, ...] = ()  # of `nemorl slurm submit`, for a later submission of the same run

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*variables, shlex.join(self.command)])

    def submit(self) -> Self:
        """Call `sbatch`; return the submission with the id of its job. Raises `SlurmError`."""
        # A submission from inside a job must not inherit that job's variables.
        foreign = {name for name in os.environ if name.startswith(("SLURM_", "NEMORL_"))} - {"SLURM_CONF"}
        environment = {name: value for name, value in os.environ.items() if name not in foreign}
        answer = call(self.command, environment={**environment, **self.variables})
        now = datetime.now().astimezone().isoformat(timespec="seconds")
        return replace(self, job=answer.stdout.strip().partition(";")[0], submitted=now)

    def record(self, run_dir: Path) -> None:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        with closing(JsonLinesWriter(run_dir / FOLDER / SUBMISSIONS)) as writer:
            writer.append(asdict(self))
        for index, folder in enumerate(self.run_dirs if self.is_sweep else ()):
            self.task(index).record(Path(folder))

    def task(self, index: int) -> Self:
        return replace(self, job=f"{self.job}_{index}", run_dirs=(self.run_dirs[index],), is_sweep=False)

    @property
    def log(self) -> Path:
        pattern = next(word for word in reversed(self.command) if word.startswith("--output="))
        values = {"%%": "%", "%j": self.job, "%A_%a": self.job}
        path = re.sub("|".join(values), lambda found: values[found[0]], pattern.partition("=")[2])
        return self._relative_to_here(path)

    @property
    def folders(self) -> list[Path]:
        """`run_dirs`, relative to the current folder, which may be another than that of `submit`."""
        return [self._relative_to_here(run_dir) for run_dir in self.run_dirs]

    @property
    def resume_command(self) -> str:
        config, task = Path(self.command[-1]), self.job.partition("_")[2]
        config = config / f"{task}.yaml" if task else config
        command = shlex.join(["nemorl", "slurm", "submit", "--resume", str(config), *self.options])
        # The paths in the configuration are relative to that folder too.
        return command if Path.cwd() == Path(self.folder) else f"cd {shlex.quote(self.folder)} && {command}"

    def _relative_to_here(self, path: str) -> Path:
        absolute = Path(self.folder, path)
        return absolute.relative_to(Path.cwd()) if absolute.is_relative_to(Path.cwd()) else absolute


def prepare_submission(
    run_dir: Path, options: Options, run_dirs: Sequence[Path], *, is_sweep: bool
) -> Submission:
    """Prepare the call of `sbatch`; the job reads the files of `config_files`. Raises `OptionError`."""
    folder = run_dir / FOLDER
    # The name is for lists of jobs, without spaces and the like.
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_dir.name) or "nemorl"
    arguments = options.sbatch_arguments(name, folder, len(run_dirs) if is_sweep else 0)
    config = folder / ("tasks" if is_sweep else "config.yaml")
    parse_max_restarts(os.environ)
    parse_ports(os.environ)
    variables = {name: value for name, value in os.environ.items() if name.startswith("NEMORL_")}
    if options.container:
        variables["NEMORL_CONTAINER"] = options.container
    elif environment := variables.get("NEMORL_ENV"):
        if not Path(environment, "bin", "nemorl").exists():
            fix = "Set an environment that the nodes can read, or unset it to use that of this command."
            raise OptionError(f"NEMORL_ENV = {environment}: no bin/nemorl in it. {fix}")
    elif Path(sys.prefix, "bin", "nemorl").exists():  # else the nodes find nemorl by PATH
        variables["NEMORL_ENV"] = sys.prefix
    if options.mounts:
        variables["NEMORL_MOUNTS"] = options.mounts
    return Submission(
        ("sbatch", "--parsable", *arguments, str(SCRIPT), str(config)),
        variables,
        str(Path.cwd()),
        tuple(map(str, run_dirs)),
        cpu_nodes=options.cpu_nodes,
        is_sweep=is_sweep,
        options=tuple(options.resume_options),
    )


def resolve_image(container: str) -> str:
    """Make the path of an image file absolute, as pyxis requires. Raises `OptionError` without the file."""
    if not (container.startswith(("/", ".")) or container.endswith(".sqsh")):
        return container
    if not Path(container).is_file():
        image = "an image in a registry, such as nvcr.io#nvidia/pytorch:25.10-py3"
        fix = f"Give a .sqsh file (from `enroot import`), or {image}."
        raise OptionError(f"--container {container}: no such file. {fix}")
    return str(Path(container).absolute())


def latest_submission(run_dir: Path) -> Submission | None:
    lines = read_json_lines(run_dir / FOLDER / SUBMISSIONS)
    return TypeAdapter(Submission).validate_python(lines[-1]) if lines else None


def config_files(run_dir: Path, experiments: Sequence[Experiment], *, is_sweep: bool) -> dict[Path, str]:
    """The configurations as submitted, by file: a restart runs the same even if the user's file changes."""
    files = {}
    for index, experiment in enumerate(experiments):
        text = to_yaml(experiment)
        if "gpus_per_node" not in experiment.cluster.model_fields_set:  # the nodes decide
            text = re.sub(r"(?m)^  gpus_per_node: 0\n", "", text, count=1)
        name = f"tasks/{index}.yaml" if is_sweep else "config.yaml"
        files[run_dir / FOLDER / name] = text
    return files


@contextmanager
def lock_run_folder(run_dir: Path) -> Iterator[None]:
    """Serialize submissions to a run folder; remove what this one created if it fails."""
    folder, path = run_dir / FOLDER, run_dir / FOLDER / LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a") as lock:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists() or not path.samefile(f"/proc/self/fd/{lock.fileno()}"):
                continue  # removed by a submission that failed meanwhile
            try:
                yield
            except BaseException:
                if os.listdir(folder) == [LOCK]:
                    path.unlink()
                    folder.rmdir()
                    _remove_if_empty(run_dir)
                raise
            return


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # it has other files
        folder.rmdir()


@contextmanager
def write_files(files: Mapping[Path, str]) -> Iterator[None]:
    """Write files; restore what was there before if the `with` block fails."""
    before = {path: path.read_text(encoding="utf-8") if path.exists() else None for path in files}
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        yield
    except BaseException:
        for path, earlier in before.items():
            if earlier is not None:
                write_atomically(path, earlier)
            else:
                path.unlink(missing_ok=True)
                _remove_if_empty(path.parent)
        raise
