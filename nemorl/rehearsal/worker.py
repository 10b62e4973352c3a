"""One rank of a policy, or an engine, from its start to its refit, on the pretended accelerator.

build ─▶ load ─▶ logprobs ─▶ train ─▶ refit ─▶ offload ─▶ decode ─▶ onload

The classes are those of a run, and so are their calls; what the other ranks would send is in `Others`. Run it
in a process of its own: `nemorl.rehearsal.accelerator` changes torch for good.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nemorl.algorithms.pair_losses import StepLoss
from nemorl.algorithms.policy_losses import PolicyLoss
from nemorl.config.algorithm import OnlineConfig
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.experiment import Experiment
from nemorl.config.generation import BatchingConfig, MegatronGenerationConfig, TorchGenerationConfig
from nemorl.config.policy import LayoutConfig, PolicyConfig
from nemorl.data.losses import Loss
from nemorl.data.packed import PackedBatch
from nemorl.generation.batching import BatchingEngine
from nemorl.generation.tokens import RequestLimits
from nemorl.generation.torch_engine.engine import ModelRunner
from nemorl.generation.types import GenerationRequest, SamplingParams
from nemorl.megatron.decode import (
    CopyOrders,
    CopyState,
    LeadingRunner,
    Order,
    decoded_prompts,
    decoded_step,
)
from nemorl.megatron.device import DTYPES
from nemorl.megatron.kernels import TRITON, Installed
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.kv_cache import KVCache, Runner
from nemorl.models.layout import policy_rank
from nemorl.models.registry import load_shape, policy_shape
from nemorl.models.shape import ModelShape
from nemorl.weights import endpoints
from nemorl.weights.endpoints import WeightReceiver, WeightSender
from nemorl.weights.messages import Part, ReceiverLayout, RefitSession, SenderLayout, SendingChannel
from nemorl.weights.plan import plan_transfers
from nemorl.weights.shared_memory import DeviceSlots

from .execution import Event, Execution, Kernel
from .memory import Peak

T = TypeVar("T")
_NEW_TOKENS = 4  # that are sampled of each request
_METRICS = b"[{}, {}]"  # of a loss, as the last stage would send them


@dataclass
class RankReport:
    """What one rank did. Sizes are bytes of the device."""

    rank: int
    stage: int
    header: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # that the rehearsal took, by phase
    peaks: dict[str, Peak] = field(default_factory=dict)  # by phase
    left: int = 0  # allocated on the device after `offload`
    activations_on_host: int = 0  # pinned memory that offloaded activations took
    # With how often
    synchronizations: list[tuple[Event, int]] = field(default_factory=list)
    wrong_devices: list[tuple[Event, int]] = field(default_factory=list)
    uploads: list[tuple[Event, int]] = field(default_factory=list)  # from memory that is not pinned
    kernels: list[tuple[Kernel, int]] = field(default_factory=list)

    @property
    def peak(self) -> tuple[str, Peak]:
        """The phase with the highest peak, and this."""
        return max(self.peaks.items(), key=lambda item: item[1].num_bytes)


@dataclass(frozen=True)
class Load:
    """Sequences of one optimizer step on one rank, each as long as possible."""

    lengths: list[int]
    micro_batches: list[list[int]]

    @classmethod
    def of(cls, experiment: Experiment, stage: int) -> "Load":
        """As many micro-batches as a stage has in flight, or as the step has.

        All of the step where stages keep the states of all for a head for drafts.
        """
        policy, layout = experiment.policy, experiment.policy.layout
        longest = policy.max_sequence_length
        sequences = -(-max(1, experiment.algorithm.sequences_per_update) // layout.data_parallel_size)
        together = max(1, min(policy.micro_batch_tokens // longest, sequences))
        stages, chunks = layout.pipeline_parallel_size, layout.virtual_pipeline_parallel_size
        in_flight = stages - stage if chunks == 1 else 2 * stages
        number = max(1, min(-(-sequences // together), in_flight))
        if policy.draft is not None and stages > 1:
            number = -(-sequences // together)
        if chunks > 1:  # which the interleaved schedule requires
            number = max(number, stages)
        order = range(number * together)
        batches = [list(order[first : first + together]) for first in range(0, len(order), together)]
        return cls([longest] * len(order), batches)

    def batch(self, vocab_size: int) -> PackedBatch:
        n, lengths = sum(self.lengths), self.lengths
        places = torch.cat([torch.arange(length) for length in lengths])
        tokens = torch.arange(n) % vocab_size
        tokens[places == 0] = torch.arange(len(lengths)) % vocab_size  # so that no tokens are shared
        return PackedBatch(
            tokens=tokens,
            cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            position_ids=places,
            loss_mask=places > 0,
            weights=torch.full((n,), 1 / n),
            advantages=torch.ones(n),
            logprobs=-torch.ones(n),
            labels=torch.ones(n),
        )


class PolicyRehearsal:
    def __init__(self, execution: Execution, experiment: Experiment, rank: int) -> None:
        self._execution, self._experiment, self._rank = execution, experiment, rank
        self._policy: PolicyConfig = experiment.policy
        self._shape: ModelShape = policy_shape(self._policy)
        self._layout = self._policy.layout
        self._place = policy_rank(self._layout, rank)
        self._is_last = self._place.pp_rank == self._layout.pipeline_parallel_size - 1
        self.report = RankReport(rank, self._place.pp_rank)

    def run(self) -> RankReport:
        worker = self._build()
        with self._phase("load"):
            worker.load_hf(self._policy.model_path)
        self._label(worker)
        load = Load.of(self._experiment, self._place.pp_rank)
        worker.load_batch(load.batch(self._shape.vocab_size))
        self._execution.others.hidden_shape = self._hidden_shape(load)
        chunks = self._layout.virtual_pipeline_parallel_size
        some = load.micro_batches[: self._layout.pipeline_parallel_size if chunks > 1 else 1]
        if self._policy.head == "scalar":
            with self._phase("values"):
                worker.compute_values(some)
        else:
            with self._phase("logprobs"):
                worker.compute_logprobs(some, old=True, reference=self._keeps_reference)
        with self._phase("train"):
            # The head for drafts has its optimizer's moments from the second step on.
            for _ in range(1 if self._policy.draft is None else 2):
                self._train(worker, load)
        if worker.activations is not None:
            self.report.activations_on_host = worker.activations.buffers.num_bytes
        if self._experiment.generation.takes_weights:
            with self._phase("refit"):
                send(worker.sender, self._bucket_bytes)
        offload, generation = self._policy.offload, self._experiment.generation
        leaves = offload.weights or offload.optimizer
        if leaves:
            with self._phase("offload"):
                worker.offload()
            self.report.left = self._execution.memory.total
        if isinstance(generation, MegatronGenerationConfig):
            with self._phase("decode"):
                self._decode(worker, generation)
        if leaves:
            with self._phase("onload"):
                worker.onload()
        return self.report

    def _train(self, worker: PolicyWorker, load: Load) -> None:
        if not self._is_last:
            text = torch.frombuffer(bytearray(_METRICS), dtype=torch.uint8)
            self._execution.others.broadcasts.extend([torch.tensor([len(text)]), text])
        worker.train(load.micro_batches, self._loss())

    def _build(self) -> PolicyWorker:
        with self._phase("build"):
            worker = PolicyWorker(
                self._policy,
                rank=self._rank,
                world_size=self._layout.world_size,
                rendezvous="pretended",
                device="cuda",
                threads=None,
                temperature=1.0,
                keep_reference=self._keeps_reference,
                deadline_seconds=60.0,
            )
        self.report.header = worker.header()
        return worker

    @property
    def _keeps_reference(self) -> bool:
        return self._experiment.algorithm.keeps_reference and self._experiment.reference is None

    @property
    def _bucket_bytes(self) -> int:
        return self._experiment.generation.bucket_megabytes * 2**20

    def _loss(self) -> Loss:
        """The policy's, or one whose memory differs little from that of its algorithm's."""
        algorithm = self._experiment.algorithm
        if self._policy.head == "scalar":
            return StepLoss()
        if isinstance(algorithm, OnlineConfig):
            return PolicyLoss(algorithm.loss, algorithm.kl, algorithm.correction)
        return PolicyLoss(ClipLossConfig())

    def _label(self, worker: PolicyWorker) -> None:
        """Name what a worker keeps by the parts of the memory plan."""
        memory = self._execution.memory
        buffers = [b for chunk in worker._chunks for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        modules = [chunk.module for chunk in worker._chunks]
        memory.label("gradients", (b.grad_data for b in buffers))
        memory.label("optimizer", worker.optimizer.device_tensors())
        memory.label("reference", getattr(worker._reference, "tensors", list)())
        memory.label("weights", (b.param_data for b in buffers if b.param_data is not None))
        memory.label("weights", chain(*(m.parameters() for m in modules), *(m.buffers() for m in modules)))
        if worker._draft is not None:
            memory.label("weights", worker._draft.tensors())

    def _hidden_shape(self, load: Load) -> tuple[int, int, int]:
        """Of the hidden states of a micro-batch between stages: all micro-batches are equal."""
        layout = self._layout
        shares = layout.tensor_parallel_size if layout.sequence_parallel else 1
        chunks = 2 * layout.context_parallel_size if layout.context_parallel_size > 1 else 1
        longest = self._policy.max_sequence_length
        tokens = len(load.micro_batches[0]) * -(-longest // chunks) * chunks // layout.context_parallel_size
        multiple = np.lcm(shares, 2 if chunks > 1 else 1)
        return int(-(-tokens // multiple) * multiple) // shares, 1, self._shape.hidden_size

    def _decode(self, worker: PolicyWorker, generation: MegatronGenerationConfig) -> None:
        copy = worker.decoding_copy(generation.max_kv_tokens)
        if self._is_last:
            self._sample(copy, generation, worker.device)
        else:
            leader = _RecordedCopy(copy.cache, self._shape.vocab_size)
            self._sample(leader, generation, torch.device("cpu"))
            for order, numbers in (*leader.orders, (Order.END, [])):
                self._execution.others.broadcasts.append(torch.tensor([order, len(numbers)]))
                if numbers:
                    self._execution.others.broadcasts.append(torch.tensor(numbers))
            copy.follow()

    def _sample(self, copy: CopyOrders, generation: MegatronGenerationConfig, device: torch.device) -> None:
        runner = LeadingRunner(copy, prefill_tokens=self._policy.micro_batch_tokens)
        sample(runner, generation, self._policy.max_sequence_length, self._shape.vocab_size, device)
        runner.cache.release()

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._execution.phase(name):
            began = time.monotonic()
            yield
            self.report.seconds[name] = self.report.seconds.get(name, 0.0) + time.monotonic() - began


class _RecordedCopy:
    """The orders of a leader that is another process."""

    peers: dist.ProcessGroup | None = None

    def __init__(self, of_follower: KVCache, vocab_size: int) -> None:
        self.cache = KVCache(of_follower.max_tokens, of_follower.empty_places)
        self.orders: list[tuple[Order, list[int]]] = []
        self._vocab_size = vocab_size

    def agree(self, state: CopyState) -> CopyState:
        return state

    def command(self, order: Order, numbers: Sequence[int] = ()) -> Tensor | None:
        self.orders.append((order, list(numbers)))
        match order:
            case Order.RESERVE:
                self.cache.reserve(*numbers)
            case Order.PREFILL:
                return torch.zeros(len(decoded_prompts(numbers)), self._vocab_size)
            case Order.DECODE:
                return torch.zeros(len(decoded_step(numbers)[0]), self._vocab_size)
        return None


def sample(
    runner: Runner, generation: BatchingConfig, longest: int, vocab_size: int, device: torch.device
) -> None:
    """Sample the last tokens of as many of the longest sequences as run together."""
    length = min(longest, generation.max_kv_tokens)
    limits = RequestLimits(vocab_size, length, generation.max_kv_tokens)
    engine = BatchingEngine(runner, limits, generation, device=device)
    for row in range(max(1, min(generation.max_batch_size, generation.max_kv_tokens // length))):
        prompt = np.full(length - _NEW_TOKENS, row % 2 + 1, dtype=np.int32)
        prompt[0] = row % 1000
        prompt[-1] = row // 1000
        engine.add(GenerationRequest(str(row), prompt, SamplingParams(), _NEW_TOKENS, seed=row))
    while engine.num_running or engine.num_waiting:
        engine.step()


class EngineRehearsal:
    """The embedded engine: load, decode, and a refit that it receives."""

    def __init__(self, execution: Execution, experiment: Experiment) -> None:
        self._execution, self._experiment = execution, experiment
        self.report = RankReport(0, 0)

    def run(self) -> RankReport:
        experiment, execution = self._experiment, self._execution
        generation, policy = experiment.generation, experiment.policy
        assert isinstance(generation, TorchGenerationConfig)
        shape = load_shape(policy.model_path, with_mtp=generation.drafts_by_mtp)
        device = torch.device("cuda")
        with execution.phase("build"):
            runner = ModelRunner(
                shape,
                max_kv_tokens=generation.max_kv_tokens,
                max_positions=policy.max_sequence_length,
                device=device,
                dtype=DTYPES[generation.precision or policy.precision],
            )
        with execution.phase("load"):
            runner.load(policy.model_path)
        execution.memory.relabel("activations", "weights")
        with execution.phase("decode"):
            sample(runner, generation, policy.max_sequence_length, shape.vocab_size, device)
        with execution.phase("refit"):
            receive(
                WeightReceiver(runner.slices(), runner.staging_parameters, lambda _: runner.commit()),
                generation.bucket_megabytes * 2**20,
            )
        return self.report


class _LocalSender(SendingChannel):
    """Slots of the device without a receiver: each bucket leaves its slot at once."""

    def __init__(self, part: Part, slots: DeviceSlots) -> None:
        super().__init__(part, slots)
        self._settle = slots.settle

    def publish(self, number: int, num_bytes: int) -> None:
        self._settle()


class _LocalReceiver:
    def __init__(self, part: Part, slots: DeviceSlots) -> None:
        self._buckets = iter(enumerate(part.buckets))
        self._slots = slots

    def next_bucket(self) -> Tensor:
        number, bucket = next(self._buckets)
        return self._slots.bucket(number, bucket.num_bytes)

    def taken(self) -> None:
        self._slots.settle()


@contextmanager
def _with(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


_SESSION = RefitSession(version=1, transport="cuda_ipc", place="", deadline_seconds=60.0)


def _on_own_slots(channel: Callable[[Part, DeviceSlots], T]) -> Callable[..., AbstractContextManager[T]]:
    """In place of a side's meeting with the other one: its channel over slots of its own."""

    @contextmanager
    def meet(part: Part, _: RefitSession) -> Iterator[T]:
        with DeviceSlots.make("rehearsal", part.slot_bytes) as slots:
            yield channel(part, slots)

    return meet


def send(sender: WeightSender, bucket_bytes: int) -> None:
    """Send all that a rank has by slots of the device, as to an engine that holds the same."""
    layout = sender.describe()
    receiver = ReceiverLayout(layout.slices, ("bfloat16",) * len(layout.slices))
    (part,) = plan_transfers([layout], [receiver], bucket_bytes=bucket_bytes).sender_parts(1)
    sender.prepare(part)
    with _with(endpoints, "socket_sender", _on_own_slots(_LocalSender)):
        sender.send(_SESSION)


def receive(receiver: WeightReceiver, bucket_bytes: int) -> None:
    """Receive all weights from slots of the device, and commit them."""
    layout = receiver.describe()
    sender = SenderLayout(layout.slices)
    (part,) = plan_transfers([sender], [layout], bucket_bytes=bucket_bytes).receiver_parts(1)
    receiver.prepare(part)
    with _with(endpoints, "socket_receiver", _on_own_slots(_LocalReceiver)):
        receiver.receive(_SESSION)
        receiver.commit(_SESSION.version)


def _with_triton(find: Callable[[], Installed]) -> Installed:
    """The kernel libraries of this machine, and Triton, which torch for CUDA brings along."""
    found = find()
    return Installed(found.versions | {TRITON: "of torch for CUDA"}, compiler=True)


def rehearse(experiment: Experiment, rank: int | None) -> RankReport:
    """Rehearse a rank of the policy, or with None an engine, in this process.

    `experiment.policy.model_path` is a folder of `write_hollow_model`.
    """
    kernels = staticmethod(partial(_with_triton, Installed.find))
    with Execution() as execution, _with(Installed, "find", kernels):
        rehearsal = (
            EngineRehearsal(execution, experiment)
            if rank is None
            else PolicyRehearsal(execution, experiment, rank)
        )
        report = rehearsal.run()
    report.peaks = dict(execution.memory.peaks)
    report.synchronizations = list(execution.synchronizations.items())
    report.wrong_devices = list(execution.wrong_devices.items())
    report.uploads = list(execution.uploads.items())
    report.kernels = list(execution.kernels.items())
    return report


def pipeline_ranks(layout: LayoutConfig) -> list[int]:
    """A rank of the first, of a middle and of the last pipeline stage."""
    size, stages = layout.stage_size, layout.pipeline_parallel_size
    return [size * stage for stage in sorted({0, stages // 2, stages - 1})]
