"""Training of a head for drafts (`nemorl.models.eagle3`) on hidden states of a policy, which stays as it is.

Hooks keep the embeddings and three hidden states of each micro-batch, without their gradients. On the last
pipeline stage the head computes complete sequences of them, apart from the policy's graph, in one or several
steps. A draft starts at each token. In step 1 the head takes the policy's states of this token, and in step k
its own output of step k - 1 and the embedding of the token which that predicts, at k - 1 positions further.
Its queries see what step 1 has of the tokens up to the draft's start, and the later steps of their own draft:
what engines compute when they draft. The loss of step k is the mean, over the trained tokens of an optimizer
step that have k + 1 tokens before them, of the cross entropy of the head's distribution q to the policy's own
p at temperature 1,

    -sum_v p_v log q_v,    of which the gradient with respect to the logits of q is q - p.

The steps' losses add up, that of step k times `step_decay` to the power of k - 1: the training-time test of
EAGLE-3 (arXiv 2503.01840, 3.2).

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

from .attention import JoinedAttention, PackedAttention, PackedKernel, TreeKernel, rotate
from .checkpoint_files import read_draft
from .device import DTYPES, packed_attention_kernel
from .head import soft_cross_entropy
from .kernels import Kernels
from .model import PolicyModel
from .packing import MicroBatch, PackedLayout, packed_layout
from .schedule import from_last_stage, sum_over_data_parallel

_MOMENTS = ("exp_avg", "exp_avg_sq")
_UPDATES = "updates"  # steps of the optimizer, in a checkpoint
_AHEAD = 2  # tokens from the one whose state the head takes to the one that it predicts first


@dataclass(frozen=True)
class DraftInput:
    """Sequences of a micro-batch that a rank computes together; context-parallel ranks divide them.

    They have at most `policy.micro_batch_tokens`, which those of a micro-batch exceed if they share prefixes.
    """

    rows: Tensor  # [n] places of their tokens in the batch
    # By step [m] places among these, from whose drafts trained tokens are predicted; fewer in each step.
    predictors: list[Tensor]
    positions: Tensor  # [n] of the tokens in their sequences
    layout: PackedLayout


class DraftAttention:
    """Attention of the steps of a micro-batch, called once in each: see `nemorl.models.eagle3.Attend`."""

    def __init__(self, layout: PackedLayout, positions: Tensor, rotary: RotaryTable) -> None:
        self._layout, self._positions, self._rotary = layout, positions, rotary
        self._first: tuple[Tensor, Tensor] | None = None  # keys and values of step 1
        self._keys: list[Tensor] = []  # of the later steps
        self._values: list[Tensor] = []
        self._attention = PackedAttention(rotates=False)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layout = self._layout
        if self._first is None:
            assert layout.rotary is not None, "a packed layout carries its rotary angles"
            query, key = rotate(query, *layout.rotary), rotate(key, *layout.rotary)
            self._first = key, value
            return self._attention(query, key, value, packed_seq_params=layout)  # type: ignore[no-any-return]
        angles = self._rotary.at(self._positions + len(self._keys) + 1)
        self._keys.append(rotate(key, *angles))
        self._values.append(value)
        kernel: PackedKernel | TreeKernel = TreeKernel(layout, None, None)
        if layout.kernel_rows is not None:
            kernel = PackedKernel(layout.kernel_rows, None, None, None)
        own = (*self._keys, *self._values)
        out: Tensor = JoinedAttention.apply(kernel, rotate(query, *angles), *self._first, *own)
        return out.flatten(1)


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
        self._inputs: deque[list[DraftInput]] = deque()  # of each micro-batch
        self._finals: deque[Tensor] = deque()  # what the decoder returns, where stages wait for each other
        self._counts = [0.0] * config.depth  # predicted tokens of the optimizer step, of all ranks, by step
        # By step the sum of cross entropies, and the number of likeliest tokens that agree.
        self._sums = torch.zeros(config.depth, 2, dtype=torch.float64, device=device)
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
            self._kernel = packed_attention_kernel(kernels.attention)
            self._rotary = RotaryTable(
                *(self._shape.head_dim, self._shape.rope),
                # Drafts reach beyond the ends of sequences, where nothing is learned from them.
                max_positions=policy.max_sequence_length + config.depth,
                dtype=DTYPES[policy.precision],
                device=device,
            )
            # Weight by weight, without copies of all of them at a time.
            self._optimizer = torch.optim.AdamW(
                self._head.parameters(), lr=config.lr, weight_decay=0.0, foreach=False
            )

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
        predicted = [self._predicted(micro) for micro in made]
        counts = torch.tensor([list(map(len, steps)) for steps in predicted], dtype=torch.float64).sum(0)
        self._counts = sum_over_data_parallel(counts, self._device).tolist()
        if self._head is not None:
            self._inputs = deque(map(self._inputs_of, made, predicted))

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
        sums = from_last_stage(torch.cat((self._sums.flatten(), norm.unsqueeze(0)))).cpu()
        counts = torch.tensor(self._counts, dtype=torch.float64).clamp(min=1)
        means = sums[:-1].view(-1, 2) / counts.unsqueeze(1)
        losses, accuracies = means.t().tolist()
        metrics = {
            "draft/loss": sum(loss * self._config.step_decay**step for step, loss in enumerate(losses)),
            "draft/accuracy": accuracies[0],
            "draft/grad_norm": float(sums[-1]),
        }
        if len(losses) > 1:
            for step, (loss, accuracy) in enumerate(zip(losses, accuracies, strict=True), 1):
                metrics |= {f"draft/loss_{step}": loss, f"draft/accuracy_{step}": accuracy}
        return metrics

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

    def _predicted(self, micro: MicroBatch) -> list[Tensor]:
        """By step the places in the batch of the tokens that are predicted, on the CPU."""
        trained, positions = micro.batch.loss_mask.cpu(), micro.batch.position_ids.cpu()
        return [
            (trained & (positions >= _AHEAD + step)).nonzero().squeeze(1)
            for step in range(self._config.depth)
        ]

    def _inputs_of(self, micro: MicroBatch, predicted: Sequence[Tensor]) -> list[DraftInput]:
        """What this rank computes; `predicted` as `_predicted` returns it."""
        share, starts = micro.layout.share, micro.batch.cu_seqlens.tolist()
        mine = range(share.rank, micro.batch.num_sequences, share.size)
        together: list[list[int]] = []
        room = 0
        for sequence in mine:
            length = starts[sequence + 1] - starts[sequence]
            if length > room:
                together.append([])
                room = self._policy.micro_batch_tokens
            together[-1].append(sequence)
            room -= length
        inputs = []
        for sequences in together:
            of_sequences = [torch.arange(starts[s], starts[s + 1]) for s in sequences]
            rows = torch.cat(of_sequences)
            place = torch.full((micro.batch.num_tokens,), -1)
            place[rows] = torch.arange(len(rows))
            predictors = [place[tokens - _AHEAD - step] for step, tokens in enumerate(predicted)]
            predictors = [each[each >= 0].to(self._device) for each in predictors]
            if len(predictors[0]):
                rows = rows.to(self._device)
                positions = micro.batch.position_ids[rows]
                lengths = [len(part) for part in of_sequences]
                layout = packed_layout(lengths, self._rotary.at(positions), self._kernel)
                inputs.append(DraftInput(rows, predictors, positions, layout))
        return inputs

    def _learn(self, states: Sequence[Tensor], micro: MicroBatch) -> None:
        """Add the gradients of a micro-batch; `states` are the embeddings, three states and the last one."""
        inputs = self._inputs.popleft()
        whole = [self._model.states_of_batch(state, micro) for state in states]
        for number, given in enumerate(inputs, 1):
            of_rows = [state.index_select(0, given.rows) for state in whole]
            if number == len(inputs):
                whole.clear()
            self._learn_from(of_rows, given)

    def _learn_from(self, states: list[Tensor], given: DraftInput) -> None:
        """Take `states` [n, H] of the rows, and free them."""
        head, dtype = self._head, DTYPES[self._policy.precision]
        assert head is not None, "the last stage has the head"
        embedded, *of_layers, final = states
        together = torch.cat(of_layers, -1)
        states.clear()
        del of_layers
        attend = DraftAttention(given.layout, given.positions, self._rotary)
        weight = head.lm_head.weight
        own_weight, target_weight = weight.detach().to(dtype), self._output_weight()
        outputs, gradients = [], []
        with torch.enable_grad():
            hidden = head.combined(together)
        for step, predictors in enumerate(given.predictors):
            if not len(predictors):
                break
            with torch.enable_grad():
                # Behind the end of a sequence, where nothing is predicted, the tokens are of another one.
                hidden = head(embedded.roll(-1 - step, 0), hidden, attend)
                outputs.append(head.norm(hidden).index_select(0, predictors))
            found = soft_cross_entropy(
                *(outputs[-1].detach(), own_weight),
                *(final.index_select(0, predictors + 1 + step), target_weight),
                self._vocabulary,
                chunk_tokens=self._model.chunk_tokens,
            )
            count = self._counts[step] / self._config.step_decay**step
            gradients.append(found.grad_hidden / count)
            gradient = found.grad_weight.div_(count)
            weight.grad = gradient if weight.grad is None else weight.grad.add_(gradient)
            self._sums[step] += torch.stack((found.loss, found.agreed))
        torch.autograd.backward(outputs, gradients)

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
        if self._counts[0] and math.isfinite(norm):
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
