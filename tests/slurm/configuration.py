"""The configuration of the test cluster, and the command lines of its daemons."""

import os
import pwd
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

CONFIGURATION = "slurm.conf"
NODES = ("n1", "n2")
DAEMONS = ("munged", "slurmctld", "slurmd", "slurmstepd")
COMMANDS = ("sbatch", "srun", "salloc", "scancel", "scontrol", "sinfo", "squeue")
ADMINISTRATION = ("/usr/sbin", "/usr/local/sbin", "/sbin")  # folders that are not in everybody's PATH

FIRST_PORT, LAST_PORT = 17000, 27000  # below Linux's ephemeral ports
LONGEST_FOLDER = 60  # characters: the paths of the sockets below it must stay under 108

# What is short here lasts minutes on a real cluster, and what it means is the same:
# - cred_expire is also how long a requeued job waits before it starts again (120 s elsewhere);
# - SlurmdTimeout is when a silent node counts as lost (300 s);
# - KillWait is between SIGTERM and SIGKILL (30 s), GraceTime the same for a pre-empted job.
# pgid: signals other than SIGKILL reach the tasks alone, as with cgroups, which need a machine that lets us
# make some; linuxproc would signal Ray's processes too, and no run could end in order.
TEMPLATE = """\
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge_socket},cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={folder}/log/jobs
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,batch_sched_delay=0,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
SlurmdTimeout=10
KillWait=25
OverTimeLimit=0
InactiveLimit=0
SlurmdParameters=config_overrides
GresTypes=gpu
{nodes}
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=25
PartitionName=scavenge Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=0
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


@dataclass(frozen=True)
class Daemons:
    """What runs for one cluster: command lines by name in the order of starting, and their environment."""

    folder: Path
    commands: dict[str, list[str]]
    environment: dict[str, str]

    @property
    def munge_socket(self) -> Path:
        """Where munged listens."""
        return self.folder / "munge.socket"

    def client(self, name: str) -> str:
        """The path of one of Slurm's commands."""
        return _path(name)


def missing() -> list[str]:
    """The programs that are not installed."""
    return [name for name in (*DAEMONS, *COMMANDS) if not _found(name)]


def environment(folder: Path) -> dict[str, str]:
    """This process's environment for the cluster in `folder`; nothing of a Slurm that we may run in."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH_", "SRUN_", "SALLOC_"))}
    return ours | {"SLURM_CONF": str(folder / CONFIGURATION)}


def write_configuration(folder: Path, *, cpus: int, gpus: int) -> Daemons:
    """Fill `folder` for a cluster of two nodes with `cpus` and `gpus` (counted, not there) each."""
    for name in ("log", "state", *(f"spool/{node}" for node in NODES)):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    controller_port, *node_ports = _free_ports(1 + len(NODES))
    host = socket.gethostname().partition(".")[0]
    (folder / CONFIGURATION).write_text(
        TEMPLATE.format(
            name=f"nemorl{controller_port}",
            host=host,
            controller_port=controller_port,
            user=pwd.getpwuid(os.getuid()).pw_name,
            folder=folder,
            munge_socket=folder / "munge.socket",
            nodes="\n".join(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={cpus}"
                f" RealMemory={_memory_megabytes()} Feature={node},domain{index}"
                + (f" Gres=gpu:{gpus}" if gpus else "")
                for index, (node, port) in enumerate(zip(NODES, node_ports, strict=True))
            ),
        )
    )
    devices = [folder / f"gpu{index}" for index in range(gpus)]  # slurmd requires the files
    for device in devices:
        device.touch()
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
    munge = [
        *(_path("munged"), "--foreground", "--force", f"--socket={folder}/munge.socket"),
        *(f"--key-file={key}", f"--pid-file={folder}/munged.pid", f"--seed-file={folder}/munged.seed"),
        f"--log-file={folder}/log/munged.log",
    ]
    nodes = {f"slurmd.{node}": [_path("slurmd"), "-D", "-N", node] for node in NODES}
    commands = {"munged": munge, "slurmctld": [_path("slurmctld"), "-D"], **nodes}
    return Daemons(folder, commands, environment(folder))


def _memory_megabytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20


def _free_ports(count: int) -> list[int]:
    """Ports on which nothing listens; another cluster that starts now begins its search elsewhere."""
    held: list[socket.socket] = []
    port = FIRST_PORT + os.getpid() * 7 % (LAST_PORT - FIRST_PORT)
    while len(held) < count:
        port = port + 1 if port < LAST_PORT else FIRST_PORT
        listener = socket.socket()
        try:
            listener.bind(("0.0.0.0", port))
        except OSError:
            listener.close()
        else:
            held.append(listener)
    ports = [listener.getsockname()[1] for listener in held]
    for listener in held:
        listener.close()
    return ports


def _found(name: str) -> str | None:
    folders = [os.environ.get("PATH", os.defpath), *ADMINISTRATION]
    if name == "slurmstepd":  # started by slurmd only, and in a folder of its own with some packages
        folders += ["/usr/lib/slurm", "/usr/libexec/slurm"]
    return shutil.which(name, path=os.pathsep.join(folders))


def _path(name: str) -> str:
    path = _found(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed")
    return path
