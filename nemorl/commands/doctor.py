"""`nemorl doctor`: what is installed, what this machine offers, and what is missing for what."""

import platform
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.text import Text

from nemorl.commands.terminal import output, say, table
from nemorl.generation.vllm_engine.plan import vllm_version
from nemorl.megatron import kernels
from nemorl.plan.machine import Machine, read_machine

from .terminal import ExitCode

HELP = "list what is installed, what this machine has, and what is missing"


class State(Enum):
    """How much a finding matters."""

    GOOD = "good"
    OPTIONAL = "-"  # missing, and only some runs require it
    MISSING = "MISSING"  # the main job cannot run


@dataclass(frozen=True)
class Package:
    """A distribution that nemorl can use."""

    name: str
    use: str
    required: bool = False


PACKAGES = (
    Package("torch", "training and the embedded engine", required=True),
    Package("megatron-core", "policy workers", required=True),
    Package("ray", "processes over machines", required=True),
    Package("transformers", "tokenizers", required=True),
    Package("safetensors", "weights on disk", required=True),
    Package("math-verify", "the environment `math`", required=True),
    Package("reasoning-gym", "the environment and datasets `reasoning_gym`", required=True),
    Package("plotly", "report.html", required=True),
    Package("tensorboard", "logger.tensorboard (extra `trackers`)"),
    Package("gguf", "nemorl models fetch smollm2 (extra `smollm2`)"),
    Package("accelerate", "nemorl models fetch smollm2 (extra `smollm2`)"),
    Package("trl", "the comparison of `make bench` (extra `bench`)"),
)


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    what: str
    state: State
    found: str
    use: str


def add_arguments(parser: ArgumentParser) -> None:
    """The command's own arguments."""
    parser.add_argument("--brief", action="store_true", help="say only what is missing")
    parser.add_argument(
        "--gpus", type=int, default=0, metavar="N", help="fail where torch can use fewer than N GPUs"
    )


def run(arguments: Namespace) -> int:
    """0 when the main job can run here, and on as many GPUs as were asked for."""
    machine = read_machine()
    findings = [
        _python(),
        *map(_package, PACKAGES),
        _vllm(),
        *_hardware(machine),
        *_cuda(len(machine.gpus), arguments.gpus),
        *_kernels("cuda" if machine.gpus else "cpu"),
        _gloo(),
    ]
    if not arguments.brief:
        _print(findings)
    missing = [finding for finding in findings if finding.state is State.MISSING]
    named = (f"{finding.what} ({finding.found})" if arguments.brief else finding.what for finding in missing)
    say(f"not ready: {', '.join(named)}" if missing else "ready to train on this machine")
    return ExitCode.FAILED if missing else ExitCode.WELL


def _print(findings: list[Finding]) -> None:
    rows = table("", ["what", "state", "found", "for"])
    for finding in findings:
        cells = (finding.what, finding.state.value, finding.found, finding.use)
        rows.add_row(*map(Text, cells))
    output().print(rows, soft_wrap=False)


_OLDEST_PYTHON, _FIRST_UNTRIED_PYTHON = (3, 11), (3, 13)
_MIN_MEMORY_BYTES = 4_000_000_000  # for the quickstart
_MIN_DISK_BYTES = 2_000_000_000
_ROOMY_SHARED_MEMORY_BYTES = 512 * 2**20  # the default of cluster.object_store_megabytes


def _python() -> Finding:
    supported = _OLDEST_PYTHON <= sys.version_info[:2] < _FIRST_UNTRIED_PYTHON
    state = State.GOOD if supported else State.MISSING
    return Finding("python", state, platform.python_version(), "everything; 3.11 and 3.12 are supported")


def _package(package: Package) -> Finding:
    try:
        version = metadata.version(package.name)
    except metadata.PackageNotFoundError:
        state = State.MISSING if package.required else State.OPTIONAL
        return Finding(package.name, state, "not installed", package.use)
    return Finding(package.name, State.GOOD, version, package.use)


def _vllm() -> Finding:
    version, use = vllm_version(), "generation.backend: vllm (docs/vllm.md)"
    if version is not None:
        return Finding("vllm", State.GOOD, version, use)
    reason = "not installed: `make` installs it" if sys.platform == "linux" else "not installed: Linux only"
    return Finding("vllm", State.OPTIONAL, reason, use)


def _hardware(machine: Machine) -> Iterator[Finding]:
    yield Finding("CPU cores", State.GOOD, str(machine.cores), "everything")
    yield _space("memory", machine.memory_bytes, _MIN_MEMORY_BYTES, State.MISSING, "4 GB for the quickstart")
    shared, use = machine.shared_memory_bytes, "Ray's objects; with less than 0.5 GB it uses the disk"
    yield _space("/dev/shm", shared or 0, _ROOMY_SHARED_MEMORY_BYTES, State.OPTIONAL, use)
    disk = shutil.disk_usage(Path.cwd()).free
    yield _space("free disk here", disk, _MIN_DISK_BYTES, State.MISSING, "runs, checkpoints and models")
    names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)" for gpu in machine.gpus)
    state = State.GOOD if names else State.OPTIONAL
    yield Finding("NVIDIA GPUs", state, names or "none", "speed; everything runs without")


def _cuda(listed: int, required: int) -> Iterator[Finding]:
    """Whether torch can use the GPUs: a driver may list some, and be too old for the CUDA of this torch."""
    if not listed and not required:
        return
    use = "policy and engines on GPUs"
    try:
        import torch
    except ImportError as error:
        yield Finding("CUDA", State.MISSING, f"torch cannot be imported: {error}", use)
        return
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    built = f"torch for CUDA {torch.version.cuda}" if torch.version.cuda else "torch without CUDA"
    found = f"{built} can use {usable} of {max(listed, required)} GPUs"
    needed = required or (1 if torch.version.cuda else 0)
    state = State.MISSING if usable < needed else State.GOOD if usable else State.OPTIONAL
    yield Finding("CUDA", state, found, use)


def _space(what: str, there: int, required: int, otherwise: State, use: str) -> Finding:
    return Finding(what, State.GOOD if there >= required else otherwise, f"{there / 1e9:.1f} GB", use)


def _kernels(kind: Literal["cpu", "cuda"]) -> Iterator[Finding]:
    """What a bfloat16 policy of a common family would compute with here."""
    installed = kernels.Installed.find()
    chosen = kernels.choose("auto", kind=kind, precision="bfloat16", activation="silu", installed=installed)
    for what, found in chosen.described(installed, kind).items():
        state = State.OPTIONAL if "not found" in found else State.GOOD
        yield Finding(what, state, found, "policy workers; the fastest that is installed")


def _gloo() -> Finding:
    """Form a group of one process, as policy workers on a CPU do with more."""
    use = "policy workers on a CPU"
    try:
        import torch.distributed as dist
    except ImportError as error:
        return Finding("gloo", State.MISSING, f"torch cannot be imported: {error}", use)
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.barrier()
    except (RuntimeError, ValueError) as error:
        return Finding("gloo", State.MISSING, str(error), use)
    dist.destroy_process_group()
    return Finding("gloo", State.GOOD, "a process group forms", use)
