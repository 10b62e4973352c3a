"""Commands that start the first process of a sandbox, `sandbox_init.py`, in namespaces of its own.

`Bubblewrap` and `Namespaces` are two ways to make them.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nemorl.config.sandbox import LocalSandboxConfig

_INIT = Path(__file__).with_name("sandbox_init.py")
_UNPRIVILEGED = 65534
_CAPABILITIES = {"CAP_SYS_ADMIN": 21, "CAP_SETUID": 7, "CAP_SETGID": 6, "CAP_CHOWN": 0}  # which init drops
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ENVIRONMENT = {
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONUTF8": "1",
    "PYTHONHASHSEED": "0",  # the same order of sets, so that the same program has the same reward
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",  # each arena takes 64 MiB of the address space
}
_PROGRAMS = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_LINKS = (("/tmp", "/dev/shm"), ("/proc/self/fd", "/dev/fd"), ("/proc/self/fd/0", "/dev/stdin"))


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the program."""


@dataclass(frozen=True)
class Files:
    """What a sandbox shows of the machine, read-only."""

    python: str
    binds: tuple[tuple[str, str], ...]  # (on the machine, in the sandbox), parents first
    links: tuple[tuple[str, str], ...]  # (target, link)
    folders: tuple[str, ...]  # further ones of the program

    @property
    def program_folders(self) -> list[str]:
        """Where programs are found by name."""
        shown = [place for _, place in self.binds]
        return [os.path.dirname(self.python), *(_PROGRAMS if "/usr" in shown else ())]


@dataclass(frozen=True)
class User:
    """The user of a program: never the one of the run, where that has the capabilities to change it."""

    number: int
    is_changed: bool  # without a user namespace


class Isolation(ABC):
    """A way to isolate programs."""

    def command(self, limits: LocalSandboxConfig, wall_seconds: float, report: int) -> list[str]:
        """The command that starts init, which reports on the descriptor `report`. Raises SandboxError."""
        files, user = _find_files(limits.python, limits.programs, limits.folders), _choose_user()
        spec = {
            "report": report,
            "user": user.number,
            "changes_user": user.is_changed,
            "cpu_seconds": limits.cpu_seconds,
            "wall_seconds": wall_seconds,
            "memory_bytes": limits.memory_mib << 20,
            "disk_bytes": limits.disk_mib << 20,
            "num_processes": limits.max_processes,
            "executes": limits.programs,
            "folders": limits.folders,
            "python": files.python,
            "arguments": ["-s", "-B"],
            "environment": _ENVIRONMENT | {"PATH": os.pathsep.join(files.program_folders)},
        }
        words, more = self.launcher(files, user)
        python = os.path.realpath(sys.executable)
        return [*words, python, "-I", "-S", "-c", _init_source(), json.dumps(spec | more)]

    @abstractmethod
    def launcher(self, files: Files, user: User) -> tuple[list[str], dict[str, Any]]:
        """The words before the command of init, and what they add to its specification."""


class Bubblewrap(Isolation):
    """The program `bwrap` makes the namespaces; distributions may allow them to it alone."""

    def launcher(self, files: Files, user: User) -> tuple[list[str], dict[str, Any]]:
        words = [shutil.which("bwrap") or "bwrap", "--die-with-parent", "--as-pid-1", "--clearenv"]
        words += ["--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
        if not user.is_changed:
            words += ["--unshare-user", "--uid", str(user.number), "--gid", str(user.number)]
        for capability in _CAPABILITIES if user.is_changed else ("CAP_SYS_ADMIN",):
            words += ["--cap-add", capability]
        # Else bwrap makes the folders above a mount with permissions for their owner alone.
        places = [place for _, place in files.binds] + ["/dev/null", "/tmp/main.py"]
        places += [f"{folder}/file" for folder in files.folders]
        for folder in dict.fromkeys(
            str(above) for place in places for above in [*Path(place).parents][-2::-1]
        ):
            words += ["--dir", folder]
        for source, place in files.binds:
            words += ["--ro-bind", source, place]
        for device in _DEVICES:
            words += ["--dev-bind", device, device]
        for target, link in files.links:
            words += ["--symlink", target, link]
        words += ["--proc", "/proc", "--remount-ro", "/", "--chdir", "/"]
        return words, {"launches": False}


class Namespaces(Isolation):
    """Init makes the namespaces itself, with capabilities or in a user namespace."""

    def launcher(self, files: Files, user: User) -> tuple[list[str], dict[str, Any]]:
        mounts = {"binds": files.binds, "links": files.links, "devices": _DEVICES}
        return [], mounts | {"launches": True, "parent": os.getpid()}


ISOLATIONS: dict[str, Callable[[], Isolation]] = {"bubblewrap": Bubblewrap, "namespaces": Namespaces}


@cache
def _init_source() -> str:
    return _INIT.read_text()


@cache
def _find_files(python: Path | None, programs: bool, folders: tuple[str, ...]) -> Files:
    """The interpreter and the libraries that it needs. Raises SandboxError if it does not start, or where one
    of the writable folders has one of these.
    """
    own = os.path.realpath(sys.executable)
    prefixes, binaries = [sys.base_prefix], [own]
    if python is not None:
        code = (
            "import os, sys; print(sys.prefix, sys.base_prefix, os.path.realpath(sys.executable), sep='\\n')"
        )
        try:
            command = [str(python), "-I", "-c", code]
            answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"env.sandbox.python = {python}: does not start: {error}") from error
        *more, binary = answer.splitlines()
        prefixes, binaries = [*prefixes, *more], [*binaries, binary]
    for path in (*prefixes, *binaries):
        if path.startswith("/tmp/"):
            fix = "move the environment elsewhere, since programs have their own folder there"
            raise SandboxError(f"the interpreter needs {path}; {fix}")
    libraries = ["/usr/lib", "/usr/lib64", "/usr/lib32", "/lib", "/lib64", "/lib32", "/etc/ld.so.cache"]
    libraries += ["/usr/share/zoneinfo", sysconfig.get_config_var("LIBDIR") or "/usr/lib"]
    # Of a system's Python only the program itself: its prefix holds every program of the system.
    paths = [path for path in (*prefixes, *libraries) if path != "/usr"] + binaries
    if programs:
        paths += ["/usr", "/bin", "/sbin", "/etc/alternatives"]
    links = [(os.readlink(path), path) for path in paths if os.path.islink(path)]
    links = [(target, path) for target, path in links if path.count("/") == 1]  # /lib is usr/lib
    shown: list[str] = []
    for path in sorted({*paths, *map(os.path.realpath, paths)}):
        is_linked = any(path == link or path.startswith(f"{link}/") for _, link in links)
        is_shown = any(path.startswith(f"{parent}/") for parent in shown)
        if os.path.exists(path) and not is_linked and not is_shown:
            shown.append(path)
    for folder in folders:
        for path in (*shown, *(link for _, link in links), "/dev", "/proc", "/tmp"):
            if f"{path}/".startswith(f"{folder}/"):
                raise SandboxError(
                    f"env.sandbox.folders = {folder}: the sandbox has {path} itself; remove it"
                )
    binds = tuple((os.path.realpath(path), path) for path in shown)
    return Files(str(python.absolute()) if python else own, binds, (*links, *_LINKS), folders)


def _choose_user() -> User:
    """A user without other processes where the run may change its own: processes are limited by user."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    effective = int(status["CapEff"], 16)
    if all(effective >> bit & 1 for bit in _CAPABILITIES.values()):
        first, _, count = map(int, Path("/proc/self/uid_map").read_text().splitlines()[-1].split())
        end = min(first + count, 2**31)
        if end >= 2**16:
            return User(random.SystemRandom().randrange(end // 2, end), is_changed=True)
    return User(_UNPRIVILEGED, is_changed=False)
