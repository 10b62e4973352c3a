"""`nemorl doctor`: what is installed, what this machine offers, and what is missing for what.

With a run folder: what became of the run, and what to look at first.
"""

import platform
import shutil
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path
from typing import Literal, cast

from rich.text import Text

from nemorl.config.base import counted
from nemorl.config.generation import GenerationBase, GenerationConfig
from nemorl.config.schema import names, variants
from nemorl.megatron import kernels
from nemorl.plan.machine import Machine, read_machine

from .terminal import Commands, ExitCode, add_command, output, say, table


class State(Enum):
    GOOD = "good"
    OPTIONAL = "-"  # missing, and only some runs require it
    MISSING = "MISSING"  # the main job cannot run


REQUIRED = {
    "torch": "training and the embedded engine",
    "megatron-core": "policy workers",
    "ray": "processes over machines",
    "transformers": "tokenizers",
    "safetensors": "weights on disk",
    "math-verify": "the environment `math`",
    "reasoning-gym": "the environment and datasets `reasoning_gym`",
    "plotly": "report.html",
}
OPTIONAL = {
    "tensorboard": "logger.trackers (extra `trackers`)",
    **dict.fromkeys(("gguf", "accelerate"), "nemorl models fetch smollm2 (extra `smollm2`)"),
    "trl": "the comparison of `make bench` (extra `bench`)",
}


@dataclass(frozen=True)
class Finding:
    what: str
    state: State
    found: str
    use: str


_OLDEST_PYTHON, _FIRST_UNTRIED_PYTHON = (3, 11), (3, 14)
_DEFAULT_OBJECT_STORE_BYTES = 512 * 2**20


def register(commands: Commands) -> None:
    help_text = (
        "report the installed packages, the hardware, and what is missing for training; or explain a run"
    )
    doctor = add_command(commands, "doctor", _doctor, help_text)
    run_help = (
        "run folder: report whether the run is healthy, hangs or ended, the probable cause and what to do"
    )
    doctor.add_argument("run_dir", nargs="?", type=Path, metavar="RUN_DIR", help=run_help)
    doctor.add_argument("--brief", action="store_true", help="print only what is missing")
    gpus_help = "fail unless torch can use at least N GPUs"
    doctor.add_argument("--gpus", type=int, default=0, metavar="N", help=gpus_help)


def _doctor(arguments: Namespace) -> int:
    if arguments.run_dir is not None:
        return _explain(arguments.run_dir)
    machine = read_machine()
    findings = [*_installed(), *_hardware(machine), *_cuda(len(machine.gpus), arguments.gpus)]
    findings += [*_kernels("cuda" if machine.gpus else "cpu"), _gloo(), _policy_worker()]
    if not arguments.brief:
        rows = table("", ["what", "state", "found", "for"])
        for finding in findings:
            rows.add_row(*map(Text, (finding.what, finding.state.value, finding.found, finding.use)))
        output().print(rows, soft_wrap=False)
        _print_uses("cuda" if machine.gpus else "cpu")
    missing = [finding for finding in findings if finding.state is State.MISSING]
    named = (f"{finding.what} ({finding.found})" if arguments.brief else finding.what for finding in missing)
    say(f"not ready: {', '.join(named)}" if missing else "ready to train on this machine")
    return ExitCode.FAILED if missing else ExitCode.WELL


def _explain(run_dir: Path) -> int:
    """Explain a run; fail if it has failed or hangs."""
    from nemorl.run.diagnosis import Condition, diagnose  # imports Ray

    found = diagnose(run_dir)
    lines = [f"{run_dir}: {found.condition.value}"]
    lines += [f"probable cause: {found.cause}"] * bool(found.cause)
    lines += [f"  - {fact}" for fact in found.facts]
    lines += ["next:", *(f"  {command}" for command in found.commands)] if found.commands else []
    say("\n".join(lines))
    fine = (Condition.COMPLETE, Condition.HEALTHY, Condition.STOPPED)
    return ExitCode.WELL if found.condition in fine else ExitCode.FAILED


def _installed() -> Iterator[Finding]:
    supported = _OLDEST_PYTHON <= sys.version_info[:2] < _FIRST_UNTRIED_PYTHON
    state, use = State.GOOD if supported else State.MISSING, "everything; 3.11 to 3.13 are supported"
    yield Finding("python", state, platform.python_version(), use)
    for package, use in (REQUIRED | OPTIONAL).items():
        try:
            state, found = State.GOOD, metadata.version(package)
        except metadata.PackageNotFoundError:
            state, found = State.MISSING if package in REQUIRED else State.OPTIONAL, "not installed"
        yield Finding(package, state, found, use)
    for engine in cast(tuple[type[GenerationBase], ...], variants(GenerationConfig)):
        if engine.package:
            version = import_module(engine.plan_module).installed_version()
            state, use = State.GOOD if version else State.OPTIONAL, f"generation.backend: {names(engine)[0]}"
            yield Finding(engine.package, state, version or "not installed", use)


def _hardware(machine: Machine) -> Iterator[Finding]:
    yield Finding("CPU cores", State.GOOD, str(machine.cores), "everything")
    shared, disk = machine.shared_memory_bytes or 0, shutil.disk_usage(Path.cwd()).free
    use = "Ray's objects; with less than 0.5 GB it uses the disk"
    for what, size, required, otherwise, what_for in (
        ("memory", machine.memory_bytes, 4_000_000_000, State.MISSING, "4 GB for the quickstart"),
        ("/dev/shm", shared, _DEFAULT_OBJECT_STORE_BYTES, State.OPTIONAL, use),
        ("free disk here", disk, 2_000_000_000, State.MISSING, "runs, checkpoints and models"),
    ):
        state = State.GOOD if size >= required else otherwise
        yield Finding(what, state, f"{size / 1e9:.1f} GB", what_for)
    names = ", ".join(f"{gpu.name} ({gpu.memory_bytes / 1e9:.0f} GB)" for gpu in machine.gpus)
    state = State.GOOD if names else State.OPTIONAL
    yield Finding("NVIDIA GPUs", state, names or "none", "speed; everything runs without")


def _cuda(listed: int, required: int) -> Iterator[Finding]:
    """Check what torch can use: a driver may list GPUs, and be too old for the CUDA of this torch."""
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
    needed = required or (1 if torch.version.cuda else 0)
    state = State.MISSING if usable < needed else State.GOOD if usable else State.OPTIONAL
    found = f"{built} can use {usable} of {max(listed, required)} GPUs"
    if required and torch.version.cuda is None:
        verb = "was" if required == 1 else "were"
        found = f"this torch build has no CUDA; {counted(required, 'GPU')} {verb} requested"
    yield Finding("CUDA", state, found, use)


def _kernels(kind: Literal["cpu", "cuda"]) -> Iterator[Finding]:
    """Kernels that a bfloat16 policy of a common family would use here."""
    installed = kernels.Installed.find()
    chosen = kernels.choose("auto", kind=kind, precision="bfloat16", activation="silu", installed=installed)
    for what, found in chosen.described(installed, kind).items():
        state = State.OPTIONAL if "not found" in found else State.GOOD
        yield Finding(what, state, found, "policy workers; the fastest that is installed")


def _print_uses(kind: Literal["cpu", "cuda"]) -> None:
    """Print every use of a kernel library; a CPU uses the fallbacks."""
    installed = kernels.Installed.find()
    lines = ["kernels of policy workers on GPUs:"]
    for use in kernels.USES:
        unused = ", not used on a CPU" if kind == "cpu" and use.library in installed else ""
        lines.append(f"  {use.what}: {use.kernel} ({installed.described(use.library)}{unused})")
        lines.append(f"    otherwise {use.fallback}")
        lines.append(f"    chosen in {use.chosen}, compared in {use.test}")
    output().print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def _gloo() -> Finding:
    state, found = State.GOOD, "a process group forms"
    try:
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        dist.barrier()
        dist.destroy_process_group()
    except ImportError as error:
        state, found = State.MISSING, f"torch cannot be imported: {error}"
    except (RuntimeError, ValueError) as error:
        state, found = State.MISSING, str(error)
    return Finding("gloo", state, found, "policy workers on a CPU")


def _policy_worker() -> Finding:
    """Import what a policy worker imports: Megatron also imports packages that it finds by chance."""
    state, found = State.GOOD, "can be imported"
    try:
        with warnings.catch_warnings(action="ignore"):
            import_module("nemorl.megatron.worker")
    except Exception as error:  # noqa: BLE001 - whatever is wrong with a package
        state, found = State.MISSING, f"cannot be imported: {type(error).__name__}: {error}"
    return Finding("policy worker", state, found, "training")
