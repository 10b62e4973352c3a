"""The folder of a run: its files, its lock, and what a resume keeps. Imports nothing heavy."""

import fcntl
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import IO, Any

from nemorl.errors import RunStopped

from .files import JsonObject, RunFolderError, WriteError, keep_json_lines, write_atomically, write_failed

PACKAGES = ("nemorl", "torch", "megatron-core", "transformers", "ray", "numpy", "pydantic")


def installed_versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def git_commit(file: Path) -> str | None:
    """Return the commit of `file`, `+changes` if the work tree differs; None if git does not track it."""

    def git(*arguments: str) -> str | None:
        command = ["git", *arguments]
        try:
            done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = git("rev-parse", "HEAD")
    return f"{commit}+changes" if git("status", "--porcelain", "--untracked-files=no") else commit


ABOUT = """# A run of nemorl

| file | what it holds |
|---|---|
| `config.yaml` | the whole configuration, defaults included; `nemorl train config.yaml` repeats the run |
| `header.json` | one entry for each start: command, versions, machine, commit, kernels in use, how it ended |
| `metrics.jsonl` | the metrics of every step, a line each; NaN and infinity are null, named in `nonfinite` |
| `samples.jsonl` | some conversations of every step, a JSON object a line |
| `trajectories/` | all in an index, some with tokens (`logger.trajectories`); `nemorl show` prints those |
| `timeline.json` | stages, work of processes, critical path; open it in Perfetto or chrome://tracing |
| `report.html` | all of this as one page that needs no network; `nemorl report` writes it again |
| `trackers/` | files and ids of the trackers, if `logger.trackers` names any |
| `profiles/` | traces of steps of the policy's processes, for ui.perfetto.dev (`policy.profile`) |
| `live.json` | what the run does now: stages, engines and processes, and how it ended |
| `stall-N.json` | what every process did when a stage made no progress; `nemorl doctor` explains it |
| `checkpoints/` | what `--resume` continues from |
| `hf/` | the final weights in the Hugging Face format (`checkpointing.save_hf`) |
| `eval/` | metrics and samples of the latest `nemorl eval` |
| `weights/` | the newest weights for engines that read files (`generation.transport: files`) |
| `logs/` | output of the driver and the workers |
| `replicas.json` | the engines while the run is going; `nemorl scale` changes their number |
| `endpoint_key` | the key of the endpoint of the latest start, if it was generated there; keep it secret |
"""


class RunPaths:
    """Paths in a run folder; `ABOUT` says what each file holds."""

    def __init__(self, root: Path) -> None:
        self.root, self.report = root, root / "report.html"
        self.config, self.header = root / "config.yaml", root / "header.json"
        self.metrics, self.samples = root / "metrics.jsonl", root / "samples.jsonl"
        self.trajectories = root / "trajectories"
        self.timeline, self.trackers = root / "timeline.json", root / "trackers"
        self.live = root / "live.json"
        self.profiles = root / "profiles"
        self.checkpoints, self.logs = root / "checkpoints", root / "logs"
        self.memory = self.checkpoints / "memory"  # name of the folder with the newest one in memory
        self.endpoint_key = root / "endpoint_key"
        self.scale_request, self.replicas = root / "scale.json", root / "replicas.json"

    @property
    def holds_run(self) -> bool:
        return self.config.exists() or self.metrics.exists()

    @property
    def has_steps(self) -> bool:
        """True if a run got as far as a step here; a start that failed before leaves nothing to lose."""
        recorded = self.metrics.exists() and self.metrics.stat().st_size > 0
        stored = any(self.trajectories.glob("step_*.json"))  # also by `nemorl rollout`
        return recorded or stored or any(self.checkpoints.glob("step_*"))

    def forget_engines(self) -> None:
        for path in (self.replicas, *self.root.glob(f"{self.scale_request.name}*")):
            path.unlink(missing_ok=True)

    def memory_folder(self) -> str:
        """Name of the folder in memory that the latest start of the run has used; empty if there is none."""
        with suppress(OSError, UnicodeDecodeError):
            return self.memory.read_text(encoding="utf-8").strip()
        return ""


class RunFolder:
    """The run folder of the process that writes it. One process at a time holds a folder."""

    def __init__(self, root: Path, config_yaml: str, *, resumed_step: int | None, lock: IO[str]) -> None:
        self.paths = RunPaths(root)
        self.resumed_step = resumed_step  # of the checkpoint that this start continues from, if any
        self._lock = lock
        for folder in (self.paths.checkpoints, self.paths.logs):
            _make(folder)
        self.paths.forget_engines()  # of a start that was killed
        write_atomically(root / "ABOUT.md", ABOUT)
        write_atomically(self.paths.config, config_yaml)
        self._start: JsonObject = {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "resumed_step": resumed_step,
            "git_commit": git_commit(Path(__file__)),
            "versions": {"python": platform.python_version(), **installed_versions()},
            "machine": {
                **{"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
                "memory_gigabytes": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
            },
        }
        self._starts = [*read_header(self.paths.header), self._start]
        self._write_header()

    @classmethod
    def create(cls, root: Path, config_yaml: str) -> "RunFolder":
        """Raises `RunFolderError` when the folder holds a run or is in use, and `WriteError`."""
        lock = lock_folder(root)
        if RunPaths(root).has_steps:
            lock.close()
            fix = "Continue it with --resume, take another run_dir, or remove it."
            raise RunFolderError(f"{root} already holds a run. {fix}")
        _note_last_write(RunPaths(root))
        return cls(root, config_yaml, resumed_step=None, lock=lock)

    @classmethod
    def resume(cls, root: Path, config_yaml: str, step: int | None) -> "RunFolder":
        """Continue from the checkpoint of `step` (None: start over); cut off later metrics and samples."""
        lock = lock_folder(root)
        last, paths = -1 if step is None else step, RunPaths(root)
        _note_last_write(paths)
        for path in (paths.metrics, paths.samples):
            keep_json_lines(path, lambda line: int(line["step"]) <= last)
        return cls(root, config_yaml, resumed_step=step, lock=lock)

    def add_facts(self, facts: Mapping[str, Any]) -> None:
        """Add facts known only after the start, such as the kernels in use, to this start's entry."""
        self._start["run"] = self._start.get("run", {}) | dict(facts)
        self._write_header()

    def record_end(self, error: BaseException | None) -> tuple[str, str]:
        """Add to this start's entry how it ended, unless the disk is full; outcome and text of the error."""
        text = "" if error is None else "\n".join([str(error), *getattr(error, "__notes__", ())])
        outcome = "complete" if error is None else "stopped" if isinstance(error, RunStopped) else "failed"
        ended = datetime.now(UTC).isoformat(timespec="seconds")
        self._start["end"] = {"time": ended, "outcome": outcome, "error": text}
        with suppress(WriteError):
            self._write_header()
        return outcome, text

    def close(self) -> None:
        self._lock.close()

    def _write_header(self) -> None:
        write_atomically(self.paths.header, _header(self._starts))


def _note_last_write(paths: RunPaths) -> None:
    """Add to the last start, if it left no end, when its files were written last: it was killed then."""
    starts = read_header(paths.header)
    if not starts or "end" in starts[-1]:
        return
    written = [path.stat().st_mtime for path in (paths.live, paths.metrics) if path.exists()]
    if written:
        last = datetime.fromtimestamp(max(written), UTC).isoformat(timespec="seconds")
        write_atomically(paths.header, _header([*starts[:-1], {**starts[-1], "last_written": last}]))


def _header(starts: list[JsonObject]) -> str:
    return json.dumps(starts, indent=2, ensure_ascii=False) + "\n"


def read_header(path: Path) -> list[JsonObject]:
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise RunFolderError(f"{path} is not JSON ({error}). Remove it to continue.") from error


def holder(root: Path) -> tuple[int, str] | None:
    """Process and host of the driver that holds a run folder; None if none does."""
    try:
        with (root / ".lock").open("rb") as lock:
            text = lock.read().decode(errors="replace")
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found = re.match(r"(\d+) on (\S+)", text)
                return (int(found[1]), found[2]) if found else (0, "")
    except OSError:
        pass
    return None


def lock_folder(root: Path) -> IO[str]:
    """Hold a folder until the returned file is closed or this process ends. Raises `RunFolderError`."""
    _make(root)
    path = root / ".lock"
    try:
        lock = path.open("a+", encoding="utf-8")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
    except BlockingIOError as error:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        lock.close()
        fix = "End that process first, or choose another run_dir."
        raise RunFolderError(f"{root} is being written by process {holder}. {fix}") from error
    except OSError as error:
        raise write_failed(path, error) from error
    return lock


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_failed(folder, error) from error
