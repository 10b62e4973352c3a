"""This machine: its resources, and whether a run fits into them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemorl.config.algorithm import OfflineBase
from nemorl.config.experiment import Experiment, field_value
from nemorl.config.facts import models_of
from nemorl.errors import Problem, Problems

from .memory import MEMORY_PARTS, ON_HOST, ProcessMemory, buckets_bytes

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Gpu:
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


def read_machine() -> Machine:
    shared = Path("/dev/shm")
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # A container's limit is a huge number, or the word `max`, where there is none.
    limits = [
        Path(file).read_text(encoding="ascii").strip() for file in _CGROUP_LIMITS if Path(file).exists()
    ]
    query = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=min([physical, *(int(limit) for limit in limits if limit.isdecimal())]),
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.is_dir() else None,
        gpus=parse_gpus(nvidia_smi(*query)),
    )


def nvidia_smi(*options: str) -> str:
    """Output of the driver's own tool; empty where it is not installed or does not answer."""
    try:
        answer = subprocess.run(["nvidia-smi", *options], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def parse_gpus(listed: str) -> tuple[Gpu, ...]:
    """Lines such as `NVIDIA H100 80GB HBM3, 81559`, memory in MiB; unified-memory devices name no number."""
    rows = [line.rpartition(",") for line in listed.splitlines()]
    return tuple(Gpu(name.strip(), int(size) * 2**20) for name, _, size in rows if size.strip().isdecimal())


def is_this_machine(experiment: Experiment, machine: Machine) -> bool:
    """True unless the run is for a cluster (other than the job's nodes), or for GPUs and there are none."""
    here = bool(machine.nodes) or not _elsewhere(experiment)
    return here and bool(machine.gpus or not experiment.cluster.gpus_per_node)


def _elsewhere(experiment: Experiment) -> bool:
    return "RAY_ADDRESS" in os.environ or experiment.cluster.num_nodes > 1


def gpu_problems(experiment: Experiment, machine: Machine) -> Problems:
    """GPUs that a run on this machine requires and that it does not have."""
    required, available = experiment.cluster.gpus_per_node, len(machine.gpus)
    if required > available and not _elsewhere(experiment):
        fix = f"start the run on a machine with {required}, or set it to 0 to run on CPUs"
        yield Problem("cluster.gpus_per_node", required, f"this machine has {available or 'no'} GPUs; {fix}")


def memory_problems(experiment: Experiment, processes: Sequence[ProcessMemory], machine: Machine) -> Problems:
    """What does not fit into the memory of this machine, where the run is for this machine."""
    if not is_this_machine(experiment, machine):
        return
    if not machine.nodes:
        yield from _memory_dir_problems(experiment, processes)
    if not experiment.cluster.gpus_per_node:
        needed = sum(process.total * process.count for process in processes)
        if needed > machine.memory_bytes:
            have = f"the {machine.nodes} nodes of the job have" if machine.nodes > 1 else "this machine has"
            problem = f"all processes need about {_gigabytes(needed)}"
            yield _blamed(experiment, processes, problem, f"{have} {_gigabytes(machine.memory_bytes)}")
        return
    gpu = min(machine.gpus, key=lambda gpu: gpu.memory_bytes)
    room = f"the {gpu.name} has {_gigabytes(gpu.memory_bytes)}"
    for process in processes:
        if process.group not in ("driver", "rollout", "endpoint") and process.on_device > gpu.memory_bytes:
            problem = f"a {process.group} process needs about {_gigabytes(process.on_device)}"
            yield _blamed(experiment, (replace(process, count=1),), problem, room, on_device=True)
    # In a refit, and until the policy leaves, a GPU has what both keep, without what they compute with.
    colocated = experiment.generation.shares_devices
    kept = [p.between_steps for p in processes if p.group in ("policy", "generation")]
    if colocated and len(kept) > 1 and sum(kept) > gpu.memory_bytes:
        keeps = f"{_gigabytes(kept[0])} of the policy and {_gigabytes(kept[1])} of an engine"
        spread = "spread the policy over more processes (policy.layout)"
        fix = f"{spread}, raise generation.tensor_parallel_size, or set this to false"
        yield Problem("generation.colocated", True, f"in a refit a GPU keeps {keeps}, and {room}: {fix}")
    # While one of the models on the policy's devices computes, the others keep what they do not leave. Reward
    # models compute while something is sampled, while engines are awake.
    residents = {m.name: m for m in models_of(experiment) if m.name == "policy" or m.on_policy_devices}
    there = [process for process in processes if process.group in residents]
    if len(there) < 2:
        return
    engines = sum(p.on_device for p in processes if p.group == "generation") if colocated else 0
    stays: dict[str, int] = {}
    for process in there:
        offload = residents[process.group].config.offload
        weights = (process.weights + process.reference) * offload.weights
        training = (process.gradients + process.optimizer) * offload.optimizer
        stays[process.group] = process.between_steps - weights - training
    needs = {
        p.group: p.on_device + engines * residents[p.group].scores + sum(stays.values()) - stays[p.group]
        for p in there
    }
    most = max(needs, key=lambda group: needs[group])
    if needs[most] > gpu.memory_bytes:
        guests = [p.group for p in there if p.group != "policy"]
        guest = residents[most if most in guests else guests[0]].section
        holds = f"{_gigabytes(needs[most])}, with what the others keep there"
        leave = f"let them leave (policy.offload, {guest}.offload), spread them over more processes"
        fix = f"while the {most} computes, a GPU holds {holds}, and {room}: {leave}, or take `own` devices"
        yield Problem(f"{guest}.devices", "policy", fix)


def host_problems(experiment: Experiment, processes: Sequence[ProcessMemory], machine: Machine) -> Problems:
    """Offloaded activations for which a node with GPUs has no room, next to what else its processes keep."""
    if not (is_this_machine(experiment, machine) and experiment.cluster.gpus_per_node):
        return
    needed = activations = 0
    for process in processes:
        if process.activations_on_host:
            count = min(process.count, experiment.cluster.gpus_per_node)
            activations += count * process.activations_on_host
            needed += count * (process.runtime + process.total - process.on_device)
    offload = experiment.policy.offload_activations
    if offload is not None and needed > machine.memory_bytes:
        holds = f"the processes of a node keep {_gigabytes(needed)} in its memory"
        share = f"{_gigabytes(activations)} of that are offloaded activations"
        fix = "lower it, recompute more (policy.recompute), or lower policy.micro_batch_tokens"
        fix = f"{holds}, {share}, and it has {_gigabytes(machine.memory_bytes)}: {fix}"
        yield Problem("policy.offload_activations.layers", offload.layers, fix)


def _memory_dir_problems(experiment: Experiment, processes: Sequence[ProcessMemory]) -> Problems:
    """Checkpoints in memory for which the folder of this machine has no room."""
    checkpointing = experiment.checkpointing
    folder, needed = checkpointing.memory_dir, sum(p.checkpoints_in_memory * p.count for p in processes)
    if not needed:
        return
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        fix = "there is no such folder to write to: name one in memory (tmpfs)"
        yield Problem("checkpointing.memory_dir", str(folder), fix)
    elif needed > (free := shutil.disk_usage(folder).free):
        problem = f"the newest checkpoint and the next one need {_gigabytes(needed)} in {folder}"
        room = f"make room there, for example by a larger tmpfs (docker: --shm-size={needed // 10**9 + 1}g)"
        fix = f"{problem}, which has {_gigabytes(free)} free: {room}, or set this to null"
        yield Problem("checkpointing.memory_period", checkpointing.memory_period, fix)


def _blamed(
    experiment: Experiment,
    processes: Sequence[ProcessMemory],
    problem: str,
    room: str,
    *,
    on_device: bool = False,
) -> Problem:
    """The field that decides on the part that takes the most, and what to do about it.

    `problem` says how much all of `processes` need, of which that part is a share; `room` what there is.
    """
    sizes = {
        (process.group, part): getattr(process, part) * process.count
        for process in processes
        for part in MEMORY_PARTS
        if not (on_device and part in ON_HOST)
    }
    group, part = max(sizes, key=lambda key: sizes[key])
    process = next(process for process in processes if process.group == group)
    field, fix = _remedy(experiment, process, part)
    if field.endswith(".model_path"):  # a section without one has the policy's
        paths = {f"{model.section}.model_path": model.config.model_path for model in models_of(experiment)}
        value = str(paths[field])
    elif field == "policy.layout":
        value = experiment.policy.layout.name
    else:
        value = field_value(dict(experiment), field)
    of_whom = "" if on_device else f" of the {group} processes"
    share = f"{_gigabytes(sizes[group, part])} of that for the {part.replace('_', ' ')}{of_whom}"
    return Problem(field, value, f"{problem}, {share}, and {room}; {fix}")


def _remedy(experiment: Experiment, process: ProcessMemory, part: str) -> tuple[str, str]:
    group, generation, algorithm = process.group, experiment.generation, experiment.algorithm
    spec = next((model for model in models_of(experiment)[1:] if model.name == group), None)
    section = spec.section if spec else "policy"  # the policy's holds for fields that another leaves out
    smaller = "name a smaller model" if spec else "take a smaller model"
    spread = f"{smaller}, or spread it over more processes ({section}.layout)"
    fewer_replicas = ("generation.replicas", f"lower it, or {smaller}")
    batch = f"generation.{generation.batch_field}"
    match part, group:
        case "activations", _:
            given = spec and spec.config.micro_batch_tokens != experiment.policy.micro_batch_tokens
            return f"{section if given else 'policy'}.micro_batch_tokens", "lower it"
        case "checkpoints_in_memory", _:
            return "checkpointing.memory_period", "set it to null, which keeps none in memory"
        case "checkpoint", _:
            return "checkpointing.asynchronous", "set it to false, which keeps no copy of the training state"
        case (("optimizer" | "optimizer_on_host"), _) if spec:
            return f"{section}.model_path", f"{smaller}, or raise {section}.layout.data_parallel_size"
        case _ if spec:
            return f"{section}.model_path", spread
        case "reference", _ if isinstance(algorithm, OfflineBase):
            return "algorithm.reference", "set it to precomputed, which keeps none"
        case "reference", _ if algorithm.reference_field is not None:
            return algorithm.reference_field, "set it to 0, which keeps no reference"
        case (("optimizer" | "optimizer_on_host"), _):
            fix = f"raise policy.layout.data_parallel_size, or {smaller}"
            if part == "optimizer":
                fix = f"{fix}, or, on GPUs, set policy.optimizer.on_host to true"
            return "policy.model_path", fix
        case "logits", _:
            chunked = group == "policy" and generation.has_engines
            return "policy.logprob_chunk_tokens" if chunked else batch, "lower it"
        case "kv_cache", _:  # the smaller of two limits is the one that holds
            sequences = getattr(generation, "max_batch_size", 0) * experiment.policy.max_sequence_length
            by_batch = sequences < getattr(generation, "max_kv_tokens", 0)
            return batch if by_batch else f"generation.{generation.cache_field}", "lower it"
        case "staging", "policy":
            return "generation.bucket_megabytes", "lower it"
        case "staging_on_host", "policy":
            return "generation.delta", "set it to false, which keeps no copy of what was sent"
        case (("staging" | "staging_on_host"), _):
            buckets = buckets_bytes(generation, process.weights)
            if part == "staging" and generation.backend != "torch" and 2 * buckets > process.staging:
                return "generation.bucket_megabytes", "lower it"
            return fewer_replicas if generation.replicas > 1 else ("policy.model_path", smaller)
        case "runtime", _:
            fields = {
                "driver": ("cluster.object_store_megabytes", "lower it"),
                "policy": ("policy.layout", "take fewer processes"),
                "generation": ("generation.replicas", "start fewer"),
                "rollout": ("cluster.rollout_workers", "start fewer"),
            }
            return fields.get(group, ("policy.model_path", smaller))
    if group == "generation" and generation.replicas > 1:
        return fewer_replicas
    return "policy.model_path", spread


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
