"""The first process of a sandbox: builds it, gives up every privilege, starts the program and watches it.

Run as `python -I -S -c SOURCE SPEC` with the standard library alone, since nothing else exists in a sandbox.

    launcher ─fork▶ init, process 1 of its own process namespace ─fork▶ program ─▶ its children

With bubblewrap, `bwrap` is the launcher and has made the namespaces and the mounts; else `_launch` makes
them. The kernel kills every process of the namespace when init ends, and init when its launcher ends.
Standard input holds the program's text behind its length of eight bytes, then the program's own input. Init
answers on the descriptor `report` with one line of JSON: `error` if the sandbox failed, else how the program
ended.
"""

import ctypes
import json
import os
import platform
import resource
import select
import signal
import struct
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

FOLDER = "/tmp"  # the program's own folder, its current one and its home
PROGRAM = "main.py"
LOOK_SECONDS = 0.02  # between two looks at what the processes use
NUM_FILES = 4096  # files and folders in FOLDER
NUM_DESCRIPTORS = 256  # of a process

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE, MNT_DETACH = 16384, 1 << 18, 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, AT_RECURSIVE, AT_FDCWD = 1, 2, 4, 0x8000, -100
CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME = 0x10000000, 0x20000000, 0x40000000, 0x80
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
AF_UNIX = 1
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}

libc = ctypes.CDLL(None, use_errno=True)

# Calls that reach the kernel's rarely used parts, other processes or memory that no limit counts, by their
# numbers on x86-64 and on 64-bit ARM.
DENIED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "quotactl": (179, 60),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
}
# Calls that a process may use for itself, number 0, alone: init has the same user, and a program that lowers
# the limits of init would end as a failure of the sandbox instead of a wrong answer.
OWN_ONLY = {
    "prlimit64": (302, 261),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
}
# The audit name of the architecture; numbers of clone, clone3, socket and socketpair; the column of DENIED.
MACHINES = {
    "x86_64": (0xC000003E, 56, 435, 41, 53, 0),
    "aarch64": (0xC00000B7, 220, 435, 198, 199, 1),
}


def main() -> None:
    spec = json.loads(sys.argv[1])
    report: int = spec["report"]
    os.set_inheritable(report, False)
    # The handler of Python for this signal would let a program interrupt init.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if spec["launches"]:
            _launch(spec)
        else:
            _make_folders("", spec)
        outcome = _run(spec, _receive_program())
    except (OSError, EOFError) as error:
        outcome = {"error": str(error)}
    os.write(report, json.dumps(outcome).encode() + b"\n")
    os._exit(0)  # no thread and no destructor is left to wait for


def _called(name: str, result: int) -> None:
    """Raise OSError, with what was called, where a call of the C library failed."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _prctl(option: int, *arguments: int) -> None:
    words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:4]]
    _called(f"prctl({option})", libc.prctl(ctypes.c_int(option), *words))


# Namespaces and mounts


def _launch(spec: dict[str, Any]) -> None:
    """Return in a child that is process 1 of new namespaces and sees only the sandbox's files."""
    spaces = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP
    if not spec["changes_user"]:
        user, group = os.geteuid(), os.getegid()
        _called("unshare a user namespace", libc.unshare(CLONE_NEWUSER))
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{spec['user']} {user} 1"),
            ("gid_map", f"{spec['user']} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    _called("unshare namespaces", libc.unshare(spaces))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec["parent"]:
        os._exit(1)  # it died before that
    if child := os.fork():
        os.close(spec["report"])
        os.closerange(0, 3)  # so that only the program's processes hold them
        os.waitpid(child, 0)
        os._exit(0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    # The host's files are moved to /old, so that nothing of them is hidden while /new is made.
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    _pivot("/tmp", "/tmp/old")
    os.chdir("/")
    _mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for source, place in spec["binds"]:
        _bind(f"/old{source}", f"/new{place}")
    for target, link in spec["links"]:
        os.makedirs(os.path.dirname(f"/new{link}"), exist_ok=True)
        os.symlink(target, f"/new{link}")
    for device in spec["devices"]:
        _bind(f"/old{device}", f"/new{device}", is_device=True)
    os.mkdir("/new/proc")
    _mount("proc", "/new/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "subset=pid")
    for folder in spec["folders"]:
        os.mkdir(f"/new{folder}")
    _make_folders("/new", spec)
    os.chdir("/new")
    _pivot(".", ".")
    _called("unmount the host's files", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    _mount("none", "/", "", MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _mount(source: str, place: str, kind: str, flags: int, options: str = "") -> None:
    words = (source.encode(), place.encode(), kind.encode())
    _called(f"mount {kind or source} on {place}", libc.mount(*words, ctypes.c_ulong(flags), options.encode()))


def _pivot(root: str, old: str) -> None:
    number = PIVOT_ROOT[platform.machine()]
    _called("pivot_root", libc.syscall(ctypes.c_long(number), root.encode(), old.encode()))


def _bind(source: str, place: str, *, is_device: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(place, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(place), exist_ok=True)
        os.close(os.open(place, os.O_CREAT | os.O_WRONLY, 0o600))
    _mount(source, place, "", MS_BIND | MS_REC)
    if not is_device:
        attributes = struct.pack("QQQQ", ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, 0, 0, 0)
        arguments = (AT_FDCWD, place.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(len(attributes)))
        name = f"make {place} read-only (mount_setattr)"
        _called(name, libc.syscall(ctypes.c_long(MOUNT_SETATTR), *arguments))


def _make_folders(root: str, spec: dict[str, Any]) -> None:
    """A file system in memory with a limit of its own, which ends with the sandbox, and its folders that are
    also shown elsewhere."""
    place = root + FOLDER
    os.makedirs(place, exist_ok=True)
    user, size = spec["user"], spec["disk_bytes"]
    options = f"mode=700,uid={user},gid={user},size={size},nr_inodes={NUM_FILES}"
    flags = MS_NOSUID | MS_NODEV | (0 if spec["executes"] else MS_NOEXEC)
    _mount("tmpfs", place, "tmpfs", flags, options)
    for folder in spec["folders"]:
        os.mkdir(place + folder)
        os.chown(place + folder, user, user)
        _mount(place + folder, root + folder, "", MS_BIND)


# The program


def _receive_program() -> bytes:
    def read(count: int) -> bytes:
        parts = []
        while count and (part := os.read(0, count)):
            parts.append(part)
            count -= len(part)
        if count:
            raise EOFError("the program ends early")
        return b"".join(parts)

    return read(int.from_bytes(read(8), "big"))


def _run(spec: dict[str, Any], program: bytes) -> dict[str, Any]:
    """Start the program without privileges and wait until it ends or exceeds a limit."""
    if spec["changes_user"]:
        for number in range(3):
            os.fchown(number, spec["user"], spec["user"])  # for a program that opens /dev/stdin
        os.setgroups([])
        os.setresgid(spec["user"], spec["user"], spec["user"])
        os.setresuid(spec["user"], spec["user"], spec["user"])
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _drop_capabilities()
    # The program has init's user: it may neither trace init nor read its memory. A change of the user
    # also resets the signal at the launcher's death.
    _prctl(PR_SET_DUMPABLE, 0)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.chdir(FOLDER)
    with open(PROGRAM, "wb") as file:
        file.write(program)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    failed, fails = os.pipe()  # closed by a successful exec
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _become_program(spec, fails)
    os.close(fails)
    if problem := os.read(failed, 1000):
        return {"error": problem.decode()}
    # Only the program's processes hold its input and output, so that their ends are seen.
    os.closerange(0, 3)
    ended_by, status = _watch(child, spec, start)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "ended_by": ended_by,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "wall_seconds": time.monotonic() - start,
    }


def _drop_capabilities() -> None:
    """Give up what a user namespace gives; a change of the user has already done so for root."""
    header = struct.pack("Ii", 0x20080522, 0)  # version 3, this process
    _called("capset", libc.capset(header, bytes(24)))


def _become_program(spec: dict[str, Any], fails: int) -> NoReturn:
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        _prctl(PR_SET_DUMPABLE, 1)  # else the file is root's
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the kernel ends it before a process of the run
        cpu = int(spec["cpu_seconds"]) + 2  # the limit itself is of all processes: see _watch
        for kind, limit in (
            (resource.RLIMIT_CPU, cpu),
            (resource.RLIMIT_AS, spec["memory_bytes"]),
            (resource.RLIMIT_NPROC, spec["num_processes"] + 2),  # and init and its launcher
            (resource.RLIMIT_FSIZE, spec["disk_bytes"]),
            (resource.RLIMIT_NOFILE, NUM_DESCRIPTORS),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
            (resource.RLIMIT_MSGQUEUE, 0),
        ):
            resource.setrlimit(kind, (limit, limit))
        _prctl(PR_SET_NO_NEW_PRIVS, 1)
        _filter_calls()
        os.set_inheritable(fails, False)
        os.closerange(3, fails)
        os.closerange(fails + 1, 1 << 20)
        os.execve(spec["python"], [spec["python"], *spec["arguments"], PROGRAM], spec["environment"])
    except BaseException as error:  # noqa: BLE001  init reports it
        os.write(fails, f"start the program: {error}".encode())
    os._exit(1)


def _filter_calls() -> None:
    """Refuse the calls of DENIED, namespaces and sockets other than local ones, with EPERM (seccomp)."""
    audit, clone, clone3, socket, socketpair, column = MACHINES[platform.machine()]
    load, equal, above, anyof, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # EPERM, ENOSYS
    spaces = CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC
    spaces |= CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWTIME
    # Each row: operation, jump if true, jump if false (both relative), operand. seccomp_data has the number
    # at 0, the architecture at 4 and the low half of the first argument at 16.
    rows = [(load, 0, 0, 4), (equal, 1, 0, audit), (answer, 0, 0, kill), (load, 0, 0, 0)]
    if column == 0:
        rows += [(above, 0, 1, 0x40000000), (answer, 0, 0, kill)]  # the x32 interface
    for numbers in DENIED.values():
        rows += [(equal, 0, 1, numbers[column]), (answer, 0, 0, refuse)]
    for numbers in OWN_ONLY.values():
        rows += [(equal, 0, 4, numbers[column]), (load, 0, 0, 16), (equal, 1, 0, 0)]
        rows += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    rows += [(equal, 0, 1, clone3), (answer, 0, 0, absent)]  # its flags are in memory; libraries use clone
    rows += [(equal, 0, 4, clone), (load, 0, 0, 16), (anyof, 0, 1, spaces)]
    rows += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    rows += [(equal, 1, 0, socket), (equal, 0, 3, socketpair), (load, 0, 0, 16), (equal, 1, 0, AF_UNIX)]
    rows += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *row) for row in rows)
    buffer = ctypes.create_string_buffer(code)
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rows), ctypes.addressof(buffer)))
    _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _watch(child: int, spec: dict[str, Any], start: float) -> tuple[str | None, int]:
    """The limit that ended the program, if any, and its wait status. No process of it is left after that."""
    ended_by: str | None = None
    # Also shows that the run has closed the other end or died: a launcher of bubblewrap without capabilities
    # cannot signal init, which has another user.
    reader = select.poll()
    reader.register(spec["report"], 0)
    while True:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_SECONDS)
        if (status := _reap(child)) is not None:
            break
        if reader.poll(0):
            os._exit(1)
        cpu_seconds, memory_bytes = _used()
        if cpu_seconds > spec["cpu_seconds"]:
            ended_by = "cpu"
        elif memory_bytes > spec["memory_bytes"]:
            ended_by = "memory"
        elif time.monotonic() - start > spec["wall_seconds"]:
            ended_by = "wall"
        else:
            continue
        break
    if os.waitstatus_to_exitcode(status or 0) == -signal.SIGXCPU:
        ended_by = "cpu"
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # every other process of the namespace, also what is being forked
    while status is None:
        signal.sigtimedwait({signal.SIGCHLD}, LOOK_SECONDS)
        status = _reap(child)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return ended_by, status


def _reap(child: int) -> int | None:
    """Wait for all processes that have ended; the status of `child` if it is one of them."""
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            if found[0] == child:
                return found[1]
    except ChildProcessError:
        pass
    return None


def _used() -> tuple[float, int]:
    """Processor time of all processes, ended ones included, and memory of the living ones, without files."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, pages = ended.ru_utime + ended.ru_stime, 0
    for name in os.listdir("/proc"):
        if not name.isdecimal() or name == "1":
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name of a process may hold spaces and brackets; user and system time follow it.
                fields = file.read().rpartition(b")")[2].split()
            with open(f"/proc/{name}/statm", "rb") as file:
                sizes = file.read().split()
        except OSError:
            continue  # it has ended
        seconds += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        pages += int(sizes[1]) - int(sizes[2])
    return seconds, pages * resource.getpagesize()


if __name__ == "__main__":
    main()
