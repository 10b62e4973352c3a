"""Programs that try to leave their sandbox, in each way to isolate that this machine has.

A machine that has none must refuse to run programs, which every machine tests; it skips the rest.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil
import pytest

from nemorl.config.sandbox import CustomSandboxConfig, LocalSandboxConfig
from nemorl.environments import sandbox as sandboxes
from nemorl.environments.isolation import ISOLATIONS, Isolation
from nemorl.environments.sandbox import (
    Execution,
    LocalSandbox,
    SandboxError,
    SandboxUnavailable,
    find_isolation,
    isolation_problem,
    sandbox_problems,
)
from tests.required import missing

# Limits that a busy machine must not reach; programs that wait on purpose have a short one of wall time.
LIMITS = {"cpu_seconds": 1.0, "wall_seconds": 60.0, "memory_mib": 128, "disk_mib": 8, "output_kib": 64}


@pytest.fixture(params=list(ISOLATIONS))
def isolation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if problem := isolation_problem(name, LocalSandboxConfig()):
        missing(name, f"{name}: {problem}")
    return name


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No process, mount or descriptor remains of a test."""
    mounts, descriptors = mounted(), os.listdir("/proc/self/fd")
    yield
    children = [child for child in psutil.Process().children(recursive=True) if is_sandbox(child)]
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    assert mounted() == mounts
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors) + 3  # an event loop that is not collected yet


def mounted() -> set[str]:
    """Where something is mounted, but for what other tests mount in their folders at the same time."""
    places = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return {place for place in places if "/pytest-of-" not in place}


def is_sandbox(process: psutil.Process) -> bool:
    try:
        return "sandbox" in " ".join(process.cmdline())
    except psutil.Error:
        return False


def runs(isolation: str, program: str, stdin: str = "", **limits: float) -> Execution:
    [execution] = run_together(isolation, [program], stdin, **limits)
    return execution


def run_together(
    isolation: str, programs: Iterable[str], stdin: str = "", **limits: float
) -> list[Execution]:
    """Run programs at the same time, each in a sandbox of its own."""
    config = LocalSandboxConfig(name=isolation, max_concurrent=8, **(LIMITS | limits))

    async def main() -> list[Execution]:
        sandbox = LocalSandbox(config, ISOLATIONS[isolation]())
        try:
            return await asyncio.gather(*(sandbox.run(program, stdin) for program in programs))
        finally:
            await sandbox.close()

    return asyncio.run(main())


def processes_with(mark: str) -> list[psutil.Process]:
    """Living processes of this machine whose command holds `mark`."""
    found = []
    for process in psutil.process_iter():
        try:
            if mark in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def wait_for_end(mark: str) -> None:
    """Wait until no process has the mark."""
    deadline = time.monotonic() + 60
    while processes_with(mark):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_program_reads_its_input_and_writes_its_output(isolation: str) -> None:
    program = "import sys\nprint(sys.stdin.read().upper())\nsys.exit(3)"
    execution = runs(isolation, program, "grüße\n" * 20_000, output_kib=1024)
    assert execution == Execution("GRÜSSE\n" * 20_000 + "\n", "", 3, None, execution.cpu_seconds)
    assert 0 < execution.cpu_seconds < 1.0


def test_a_program_that_ends_by_a_signal_or_an_error(isolation: str) -> None:
    assert runs(isolation, "import os\nos.abort()").exit_code == -6
    execution = runs(isolation, "print(1 / 0)")
    assert execution.exit_code == 1
    assert execution.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_program_writes_and_starts_processes_in_its_sandbox(isolation: str) -> None:
    program = """
import multiprocessing, os, tempfile, threading
with tempfile.TemporaryFile() as file:
    file.write(bytes(1000))
thread = threading.Thread(target=print, args=("thread",), kwargs={"flush": True})
thread.start(); thread.join()
with multiprocessing.Pool(2) as pool:
    print(pool.map(abs, [-1, -2]), os.getcwd(), open("/dev/stdin").read())
"""
    execution = runs(isolation, program, "input")
    assert (execution.stdout, execution.stderr) == ("thread\n[1, 2] /tmp input\n", "")


# What each program attempts; it prints `escaped` only where it succeeds.
REFUSED = {
    "host_files": """
import glob, os
paths = ["/etc/shadow", "/etc/passwd", "/var/log", "/home", "/sys", "/run", PRIVATE, FOLDER, "/root/.ssh",
         "/proc/1/environ", "/proc/1/root/etc", "/proc/1/cwd", "/proc/1/mem", "/proc/self/root/etc/passwd",
         "/proc/kcore", "/dev/mem", "/dev/kmsg", "/dev/sda", "/dev/vda", "/../../etc/passwd"]
for path in paths:
    try:
        os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(1)
        print("escaped", path)
    except OSError:
        pass
""",
    "writes_outside": """
import os
library = os.path.dirname(os.__file__)
for folder in ["/", "/dev", "/usr", "/usr/lib", "/lib", "/etc", "/root", library, FOLDER]:
    for call in (lambda: open(folder + "/escape", "w"), lambda: os.mkdir(folder + "/escaped"),
                 lambda: os.rename("/tmp/main.py", folder + "/main.py"), lambda: os.chmod(folder, 0o777),
                 lambda: os.utime(folder), lambda: os.unlink(os.__file__)):
        try:
            call()
            print("escaped", folder)
        except OSError:
            pass
""",
    "symlinks": """
import os
for target in ["/etc/shadow", PRIVATE, "/proc/1/root", "../../../../etc/passwd", "/proc/1/fd/0"]:
    os.symlink(target, "link")
    for path in ("link", "link/etc/passwd"):
        try:
            open(path).read()
            print("escaped", target)
        except OSError:
            pass
    try:
        os.link(target, "hard")
        print("escaped", target)
    except OSError:
        pass
    os.unlink("link")
""",
    "sockets": """
import socket
def attempt(family, kind, address, protocol=0):
    try:
        with socket.socket(family, kind, protocol) as one:
            one.settimeout(5)
            one.connect(address)
            one.send(b"escaped")
            print("escaped", family, kind)
    except OSError:
        pass
attempt(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", PORT))
attempt(socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", PORT))
attempt(socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53))
attempt(socket.AF_INET6, socket.SOCK_STREAM, ("::1", PORT))
attempt(socket.AF_INET, socket.SOCK_RAW, ("127.0.0.1", 0), socket.IPPROTO_ICMP)
attempt(socket.AF_UNIX, socket.SOCK_STREAM, ABSTRACT)
attempt(socket.AF_UNIX, socket.SOCK_STREAM, PRIVATE + ".socket")
attempt(socket.AF_VSOCK, socket.SOCK_STREAM, (2, 1024))
attempt(socket.AF_PACKET, socket.SOCK_RAW, ("lo", 0))
attempt(socket.AF_NETLINK, socket.SOCK_RAW, (0, 0))
try:
    socket.getaddrinfo("localhost.localdomain.example", 80)
    print("escaped by a name")
except OSError:
    pass
""",
    "signals": """
import os, signal
for process in [PARENT, SIBLING, 1]:
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP, signal.SIGINT, signal.SIGHUP):
        try:
            os.kill(process, number)
        except OSError:
            continue
        if process != 1:
            print("escaped", process)  # init ignores what its own namespace sends
""",
    "ptrace": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
child = os.fork()
if not child:
    import time; time.sleep(30); os._exit(0)
for process in [PARENT, 1, child]:
    if libc.ptrace(16, process, 0, 0) == 0:  # PTRACE_ATTACH
        print("escaped by ptrace", process)
    buffer = ctypes.create_string_buffer(8)
    vector = (ctypes.c_void_p * 2)(ctypes.addressof(buffer), 8)
    address = (ctypes.c_void_p * 2)(id(process), 8)
    if libc.process_vm_readv(process, vector, 1, address, 1, 0) > 0:
        print("escaped by process_vm_readv", process)
os.kill(child, 9)
""",
    "namespaces_and_mounts": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x20000, 0x10020000, 0x20000000, 0x40000000):
    if libc.unshare(flags) == 0:
        print("escaped by unshare", hex(flags))
if libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) >= 0:  # clone of x86-64
    print("escaped by clone")
if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None) == 0 or libc.umount2(b"/tmp", 2) == 0:
    print("escaped by mount")
if libc.chroot(b"/tmp") == 0 or libc.setns(0, 0) == 0:
    print("escaped by chroot or setns")
for call in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),
             lambda: os.mknod("d", 0o60666, 0), lambda: os.memfd_create("memory"),
             lambda: os.write(os.open("/proc/self/uid_map", os.O_WRONLY), b"0 0 1")):
    try:
        call()
        print("escaped", call)
    except OSError:
        pass
libc.shmget.restype = ctypes.c_int
if libc.shmget(0, 4096, 0o1600) >= 0 or libc.syscall(321, 0, 0, 0) >= 0 or libc.syscall(425, 8, 0) >= 0:
    print("escaped by shmget, bpf or io_uring")
""",
    "setuid_binaries": """
import os, stat, subprocess
null = open("/dev/null", "w")
os.chmod("/tmp/main.py", 0o6777)
assert open("/proc/self/status").read().count("NoNewPrivs:\\t1") == 1
for folder, _, names in os.walk("/usr"):
    for name in names:
        path = os.path.join(folder, name)
        if not os.path.islink(path) and os.stat(path).st_mode & stat.S_ISUID and os.access(path, os.X_OK):
            try:
                subprocess.run([path], stdin=0, stdout=null, stderr=null, timeout=5)
            except (OSError, subprocess.TimeoutExpired):
                pass
for line in open("/proc/self/mountinfo"):
    options = line.split()[5]
    if "nosuid" not in options and not line.split()[4].startswith("/dev/") and line.split()[4] != "/":
        print("escaped: setuid works on", line)
""",
    "other_binaries": """
import os, shutil, subprocess, sys
for command in (["/bin/sh", "-c", "cat /etc/shadow"], ["bash"], ["/usr/bin/curl", "http://127.0.0.1"], ["su"],
                ["sudo", "id"], ["gcc"], ["mount"]):
    try:
        if subprocess.run(command, capture_output=True).stdout:
            print("escaped by", command)
    except OSError:
        pass
shutil.copy(sys.executable, "/tmp/python")  # into its folder, where no program starts
os.chmod("/tmp/python", 0o777)
try:
    subprocess.run(["/tmp/python", "-c", "print('escaped')"])
except OSError:
    pass
""",
    "init": """
import ctypes, os, resource
for path in ("/proc/1/mem", "/proc/1/environ", "/proc/1/fd/3", "/proc/1/fd/0"):
    try:
        open(path, "rb").read(1)
        print("escaped by", path)
    except OSError:
        pass
for number in range(3, 256):
    try:
        os.write(number, b'{"exit_code": 0}\\n')
        print("escaped by descriptor", number)
    except OSError:
        pass
# Init ends, or cannot work, with such limits.
for kind in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
    try:
        resource.prlimit(1, kind, (0, 0))
        print("escaped by a limit", kind)
    except OSError:
        pass
for call in (lambda: os.setpriority(os.PRIO_PROCESS, 1, 19), lambda: os.setpriority(os.PRIO_USER, 0, 19),
             lambda: os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0)),
             lambda: os.sched_setaffinity(1, {0})):
    try:
        call()
        print("escaped by a priority", call)
    except OSError:
        pass
libc = ctypes.CDLL(None)
if libc.syscall(251, 1, 1, 3 << 13) == 0:  # ioprio_set of x86-64
    print("escaped by ioprio_set")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # its own limits it may lower
""",
}


def test_refused(isolation: str, tmp_path: Path) -> None:
    """Every attempt fails, the program reaches its end, and what it aimed at is unchanged."""
    private = tmp_path / "private"
    private.write_text("secret")
    abstract = f"\0nemorl-{os.getpid()}-{time.monotonic_ns()}"
    sibling = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as local, sibling:
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        local.bind(abstract)
        local.listen()
        names = {
            "PRIVATE": str(private),
            "FOLDER": os.getcwd(),
            "PORT": tcp.getsockname()[1],
            "ABSTRACT": abstract,
            "PARENT": os.getpid(),
            "SIBLING": sibling.pid,
        }
        program = f"""
import os
for name, attempt in {REFUSED!r}.items():
    child = os.fork()
    if child:
        os.waitpid(child, 0)
    else:
        exec(attempt, {names!r})
        print(name, flush=True)
        os._exit(0)
"""
        execution = runs(isolation, program, cpu_seconds=30)
        assert sibling.poll() is None
        sibling.kill()
    assert (execution.stdout, execution.stderr, execution.exit_code) == ("\n".join([*REFUSED, ""]), "", 0)
    assert private.read_text() == "secret"
    assert [path.name for path in tmp_path.iterdir()] == ["private"]


# Programs that take too much, with the limit that ends them or the error that they get.
TOO_MUCH = {
    "fork_bomb": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        "cpu",
        None,
    ),
    "memory": ("data = []\nwhile True:\n    data.append(bytes(1 << 20))", None, "MemoryError"),
    "memory_of_children": (
        "import os, time\nfor _ in range(8):\n    if not os.fork():\n        break\n"
        "data = bytearray(60 << 20)\ntime.sleep(60)",
        "memory",
        None,
    ),
    "disk": ("open('big', 'wb').write(bytes(9 << 20))", None, "OSError"),
    "disk_of_many_files": (
        "for n in range(100):\n    open(str(n), 'wb').write(bytes(1 << 20))",
        None,
        "No space left on device",
    ),
    "many_files": ("for n in range(5000):\n    open(str(n), 'w').close()", None, "No space left on device"),
    "sparse_file": (
        "import os\nos.truncate(os.open('big', os.O_CREAT | os.O_RDWR), 1 << 40)",
        None,
        "File too large",
    ),
    "descriptors": ("files = [open('/dev/null') for _ in range(5000)]", None, "Too many open files"),
    "threads": (
        "import threading, time\nfor _ in range(100):\n"
        "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        None,
        "can't start new thread",
    ),
    "stdout": ("while True:\n    print('x' * 1000)", "output", None),
    "stderr": ("import sys\nwhile True:\n    sys.stderr.write('x' * 1000)", "output", None),
    "loop": ("while True:\n    pass", "cpu", None),
    "loop_of_children": (
        "import os\nfor _ in range(3):\n    os.fork()\nwhile True:\n    pass",
        "cpu",
        None,
    ),
}


def test_too_much(isolation: str) -> None:
    executions = run_together(isolation, [program for program, *_ in TOO_MUCH.values()])
    for (name, (_, ended_by, error)), execution in zip(TOO_MUCH.items(), executions, strict=True):
        assert execution.ended_by == ended_by, (name, execution)
        if error is None:
            assert execution.exit_code is None, name
            assert max(len(execution.stdout), len(execution.stderr)) <= LIMITS["output_kib"] * 1024, name
        else:
            assert execution.exit_code == 1, (name, execution)
            assert error in execution.stderr, name


WAITING = {
    "sleep": "import time\ntime.sleep(600)",
    "ignores_signals": "import signal\nfor n in set(range(1, 32)) - {9, 19}:\n"
    "    signal.signal(n, signal.SIG_IGN)\nsignal.pause()",
    "closed_stdio": "import os, time\nfor n in range(3):\n    os.close(n)\ntime.sleep(600)",
    "stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "reads_nothing": "import signal\nsignal.pause()",
}


def test_waiting_for_ever(isolation: str) -> None:
    executions = run_together(isolation, WAITING.values(), "x" * 1_000_000, wall_seconds=1.0)
    for name, execution in zip(WAITING, executions, strict=True):
        assert (execution.exit_code, execution.ended_by) == (None, "wall"), name


# A program that is found by its mark.
SLEEPER = """
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "{mark}"])
"""


def test_a_daemon_that_is_left_behind_ends_with_its_program(isolation: str) -> None:
    mark = f"daemon-{os.getpid()}-{time.monotonic_ns()}"
    program = f"""
import os, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3):
            os.close(number)
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", {mark!r}])
    os._exit(0)
def commands():
    return [open(f"/proc/{{n}}/cmdline").read() for n in os.listdir("/proc") if n.isdecimal()]
while {mark!r} not in "".join(commands()):
    time.sleep(0.02)
print("daemon")
"""
    execution = runs(isolation, program)
    assert (execution.stdout, execution.exit_code) == ("daemon\n", 0)
    wait_for_end(mark)


def test_a_cancelled_program_ends(isolation: str) -> None:
    mark = f"cancelled-{os.getpid()}-{time.monotonic_ns()}"
    program = SLEEPER.format(mark=mark)

    async def main() -> None:
        sandbox = LocalSandbox(LocalSandboxConfig(name=isolation, wall_seconds=600), ISOLATIONS[isolation]())
        running = asyncio.create_task(sandbox.run(program))
        while not processes_with(mark):
            assert not running.done()
            await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await sandbox.close()

    asyncio.run(main())
    wait_for_end(mark)


def test_programs_end_with_the_process_that_started_them(isolation: str) -> None:
    mark = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    program = SLEEPER.format(mark=mark)
    code = f"""
import asyncio
from nemorl.config.sandbox import LocalSandboxConfig
from nemorl.environments.isolation import ISOLATIONS
from nemorl.environments.sandbox import LocalSandbox
sandbox = LocalSandbox(LocalSandboxConfig(name={isolation!r}, wall_seconds=600), ISOLATIONS[{isolation!r}]())
asyncio.run(sandbox.run({program!r}))
"""
    script = subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2])

    def in_sandbox() -> list[psutil.Process]:
        return [one for one in processes_with(mark) if one.pid != script.pid]

    while not in_sandbox():
        assert script.poll() is None
        time.sleep(0.05)
    script.kill()
    script.wait()
    wait_for_end(mark)


def test_programs_run_at_the_same_time_up_to_the_bound(isolation: str) -> None:
    config = LocalSandboxConfig(name=isolation, wall_seconds=60, max_concurrent=2)
    running, most, lock = 0, 0, threading.Lock()
    exchange = sandboxes._Process.exchange

    def counted(self, *arguments):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        try:
            return exchange(self, *arguments)
        finally:
            with lock:
                running -= 1

    async def main() -> list[Execution]:
        sandbox = LocalSandbox(config, ISOLATIONS[isolation]())
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(sandboxes._Process, "exchange", counted)
                program = "import time\ntime.sleep(0.2)\nprint(input())"
                return await asyncio.gather(*(sandbox.run(program, str(n)) for n in range(4)))
        finally:
            await sandbox.close()

    assert [execution.stdout for execution in asyncio.run(main())] == [f"{n}\n" for n in range(4)]
    assert most == 2


def test_a_session_keeps_variables_and_files(isolation: str) -> None:
    config = LocalSandboxConfig(name=isolation, **(LIMITS | {"wall_seconds": 60, "max_concurrent": 2}))

    async def main() -> None:
        sandbox = LocalSandbox(config, ISOLATIONS[isolation]())
        one, other = sandbox.session(), sandbox.session()
        try:
            assert (await one.run("x = 20\nopen('file', 'w').write('text')\nx + 1")).stdout == "21\n"
            assert (await one.run("print(x, open('file').read())")).stdout == "20 text\n"
            failed = await other.run("x")
            assert failed.exit_code == 1
            assert failed.stderr.endswith("NameError: name 'x' is not defined\n")
            assert (await one.run("input()")).stderr.endswith("EOFError: EOF when reading a line\n")
            assert (await one.run("def f(")).exit_code == 1
            assert (await one.run("x")).stdout == "20\n"
            # A limit ends the interpreter; the next snippet has a new one.
            assert (await one.run("while True: pass")).ended_by == "cpu"
            assert (await one.run("x")).stderr.endswith("NameError: name 'x' is not defined\n")
            assert (await one.run("while True: print('x' * 1000)")).ended_by == "output"
            assert (await one.run("import os; os._exit(0)")).exit_code == 0
            assert (await one.run("1")).stdout == "1\n"
        finally:
            await sandbox.close()

    asyncio.run(main())


def test_a_session_without_an_answer_ends(isolation: str) -> None:
    config = LocalSandboxConfig(name=isolation, wall_seconds=1.0)

    async def main() -> Execution:
        sandbox = LocalSandbox(config, ISOLATIONS[isolation]())
        session = sandbox.session()
        try:
            return await session.run("import time; time.sleep(600)")
        finally:
            await session.close()
            await sandbox.close()

    assert asyncio.run(main()).ended_by == "wall"


def test_packages_of_a_virtual_environment(isolation: str, tmp_path: Path) -> None:
    program = "import my_package, sys\nprint(sys.prefix, my_package.NAME)"
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        venv.create(folder)
        [packages] = Path(folder).glob("lib/python*/site-packages")
        (packages / "my_package.py").write_text("NAME = 7")
        python = Path(folder, "bin", "python")
        assert runs(isolation, program, python=python).stdout == f"{folder} 7\n"
    assert "ModuleNotFoundError" in runs(isolation, program).stderr
    with pytest.raises(SandboxError, match=r"env.sandbox.python = .*: does not start"):
        runs(isolation, program, python=tmp_path / "python")


def test_a_machine_that_cannot_isolate_is_refused_with_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(Isolation):
        def launcher(self, files, user):
            return [sys.executable, "-c", "raise SystemExit('unshare: not permitted')"], {}

    class Open(Isolation):
        """Runs a program without a sandbox."""

        def launcher(self, files, user):
            outcome = json.dumps({"exit_code": 0, "ended_by": None, "cpu_seconds": 0})
            code = (
                "import json, os, sys\nsize = int.from_bytes(os.read(0, 8), 'big')\n"
                "program = os.read(0, size)\ndef refuse():\n    raise OSError\nos.fork = refuse\n"
                "exec(program)\nsys.stdout.flush()\n"
                f"os.write(json.loads(sys.argv[-1])['report'], {outcome.encode()!r} + b'\\n')\n"
            )
            return [sys.executable, "-c", code], {}

    isolation_problem.cache_clear()
    monkeypatch.setattr(sandboxes, "ISOLATIONS", {"fails": Fails, "open": Open})
    config = LocalSandboxConfig()
    try:
        with pytest.raises(SandboxUnavailable) as refused:
            find_isolation(config)
        [problem] = sandbox_problems(config, 60)
    finally:
        isolation_problem.cache_clear()
    message = str(refused.value)
    assert "fails: ended without a report: unshare: not permitted" in message
    assert "open: a program " in message
    for found in ("has no filter of calls", "sees files of the machine", "can open sockets"):
        assert found in message
    assert "install bubblewrap" in message
    assert (problem.field, problem.value, problem.fix) == ("name", "auto", message)


def test_without_bwrap_the_other_way_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    isolation_problem.cache_clear()
    monkeypatch.setenv("PATH", "/nonexistent")
    try:
        with pytest.raises(SandboxUnavailable, match="bubblewrap: the program bwrap is not installed"):
            find_isolation(LocalSandboxConfig(name="bubblewrap"))
    finally:
        isolation_problem.cache_clear()


class EchoSandbox:
    """A sandbox of the user's."""

    def __init__(self, limits, answer="7") -> None:
        self.answer, self.limits = answer, limits

    async def run(self, program, stdin=""):
        return Execution(self.answer, "", 0)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("factory", "options", "problem"),
    [
        ("EchoSandbox", {}, None),
        ("EchoSandbox", {"answer": "8"}, "a program that prints its input, 7, gave Execution"),
        ("EchoSandbox", {"size": 8}, "raised TypeError"),
        ("NoSandbox", {}, "has no NoSandbox"),
    ],
)
def test_a_custom_sandbox_is_tried(
    monkeypatch: pytest.MonkeyPatch, factory: str, options: dict[str, str], problem: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "my_sandbox", sys.modules[__name__])
    config = CustomSandboxConfig(name="custom", factory=f"my_sandbox:{factory}", options=options)
    found = list(sandbox_problems(config, 60))
    if problem is None:
        assert found == []
    else:
        assert [one.field for one in found] == ["factory"]
        assert problem in found[0].fix
