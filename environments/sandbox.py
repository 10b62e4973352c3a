"""Programs that a model wrote, run where they can reach nothing (docs/sandbox.md). Linux only.

Each program has processes, a folder and a network of its own, which the kernel removes with it. This module
is the outside of a sandbox. `isolation.py` makes the command that starts it; `sandbox_init.py` is the first
process in it.
"""

import asyncio
import json
import os
import platform
import secrets
import selectors
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal, Protocol

from nemorl.config.base import NotImported, call_within
from nemorl.config.sandbox import CustomSandboxConfig, LocalSandboxConfig, SandboxConfig
from nemorl.errors import NemorlError, Problem, Problems

from .isolation import ISOLATIONS, Isolation
from .isolation import SandboxError as SandboxError

EndedBy = Literal["cpu", "wall", "memory", "output"]

_GRACE_SECONDS = 60.0  # for init to end a program at its limit, on a machine under load
_LOOK_SECONDS = 0.05  # between two looks whether a program was ended from outside
_END_SECONDS = 5.0  # for a launcher after init
_SESSION_SECONDS = 24 * 3600.0
_MACHINES = ("x86_64", "aarch64")  # whose calls init can filter


class SandboxUnavailable(NemorlError):
    """Nothing on this machine can isolate a program; the message has each reason and its fix."""


@dataclass(frozen=True)
class Execution:
    """How a program ended, or a snippet of a session."""

    stdout: str  # as far as it was read; invalid bytes are replaced
    stderr: str
    exit_code: int | None  # negative: the signal that ended it; None where a limit did
    ended_by: EndedBy | None = None  # the limit that it exceeded
    cpu_seconds: float | None = None  # of all its processes; None where unknown


class SandboxSession(Protocol):
    """An interpreter that keeps its variables and files between snippets."""

    async def run(self, code: str) -> Execution:
        """Run a snippet; the value of a last expression is printed. Raises SandboxError.

        A snippet that exceeds a limit ends the interpreter, and the next one starts in a new one.
        """

    async def close(self) -> None:
        """End the interpreter with everything that it started."""


class Sandbox(Protocol):
    """Runs Python programs within limits. Constructed with the section `sandbox`."""

    async def run(self, program: str, stdin: str = "") -> Execution:
        """Run a program until all of its processes have ended. Raises SandboxError."""

    def session(self) -> SandboxSession:
        """A session, whose interpreter starts with its first snippet."""

    async def close(self) -> None:
        """End every program and session."""


def make_sandbox(config: SandboxConfig) -> Sandbox:
    """Raises SandboxUnavailable, and NotImported for a sandbox of the user's."""
    if isinstance(config, CustomSandboxConfig):
        return config.make_sandbox()  # type: ignore[no-any-return]
    return LocalSandbox(config, find_isolation(config))


def sandbox_problems(config: SandboxConfig, seconds: float) -> Problems:
    """Why programs cannot run here; tries one of at most `seconds` in a sandbox of the user's.

    Fields are relative to the section of the sandbox.
    """
    if isinstance(config, LocalSandboxConfig):
        try:
            find_isolation(config)
        except SandboxUnavailable as error:
            yield Problem("name", config.name, str(error))
        return

    async def trial() -> Execution:
        sandbox = make_sandbox(config)
        try:
            return await sandbox.run("print(input())", "7")
        finally:
            await sandbox.close()

    try:
        execution = call_within(seconds, lambda: asyncio.run(trial()))
    except NotImported as error:
        yield Problem("factory", config.factory, str(error))
    except Exception as error:  # noqa: BLE001  code of the user's
        problem = f"raised {type(error).__name__}: {error}; correct the sandbox or its options"
        yield Problem("factory", config.factory, problem)
    else:
        if not isinstance(execution, Execution) or execution.stdout.strip() != "7":
            problem = f"a program that prints its input, 7, gave {execution}; correct the sandbox"
            yield Problem("factory", config.factory, problem)


# The way to isolate

# Prints what a program can do and must not, as JSON. It looks at the kernel's answers, not at what was set.
_PROBE = """
import json, os, signal, socket, sys, time
limit, found = int(sys.stdin.read()), []
lines = open("/proc/self/status").read().splitlines()
status = dict(line.split(":", 1) for line in lines if ":" in line)
if int(status["CapEff"], 16) or int(status["CapPrm"], 16):
    found.append("has capabilities")
if int(status["NoNewPrivs"]) != 1 or int(status["Seccomp"]) != 2:
    found.append("has no filter of calls")
if any(os.path.exists(path) for path in ("/etc/passwd", "/etc/hostname", "/var/log", "/sys", "/run")):
    found.append("sees files of the machine")
for path in ("/outside", "/dev/outside", "/usr/outside", "/proc/sys/kernel/hostname"):
    try:
        open(path, "w")
        found.append(f"can write {path}")
    except OSError:
        pass
if sum(name.isdecimal() for name in os.listdir("/proc")) > 2:
    found.append("sees processes of the machine")
if [line.split(":")[0].strip() for line in open("/proc/self/net/dev").readlines()[2:]] not in ([], ["lo"]):
    found.append("has a network")
try:
    socket.socket()
    found.append("can open sockets")
except OSError:
    pass
for path in ("/dev/null", "/tmp/file"):
    try:
        open(path, "w").close()
    except OSError as error:
        found.append(f"cannot write: {error}")
children = []
for _ in range(limit + 5):
    try:
        child = os.fork()
    except OSError:
        break
    if not child:
        time.sleep(60)
        os._exit(0)
    children.append(child)
if not children:
    found.append("cannot start a process within max_processes (needs Linux 5.14 without root)")
elif len(children) > limit:
    found.append("is not limited by max_processes")
print(json.dumps(found))
"""
_FIXES = (
    "install bubblewrap (package `bubblewrap`)",
    "allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone=1, "
    "kernel.apparmor_restrict_unprivileged_userns=0)",
    "in a container, allow unshare, mount and a new /proc (Docker: --security-opt seccomp=unconfined "
    "--security-opt systempaths=unconfined, as root also --cap-add SYS_ADMIN), or run it privileged",
    "set env.sandbox.name to custom and name a sandbox elsewhere",
)


def find_isolation(config: LocalSandboxConfig) -> Isolation:
    """The first way of `config.name` in which a probe is isolated. Raises SandboxUnavailable."""
    names = list(ISOLATIONS) if config.name == "auto" else [config.name]
    reasons = []
    for name in names:
        if (reason := isolation_problem(name, config)) is None:
            return ISOLATIONS[name]()
        reasons.append(f"{name}: {reason}")
    fixes = "; ".join(_FIXES)
    raise SandboxUnavailable(
        f"this machine cannot isolate programs ({', '.join(reasons)}); do one of: {fixes}"
    )


@cache
def isolation_problem(name: str, config: LocalSandboxConfig) -> str | None:
    """Why a way does not isolate programs on this machine, after running a probe in it; None if it does."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        return f"requires Linux on {' or '.join(_MACHINES)}"
    if name == "bubblewrap" and shutil.which("bwrap") is None:
        return "the program bwrap is not installed"
    # Of the limits only that of processes counts: a slow machine is no reason to refuse.
    limits = config.model_copy(update={"cpu_seconds": 60.0, "wall_seconds": 60.0})
    try:
        process = _Process(limits, ISOLATIONS[name](), _PROBE, limits.wall_seconds)
        execution = process.exchange(str(config.max_processes).encode())
        found = json.loads(execution.stdout)
    except SandboxError as error:
        return str(error)
    except ValueError:
        return f"a probe failed: {_last_line(execution.stderr) or execution}"
    return f"a program {', '.join(found)}" if found else None


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


# Programs


class LocalSandbox(Sandbox):
    def __init__(self, config: LocalSandboxConfig, isolation: Isolation) -> None:
        self._config, self._isolation = config, isolation
        # Threads of this pool start the programs, since the kernel ends a program with the thread that did.
        self._threads = ThreadPoolExecutor(config.max_concurrent, thread_name_prefix="sandbox")
        self._processes: set[_Process] = set()

    async def run(self, program: str, stdin: str = "") -> Execution:
        process = self._new(program, self._config.wall_seconds)
        try:
            return await self._call(process, stdin.encode(errors="replace"))
        finally:
            self._end(process)

    def session(self) -> "LocalSession":
        return LocalSession(self)

    async def close(self) -> None:
        for process in [*self._processes]:
            self._end(process)
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    def _new(self, program: str, wall_seconds: float) -> "_Process":
        process = _Process(self._config, self._isolation, program, wall_seconds)
        self._processes.add(process)
        return process

    async def _call(self, process: "_Process", data: bytes, mark: bytes | None = None) -> Execution:
        return await asyncio.get_running_loop().run_in_executor(self._threads, process.exchange, data, mark)

    def _end(self, process: "_Process") -> None:
        process.kill()
        self._processes.discard(process)


# The interpreter of a session: runs the snippets that come as lines of JSON, and writes the mark of each
# behind what it printed.
_SESSION = """
def serve():
    import ast, json, os, sys, traceback
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    space = {"__name__": "__main__"}
    for line in requests:
        code, mark = json.loads(line)
        failed = 0
        try:
            tree = ast.parse(code, "snippet")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "snippet", "exec"), space)
            if last is not None:
                value = eval(compile(ast.Expression(last.value), "snippet", "eval"), space)
                if value is not None:
                    print(repr(value))
        except BaseException:
            failed = 1
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, f"{mark}{failed}\\n".encode())
serve()
"""


class LocalSession(SandboxSession):
    def __init__(self, sandbox: LocalSandbox) -> None:
        self._sandbox = sandbox
        self._process: _Process | None = None

    async def run(self, code: str) -> Execution:
        if self._process is None:
            self._process = self._sandbox._new(_SESSION, _SESSION_SECONDS)
        process, mark = self._process, secrets.token_hex(16)
        request = json.dumps([code, mark]).encode() + b"\n"
        execution = None
        try:
            execution = await self._sandbox._call(process, request, mark.encode())
            return execution
        finally:
            # Without the mark the interpreter has ended or is in an unknown state.
            if execution is None or not process.is_ready:
                await self.close()

    async def close(self) -> None:
        if self._process is not None:
            self._sandbox._end(self._process)
            self._process = None


class _Process:
    """One sandbox with its program, from the outside. `exchange` blocks; any thread may call `kill`."""

    def __init__(
        self, limits: LocalSandboxConfig, isolation: Isolation, program: str, wall_seconds: float
    ) -> None:
        self._limits, self._isolation = limits, isolation
        self._program, self._wall_seconds = program.encode(errors="replace"), wall_seconds
        self._launcher: subprocess.Popen[bytes] | None = None
        self._report = -1  # where init reports
        self._is_killed, self._exchanging = False, threading.Lock()
        self.is_ready = False  # for a further snippet

    def exchange(self, data: bytes, mark: bytes | None = None) -> Execution:
        """Give the program `data` and read until it has ended, or until it writes `mark` and its status.

        Without a mark, `data` is all of its input. Raises SandboxError.
        """
        with self._exchanging:
            self.is_ready = False
            try:
                if self._launcher is None:
                    data = len(self._program).to_bytes(8, "big") + self._program + data
                    self._launcher = self._start()
                return self._exchange(self._launcher, data, mark)
            finally:
                if not self.is_ready:
                    self._is_killed = True
                    self._release()

    def kill(self) -> None:
        """End the sandbox with every process in it, or keep it from starting."""
        self._is_killed = True
        if self._launcher is not None:
            self._launcher.kill()
        if self._exchanging.acquire(blocking=False):
            try:
                self._release()
            finally:
                self._exchanging.release()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._report, write = os.pipe()
        try:
            launcher = subprocess.Popen(
                self._isolation.command(self._limits, self._wall_seconds, write),
                bufsize=0,
                pass_fds=(write,),
                env={},
                cwd="/",
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        except OSError as error:
            raise SandboxError(f"cannot start: {error}") from error
        finally:
            os.close(write)
        for descriptor in (launcher.stdin, launcher.stdout, launcher.stderr, self._report):
            os.set_blocking(_number(descriptor), False)
        if self._is_killed:
            launcher.kill()
        return launcher

    def _exchange(self, launcher: "subprocess.Popen[bytes]", data: bytes, mark: bytes | None) -> Execution:
        stdin, stdout, stderr = map(_number, (launcher.stdin, launcher.stdout, launcher.stderr))
        texts, report, rest = {stdout: bytearray(), stderr: bytearray()}, bytearray(), memoryview(data)
        limit = self._limits.output_kib << 10
        # Init ends a program at its limits, and a session ends a snippet.
        seconds = self._wall_seconds + _GRACE_SECONDS if mark is None else self._limits.wall_seconds
        deadline = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(stdin, selectors.EVENT_WRITE)
            for number in (*texts, self._report):
                selector.register(number, selectors.EVENT_READ)
            while (seconds := deadline - time.monotonic()) > 0:
                if self._is_killed:
                    raise SandboxError("was ended")
                for key, _ in selector.select(min(seconds, _LOOK_SECONDS)):
                    if key.fd == stdin:
                        if not (rest := rest[_written(stdin, rest) :]):
                            selector.unregister(stdin)
                            if mark is None and launcher.stdin:
                                launcher.stdin.close()
                        continue
                    text = report if key.fd == self._report else texts[key.fd]
                    if part := _read(key.fd):
                        text += part
                    elif key.fd == self._report:
                        _read_rest(texts, limit)
                        return _reported(texts.values(), bytes(report), limit)
                    else:
                        selector.unregister(key.fd)  # the program closed it
                    if text is not report and len(text) > limit:
                        return _execution(texts.values(), limit, ended_by="output")
                output = texts[stdout]
                if mark is not None and output.endswith((mark + b"0\n", mark + b"1\n")):
                    exit_code = int(output[-2:-1])
                    del output[-len(mark) - 2 :]
                    _read_rest(texts, limit)
                    self.is_ready = not self._is_killed
                    return _execution(texts.values(), limit, exit_code)
        if mark is None:
            raise SandboxError(f"has not ended {_GRACE_SECONDS:g} s after its limit of wall time")
        return _execution(texts.values(), limit, ended_by="wall")

    def _release(self) -> None:
        """Called by the thread that exchanges, or by any thread where none does."""
        if self._report >= 0:
            os.close(self._report)  # which ends init, if it still runs
            self._report = -1
        if (launcher := self._launcher) is None:
            return
        for stream in (launcher.stdin, launcher.stdout, launcher.stderr):
            if stream:
                stream.close()
        try:
            # A launcher that is killed leaves init to process 1 of the machine, which in a container may
            # never wait for it.
            launcher.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def _number(stream: IO[bytes] | int | None) -> int:
    assert stream is not None
    return stream if isinstance(stream, int) else stream.fileno()


def _written(descriptor: int, data: memoryview) -> int:
    """How many bytes were written; all, where the program has closed its input."""
    try:
        return os.write(descriptor, data[: 1 << 16])
    except BlockingIOError:
        return 0
    except OSError:
        return len(data)


def _read(descriptor: int) -> bytes | None:
    """What there is, at most 64 KiB; None if there is nothing yet, and an empty text at the end."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None


def _read_rest(texts: dict[int, bytearray], limit: int) -> None:
    """Read what programs wrote before they ended."""
    for descriptor, text in texts.items():
        while len(text) <= limit and (part := _read(descriptor)):
            text += part


def _reported(texts: Iterable[bytearray], report: bytes, limit: int) -> Execution:
    """What init reports. Raises SandboxError if it reports an error, or ended without a report."""
    stdout, stderr = texts
    if not report.endswith(b"\n"):
        raise SandboxError(
            f"ended without a report: {_last_line(stderr.decode(errors='replace')) or 'killed'}"
        )
    outcome = json.loads(report)
    if "error" in outcome:
        raise SandboxError(outcome["error"])
    ended_by = outcome["ended_by"]
    if ended_by is None and max(len(stdout), len(stderr)) > limit:
        ended_by = "output"
    exit_code = outcome["exit_code"] if ended_by is None else None
    return _execution((stdout, stderr), limit, exit_code, ended_by, outcome["cpu_seconds"])


def _execution(
    texts: Iterable[bytearray],
    limit: int,
    exit_code: int | None = None,
    ended_by: EndedBy | None = None,
    cpu_seconds: float | None = None,
) -> Execution:
    stdout, stderr = (bytes(text[:limit]).decode(errors="replace") for text in texts)
    return Execution(stdout, stderr, exit_code, ended_by, cpu_seconds)
