"""Training of a head for drafts (`nemorl.models.eagle3`) on hidden states of a policy, which stays as it is.

Hooks keep the embeddings and three hidden states of each micro-batch, without their gradients. On the last
pipeline stage the head computes complete sequences of them, apart from the policy's graph: its loss is the
mean, over the trained tokens of an optimizer step that have two tokens before them, of the cross entropy of
its distribution q to the policy's own p at temperature 1,

    -sum_v p_v log q_v,    of which the gradient with respect to the logits of q is q - p.

Tensor-parallel ranks hold copies of the head, and of its `lm_head` the rows of the tokens of which they hold
those of the policy's. A head that drafts some of the tokens learns p of these alone.
Context-parallel ranks take different sequences. Gradients are summed over the ranks that share the batch,
and a torch AdamW of its own takes the step, so the policy's gradients, norm and update are those without it.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from nemorl.config.policy import DraftHeadConfig, PolicyConfig
from nemorl.models.eagle3 import D2T, EMBEDDING, Eagle3Head, drafted_ids, read_d2t, read_head
from nemorl.models.eagle3_shape import LM_HEAD, SENT, head_shape
from nemorl.models.layout import stage_layers
from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice

from .attention import PackedAttention
from .checkpoint_files import read_draft
from .device import DTYPES, packed_attention_kernel
from .head import soft_cross_entropy
from .kernels import Kernels
from .model import PolicyModel
from .packing import MicroBatch, PackedLayout, packed_layout
from .schedule import from_last_stage, sum_over_data_parallel

_MOMENTS = ("exp_avg", "exp_avg_sq")
_UPDATES = "updates"  # steps of the optimizer, in a checkpoint
_AHEAD = 2  # tokens from the one whose state the head takes to the one that it predicts


@dataclass(frozen=True)
class DraftInput:
    """The sequences of a micro-batch that a rank computes; context-parallel ranks divide them."""

    rows: Tensor  # [n] places of their tokens in the batch
    predictors: Tensor  # [m] places among these, from which trained tokens are predicted
    layout: PackedLayout | None  # None if there is no sequence, or nothing to predict


class DraftTraining:
    """A rank's part in training the head; the ranks of the last pipeline stage hold it.

    For an optimizer step: `begin`, the passes inside `capturing`, `observe` for each micro-batch on the last
    stage, `end`.
    """

    def __init__(
        self,
        config: DraftHeadConfig,
        policy: PolicyConfig,
        model: ModelShape,
        chunks: Sequence[PolicyModel],
        kernels: Kernels,
        device: torch.device,
        seed: int,
    ) -> None:
        self._config, self._policy, self._device = config, policy, device
        self._shape = head_shape(model, config.layers, config.model_path)
        # The head's inputs in order: after how many layers, and on which stage.
        self._states = _states(self._shape.layers, model.num_layers, policy)
        self._capturing = False
        self._captured: dict[int, list[Tensor]] = defaultdict(list)  # by the number of layers before
        for number, chunk in enumerate(chunks):
            self._attach(chunk, model.num_layers, number)
        self._inputs: deque[DraftInput] = deque()
        self._finals: deque[Tensor] = deque()  # what the decoder returns, where stages wait for each other
        self._count = 0.0  # predicted tokens of the optimizer step, of all ranks
        self._sums = torch.zeros(2, dtype=torch.float64, device=device)  # loss, likeliest tokens that agree
        self._head: Eagle3Head | None = None
        if parallel_state.is_pipeline_last_stage():
            self._model, vocabulary = chunks[-1], chunks[-1].vocabulary
            self._d2t = None
            if config.model_path is not None:
                self._d2t = read_d2t(config.model_path, self._shape)
            self._ids: Tensor | None = None  # [rows] of the policy's output matrix here; None for all
            first, count = vocabulary.start, vocabulary.num_real
            if self._d2t is not None:
                ids = drafted_ids(self._d2t)
                first = int((ids < vocabulary.start).sum())
                count = int((ids < vocabulary.start + vocabulary.num_real).sum()) - first
                self._ids = (ids[first : first + count] - vocabulary.start).to(device)
            self._rows = range(first, first + count)  # of the whole `lm_head`
            self._vocabulary = replace(vocabulary, num_real=count)
            with torch.device("meta"):  # nothing is drawn from the process's generator
                self._head = Eagle3Head(self._shape, max(count, 1))
            self._head.to_empty(device=device).draw(seed)
            self._attention = PackedAttention()
            self._kernel = packed_attention_kernel(kernels.attention)
            self._rotary = RotaryTable(
                *(self._shape.head_dim, self._shape.rope),
                max_positions=policy.max_sequence_length,
                dtype=DTYPES[policy.precision],
                device=device,
            )
            self._optimizer = torch.optim.AdamW(self._head.parameters(), lr=config.lr, weight_decay=0.0)

    @torch.no_grad()
    def start(self) -> None:
        """Take the head in `policy.draft.model_path`, and the policy's output matrix where it has none."""
        if self._head is None:
            return
        folder = self._config.model_path
        given = read_head(folder, self._shape) if folder is not None else {}
        whole = given.pop(LM_HEAD, None)
        of_rows = self._output_weight() if whole is None else whole[self._rows.start : self._rows.stop]
        for name, weight in self._head.named_parameters():
            if name == LM_HEAD:
                weight.zero_()[: len(of_rows)] = of_rows.to(weight)
            elif name in given:
                weight.copy_(given[name])

    def begin(self, made: Sequence[MicroBatch]) -> None:
        """Prepare the micro-batches of an optimizer step, before their passes."""
        self._sums.zero_()
        predicted = [
            (micro.batch.loss_mask & (micro.batch.position_ids >= _AHEAD)).nonzero().squeeze(1).cpu()
            for micro in made
        ]
        count = torch.tensor(sum(map(len, predicted)), dtype=torch.float64)
        self._count = float(sum_over_data_parallel(count, self._device))
        if self._head is not None:
            self._inputs = deque(map(self._input, made, predicted))

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Inside, hidden states are kept."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False
            self._captured.clear()
            self._finals.clear()

    def observe(self, hidden: Tensor, micro: MicroBatch) -> None:
        """Learn from a micro-batch right after its forward pass, `hidden` as the model returns it.

        With several stages the states are sent in `learn_from_stages`, when the schedule has ended.
        """
        if self._policy.layout.pipeline_parallel_size > 1:
            self._finals.append(hidden.detach())
            return
        # Layers for further tokens look up embeddings too, after this.
        states = [self._captured[place][-1] for place, _ in self._states]
        self._captured.clear()
        self._learn([*states, hidden.detach()], micro)

    def learn_from_stages(self, made: Sequence[MicroBatch]) -> None:
        """Bring the states of all stages to the last one and learn from them."""
        layout = self._policy.layout
        if layout.pipeline_parallel_size == 1:
            return
        group = parallel_state.get_pipeline_model_parallel_group()
        parts = layout.tensor_parallel_size if layout.sequence_parallel else 1
        for number, micro in enumerate(made):
            extents = (micro.tokens.numel() // parts, 1, self._shape.hidden_size)
            states = []
            for place, stage in self._states:
                if group.rank() == stage:
                    state = self._captured[place][number].contiguous()
                else:
                    state = torch.empty(extents, dtype=DTYPES[self._policy.precision], device=self._device)
                dist.broadcast(state, dist.get_global_rank(group, stage), group=group)
                states.append(state)
            if self._head is not None:
                self._learn([*states, self._finals.popleft()], micro)

    def end(self) -> dict[str, float]:
        """Update the head; the step's metrics, equal on all ranks."""
        norm = torch.zeros((), dtype=torch.float64, device=self._device)
        if self._head is not None:
            norm.copy_(self._update(self._head))
            dist.all_reduce(self._sums, group=_batch_group())
        loss, agreed, grad_norm = from_last_stage(torch.stack((*self._sums, norm))).tolist()
        count = max(self._count, 1.0)
        return {
            "draft/loss": loss / count,
            "draft/accuracy": agreed / count,
            "draft/grad_norm": grad_norm,
        }

    def tensors(self) -> Iterator[Tensor]:
        """What the rank holds between steps."""
        if self._head is not None:
            for weight in self._head.parameters():
                yield weight.data
                yield from (self._optimizer.state[weight][m] for m in self._moments(weight))

    def slices(self) -> list[TensorSlice]:
        """The parts of the head in each of `weights`, by their names in updates of engines."""
        if self._head is None:
            return []
        tensors = self._shape.sent_tensors()
        lm_head = TensorSlice.whole(SENT + LM_HEAD, tensors.pop(SENT + LM_HEAD))
        rows = replace(lm_head, start=(self._rows.start, 0), size=(len(self._rows), self._shape.hidden_size))
        return [*(TensorSlice.whole(*each) for each in tensors.items()), *([rows] if self._rows else [])]

    def weights(self) -> dict[str, Tensor]:
        """The weights of the head on this rank, by their names in updates of engines."""
        if self._head is None:
            return {}
        return {SENT + name: weight.data for name, weight in self._head.named_parameters()}

    def state(self) -> dict[str, Tensor]:
        """For a checkpoint, of the first rank of those with the same; empty on the others."""
        if self._head is None or _batch_group().rank() > 0:
            return {}
        found, updates = {}, torch.zeros(())
        for name, weight in self._head.named_parameters():
            rows = slice(0, len(self._rows)) if name == LM_HEAD else slice(None)
            found[name] = weight.data[rows]
            for moment in self._moments(weight):
                found[f"{moment}.{name}"] = self._optimizer.state[weight][moment][rows]
                updates = self._optimizer.state[weight]["step"]
        drafted = {} if self._d2t is None else {D2T: self._d2t}
        return found | drafted | {_UPDATES: updates}

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the head of a checkpoint of any layout. Raises `UnfitCheckpoint` if it has another or none."""
        if self._head is None:
            return
        saved = read_draft(folder, LM_HEAD, self._rows, self._shape.tensors())
        for name, weight in self._head.named_parameters():
            real = slice(0, len(saved[name]))
            weight[real] = saved[name].to(weight)
            self._optimizer.state.pop(weight, None)
            if f"{_MOMENTS[0]}.{name}" in saved:
                state = self._optimizer.state[weight] = {"step": saved[_UPDATES].clone()}
                for moment in _MOMENTS:
                    state[moment] = torch.zeros_like(weight)
                    state[moment][real] = saved[f"{moment}.{name}"].to(weight)

    def _output_weight(self) -> Tensor:
        """[rows, H] of the policy, of the tokens that the head drafts."""
        weight = self._model.output_weight().detach()
        if self._ids is not None and len(self._ids):
            return weight.index_select(0, self._ids)
        return weight[: max(len(self._rows), 1)]

    def _moments(self, weight: Tensor) -> Sequence[str]:
        return _MOMENTS if weight in self._optimizer.state else ()

    def _attach(self, chunk: PolicyModel, num_layers: int, number: int) -> None:
        if chunk.pre_process:
            chunk.embedding.register_forward_hook(partial(self._capture, EMBEDDING))
        stage = parallel_state.get_pipeline_model_parallel_rank()
        held = stage_layers(num_layers, self._policy.layout, stage, number)
        for index, layer in zip(held, chunk.decoder.layers, strict=True):
            if index + 1 in self._shape.layers:
                layer.register_forward_hook(partial(self._capture, index + 1))

    def _capture(self, place: int, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        # Layers that are computed again in a backward pass were seen before.
        if self._capturing and torch._C._current_graph_task_id() < 0:
            hidden = output[0] if isinstance(output, tuple) else output
            self._captured[place].append(hidden.detach())

    def _input(self, micro: MicroBatch, predicted: Tensor) -> DraftInput:
        """`predicted` are the places in the batch of the tokens that are predicted, on the CPU."""
        share, starts = micro.layout.share, micro.batch.cu_seqlens.tolist()
        mine = range(share.rank, micro.batch.num_sequences, share.size)
        of_sequences = [torch.arange(starts[s], starts[s + 1]) for s in mine]
        rows = torch.cat(of_sequences) if of_sequences else torch.arange(0)
        place = torch.full((micro.batch.num_tokens,), -1)
        place[rows] = torch.arange(len(rows))
        predictors = place[predicted - _AHEAD]
        predictors = predictors[predictors >= 0]
        rows, predictors = rows.to(self._device), predictors.to(self._device)
        layout = None
        if len(predictors):
            angles = self._rotary.at(micro.batch.position_ids[rows])
            layout = packed_layout([len(part) for part in of_sequences], angles, self._kernel)
        return DraftInput(rows, predictors, layout)

    def _learn(self, states: Sequence[Tensor], micro: MicroBatch) -> None:
        """Add the gradients of a micro-batch; `states` are the embeddings, three states and the last one."""
        assert self._head is not None, "the last stage has the head"
        given, dtype = self._inputs.popleft(), DTYPES[self._policy.precision]
        whole = [self._model.states_of_batch(state, micro) for state in states]
        if given.layout is None:
            return
        embedded, *of_layers, final = (state.index_select(0, given.rows) for state in whole)
        attend = partial(self._attend, given.layout)
        with torch.enable_grad():
            # Of the last token of a sequence, from which nothing is predicted, the next is of another one.
            output = self._head(embedded.roll(-1, 0), torch.cat(of_layers, -1), attend)
            output = output.index_select(0, given.predictors)
        weight = self._head.lm_head.weight
        found = soft_cross_entropy(
            *(output.detach(), weight.detach().to(dtype)),
            *(final.index_select(0, given.predictors + 1), self._output_weight()),
            self._vocabulary,
            chunk_tokens=self._model.chunk_tokens,
        )
        output.backward(found.grad_hidden / self._count)
        gradient = found.grad_weight.div_(self._count)
        weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
        self._sums += torch.stack((found.loss, found.agreed))

    def _attend(self, layout: PackedLayout, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._attention(query, key, value, packed_seq_params=layout)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _update(self, head: Eagle3Head) -> Tensor:
        """The norm of the gradients before clipping; without finite ones, or any, nothing changes."""
        squares = torch.zeros(2, device=self._device)  # of what ranks have copies of, and of `lm_head`
        gradients = {}
        for name, weight in head.named_parameters():
            if weight.grad is None:  # other ranks may have one
                weight.grad = torch.zeros_like(weight)
            gradients[name] = weight.grad
            dist.all_reduce(weight.grad, group=_batch_group())
            squares[int(name == LM_HEAD)] += weight.grad.square().sum()
        dist.all_reduce(squares[1:], group=parallel_state.get_tensor_model_parallel_group())
        norm = squares.sum().sqrt()
        limit = self._policy.max_grad_norm
        if self._count and math.isfinite(norm):
            if limit is not None and norm > limit:
                for gradient in gradients.values():
                    gradient.mul_(limit / (norm + 1e-6))
            self._optimizer.step()
        self._optimizer.zero_grad()
        return norm


def _states(layers: Sequence[int], num_layers: int, policy: PolicyConfig) -> list[tuple[int, int]]:
    """The embeddings and the states after `layers`, as numbers of layers, with the stage that has each."""
    layout = policy.layout
    stages = {EMBEDDING: 0}
    for stage in range(layout.pipeline_parallel_size):
        for chunk in range(layout.virtual_pipeline_parallel_size):
            stages |= dict.fromkeys(
                (n + 1 for n in stage_layers(num_layers, layout, stage, chunk) if n + 1 in layers), stage
            )
    return [(place, stages[place]) for place in (EMBEDDING, *layers)]


def _batch_group() -> dist.ProcessGroup:
    """The ranks that divide a batch, by data and by context."""
    return parallel_state.get_data_parallel_group(with_context_parallel=True)  # type: ignore[no-any-return]
