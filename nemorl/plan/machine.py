"""This machine: its resources, and whether a run fits into them."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemorl.config.algorithm import OfflineBase
from nemorl.config.experiment import Experiment
from nemorl.config.facts import ModelSpec, models_of
from nemorl.config.policy import PolicyConfig
from nemorl.errors import Problem

from .memory import ON_HOST, ProcessMemory, buckets_bytes, memory_parts

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_NVIDIA_SMI_SECONDS = 20


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Machine:
    """Resources that this process may use."""

    cores: int
    memory_bytes: int
    shared_memory_bytes: int | None  # size of /dev/shm; None where there is none
    gpus: tuple[Gpu, ...]
    nodes: int = 0  # of the job that this describes; 0 for this machine
    same_packages: bool = True  # that are installed here; an image has its own

    @property
    def has(self) -> str:
        """For messages."""
        return f"the {self.nodes} nodes of the job have" if self.nodes > 1 else "this machine has"


def read_machine() -> Machine:
    """The machine this runs on, within the limits of its container."""
    shared = Path("/dev/shm")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory_bytes(),
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.is_dir() else None,
        gpus=_gpus(),
    )


def _memory_bytes() -> int:
    """A container's limit is a huge number, or the word `max`, where there is none."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = [Path(file).read_text(encoding="ascii").strip() for file in _CGROUP_LIMITS if Path(file).exists()]
    return min([physical, *(int(text) for text in texts if text.isdecimal())])


def _gpus() -> tuple[Gpu, ...]:
    """As the driver's own tool lists them; none where it is not installed or does not answer."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    if answer.returncode != 0:
        return ()
    return parse_gpus(answer.stdout)


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Lines such as `NVIDIA H100 80GB HBM3, 81559`, memory in MiB; unified-memory devices name no number."""
    gpus = []
    for line in listed.splitlines():
        name, _, mebibytes = line.rpartition(",")
        if mebibytes.strip().isdecimal():
            gpus.append(Gpu(name.strip(), int(mebibytes) * 2**20))
    return tuple(gpus)


_MODEL = "policy.model_path"
_SMALLER = "take a smaller model"
_ON_CPUS = ("driver", "rollout", "endpoint")
_SPREAD = f"{_SMALLER}, or spread it over more processes (policy.layout)"
_MORE_COPIES = f"raise policy.layout.data_parallel_size, or {_SMALLER}"


def is_this_machine(experiment: Experiment, machine: Machine) -> bool:
    """True if the run is for this machine: neither for a cluster, nor for GPUs where it has none.

    The nodes of a job count as this machine.
    """
    return bool(machine.nodes or not _elsewhere(experiment)) and bool(
        machine.gpus or not experiment.cluster.gpus_per_node
    )


def _elsewhere(experiment: Experiment) -> bool:
    return "RAY_ADDRESS" in os.environ or experiment.cluster.num_nodes > 1


def gpu_problems(experiment: Experiment, machine: Machine) -> Iterator[Problem]:
    """GPUs that a run on this machine requires and that it does not have."""
    required, available = experiment.cluster.gpus_per_node, len(machine.gpus)
    if required > available and not _elsewhere(experiment):
        has = f"this machine has {available} GPUs" if available else "this machine has no GPUs"
        fix = f"{has}; start the run on a machine with {required}, or set it to 0 to run on CPUs"
        yield Problem("cluster.gpus_per_node", required, fix)


def memory_problems(
    experiment: Experiment, processes: Sequence[ProcessMemory], machine: Machine
) -> Iterator[Problem]:
    """What does not fit into the memory of this machine, where the run is for this machine."""
    if not is_this_machine(experiment, machine):
        return
    if experiment.cluster.gpus_per_node:
        yield from _gpu_problems(experiment, processes, machine)
        return
    needed = sum(process.total * process.count for process in processes)
    if needed > machine.memory_bytes:
        problem = f"all processes need about {_gigabytes(needed)}, and {machine.has} "
        yield _blamed(experiment, processes, problem + _gigabytes(machine.memory_bytes))


def _gpu_problems(
    experiment: Experiment, processes: Sequence[ProcessMemory], machine: Machine
) -> Iterator[Problem]:
    smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes)
    for process in processes:
        if process.group not in _ON_CPUS and process.on_device > smallest.memory_bytes:
            problem = (
                f"a {process.group} process needs about {_gigabytes(process.on_device)}, and the "
                f"{smallest.name} has {_gigabytes(smallest.memory_bytes)}"
            )
            yield _blamed(experiment, (process,), problem, on_device=True)
    if experiment.generation.shares_devices:
        yield from _sharing_problems(processes, smallest)
    yield from _turn_problems(experiment, processes, smallest)


def _turn_problems(experiment: Experiment, processes: Sequence[ProcessMemory], gpu: Gpu) -> Iterator[Problem]:
    """While one of the models on the policy's devices computes, the others keep what they do not leave.

    Reward models compute while something is sampled, while engines are awake.
    """
    residents = {m.name: m for m in models_of(experiment) if m.name == "policy" or m.on_policy_devices}
    there = [process for process in processes if process.group in residents]
    if len(there) < 2:
        return
    kept = {process.group: _kept_aside(process, residents[process.group].config) for process in there}
    engines = [p for p in processes if p.group == "generation" and experiment.generation.shares_devices]
    awake = {p.group: sum(e.on_device for e in engines) for p in there if residents[p.group].scores}
    needs = {p.group: p.on_device + awake.get(p.group, 0) + sum(kept.values()) - kept[p.group] for p in there}
    most = max(needs, key=lambda group: needs[group])
    if needs[most] > gpu.memory_bytes:
        guests = [p.group for p in there if p.group != "policy"]
        guest = residents[most if most in guests else guests[0]].section
        yield Problem(
            f"{guest}.devices",
            "policy",
            f"while the {most} computes, a GPU holds {_gigabytes(needs[most])} of it and of what the others "
            f"keep there, and the {gpu.name} has {_gigabytes(gpu.memory_bytes)}: let them leave "
            f"(policy.offload, {guest}.offload), spread them over more processes, or take `own` devices",
        )


def _kept_aside(process: ProcessMemory, config: PolicyConfig) -> int:
    """What a model keeps on its device while others compute there."""
    working = process.activations + process.logits + process.kv_cache
    weights = (process.weights + process.reference) * config.offload.weights
    training = (process.gradients + process.optimizer) * config.offload.optimizer
    return process.on_device - working - weights - training


def _sharing_problems(processes: Sequence[ProcessMemory], gpu: Gpu) -> Iterator[Problem]:
    """In a refit, and until the policy leaves, a GPU has what both keep, without what they compute with."""
    kept = [
        process.on_device - process.activations - process.logits - process.kv_cache
        for process in processes
        if process.group in ("policy", "generation")
    ]
    if len(kept) > 1 and sum(kept) > gpu.memory_bytes:
        yield Problem(
            "generation.colocated",
            True,
            f"in a refit a GPU keeps {_gigabytes(kept[0])} of the policy and {_gigabytes(kept[1])} of an "
            f"engine, and the {gpu.name} has {_gigabytes(gpu.memory_bytes)}: spread the policy over more "
            "processes (policy.layout), raise generation.tensor_parallel_size, or set this to false",
        )


def _blamed(
    experiment: Experiment, processes: Sequence[ProcessMemory], problem: str, *, on_device: bool = False
) -> Problem:
    """The field that decides on the part that takes the most, and what to do about it."""
    sizes = {
        (process.group, part): getattr(process, part) * process.count
        for process in processes
        for part in memory_parts()
        if not (on_device and part in ON_HOST)
    }
    group, part = max(sizes, key=lambda key: sizes[key])
    process = next(process for process in processes if process.group == group)
    field, fix = _remedy(experiment, process, part)
    name, size = part.replace("_", " "), _gigabytes(sizes[group, part])
    fix = f"{problem}: {size} of it are for the {name} of the {group} processes; {fix}"
    return Problem(field, _value(experiment, field), fix)


def _remedy(experiment: Experiment, process: ProcessMemory, part: str) -> tuple[str, str]:
    """Field and fix for a part of a process."""
    group = process.group
    auxiliary = {model.name: model for model in models_of(experiment)[1:]}
    if group in auxiliary:
        return _auxiliary_remedy(experiment, auxiliary[group], part)
    match part, group:
        case "activations", _:
            return "policy.micro_batch_tokens", "lower it"
        case "reference", _ if isinstance(experiment.algorithm, OfflineBase):
            return "algorithm.reference", "set it to precomputed, which keeps none"
        case "reference", _ if experiment.algorithm.reference_field is not None:
            return experiment.algorithm.reference_field, "set it to 0, which keeps no reference"
        case "checkpoint", _:
            return "checkpointing.asynchronous", "set it to false, which keeps no copy of the training state"
        case "optimizer", _:
            return _MODEL, f"{_MORE_COPIES}, or, on GPUs, set policy.optimizer.on_host to true"
        case "optimizer_on_host", _:
            return _MODEL, _MORE_COPIES
        case "logits", "policy" if not experiment.generation.samples_in_policy:
            return "policy.logprob_chunk_tokens", "lower it"
        case "logits", _:
            return _batch_size(experiment), "lower it"
        case "kv_cache", _:
            return _cache_size(experiment), "lower it"
        case (("staging" | "staging_on_host"), _):
            return _staging_size(experiment, process, part)
        case "runtime", _:
            return _number_of(group)
    if group == "generation" and experiment.generation.replicas > 1:
        return "generation.replicas", f"lower it, or {_SMALLER}"
    return _MODEL, _SPREAD


def _auxiliary_remedy(experiment: Experiment, spec: ModelSpec, part: str) -> tuple[str, str]:
    """Of an auxiliary model; the policy's section holds for fields that its own leaves out."""
    group, model = spec.section, f"{spec.section}.model_path"
    match part:
        case "activations":
            given = spec.config.micro_batch_tokens != experiment.policy.micro_batch_tokens
            return f"{group if given else 'policy'}.micro_batch_tokens", "lower it"
        case "checkpoint":
            return "checkpointing.asynchronous", "set it to false, which keeps no copy of the training state"
        case "optimizer" | "optimizer_on_host":
            return model, f"name a smaller model, or raise {group}.layout.data_parallel_size"
    return model, f"name a smaller model, or spread it over more processes ({group}.layout)"


def _batch_size(experiment: Experiment) -> str:
    return f"generation.{experiment.generation.batch_field}"


def _cache_size(experiment: Experiment) -> str:
    """The smaller of two limits is the one that holds."""
    generation = experiment.generation
    sequences = getattr(generation, "max_batch_size", 0) * experiment.policy.max_sequence_length
    by_batch = sequences < getattr(generation, "max_kv_tokens", 0)
    return _batch_size(experiment) if by_batch else f"generation.{generation.cache_field}"


def _staging_size(experiment: Experiment, process: ProcessMemory, part: str) -> tuple[str, str]:
    generation = experiment.generation
    if process.group == "policy":
        if part == "staging":
            return "generation.bucket_megabytes", "lower it"
        return "generation.delta", "set it to false, which keeps no copy of what was sent"
    buckets = buckets_bytes(generation, process.weights)
    if part == "staging" and generation.backend != "torch" and 2 * buckets > process.staging:
        return "generation.bucket_megabytes", "lower it"
    if generation.replicas > 1:
        return "generation.replicas", f"lower it, or {_SMALLER}"
    return _MODEL, _SMALLER


def _number_of(group: str) -> tuple[str, str]:
    """Which field has that many processes started."""
    fields = {
        "driver": ("cluster.object_store_megabytes", "lower it"),
        "policy": ("policy.layout", "take fewer processes"),
        "generation": ("generation.replicas", "start fewer"),
        "rollout": ("cluster.rollout_workers", "start fewer"),
    }
    return fields.get(group, (_MODEL, _SMALLER))


def _value(experiment: Experiment, field: str) -> object:
    """As people know it: a path as a text, the layout by its axes."""
    if field == "policy.layout":
        return experiment.policy.layout.name
    value: object = experiment
    for step in field.split("."):
        value = value.get(step) if isinstance(value, dict) else getattr(value, step, None)
    if value is None and field.endswith(".model_path"):
        value = experiment.policy.model_path
    return str(value) if field.endswith(".model_path") else value


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
