"""The policy worker: one rank of a model, driven by method calls that all its ranks receive.

load_hf ─▶ [ load_trajectories ─▶ compute_logprobs ─▶ train ... ─▶ sender.send ] ─▶ save_checkpoint
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from torch import Tensor

from nemorl.config.algorithm.aligned import TeacherScore
from nemorl.config.generation import SamplingConfig
from nemorl.config.policy import PolicyConfig
from nemorl.data import losses, packed
from nemorl.data.examples import Example
from nemorl.data.shards import (
    ColumnShard,
    Field,
    SequencePlace,
    Shard,
    TokenArray,
    plan_sequences,
    rows_of,
    with_rows,
)
from nemorl.data.trained import Trained, trained_of, write_trained
from nemorl.models.adapters import TrainedWeights
from nemorl.models.hf_folder import HfFolder
from nemorl.models.layout import SCALAR_HEAD, chunk_prefix, policy_rank, policy_slices
from nemorl.models.registry import policy_shape
from nemorl.models.slices import TensorSlice
from nemorl.models.tensors import ComputedTensors
from nemorl.plan.utilization import peak_tflops
from nemorl.weights.endpoints import WeightSender

from . import checkpoint, parallel
from .activation_offload import ActivationOffload, saves_weights
from .calibration import InputRanges
from .checkpoint_store import FileRecord
from .decode import CachedModel, DecodingCopy
from .device import DeviceKind, select_device
from .draft import DraftTraining
from .fake_quantization import FakeQuantization
from .guards import guarded_values
from .kernels import Installed, check_fp8, check_optimizer, choose, recompute_notes
from .lora import Adapters
from .model import build_model, local_name
from .moe import Routers
from .optimizer import Offload, PolicyOptimizer, ReferenceWeights
from .packing import MicroBatch, MicroBatchMaker, check_batch
from .profile import StepProfile
from .schedule import (
    MtpLoss,
    Pipeline,
    logprob_gap,
    of_first_rank,
    over_data_parallel,
    predicted_tokens,
    stage_range,
    sum_over_data_parallel,
    value_metrics,
)


class PolicyWorker:
    """One rank of a model. Methods are collective where they do not say otherwise: all ranks call them."""

    def __init__(
        self,
        config: PolicyConfig,
        *,
        rank: int,
        world_size: int,
        rendezvous: str,
        device: DeviceKind,
        threads: int | None,
        temperature: float,
        filters: SamplingConfig | None = None,
        keep_reference: bool,
        deadline_seconds: float,
        start_seconds: float = 600.0,
        seed: int = 0,
        trains: bool = True,
        load: bool = False,
        calibration_prompts: Sequence[Example] = (),
    ) -> None:
        """Join the other ranks at `rendezvous`; without `load` the model has no weights before `load_hf`.

        The distribution that is trained is that of `temperature` and the top-k, top-p and min-p of `filters`.
        On `calibration_prompts` the weights of the folder compute the first ranges of inputs.
        """
        if threads is not None:
            torch.set_num_threads(threads)
        self._kind: DeviceKind = device
        self._rank = rank
        self.device = select_device(device, rank)
        self._config, self._keep_reference = config, keep_reference
        self._calibration_prompts = calibration_prompts
        self._seed = seed  # of adapters and heads that no folder holds
        self._shape = policy_shape(config)
        self._installed = Installed.find()
        check_optimizer(config.optimizer, self._installed)
        self._kernels = choose(
            config.kernels,
            kind=device,
            precision=config.precision,
            activation=self._shape.activation,
            installed=self._installed,
        )
        check_fp8(config.fp8, self._kernels)
        rounding = config.trained_quantization
        # The kernel adds to gradients of parameters. A rounded weight is none, nor is one that hooks return.
        if rounding is not None or saves_weights(config):
            self._kernels = replace(self._kernels, fused_gradients=False)
        parallel.join(
            config.layout,
            rank=rank,
            world_size=world_size,
            rendezvous=rendezvous,
            device=device,
            deadline_seconds=deadline_seconds,
            start_seconds=start_seconds,
        )
        self._place = policy_rank(config.layout, rank)
        self._trained = TrainedWeights(self._shape, config.lora)
        self._adapters = Adapters(self._shape, config.lora, self._place) if config.lora else None
        self._chunks = build_model(
            self._shape, config, device, self.device, self._kernels, self._adapters, trains=trains
        )
        self._modules = [chunk.module for chunk in self._chunks]
        self._ranges = self._rounding = None
        if config.quantization is not None and config.quantization.calibration is not None:
            ranges = self._shape, config.quantization, self._place, self.device
            self._ranges = InputRanges(*ranges, waits=bool(calibration_prompts))
        if rounding is not None:
            self._rounding = FakeQuantization(
                self._shape, rounding, self._place, self.parameters, self._ranges
            )
        for number, module in enumerate(self._modules):
            for hooks in (self._ranges, self._rounding):
                if hooks is not None:
                    hooks.attach(module, number)
        self.activations: ActivationOffload | None = None
        if trains and config.offloaded_layers:
            self.activations = ActivationOffload(config.offloaded_layers, device, self.device)
            for module in self._modules:
                self.activations.attach(module)
        self._pipeline = Pipeline(self._chunks, temperature, self.device, filters)
        self._optimizer = PolicyOptimizer(config, self._chunks, device, self._trained) if trains else None
        self._maker = MicroBatchMaker(self._shape, config, self._kernels, self.device)
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        self._peak = peak_tflops(config, name)
        self._profile: StepProfile | None = None
        if config.profile is not None and rank in config.profile.ranks:
            self._profile = StepProfile(config.profile, self.device)
        self._draft: DraftTraining | None = None
        if trains and config.draft is not None:
            self._draft = DraftTraining(
                *(config.draft, config, self._shape, self._modules),
                *(self._kernels, self.device, seed),
            )
        self._routers = Routers(self._modules, self._shape, config.moe) if self._shape.moe else None
        self._reference: ReferenceWeights | Adapters | None = None
        self._offload = Offload(device, self.device)
        self._copier = checkpoint.SnapshotCopier(device)
        self._copy: checkpoint.Snapshot | None = None
        self._batch: packed.PackedBatch | None = None
        self._scored: Tensor | None = None  # [N] logprobs of the batch in its forward passes of training
        if load:
            self.load_hf(config.model_path)
        # Engines take weights with adapters in them, or adapters: what one does not ask for is not computed.
        slices = [*self.slices(), *self.adapter_slices()]
        if self._ranges is not None and config.engine_quantization is not None:
            slices += self._ranges.slices()
        if self._draft is not None:
            slices += self._draft.slices()
        self.sender = WeightSender(slices, self._sent_parameters, self.device)

    def header(self) -> dict[str, str]:
        """Device, layout, kernels and versions in use; for the header of a run's log."""
        return {
            "device": str(self.device),
            "backend": dist.get_backend(),
            "precision": self._config.precision,
            **({"fp8": fp8.described} if (fp8 := self._config.fp8) else {}),
            "layout": self._config.layout.name,
            **({"head": "scalar"} if self._shape.head == "scalar" else {}),
            **(self._adapters.described() if self._adapters else {}),
            **(self._rounding.described() if self._rounding else {}),
            "threads": str(torch.get_num_threads()),
            "torch": torch.__version__,
            **self._kernels.described(self._installed, self._kind, self._config.optimizer),
            **recompute_notes(self._shape, self._config.recompute, self._kernels.layers),
            **({"offloaded activations": of.described} if (of := self._config.offload_activations) else {}),
        }

    def start_profile(self) -> None:
        """Begin to record, if this rank is recorded."""
        if self._profile is not None:
            self._profile.start()

    def end_profile(self, folder: Path, name: str) -> None:
        """Write the trace of this rank to the folder."""
        if self._profile is not None:
            self._profile.end(folder / f"{name}-rank{self._rank}")

    def load_hf(self, folder: Path) -> None:
        """Read this rank's part of a Hugging Face folder; it also becomes the reference when one is kept."""
        weights = HfFolder(folder)
        there = weights.names()
        # A scalar head that the folder lacks, as a language model's does, begins at zero.
        parts = [s for s in self.slices() if s.param != SCALAR_HEAD.param or s.name in there]
        weights.load_into(self.parameters(), parts)
        if self._adapters is not None:
            self._adapters.begin(self.parameters(), self._seed)
        if self._optimizer is not None:
            self._optimizer.weights_changed()
        if self._draft is not None:
            self._draft.start()
        if self._keep_reference:
            self._reference = self._adapters or ReferenceWeights(self._modules)
        if self._rounding is not None:
            self._rounding.measure(reference=self._keep_reference)
        if self._calibration_prompts:
            self._calibrate(self._calibration_prompts)

    def slices(self) -> list[TensorSlice]:
        """The parts of the HF checkpoint in each of `parameters` and `merged_parameters`."""
        return policy_slices(self._shape, self._place)

    def adapter_slices(self) -> list[TensorSlice]:
        """The parts of the adapters, in PEFT's names, in each of `parameters`; empty without adapters."""
        return [] if self._adapters is None else self._adapters.slices

    def parameters(self) -> dict[str, Tensor]:
        """This rank's weights by Megatron's names; the tensors themselves, not copies."""
        self._offload.require_back()
        return {
            chunk_prefix(chunk) + local_name(name): weight
            for chunk, module in enumerate(self._modules)
            for name, weight in module.weights().items()
        }

    def merged_parameters(self) -> Mapping[str, Tensor]:
        """The weights that engines sample with: `parameters`, with adapters added when one is asked for.

        Under fake quantization they are rounded, also one at a time, unless engines round them. Where engines
        require scales of activations, these are there too.
        """
        parameters: Mapping[str, Tensor]
        if self._rounding is not None and self._config.engine_quantization is None:
            parameters = self._rounding.folded()
        else:
            scales = {} if self._ranges is None else self._ranges.scales()
            parameters = self.parameters() | scales
        return self._adapters.merged(parameters) if self._adapters else parameters

    def _sent_parameters(self) -> Mapping[str, Tensor]:
        if self._ranges is not None:
            self._ranges.adopt()
        merged = self.merged_parameters()
        if self._draft is None:
            return merged
        return ComputedTensors(self._draft.weights(), merged.keys(), merged.__getitem__)

    def decoding_copy(self, max_kv_tokens: int) -> DecodingCopy:
        """This rank's part in sampling with the weights in place; layouts without CP and VPP have one."""
        (model,) = self._modules
        moe = self._shape.moe if self._config.moe.router_replay else None
        experts = None if moe is None else (self._shape.num_moe_layers, moe.top_k)
        cached = CachedModel(model, self._maker, self._shape.vocab_size, max_kv_tokens, experts)
        return DecodingCopy(cached, self._config.layout, self.device)

    def sampling(self) -> AbstractContextManager[None]:
        """Inside, the weights in place sample and do not change; rounded ones are computed once and kept."""
        if self._ranges is not None:
            self._ranges.adopt()
        return nullcontext() if self._rounding is None else self._rounding.kept()

    def offload(self) -> int:
        """Leave the device to generation, as far as `policy.offload` says; bytes that it then has."""
        reference = self._reference.tensors() if isinstance(self._reference, ReferenceWeights) else ()
        draft = () if self._draft is None else self._draft.tensors()
        return self._offload.out(self._chunks, self._optimizer, (*reference, *draft), self._config.offload)

    def onload(self) -> None:
        """Undo `offload`: weights and optimizer are what they were, to the bit; gradients are zero."""
        self._offload.back()

    def save_checkpoint(self, folder: Path) -> tuple[FileRecord, ...]:
        """Write weights, optimizer, schedule and random states into a folder that all ranks share."""
        return checkpoint.save(folder, self._snapshot(), trained=self._trained, layout=self._config.layout)

    def copy_for_checkpoint(self) -> None:
        """Copy aside what `write_copy` writes; the next steps may then change the state."""
        self._copy = self._copier.copy(self._snapshot())

    def write_copy(self, folder: Path) -> tuple[FileRecord, ...]:
        """Write the copied state, before the next copy begins. Not collective, and for another thread."""
        if self._copy is None:
            raise RuntimeError("nothing was copied: call copy_for_checkpoint before write_copy")
        return checkpoint.save(folder, self._copy, trained=self._trained, layout=self._config.layout)

    def _snapshot(self) -> checkpoint.Snapshot:
        self._offload.require_back()
        inputs = {} if self._ranges is None else self._ranges.state()
        draft = {} if self._draft is None else self._draft.state()
        return checkpoint.Snapshot.of(self.optimizer, self._kind, inputs, draft)

    def load_checkpoint(self, folder: Path) -> None:
        """Take what `save_checkpoint` wrote, under this or another layout; the reference stays as it is."""
        checkpoint.load(folder, self._trained, self._place, self.parameters(), self.optimizer, self._kind)
        if self._rounding is not None:
            self._rounding.measure()
        if self._ranges is not None:
            self._ranges.load(folder)
        if self._draft is not None:
            self._draft.load(folder)

    def close(self) -> None:
        parallel.leave()

    @property
    def optimizer(self) -> PolicyOptimizer:
        if self._optimizer is None:
            raise RuntimeError("this model was started without training: it has no optimizer")
        return self._optimizer

    def load_trajectories(self, shard: Shard) -> None:
        """Pack and keep this rank's trajectories; `shard.stores` are the lists themselves. Not collective."""
        batch = packed.pack_trajectories(shard.rows(), shard.advantages, shard.weights)
        if shard.likelihood is not None:
            batch = packed.with_likelihood(batch, shard.likelihood)
        if shard.rewards is not None:
            batch = packed.with_turns(batch, shard.rows(), shard.rewards)
        if shard.groups is not None:
            batch = replace(batch, groups=batch.spread(shard.groups, torch.int64))
        self.load_batch(batch if shard.compared is None else packed.with_compared(batch, shard.compared))

    def load_examples(self, shard: Shard) -> None:
        """Pack and keep this rank's examples. Not collective."""
        self.load_batch(packed.pack_examples(shard.rows(), shard.weights, shard.compared))

    def load_batch(self, batch: packed.PackedBatch) -> None:
        """Keep this data-parallel rank's sequences; all its TP and PP ranks are given the same."""
        check_batch(batch, self._config.max_sequence_length)
        if not self._config.moe.router_replay:
            batch = replace(batch, routed_experts=None)
        elif batch.routed_experts is None and batch.loss_mask.any():
            raise ValueError(
                "policy.moe.router_replay is true, but the batch names no experts: the generation back end "
                "does not return them, so set it to false"
            )
        self._batch, self._scored = batch.to(torch.device("cpu")), None

    def take_advantages(self, shard: Shard) -> None:
        """Replace the advantages of the loaded batch. Not collective."""
        batch = packed.pack_trajectories(shard.rows(), shard.advantages, shard.weights)
        self._batch = replace(self.batch, advantages=batch.advantages)

    def share(self, required: bool, field: Field) -> list[TokenArray] | None:
        """A field of the batch as an array for each sequence, if `required`. Not collective."""
        return rows_of(self.batch, field) if required else None

    def take(self, shard: ColumnShard, field: Field) -> None:
        """Fill a field of the batch with what another group has shared. Not collective."""
        self._batch = with_rows(self.batch, field, shard.rows())

    def fill(
        self, sequences: list[int], compute: Callable[[packed.PackedBatch, list[int]], Mapping[str, Tensor]]
    ) -> None:
        """Fill the fields that `compute` returns for these sequences of the batch. Not collective."""
        if sequences:
            self._batch = replace(self.batch, **compute(self.batch, sequences))

    def estimate(self, estimator: losses.TokenEstimator) -> dict[str, float]:
        """Fill `advantages`, and `returns` for a critic; metrics of the estimator."""
        estimated = estimator(self.batch, partial(sum_over_data_parallel, device=self.device))
        self._batch = replace(self.batch, advantages=estimated.advantages, returns=estimated.returns)
        return estimated.metrics

    def sequence_metrics(self, metric: losses.SequenceMetric) -> list[float]:
        """[S] a number for each sequence of this data-parallel rank. Not collective."""
        return metric(self.batch).tolist()

    def marked_values(self) -> list[list[float]]:
        """The values at the tokens of the loss mask, of each sequence of this rank. Not collective."""
        batch = self.batch
        assert batch.values is not None, "compute the values first"
        of_sequences = zip(
            batch.values.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True
        )
        return [values[mask].tolist() for values, mask in of_sequences]

    def compute_logprobs(
        self,
        micro_batches: list[list[int]],
        *,
        old: bool,
        reference: bool,
        entropy: bool = False,
        collision: bool = False,
    ) -> losses.LogprobStats:
        """Fill `old_logprobs` and `reference_logprobs`; the gap to the engine's if `old`.

        Of the old policy also `old_entropies` and `old_collisions`, if asked for, and with
        `policy.moe.update_replay` the experts that it chose, which updates then take. Filters of sampling do
        not apply to the reference: it would drop tokens that the policy keeps.
        """
        batch, made = self._prepared("compute_logprobs", micro_batches, head="lm")
        if reference:
            made_of = made
            if batch.routed_experts is not None:  # the reference chooses experts by its own routers
                unrouted = replace(batch, routed_experts=None)
                made_of = [self._maker.make(unrouted, sequences) for sequences in micro_batches]
            with self._reference_in_place(), stage_range("nemorl: reference logprobs"):
                batch = replace(batch, reference_logprobs=self._pipeline.outputs(batch, made_of).logprobs)
        routers = self._routers if self._config.moe.update_replay else None
        if old:
            if routers is not None:
                routers.record(made)
            with stage_range("nemorl: logprobs"):
                found = self._pipeline.outputs(
                    batch, made, entropy=entropy, collision=collision, filtered=True
                )
            batch = replace(
                batch,
                old_logprobs=found.logprobs,
                old_entropies=found.entropies,
                old_collisions=found.collisions,
            )
            if routers is not None:
                is_parallel = self._config.layout.sequence_parallel
                experts = routers.recorded(batch.num_tokens, made, sequence_parallel=is_parallel)
                batch = replace(batch, routed_experts=experts)
        self._batch = batch
        stats = logprob_gap(batch, batch.old_logprobs if old else None, self.device)
        own, frozen = self._scoring_flops(made)
        return replace(stats, flops=own * old, reference_flops=frozen * reference)

    def compute_values(self, micro_batches: list[list[int]]) -> losses.ValueStats:
        """Fill `values` of these sequences: what the scalar head says after each token."""
        batch, made = self._prepared("compute_values", micro_batches, head="scalar")
        self._batch = replace(batch, values=self._pipeline.outputs(batch, made)[0])
        return replace(value_metrics(self._batch, self.device), flops=self._scoring_flops(made)[0])

    def _scoring_flops(self, made: list[MicroBatch]) -> list[float]:
        """Operations of a forward pass over these, of all ranks: of the model, and without adapters."""
        counts = torch.tensor([micro.scoring_flops for micro in made], dtype=torch.float64)
        return sum_over_data_parallel(counts.view(-1, 2).sum(0), self.device).tolist()

    def compute_top(
        self,
        micro_batches: list[list[int]],
        k: int,
        *,
        scaled: bool = False,
        score: TeacherScore | None = None,
    ) -> None:
        """Fill `top_ids` and `top_logprobs`: the k likeliest tokens, or all, where the mask is set.

        Of aligned examples as `Pipeline.top_of_chunks`, with `teacher_scores` if there is a `score`.
        """
        batch, made = self._prepared("compute_top", micro_batches, head="lm")
        there = min(k, self._shape.vocab_size)
        if batch.chunks is None:
            ids, logprobs = self._pipeline.top(batch, made, there)
        else:
            ids, logprobs, *scores = self._pipeline.top_of_chunks(
                batch, made, there, scaled=scaled, score=score
            )
            batch = replace(batch, teacher_scores=scores[0] if scores else None)
            # Teachers of several vocabularies fill one field.
            ids, logprobs = F.pad(ids, (0, k - there), value=-1), F.pad(logprobs, (0, k - there))
        self._batch = replace(batch, top_ids=ids, top_logprobs=logprobs)

    def train(
        self, micro_batches: list[list[int]], loss: losses.Loss, keep: bool = False
    ) -> losses.TrainStats:
        """One optimizer step over these sequences of the batch: a list of indices for each forward pass.

        With `keep` the logprobs are kept for `record`.
        """
        head = "lm" if loss.needs_entropy else None
        _, made = self._prepared("a loss that needs the entropy", micro_batches, head=head)
        if self._routers is not None:
            self._routers.begin_step((micro.layout.routing for micro in made), self.device)
        self.optimizer.zero_grad()
        loss = self._over_update(loss, micro_batches)
        draft = self._draft
        if draft is not None:
            draft.begin(made)
        with stage_range("nemorl: forward and backward"), draft.capturing() if draft else nullcontext():
            scored: list[Tensor] = []
            sums, maxima = self._pipeline.run_loss(
                *(made, loss),
                backward=True,
                scored=scored if keep else None,
                mtp=self._mtp_loss(made),
                observe=draft.observe if draft else None,
            )
            if draft is not None:
                draft.learn_from_stages(made)
        mtp = {name: sums.pop(name) for name in list(sums) if name.startswith("mtp/")}
        if keep:
            self._keep(made, scored)
        with stage_range("nemorl: optimizer step"):
            step = self.optimizer.step(of_first_rank(guarded_values(sums), self.device))
        experts = None
        if self._routers is not None:
            experts = self._routers.end_step(self.device, updated=not (step.skipped or step.empty))
        if self._rounding is not None and self._adapters is None:
            self._rounding.measure()
        counts = [(m.batch.num_tokens, m.num_distinct, m.num_computed, m.flops) for m in made]
        summed = torch.tensor(counts, dtype=torch.float64).sum(0)  # exact up to 2^53
        *counted, flops = sum_over_data_parallel(summed, self.device).tolist()
        num_tokens, num_distinct, num_computed = map(int, counted)
        return losses.TrainStats(
            sums=sums,
            maxima=maxima,
            **(asdict(step) | {"mtp": mtp | step.mtp}),
            num_tokens=num_tokens,
            num_distinct=num_distinct,
            num_computed=num_computed,
            flops=flops,
            peak_tflops=self._peak,
            experts=experts,
            draft={} if draft is None else draft.end(),
        )

    def _mtp_loss(self, made: list[MicroBatch]) -> MtpLoss | None:
        """The loss of the layers for further tokens over these micro-batches, if they are trained."""
        if (section := self._config.multi_token_prediction) is None:
            return None
        counts = torch.tensor(predicted_tokens(made), dtype=torch.float64)
        total = sum_over_data_parallel(counts, self.device).tolist()
        return MtpLoss(section.loss_weight, section.detach, tuple(total))

    def _keep(self, made: list[MicroBatch], scored: list[Tensor]) -> None:
        """Keep the logprobs of these micro-batches, where those of before the update are not known."""
        if self.batch.old_logprobs is None:
            values = self._pipeline.lay_out(self.batch.num_tokens, made, scored, torch.empty(0))
            self._scored = values if self._scored is None else self._scored + values

    def record(self, names: dict[int, str], folder: Path, step: int) -> tuple[list[Trained], str]:
        """What was trained of this rank's sequences, and why the file is missing, if it could not be written.

        The arrays of the sequences of `names`, by their row, are written. Not collective.
        """
        batch, problem = self.batch, ""
        if batch.old_logprobs is None:
            batch = replace(batch, old_logprobs=self._scored)
        if names:
            rank = parallel_state.get_data_parallel_rank()
            try:
                write_trained(folder, step, rank, batch, names)
            except OSError as error:
                problem = str(error)
        return trained_of(batch), problem

    def evaluate(self, micro_batches: list[list[int]], loss: losses.Loss) -> losses.Evaluation:
        """The loss of these sequences under the current weights, which do not change."""
        head = "lm" if loss.needs_entropy else None
        _, made = self._prepared("a loss that needs the entropy", micro_batches, head=head)
        loss = self._over_update(loss, micro_batches)
        return losses.Evaluation(*self._pipeline.run_loss(made, loss, backward=False))

    def _over_update(self, loss: losses.Loss, micro_batches: list[list[int]]) -> losses.Loss:
        """The loss of these sequences, which some losses look at first."""
        if not isinstance(loss, losses.UpdateLoss):
            return loss
        minibatch = self.batch.select([sequence for micro in micro_batches for sequence in micro])
        return loss.prepared(minibatch, partial(over_data_parallel, device=self.device), self.batch)

    def sequence_logprobs(self, micro_batches: list[list[int]], *, reference: bool) -> list[float]:
        """[S] sums of the logprobs of each sequence's masked tokens; 0 for sequences that are not named."""
        batch, made = self._prepared("sequence_logprobs", micro_batches, head="lm")
        with self._reference_in_place() if reference else nullcontext():
            logprobs = self._pipeline.outputs(batch, made).logprobs
        return [float(part.double().sum()) for part in logprobs.split(batch.lengths)]

    @property
    def batch(self) -> packed.PackedBatch:
        if self._batch is None:
            raise RuntimeError("no batch was loaded: call load_batch before compute_logprobs and train")
        return self._batch

    def _prepared(
        self, method: str, micro_batches: list[list[int]], *, head: str | None
    ) -> tuple[packed.PackedBatch, list[MicroBatch]]:
        self._offload.require_back()
        if head not in (None, self._shape.head):
            raise RuntimeError(
                f"{method} requires a model with policy.head {head!r}, and this one has {self._shape.head!r}"
            )
        made = [self._maker.make(self.batch, sequences) for sequences in micro_batches]
        if self._ranges is not None and not self._ranges.are_complete:
            count = sum_over_data_parallel(torch.tensor(sum(map(len, micro_batches))), self.device)
            self._measure(self._ranges, self.batch, made, int(count))
        return self.batch, made

    def _measure(
        self, ranges: InputRanges, batch: packed.PackedBatch, made: list[MicroBatch], num_sequences: int
    ) -> None:
        disabled = nullcontext() if self._rounding is None else self._rounding.disabled()
        with disabled, ranges.measuring(num_sequences):
            self._pipeline.outputs(batch, made)

    def _calibrate(self, prompts: Sequence[Example]) -> None:
        """Measure the inputs over prompts, which do not count as conversations: these widen the ranges."""
        assert self._ranges is not None, "policy.quantization.calibration is set"
        layout = self._config.layout
        examples = [*prompts, *islice(cycle(prompts), -len(prompts) % layout.fewest_units)]
        places = [SequencePlace(None, row, example.num_tokens) for row, example in enumerate(examples)]
        ranks = layout.data_parallel_size
        plan = plan_sequences(places, self._config, self._shape.hidden_size, ranks, 1)
        rank = parallel_state.get_data_parallel_rank()
        share = [examples[place] for place in plan.ranks[rank]]
        batch = packed.pack_examples(share, [0.0] * len(share))
        made = [self._maker.make(batch, sequences) for sequences in plan.micro_batches[rank]]
        self._measure(self._ranges, batch, made, 0)
        self._ranges.adopt()

    def _reference_in_place(self) -> AbstractContextManager[None]:
        if self._reference is None:
            raise RuntimeError("no reference weights are kept: start with keep_reference and load_hf")
        return self._with_reference(self._reference)

    @contextmanager
    def _with_reference(self, reference: ReferenceWeights | Adapters) -> Iterator[None]:
        rounding = nullcontext() if self._rounding is None else self._rounding.reference_in_place()
        with reference.in_place(), rounding:
            yield
