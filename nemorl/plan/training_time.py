"""Lengths of sequences, and seconds of training on them in a layout. Imports no torch.

update = micro-batches * slowest stage's forward and backward + bubble + gradients, optimizer, weights
bubble = the other stages' time of a micro-batch / chunks; with equal stages (stages - 1) / chunks of one
         (Narayanan et al. 2021, arXiv 2104.04473)
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from statistics import NormalDist, fmean

from nemorl.config.policy import AutoRecompute, PolicyConfig
from nemorl.models.eagle3_shape import Eagle3Shape
from nemorl.models.layout import stage_layers
from nemorl.models.shape import ModelShape

from .costs import Attained, Cost, at_least, message_cost, product_cost, roofline
from .draft_training import (
    DraftWork,
    combined_product,
    draft_attention_width,
    step_products,
    trained_head,
)
from .hardware import Hardware
from .memory import offloaded_widths, stage_parameters
from .operations import (
    Product,
    attention_width,
    forward_attention,
    forward_operations,
    forward_products,
    layer_products,
    sent_elements,
)

# Elements that norms, activations, rotations and sums of a layer read and write for a token: of the hidden
# state, and of what the MLP's first matrix gives.
_HIDDEN_PASSES, _MLP_PASSES = 16, 3
_QUANTILES = 64  # of lengths
_LOGIT_BYTES = 16  # of a logit: written, read in float32, made a probability
_ATTENTION_BACKWARD = 2.5  # products of FlashAttention's backward pass for one of its forward pass
_FLOAT32 = 4
_SENT_STATES = 4  # of a token, for the head for drafts, which the last stage has not computed
_MAX_DRAWN = 256  # sequences of which micro-batches are made; more repeat these


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt, and of responses: measured, or log-normal of this mean after a cut at `limit`."""

    prompt: float
    response: float
    limit: float  # longest response
    sigma: float = 0.5  # of the logarithm
    scores_prompts: bool = True  # logits are computed for all tokens, and not for those of responses only
    # Share of trained tokens that shared prefixes leave out, less what padding adds, if it was measured
    shared: float | None = None
    quantiles: tuple[float, ...] = ()  # of measured responses, the shortest and the longest included

    def quantile(self, share: float) -> float:
        """Response that this share of the responses does not exceed."""
        if self.quantiles:
            place = share * (len(self.quantiles) - 1)
            below = min(int(place), len(self.quantiles) - 2)
            low, high = self.quantiles[below : below + 2]
            return low + (high - low) * (place - below)
        if self.sigma == 0 or self.response >= self.limit:
            return min(self.response, self.limit)
        return min(self.limit, math.exp(self._mu + self.sigma * NormalDist().inv_cdf(share)))

    def parts(self, count: int) -> list[float]:
        """Equally likely responses, in ascending order."""
        return [self.quantile((index + 0.5) / count) for index in range(count)]

    @property
    def uncut(self) -> float:
        """Mean of responses without the limit."""
        if self.sigma == 0 or self.response >= self.limit or self.quantiles:
            return self.response
        return math.exp(self._mu + self.sigma**2 / 2)

    @property
    def sequence(self) -> float:
        """Mean of a complete sequence."""
        return self.prompt + min(self.response, self.limit)

    def packed(self, group: int) -> "Lengths":
        """Of what is computed in training when prefixes are shared: a prompt once for each group of samples.

        Other tasks may begin with the same tokens, and samples may be the same, which is measured only.
        """
        if self.shared is None:
            return replace(self, prompt=self.prompt / group)
        computed = self.sequence * (1 - self.shared)
        response = min(self.response, computed)
        scaled = tuple(one * response / self.response for one in self.quantiles)
        return replace(self, prompt=computed - response, response=response, quantiles=scaled)

    @property
    def scored(self) -> float:
        """Share of the tokens whose logits are computed."""
        return 1.0 if self.scores_prompts else min(self.response, self.limit) / self.sequence

    @cached_property
    def seen(self) -> float:
        """Tokens before a token of a sequence, on average over tokens: half of the sequence, by length."""
        whole = [self.prompt + part for part in self.parts(_QUANTILES)]
        return fmean(length**2 for length in whole) / fmean(whole) / 2

    @cached_property
    def context(self) -> float:
        """Tokens before a sampled token, on average over these."""
        parts = self.parts(_QUANTILES)
        return self.prompt + fmean(part**2 for part in parts) / fmean(parts) / 2

    @property
    def _mu(self) -> float:
        return _mu_of_cut(self.response, self.limit, self.sigma)


@lru_cache
def _mu_of_cut(response: float, limit: float, sigma: float) -> float:
    """Of a log-normal distribution with this mean after the cut. By bisection: the mean rises with it."""
    normal = NormalDist()
    points = [sigma * normal.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES)]
    low, high = -10.0, math.log(limit) + 10 * sigma
    for _ in range(60):
        middle = (low + high) / 2
        mean = fmean(min(limit, math.exp(middle + point)) for point in points)
        low, high = (middle, high) if mean < response else (low, middle)
    return low


@dataclass(frozen=True)
class MicroBatches:
    """Of one copy in one update."""

    count: int
    tokens: float  # of one on average
    fullest: float  # tokens of the fullest


@lru_cache(maxsize=256)
def pack(lengths: Lengths, sequences: int, capacity: int) -> MicroBatches:
    """Sequences of one copy laid into micro-batches, the longest first, each where the least room is left."""
    drawn = min(max(1, sequences), _MAX_DRAWN)
    sizes = [lengths.prompt + part for part in lengths.parts(drawn)]
    filled: list[float] = []
    for size in sorted(sizes, reverse=True):
        fitting = [index for index, tokens in enumerate(filled) if tokens + size <= capacity]
        if fitting:
            filled[max(fitting, key=lambda index: filled[index])] += size
        else:
            filled.append(size)
    count = max(1, math.ceil(len(filled) * max(1, sequences) / drawn))
    tokens = sum(sizes) / drawn * max(1, sequences) / count
    return MicroBatches(count, tokens, max(filled))


@dataclass(frozen=True)
class Training:
    """A policy in its layout, and the sequences that it trains on."""

    policy: PolicyConfig  # with a settled `recompute`
    shape: ModelShape
    hardware: Hardware
    attained: Attained
    lengths: Lengths
    complete: Lengths | None = None  # of a head for drafts, where prefixes are shared in `lengths`

    def update(self, sequences: int) -> Cost:
        """An optimizer step on sequences of all copies."""
        batches = self._batches(sequences)
        cost = self._passes(batches, backward=True) + self._optimizer
        if (head := trained_head(self.policy, self.shape)) is None:
            return cost
        of_copy = math.ceil(sequences / self.policy.layout.data_parallel_size)
        tokens = of_copy * self._drafted.sequence / batches.count
        return cost + self._draft(head, tokens) * batches.count + self._draft_optimizer(head)

    def logprobs(self, sequences: int) -> Cost:
        """A forward pass over sequences of all copies."""
        return self._passes(self._batches(sequences), backward=False)

    def operations(self, sequences: int) -> float:
        """Of the model for training on these, forward and backward, without what is recomputed."""
        of_token = forward_products(self.shape) + forward_attention(self.shape, self.lengths.seen)
        work = 3 * of_token * sequences * self.lengths.sequence
        if (draft := DraftWork.of(self.policy, self.shape)) is not None:
            tokens = sequences * self._drafted.sequence
            predicted = draft.steps * tokens * self._predicted
            work += draft.training(tokens, tokens * self._drafted.seen, predicted)
        return work

    @property
    def offload(self) -> Cost:
        """Weights and state of the optimizer to the host's memory and back, as `policy.offload` has it."""
        policy = self.policy
        moved = 0.0
        parameters = stage_parameters(self.shape, policy.layout, 0)
        if policy.offload.weights:
            moved += parameters.total * self.hardware.element_bytes
        if policy.offload.optimizer and not policy.optimizer.state_is_on_host:
            moved += parameters.per_copy(policy.layout) * policy.optimizer.state_bytes(policy.precision)
        return Cost(link=2 * moved / (self.hardware.host_rate * self.attained.link))

    def _batches(self, sequences: int) -> MicroBatches:
        of_copy = math.ceil(sequences / self.policy.layout.data_parallel_size)
        return pack(self.lengths, of_copy, self.policy.micro_batch_tokens)

    def _passes(self, batches: MicroBatches, *, backward: bool) -> Cost:
        layout = self.policy.layout
        stages = range(layout.pipeline_parallel_size)
        hardware = self.hardware.while_busy(len(stages), batches.count)
        working = self if hardware is self.hardware else replace(self, hardware=hardware)
        costs = [working._stage(stage, batches.tokens, backward) for stage in stages]
        one = max(costs, key=lambda cost: cost.seconds)
        others = sum(cost.seconds for cost in costs) - one.seconds  # of the first micro-batch
        cost = one * batches.count + Cost(bubble=others / layout.virtual_pipeline_parallel_size)
        if layout.expert_parallel_size * layout.expert_tensor_parallel_size > self._copy_size:
            # Copies meet in every layer with experts, so each micro-batch waits for the fullest.
            cost += cost.waiting("straggler") * (batches.fullest / batches.tokens - 1)
        return cost

    @property
    def _copy_size(self) -> int:
        return self.policy.layout.tensor_parallel_size * self.policy.layout.context_parallel_size

    def _stage(self, stage: int, tokens: float, backward: bool) -> Cost:
        """A micro-batch of a copy in one stage, forward or both ways."""
        layout = self.policy.layout
        chunks = range(layout.virtual_pipeline_parallel_size)
        runs = [stage_layers(self.shape.num_layers, layout, stage, chunk) for chunk in chunks]
        layers = [layer for run in runs for layer in run]
        kinds = Counter((self.shape.is_moe(layer), self.shape.window(layer)) for layer in layers)
        cost = Cost()
        for (with_experts, window), count in kinds.items():
            cost += self._layer(with_experts, window, tokens, backward) * count
        if backward and self.policy.offloaded_layers:
            cost += self._copies(runs, tokens)
        if stage == layout.pipeline_parallel_size - 1:
            cost += self._head(tokens, backward)
            if backward and self.policy.multi_token_prediction is not None:
                depth = self.shape.mtp_depth(self.policy.multi_token_prediction.depth)
                cost += (self._further_layer(tokens) + self._head(tokens, backward=True)) * depth
        return cost + self._messages(tokens, layers) * (2 if backward else 1)

    def _copies(self, runs: Sequence[Sequence[int]], tokens: float) -> Cost:
        """Copies of a micro-batch's activations to the host and back that layers of these runs do not hide.

        Each has the time of one pass of a layer, or of a group that is recomputed together, since computation
        waits for the copy before the last one. Nothing hides the way back of the last layer of a stage, if
        another micro-batch came in between.
        """
        layout, group = self.policy.layout, self.policy.recomputed_group
        size = tokens / layout.context_parallel_size * self.hardware.element_bytes
        rate = self.hardware.host_rate * self.attained.link

        @cache
        def passes(with_experts: bool, window: int | None) -> tuple[float, float]:
            """Seconds of a layer of this kind, forward and both ways."""
            forward = self._layer(with_experts, window, tokens, backward=False)
            both = self._layer(with_experts, window, tokens, backward=True)
            return forward.seconds, both.seconds

        exposed = 0.0
        for layers in runs:
            for number, width in enumerate(offloaded_widths(self.shape, self.policy, layers)):
                copying = width * size / rate
                own = layers[number * group : (number + 1) * group]
                seconds = [passes(self.shape.is_moe(layer), self.shape.window(layer)) for layer in own]
                forward, both = sum(one for one, _ in seconds), sum(two for _, two in seconds)
                is_last = own[-1] == layers[-1] and layout.pipeline_parallel_size > 1
                exposed += max(0.0, copying - forward)
                exposed += copying if is_last else max(0.0, copying - (both - forward))
        return Cost(link=exposed)

    def _layer(self, with_experts: bool, window: int | None, tokens: float, backward: bool) -> Cost:
        layout, attained, moe = self.policy.layout, self.attained, self.shape.moe
        tensor, rows = layout.tensor_parallel_size, tokens / layout.context_parallel_size
        again = self._recomputed if backward else 0.0
        forward = back = Cost()
        launches, mlp = attained.launch, 0
        for product in layer_products(self.shape, self.shape.num_layers - 1 if with_experts else 0):
            if product.module not in ("projections", "mla_up_proj"):
                mlp = max(mlp, product.columns * product.copies)
            if moe is not None and product.module == "experts":
                own = moe.num_experts // layout.expert_parallel_size
                # Each rank brings its share of the copy's tokens, and gets those of its experts.
                size = layout.expert_tensor_parallel_size
                each = rows / tensor * size * layout.expert_parallel_size * moe.top_k / moe.num_experts
                part, busiest = product.on_rank(size), attained.expert_load - 1
                one, both = self._product(each, part, own), self._gradients(each, part, own)
                forward += one + one.waiting("straggler") * busiest
                back += both + both.waiting("straggler") * busiest
            else:
                part = product.on_rank(tensor)
                forward += self._product(rows, part, 1)
                back += self._gradients(rows, part, 1)
        if with_experts and moe is not None:
            launches += attained.expert_launch * (moe.num_experts // layout.expert_parallel_size)
        seen = min(self.lengths.seen, window or self.lengths.seen)
        work = 2 * rows * seen * attention_width(self.shape) / tensor
        attention = Cost(compute=work / (self.hardware.operations * attained.attention))
        elements = rows / tensor * (_HIDDEN_PASSES * self.shape.hidden_size + _MLP_PASSES * mlp)
        passing = roofline(0.0, elements * self.hardware.element_bytes, self.hardware, attained)
        forward += attention + passing
        if not backward:
            return at_least(forward, launches)
        back += attention * _ATTENTION_BACKWARD + passing * 2
        return at_least(forward * (1 + again) + back, launches * (3 + again))

    def _further_layer(self, tokens: float) -> Cost:
        """A layer for a further token, both ways."""
        rows, hidden = tokens / self.policy.layout.context_parallel_size, self.shape.hidden_size
        part = Product("projections", 2 * hidden, hidden, "columns")
        part = part.on_rank(self.policy.layout.tensor_parallel_size)
        projection = self._product(rows, part, 1) + self._gradients(rows, part, 1)
        with_experts = self.shape.is_moe(self.shape.num_layers)
        return self._layer(with_experts, None, tokens, backward=True) + projection

    def _product(self, rows: float, part: Product, groups: float) -> Cost:
        fp8 = self.policy.fp8 is not None
        return product_cost(rows, part, self.hardware, self.attained, groups=groups, fp8=fp8)

    def _gradients(self, rows: float, part: Product, groups: float) -> Cost:
        """Of the product's input, and of its weight."""
        of_input = Product(part.module, part.columns, part.inner)
        of_weight = Product(part.module, max(1, round(rows)), part.columns)
        return self._product(rows, of_input, groups) + self._product(part.inner, of_weight, groups)

    def _head(self, tokens: float, backward: bool) -> Cost:
        layout = self.policy.layout
        rows = tokens * self.lengths.scored / layout.context_parallel_size
        part = Product("projections", self.shape.hidden_size, self.shape.vocab_size, "columns")
        part = part.on_rank(layout.tensor_parallel_size)
        logits = roofline(0.0, rows * part.columns * _LOGIT_BYTES, self.hardware, self.attained)
        cost = self._product(rows, part, 1) + logits
        return cost + self._gradients(rows, part, 1) + logits if backward else cost

    @property
    def _drafted(self) -> Lengths:
        return self.complete or self.lengths

    @property
    def _predicted(self) -> float:
        """Share of the tokens that a draft is trained to predict, in each step."""
        return min(self._drafted.response, self._drafted.limit) / self._drafted.sequence

    def _draft(self, head: Eagle3Shape, tokens: float) -> Cost:
        """The head for drafts on a micro-batch of a copy, both ways, after the policy's passes.

        Tensor-parallel ranks compute the layer each, and their own part of the logits; the policy's are
        computed again. Other stages wait. States come to the last stage from the others.
        """
        assert self.policy.draft is not None, "the policy trains a head"
        layout, steps = self.policy.layout, self.policy.draft.depth
        rows = tokens / layout.context_parallel_size

        def product(rows: float, part: Product) -> Cost:
            return product_cost(rows, part, self.hardware, self.attained)

        def both_ways(rows: float, part: Product, *, of_input: bool = True) -> Cost:
            cost = product(rows, part)
            if of_input:
                cost += product(rows, Product(part.module, part.columns, part.inner))
            return cost + product(part.inner, Product(part.module, max(1, round(rows)), part.columns))

        step, back = Cost(), 1 + _ATTENTION_BACKWARD
        for part in step_products(head):
            step += both_ways(rows, part)
        work = 2 * rows * (self._drafted.seen + (steps - 1) / 2) * draft_attention_width(head)
        step += Cost(compute=back * work / (self.hardware.operations * self.attained.attention))
        elements = rows * (_HIDDEN_PASSES * head.hidden_size + _MLP_PASSES * 2 * head.ffn_hidden_size)
        moved = 3 * elements * self.hardware.element_bytes
        step += roofline(0.0, moved, self.hardware, self.attained)
        predicted = rows * self._predicted
        of_head = Product("projections", head.hidden_size, head.draft_vocab_size, "columns")
        of_head = of_head.on_rank(layout.tensor_parallel_size)
        logits = 3 * predicted * of_head.columns * _LOGIT_BYTES
        step += both_ways(predicted, of_head) + product(predicted, of_head)
        step += roofline(0.0, logits, self.hardware, self.attained)
        cost = at_least(step, 3 * self.attained.launch) * steps
        cost += both_ways(rows, combined_product(head), of_input=False)
        if layout.pipeline_parallel_size > 1:
            parts = layout.tensor_parallel_size if layout.sequence_parallel else 1
            sent = _SENT_STATES * rows / parts * head.hidden_size * self.hardware.element_bytes
            span = min(layout.world_size, 2 * layout.stage_size)
            cost += message_cost(sent, span, self.hardware, self.attained, count=_SENT_STATES)
        return cost

    def _draft_optimizer(self, head: Eagle3Shape) -> Cost:
        """The sum of the head's gradients over all copies, and its step, which each rank takes."""
        layout = self.policy.layout
        size = _FLOAT32 * head.num_parameters(layout.tensor_parallel_size)
        copies = layout.data_parallel_size * layout.context_parallel_size
        span = layout.stage_size if copies > 1 else 1
        sent = 2 * size * (copies - 1) / copies
        # Weights and two moments are read and written, gradients read for their norm and the step.
        stepped = roofline(0.0, 8 * size, self.hardware, self.attained)
        return stepped + message_cost(sent, span, self.hardware, self.attained, count=2)

    def _messages(self, tokens: float, layers: list[int]) -> Cost:
        """Of one direction, for a micro-batch of a copy."""
        layout = self.policy.layout
        experts = layout.expert_parallel_size * layout.expert_tensor_parallel_size
        with_experts = sum(map(self.shape.is_moe, layers))
        stages = min(layout.world_size, 2 * layout.stage_size) if layout.pipeline_parallel_size > 1 else 1
        spans = {
            "tensor": (layout.tensor_parallel_size, 4 * len(layers)),
            "context": (self._copy_size if layout.context_parallel_size > 1 else 1, len(layers)),
            "expert": (experts, 2 * with_experts),
            "pipeline": (stages, layout.virtual_pipeline_parallel_size),
        }
        cost = Cost()
        for axis, elements in sent_elements(self.shape, layout).items():
            span, count = spans[axis]
            sent = elements * tokens * self.hardware.element_bytes / 2
            scattered = axis == "expert"
            cost += message_cost(sent, span, self.hardware, self.attained, count=count, scattered=scattered)
        return cost

    @cached_property
    def _recomputed(self) -> float:
        """Share of the forward pass that the backward pass repeats."""
        recompute = self.policy.recompute
        if isinstance(recompute, AutoRecompute):
            raise ValueError("`policy.recompute: auto` has to be settled before its time is planned")
        work = forward_operations(self.shape, self.policy, recompute)
        whole = forward_products(self.shape) - 2 * self.shape.hidden_size * self.shape.vocab_size
        whole_attention = forward_attention(self.shape, self.policy.max_sequence_length / 2)
        return min(1.0, work / (whole + whole_attention))

    @property
    def _optimizer(self) -> Cost:
        """Gradients to their owners and weights back over the copies, and the step on a rank's share."""
        layout, optimizer = self.policy.layout, self.policy.optimizer
        parameters = stage_parameters(self.shape, layout, 0)
        copies = layout.data_parallel_size * layout.context_parallel_size
        sent = (
            parameters.total
            * (optimizer.gradient_bytes + self.hardware.element_bytes)
            * (copies - 1)
            / copies
        )
        span = layout.stage_size if copies > 1 else 1
        cost = message_cost(sent, span, self.hardware, self.attained, count=2)
        state = optimizer.state_bytes(self.policy.precision)
        updated = parameters.per_copy(layout) if optimizer.is_sharded else parameters.total
        if optimizer.state_is_on_host:
            moved = updated * (optimizer.gradient_bytes + self.hardware.element_bytes)
            return cost + Cost(link=moved / (self.hardware.host_rate * self.attained.link))
        moved = updated * (2 * state + optimizer.gradient_bytes + self.hardware.element_bytes)
        return cost + roofline(0.0, moved, self.hardware, self.attained)
