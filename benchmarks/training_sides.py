"""The sides that `training.py` compares: each trains the same weights on the same sequences in its own way.

    nemorl               PolicyWorker, from examples to metrics: plan, pack, micro-batches, loss, metrics
    nemorl:separate      the same without sharing tokens that sequences begin with in common
    nemorl:grpo          the same with the policy loss and its metrics: entropy, ratios, clip fractions
    megatron             Megatron's schedule on our model and ready micro-batches, a plain loss, no worker
    megatron-stock       Megatron's GPTModel, attention, rotary embedding and cross entropy, padded
    transformers         rows padded to the longest of each micro-batch, in order of arrival
    transformers:sorted  the same, with rows of similar length together

Only the first three make their inputs inside the measured step; the others find them ready.
"""

import gc
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from meter import Memory, Span, measured, now
from policies import start_policy
from torch import Tensor
from training_work import Padded, Work

from nemorl.algorithms.policy_losses import CrossEntropyLoss, PolicyLoss
from nemorl.config.algorithm.losses import ClipLossConfig
from nemorl.config.policy import AdamConfig, PolicyConfig
from nemorl.data.packed import pack_examples
from nemorl.megatron.device import DTYPES, DeviceKind, building, select_device
from nemorl.megatron.packing import MicroBatch
from nemorl.megatron.worker import PolicyWorker
from nemorl.models.registry import load_shape

# So small that the weights of the sides that step stay those of the sides that do not.
LEARNING_RATE = 1e-12


@dataclass(frozen=True)
class Setting:
    """Configuration of all sides."""

    model: Path
    device: DeviceKind
    precision: Literal["float32", "bfloat16"]
    threads: int
    max_sequence_length: int


@dataclass(frozen=True)
class Metrics:
    """One step of one side; loss and gradient norm are the same for all sides."""

    loss: float
    grad_norm: float
    span: Span  # forward and backward, with what the side does around them, without the optimizer
    memory: Memory
    optimizer: Span  # left out of `span`
    num_computed: int  # tokens, padding included


class Side(Protocol):
    """A model with its weights, in this process."""

    optimizer: Span  # what runs so far spent in the optimizer
    num_computed: int  # tokens of the last run, padding included

    def prepare(self, work: Work, variant: str) -> Callable[[], float]:
        """The measured part of a step, which gives the loss."""
        ...

    def grad_norm(self) -> float:
        """Of the gradients of the last run."""
        ...


def start(side: str, setting: Setting) -> Side:
    """A side without its variant, ready to run."""
    torch.set_num_threads(setting.threads)
    sides: dict[str, Callable[[Setting], Side]] = {
        "nemorl": Nemorl,
        "megatron": Megatron,
        "megatron-stock": StockMegatron,
        "transformers": Transformers,
    }
    return sides[side](setting)


def run_step(setting: Setting, side: Side, work: Work, variant: str) -> Metrics:
    """Run one step and measure it."""
    run = side.prepare(work, variant)
    before = side.optimizer
    loss, span, memory = measured(setting.device, run)
    optimizer = side.optimizer - before
    computed = side.num_computed
    return Metrics(loss, side.grad_norm(), span - optimizer, memory, optimizer, computed)


class Nemorl:
    """The policy worker, as the trainer drives it."""

    def __init__(self, setting: Setting) -> None:
        self.optimizer = Span(0.0, 0.0)
        self.num_computed = 0
        self._worker = _worker(setting)
        self._hidden_size = load_shape(setting.model).hidden_size
        self._grad_norm = math.nan
        self._time_the_optimizer(setting.device)

    def prepare(self, work: Work, variant: str) -> Callable[[], float]:
        """Examples are all that is ready; variant `grpo` trains on them as if they had been sampled."""
        examples, runs = work.examples(), None if variant == "separate" else work.runs()
        self._worker._maker.shares_prefixes = runs is not None

        def run() -> float:
            batch = pack_examples(examples, work.weights())
            if variant == "grpo":
                # An engine that was certain: the mean gap to it is the mean negative logprob.
                batch = replace(
                    batch,
                    advantages=batch.loss_mask.float(),
                    logprobs=torch.zeros(batch.num_tokens),
                )
            self._worker.load_batch(batch)
            loss = PolicyLoss(ClipLossConfig()) if variant == "grpo" else CrossEntropyLoss()
            stats = self._worker.train(work.packed(self._hidden_size, runs), loss)
            self._grad_norm, self.num_computed = stats.grad_norm, stats.num_computed
            return stats.sums["logprob_gap/mean" if variant == "grpo" else "nll"] / work.num_trained

        return run

    def grad_norm(self) -> float:
        """As the step reports it."""
        return self._grad_norm

    def close(self) -> None:
        """Leave the process group of the worker."""
        self._worker.close()

    def _time_the_optimizer(self, device: DeviceKind) -> None:
        step = self._worker.optimizer.step

        def timed(values: Mapping[str, float]) -> Any:
            before = now(device)
            result = step(values)
            self.optimizer += now(device) - before
            return result

        self._worker.optimizer.step = timed  # type: ignore[method-assign]


class _MegatronSide:
    """Megatron's schedule and nothing around it."""

    def __init__(self, setting: Setting) -> None:
        self.optimizer, self.num_computed = Span(0.0, 0.0), 0
        self._device = select_device(setting.device, 0)

    def _run(self, model: Any, forward_step: Any, batches: list[Any]) -> float:
        """Loss summed over micro-batches; what each yields is a sum already divided by the global count."""
        model.zero_grad_buffer()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=len(batches),
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )
        return float(sum(output["loss"] for output in outputs))


class Megatron(_MegatronSide):
    """Our model, prepared micro-batches, and a plain loss on the logits of the places that predict."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        worker = _worker(setting)
        (self._model,) = worker._chunks
        self._maker = worker._maker
        self._maker.shares_prefixes = False
        self._hidden_size = load_shape(setting.model).hidden_size
        del worker  # and its optimizer's state
        gc.collect()

    def prepare(self, work: Work, variant: str) -> Callable[[], float]:
        """Micro-batches with the same sequences as ours."""
        batch = pack_examples(work.examples(), work.weights())
        made = [self._maker.make(batch, sequences) for sequences in work.packed(self._hidden_size)]
        self.num_computed = sum(micro.num_computed for micro in made)
        return lambda: self._run(self._model, self._forward_step, made)

    def grad_norm(self) -> float:
        """Over all parameters."""
        return _norm([p.main_grad for p in self._model.parameters()])

    def _forward_step(self, batches: Iterator[MicroBatch], model: Any) -> Any:
        micro = next(batches)
        policy = model.module

        def loss_of(hidden: Tensor) -> Any:
            predicting = hidden.squeeze(1).index_select(0, micro.predictors)
            logits = F.linear(predicting, policy.output_weight())
            labels = micro.batch.tokens.index_select(0, micro.labels)
            losses = vocab_parallel_cross_entropy(logits.float(), labels)
            return _reported((losses * micro.batch.weights[micro.labels]).sum())

        return model(micro), loss_of


class StockMegatron(_MegatronSide):
    """Megatron's own GPTModel, attention, rotary embedding and cross entropy; for models like Llama."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        shape = load_shape(setting.model)
        self._hidden_size = shape.hidden_size
        (policy,) = _worker(setting)._modules
        with building(setting.device):
            model = GPTModel(
                config=policy.config,
                transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
                vocab_size=policy.vocab_size,
                max_sequence_length=setting.max_sequence_length,
                share_embeddings_and_output_weights=shape.tied_embeddings,
                position_embedding_type="rope",
                rotary_base=int(shape.rope.theta),
            ).to(self._device)
            weights = dict(policy.named_parameters())
            for name, parameter in model.named_parameters():
                parameter.data.copy_(weights[name])
            options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=False)
            self._model = DistributedDataParallel(policy.config, options, model)
        del policy
        gc.collect()

    def prepare(self, work: Work, variant: str) -> Callable[[], float]:
        """As many micro-batches as ours."""
        batches = list(work.padded(_chunks(work, variant, self._hidden_size), self._device))
        self.num_computed = sum(rows.tokens.numel() for rows in batches)
        return lambda: self._run(self._model, self._forward_step, batches)

    def grad_norm(self) -> float:
        """Over all parameters."""
        return _norm([p.main_grad for p in self._model.parameters()])

    def _forward_step(self, batches: Iterator[Padded], model: Any) -> Any:
        rows = next(batches)
        length = rows.tokens.shape[1]
        before = int(rows.predicting[0])
        labels, weights = (F.pad(x, (before, 1)) for x in (rows.labels, rows.weights))
        positions = torch.arange(length, device=self._device).expand_as(rows.tokens)
        # Padding is at the end of a row, where no token attends to it.
        hidden_from = torch.ones(length, length, dtype=torch.bool, device=self._device).triu(1)
        losses = model(rows.tokens, positions, hidden_from[None, None], labels=labels)
        return losses, lambda losses: _reported((losses * weights).sum())


class Transformers:
    """`AutoModelForCausalLM` on padded rows; logits of the places before any trained token are omitted."""

    def __init__(self, setting: Setting) -> None:
        from transformers import AutoModelForCausalLM

        self.optimizer, self.num_computed = Span(0.0, 0.0), 0
        self._device = select_device(setting.device, 0)
        self._model: Any = AutoModelForCausalLM.from_pretrained(
            setting.model, dtype=DTYPES[setting.precision], attn_implementation="sdpa"
        ).to(self._device)
        self._hidden_size = self._model.config.hidden_size
        self._model.train()

    def prepare(self, work: Work, variant: str) -> Callable[[], float]:
        """As many micro-batches as ours, of equally many sequences; variant `sorted` orders by length."""
        batches = list(work.padded(_chunks(work, variant, self._hidden_size), self._device))
        self.num_computed = sum(rows.tokens.numel() for rows in batches)
        self._model.zero_grad()  # forgets the gradients' memory: each step allocates it again
        return lambda: self._run(batches)

    def grad_norm(self) -> float:
        """Over all parameters."""
        return _norm([p.grad for p in self._model.parameters()])

    def _run(self, batches: list[Padded]) -> float:
        return float(sum(self._forward_backward(rows) for rows in batches))

    def _forward_backward(self, rows: Padded) -> Tensor:
        logits = self._model(
            input_ids=rows.tokens,
            attention_mask=rows.attention,
            logits_to_keep=rows.predicting,
            use_cache=False,
        ).logits
        losses = F.cross_entropy(logits.float().flatten(0, 1), rows.labels.flatten(), reduction="none")
        loss = (losses * rows.weights.flatten()).sum()
        loss.backward()
        return loss.detach()


def _worker(setting: Setting) -> PolicyWorker:
    """A policy of one process with the model's weights."""
    config = PolicyConfig(
        model_path=setting.model,
        precision=setting.precision,
        max_sequence_length=setting.max_sequence_length,
        optimizer=AdamConfig(lr=LEARNING_RATE),
    )
    return start_policy(config, setting.device, threads=setting.threads)


def _chunks(work: Work, variant: str, hidden_size: int) -> list[list[int]]:
    return work.chunks(len(work.packed(hidden_size)), by_length=variant == "sorted")


def _reported(loss: Tensor) -> Any:
    # The count would divide the loss, which is divided already.
    return loss, torch.zeros((), dtype=torch.int, device=loss.device), {"loss": loss.detach()}


def _norm(gradients: list[Tensor]) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
