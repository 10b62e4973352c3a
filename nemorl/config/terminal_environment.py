"""`env: {name: terminal}`: tasks in a shell, from folders with an instruction and tests."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemorl.errors import Problem, Problems

from .base import Variants, check
from .environment_base import EnvBase
from .run import ClusterConfig
from .sandbox import CustomSandboxConfig, LocalSandboxConfig


class TerminalSandboxConfig(LocalSandboxConfig):
    """The machine of a task: a sandbox with the programs of the rollout worker's machine."""

    programs: Literal[True] = True
    """Show the programs of the machine below /usr, read-only, and execute those that a command writes."""
    folders: tuple[Annotated[str, Field(pattern=r"^/[\w.-]+$")], ...] = (
        "/app",
        "/data",
        "/logs",
        "/tests",
        "/workspace",
    )
    """Folders that commands may write in addition to /tmp; tasks may use no other ones."""
    cpu_seconds: float = Field(120.0, gt=0)
    """Processor time of all commands of a conversation and of its tests."""
    wall_seconds: float = Field(50.0, gt=0)
    """Time until the sandbox is ended, if a command or test does not end within its own limit."""
    memory_mib: int = Field(1024, ge=32)
    """Memory of all processes of a conversation in MiB, and address space of each."""
    max_processes: int = Field(64, ge=1)
    """Processes and threads of a conversation at a time."""


class TerminalEnvConfig(EnvBase):
    """Task folders of Harbor or terminal-bench: commands in a sandbox, then the folder's tests
    (docs/environment_servers.md)."""

    factory_path: ClassVar[str] = "nemorl.environments.terminal:TerminalFactory"
    needs_chat: ClassVar[bool] = True
    has_tools: ClassVar[bool] = True
    name: Literal["terminal"]
    folder_key: str = "folder"
    """Column of the dataset with the path of the task's folder."""
    max_turns: int = Field(16, ge=1)
    """Turns of the policy, after which the tests run."""
    command_seconds: float = Field(20.0, gt=0)
    """Time of the commands of a turn, and of those that prepare a task's files."""
    test_seconds: float = Field(40.0, gt=0)
    """Time of the tests; the limits that task folders set are not used."""
    max_result_characters: int = Field(8192, ge=200)
    """Characters of a command's output; what is longer loses its middle."""
    images: tuple[str, ...] = ("debian:*", "ubuntu:*", "python:*", "*/t-bench/*")
    """Patterns of the images whose place the sandbox with the machine's programs takes. Tasks with others
    are refused."""
    reward_key: str = "reward"
    """The reward among several in a `reward.json`."""
    sandbox: Annotated[TerminalSandboxConfig | CustomSandboxConfig, Variants(TerminalSandboxConfig)] = (
        TerminalSandboxConfig()
    )
    """Where commands and tests run, and their limits."""
    weight: float = 1.0
    """Weight of the reward `terminal` in the sum."""

    @check
    def _commands_end_in_time(self, cluster: ClusterConfig) -> Problems:
        deadline, longest = cluster.deadlines.environment, self.sandbox.wall_seconds
        if longest >= deadline:
            fix = f"cluster.deadlines.environment is {deadline:g}; lower it, or raise that"
            yield Problem("sandbox.wall_seconds", longest, fix)
        for field in ("command_seconds", "test_seconds"):
            if (seconds := getattr(self, field)) >= longest:
                fix = f"sandbox.wall_seconds is {longest:g}, which ends the sandbox; lower it, or raise that"
                yield Problem(field, seconds, fix)
