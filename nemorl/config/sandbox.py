"""`sandbox`: where programs of a model run, and their limits (docs/sandbox.md)."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from .base import Config, Variants, function_at


class SandboxLimits(Config):
    """Limits of each program; docs/sandbox.md shows how each is enforced."""

    cpu_seconds: float = Field(5.0, gt=0)
    """Processor time of a program, its child processes included."""
    wall_seconds: float = Field(10.0, gt=0)
    """Time until a program is ended, for programs that wait. Set it well above `cpu_seconds`, since this time
    depends on the load of the machine."""
    memory_mib: int = Field(512, ge=32)
    """Memory of all processes of a program in MiB, and address space of each."""
    disk_mib: int = Field(64, ge=1)
    """Files that a program may write, in MiB. They are in memory and end with it."""
    output_kib: int = Field(256, ge=1)
    """Output of a program in KiB, for stdout and stderr each."""
    max_processes: int = Field(16, ge=1)
    """Processes and threads of a program at a time."""
    max_concurrent: int = Field(4, ge=1)
    """Programs that each rollout worker runs at a time; more wait."""
    python: Path | None = None
    """Interpreter of the programs; that of a virtual environment brings its packages. null: the interpreter
    of nemorl without its packages."""


class LocalSandboxConfig(SandboxLimits):
    """Programs run on the machine of the rollout worker, in Linux namespaces."""

    name: Literal["auto", "bubblewrap", "namespaces"] = "auto"
    """`bubblewrap`: isolated by the program `bwrap`. `namespaces`: without a program, as root or in user
    namespaces. `auto`: the first of these that isolates a probe on this machine."""
    programs: bool = False
    """Show the programs of the machine below /usr, read-only, and execute those that a program writes."""
    folders: tuple[Annotated[str, Field(pattern=r"^/[\w.-]+$")], ...] = ()
    """Further folders that a program may write, such as /app; they share the limits of /tmp."""


class CustomSandboxConfig(SandboxLimits):
    """A custom sandbox, for example of containers or on other machines (docs/sandbox.md)."""

    name: Literal["custom"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:Sandbox`, a class with the methods of `nemorl.environments.sandbox.Sandbox`. Its
    constructor takes this section, whose limits it enforces, and the options."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the factory."""

    def make_sandbox(self) -> Any:
        """Construct it with its options. Raises NotImported, and what the constructor raises."""
        return function_at(self.factory)(self, **self.options)


SandboxConfig = Annotated[LocalSandboxConfig | CustomSandboxConfig, Variants(LocalSandboxConfig)]
