"""Rehearse ranks in processes of their own, and compare them with the memory plan.

The model folder of a rehearsal has a real config.json and weights that take no room: files with headers and
holes. `KNOWN_WAITS` lists where the host may wait for the device; any other wait is a fault.
"""

import json
import math
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from nemorl.config.experiment import Experiment
from nemorl.models.eagle3 import D2T
from nemorl.models.eagle3_shape import head_shape
from nemorl.models.hf_config import INDEX_FILE, read_json_object
from nemorl.models.layout import hf_tensors
from nemorl.models.registry import load_shape, model_config, policy_shape
from nemorl.models.shape import ModelShape
from nemorl.plan.memory import ProcessMemory, stage_memory

from .execution import Event
from .worker import RankReport, rehearse

_ITEM_BYTES = 2  # of bfloat16
_FILE_BYTES = 5 * 10**9  # of weights in a file, as usual; readers map files whole


def write_hollow_model(folder: Path, config: Mapping[str, Any], shape: ModelShape) -> None:
    """Write safetensors of the model's size in which every weight reads as 0; `config` is its config.json."""
    _write_hollow(folder, config, hf_tensors(shape))


def _write_hollow(folder: Path, config: Mapping[str, Any], tensors_of: Mapping[str, tuple[int, ...]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    files: dict[str, str] = {}
    total = 0
    for number, tensors in enumerate(_parts(tensors_of)):
        name = f"model-{number:05}.safetensors"
        header: dict[str, object] = {}
        offset = 0
        for tensor, extents in tensors.items():
            end = offset + math.prod(extents) * _ITEM_BYTES
            header[tensor] = {"dtype": "BF16", "shape": list(extents), "data_offsets": [offset, end]}
            files[tensor], offset = name, end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + offset)  # what is not written takes no blocks
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")


def _parts(tensors: Mapping[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, extents in tensors.items():
        num_bytes = math.prod(extents) * _ITEM_BYTES
        if part and size + num_bytes > _FILE_BYTES:
            yield part
            part, size = {}, 0
        part[name] = extents
        size += num_bytes
    if part:
        yield part


@contextmanager
def hollow(experiment: Experiment) -> Iterator[Experiment]:
    """The experiment with a hollow model, whose folder exists meanwhile; its own needs a config.json only."""
    source = experiment.policy.model_path
    with tempfile.TemporaryDirectory(prefix="nemorl-rehearsal-") as folder:
        model = Path(folder) / "model"
        trains = experiment.policy.multi_token_prediction is not None
        with_mtp = trains or experiment.generation.drafts_by_mtp
        write_hollow_model(model, model_config(source), load_shape(source, with_mtp=with_mtp))
        policy = experiment.policy.model_copy(update={"model_path": model})
        if policy.draft is not None and (source_of_head := policy.draft.model_path) is not None:
            of_head = head_shape(load_shape(source), policy.draft.layers, source_of_head)
            # Zeros in d2t name the first tokens of the model.
            tensors = of_head.tensors() | {D2T: (of_head.draft_vocab_size,)}
            head = Path(folder) / "head"
            _write_hollow(head, read_json_object(source_of_head / "config.json"), tensors)
            draft = policy.draft.model_copy(update={"model_path": head})
            policy = policy.model_copy(update={"draft": draft})
        cluster = experiment.cluster
        if not cluster.gpus_per_node:
            cluster = cluster.model_copy(update={"gpus_per_node": 1})
        yield experiment.model_copy(update={"policy": policy, "cluster": cluster})


def rehearse_all(
    experiment: Experiment, ranks: Sequence[int | None], processes: int = 1
) -> Iterator[RankReport]:
    """The reports of these ranks of the policy, in their order; None means an engine.

    The folder of the model needs a config.json only.
    """
    # Of the processes: one thread each, nothing compiled, no warnings of libraries that are not installed.
    for name, value in (("OMP_NUM_THREADS", "1"), ("TORCHDYNAMO_DISABLE", "1"), ("PYTHONWARNINGS", "ignore")):
        os.environ.setdefault(name, value)
    context = get_context("forkserver")
    context.set_forkserver_preload([rehearse.__module__])  # whose imports take most of the time
    with (
        hollow(experiment) as placed,
        ProcessPoolExecutor(processes, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        yield from pool.map(rehearse, [placed] * len(ranks), ranks)


# Parts that a policy holds from its start to its end.
RESIDENT = ("weights", "gradients", "optimizer", "reference")
# Parts of the plan in each phase, besides these.
_PHASES = {
    "build": (),
    "load": (),
    "logprobs": ("activations", "logits"),
    "values": ("activations",),
    "train": ("activations", "logits", "head_gradient"),
    "refit": ("staging",),
    "offload": (),
    "onload": (),
    "decode": ("kv_cache", "logits"),
}


@dataclass(frozen=True)
class KnownWait:
    """A function in which the host waits for the device, and why."""

    file: str
    function: str
    reason: str

    def covers(self, event: Event) -> bool:
        return any(
            self.file in place.partition(":")[0] and place.endswith(f"({self.function})")
            for place in (event.location, event.called_from)
        )


_P2P = "megatron/core/pipeline_parallel/p2p_communication.py"
KNOWN_WAITS = (
    # Within micro-batches
    KnownWait(_P2P, "_communicate_shapes", "stages exchange the lengths of micro-batches"),
    KnownWait(_P2P, "_communicate", "Megatron waits for each exchange between pipeline stages"),
    KnownWait("moe/token_dispatcher.py", "_maybe_dtoh_and_synchronize", "sizes of the exchange of tokens"),
    KnownWait("moe/moe_utils.py", "permute", "tokens by expert; Transformer Engine's kernel has no wait"),
    # Once in a call
    KnownWait("optimizer/clip_grads.py", "get_grad_norm_fp32", "the gradient norm, which guards judge"),
    KnownWait("megatron/schedule.py", "lay_out", "logprobs of a batch stay on the host"),
    KnownWait("megatron/schedule.py", "_over_data_parallel", "metrics"),
    KnownWait("megatron/schedule.py", "run_loss", "metrics of the last pipeline stage"),
    KnownWait("megatron/schedule.py", "sum_over_data_parallel", "metrics"),
    KnownWait("megatron/schedule.py", "over_data_parallel", "values of all tokens of an update"),
    KnownWait("megatron/schedule.py", "of_first_rank", "the decision of the guards"),
    KnownWait("megatron/schedule.py", "logprob_gap", "metrics"),
    KnownWait("megatron/moe.py", "begin_step", "the numbers of sequences and tokens of a step"),
    KnownWait("megatron/moe.py", "end_step", "metrics of the experts"),
    # Of a head for drafts, once for each micro-batch before all passes, or once in a call
    KnownWait("megatron/draft.py", "_predicted", "the tokens that drafts are trained to predict"),
    KnownWait("megatron/draft.py", "_inputs_of", "the sequences of a micro-batch"),
    KnownWait("megatron/draft.py", "_update", "the gradient norm of the head for drafts"),
    KnownWait("megatron/draft.py", "end", "metrics"),
    # On the way to an engine, and in it
    KnownWait("weights/shared_memory.py", "synchronize", "a bucket is complete before the other side reads"),
    KnownWait("weights/messages.py", "read_fingerprints", "fingerprints, all at once"),
    KnownWait("megatron/device.py", "finish_copies", "what was copied to the host, before it is freed"),
    KnownWait("generation/sampling.py", "read", "sampled tokens, one copy for a step"),
    KnownWait("megatron/decode.py", "follow", "orders of the rank that leads a copy"),
    KnownWait("megatron/decode.py", "agree", "copies that share experts run the model together"),
    KnownWait("megatron/decode.py", "experts", "the experts that a completion names"),
)


def known_wait(event: Event) -> KnownWait | None:
    return next((known for known in KNOWN_WAITS if known.covers(event)), None)


def faults(report: RankReport) -> list[tuple[Event, int]]:
    """Operators with tensors of several devices, and waits that no entry of `KNOWN_WAITS` explains."""
    unexpected = [(event, count) for event, count in report.synchronizations if known_wait(event) is None]
    return report.wrong_devices + unexpected


@dataclass(frozen=True)
class Comparison:
    """The highest peak of a rank, next to the plan of the same phase. Bytes of the device."""

    rank: int
    stage: int
    phase: str
    location: str
    measured: int
    planned: int
    parts: dict[str, tuple[int, int]]  # measured and planned

    @property
    def difference(self) -> float:
        """By how much the plan exceeds what was measured, as a share of this."""
        return self.planned / self.measured - 1


def compare(report: RankReport, experiment: Experiment, phase: str | None = None) -> Comparison:
    """Compare a rank of the policy with the plan, in its highest phase or in a given one."""
    policy = experiment.policy
    plan = stage_memory(experiment, policy_shape(policy), report.stage)
    if phase is None:
        phase, peak = report.peak
    else:
        peak = report.peaks[phase]
    planned = planned_parts(plan, phase)
    names = dict.fromkeys((*planned, *peak.parts))
    parts = {name: (peak.parts.get(name, 0), planned.get(name, 0)) for name in names}
    if "head_gradient" in parts:  # both are the head's, which measures them as one
        of_head = parts.pop("head_gradient")
        parts["logits"] = (parts["logits"][0], parts["logits"][1] + of_head[1])
    return Comparison(
        *(report.rank, report.stage, phase, peak.location),
        measured=peak.num_bytes,
        planned=sum(planned.values()),
        parts={name: sizes for name, sizes in parts.items() if any(sizes)},
    )


def planned_parts(plan: ProcessMemory, phase: str) -> dict[str, int]:
    """Bytes that a rank holds in a phase of a rehearsal, by part of the plan."""
    return {name: getattr(plan, name) for name in (*RESIDENT, *_PHASES[phase])}


def as_json(reports: Sequence[RankReport], experiment: Experiment) -> list[dict[str, Any]]:
    return [
        {
            "rank": report.rank,
            "stage": report.stage,
            "header": report.header,
            "plan": asdict(comparison := compare(report, experiment)) | {"difference": comparison.difference},
            "peaks": {phase: asdict(peak) for phase, peak in report.peaks.items()},
            "left_on_device_after_offload": report.left,
            "activations_on_host": report.activations_on_host,
            "faults": _listed(faults(report)),
            "waits": _listed(report.synchronizations),
            "copies_from_pageable_memory": _listed(report.uploads),
            "seconds": {phase: round(seconds, 2) for phase, seconds in report.seconds.items()},
        }
        for report in reports
    ]


def _listed(events: Sequence[tuple[Event, int]]) -> list[dict[str, Any]]:
    return [
        asdict(event) | {"count": count, "reason": known.reason if (known := known_wait(event)) else ""}
        for event, count in events
    ]
