"""Operations and memory of training a head for drafts (`nemorl.megatron.draft`). Imports no torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemorl.config.policy import PolicyConfig
from nemorl.models.eagle3_shape import Eagle3Shape, head_shape
from nemorl.models.hf_config import BrokenModelFolder, UnsupportedModel
from nemorl.models.layout import stage_layers
from nemorl.models.shape import ModelShape

from .operations import Product

_FLOAT32 = 4
_STATES = 5  # of a token: its embedding, three states of layers, the last one
# Of logits: those of head and policy, the head's probabilities, and a product of the two.
_LOGIT_COPIES = 4


def trained_head(policy: PolicyConfig, shape: ModelShape) -> Eagle3Shape | None:
    """The head that the policy trains; None if it trains none."""
    if (section := policy.draft) is None:
        return None
    try:
        return head_shape(shape, section.layers, section.model_path)
    except (BrokenModelFolder, UnsupportedModel):  # refused by another check
        return Eagle3Shape.of(shape)


@dataclass(frozen=True)
class DraftWork:
    """Operations of a forward pass in the head's products and in its attention, by what they are for."""

    combined: int  # for a token, of its three states, once
    layer: int  # for a token in each step
    head: int  # for a predicted token
    seen: int  # for each key that a query sees
    steps: int

    @classmethod
    def of(cls, policy: PolicyConfig, shape: ModelShape) -> "DraftWork | None":
        """Of the head that the policy trains, if it trains one."""
        if policy.draft is None or (head := trained_head(policy, shape)) is None:
            return None
        return cls(
            combined=combined_product(head).operations,
            layer=sum(product.operations for product in step_products(head)),
            head=2 * head.hidden_size * head.draft_vocab_size,
            seen=2 * draft_attention_width(head),
            steps=policy.draft.depth,
        )

    def training(self, tokens: float, seen: float, predicted: float) -> float:
        """Forward and backward over `tokens`, whose queries see `seen` keys in step 1, all together.

        `predicted` tokens are those of all steps. The policy's states have no gradient. The policy's logits,
        which the loss computes again, do not count.
        """
        keys = self.steps * seen + tokens * self.steps * (self.steps - 1) / 2  # one more in each step
        each_step = self.steps * self.layer * tokens
        return 2 * self.combined * tokens + 3 * (each_step + self.head * predicted + self.seen * keys)

    def of_sequences(self, lengths: Sequence[int], predicted: int) -> float:
        """The same of complete sequences."""
        return self.training(sum(lengths), sum(n * (n + 1) // 2 for n in lengths), predicted)


def combined_product(head: Eagle3Shape) -> Product:
    """Of the three states, once for all steps; every tensor-parallel rank computes it, as those of a step."""
    return Product("projections", 3 * head.hidden_size, head.hidden_size)


def step_products(head: Eagle3Shape) -> Iterator[Product]:
    """Of the layer, in each step."""
    heads = head.num_attention_heads + 2 * head.num_key_value_heads
    yield Product("projections", 2 * head.hidden_size, heads * head.head_dim)
    yield Product("projections", head.num_attention_heads * head.head_dim, head.hidden_size)
    yield Product("mlp", head.hidden_size, 2 * head.ffn_hidden_size)
    yield Product("mlp", head.ffn_hidden_size, head.hidden_size)


def draft_attention_width(head: Eagle3Shape) -> int:
    """As `nemorl.plan.operations.attention_width`."""
    return 2 * head.num_attention_heads * head.head_dim


def draft_tokens(policy: PolicyConfig, tokens: int) -> int:
    """The most that a rank computes of a micro-batch: context-parallel ranks divide its sequences."""
    longest, sharing = policy.max_sequence_length, policy.layout.context_parallel_size
    return min(tokens, -(-max(1, tokens // longest) // sharing) * longest)


def draft_bytes(head: Eagle3Shape, policy: PolicyConfig, tokens: int, item: int) -> int:
    """Of a micro-batch of `tokens` on a rank at the loss of the last step, without weights and gradients.

    `item` are the bytes of an element in the policy's precision.
    """
    assert policy.draft is not None, "the policy trains a head"
    hidden, ffn, steps = head.hidden_size, head.ffn_hidden_size, policy.draft.depth
    query, keys = (n * head.head_dim for n in (head.num_attention_heads, 2 * head.num_key_value_heads))
    # Of a step: the inputs of four norms in float32, both inputs of the layer together, queries, keys and
    # values, what attention returns, its normed sum, of the MLP gate, activated gate, other part and product;
    # and what the output matrix takes, with its gradient.
    elements = 2 * hidden + query + keys + query + hidden + 4 * ffn + 2 * hidden
    kept = tokens * (steps * (4 * hidden * _FLOAT32 + elements * item) + _STATES * hidden * item)
    rows = -(-head.draft_vocab_size // policy.layout.tensor_parallel_size)
    if item < _FLOAT32:  # matrices in the policy's precision, in each step
        layer = head.num_parameters() - head.draft_vocab_size * hidden - 3 * hidden * hidden
        kept += item * (steps * layer + 3 * hidden * hidden + rows * hidden)
    chunk = min(policy.logprob_chunk_tokens, tokens)
    logits = _LOGIT_COPIES * chunk * rows * _FLOAT32
    gradient = rows * hidden * _FLOAT32 * (1 if item == _FLOAT32 else 2)
    return kept + logits + gradient


def draft_activations(
    head: Eagle3Shape,
    policy: PolicyConfig,
    num_layers: int,
    stage: int,
    tokens: int,
    num_micro_batches: int,
    item: int,
    *,
    activations: int,
    waits: int,
    others: int,
) -> int:
    """Bytes of a rank's activations where `head` is trained, from those of the policy alone.

    The last stage computes a micro-batch of `tokens` when the policy's forward pass has ended, of which
    `waits` bytes stay for the backward pass: before it has logits and the gradient of its output weight,
    `others`. With several stages it computes them all when the passes have ended, and until then every stage
    keeps its states of all micro-batches.
    """
    layout = policy.layout
    stages, last = layout.pipeline_parallel_size, stage == layout.pipeline_parallel_size - 1
    states = 0
    if stages > 1:
        runs = range(layout.virtual_pipeline_parallel_size)
        after = {layer + 1 for run in runs for layer in stage_layers(num_layers, layout, stage, run)}
        number = len(after & set(head.layers)) + (stage == 0) + last
        parts = layout.context_parallel_size
        parts *= layout.tensor_parallel_size if layout.sequence_parallel else 1
        states, waits = number * num_micro_batches * -(-tokens // parts) * head.hidden_size * item, 0
    if not last:
        return activations + states
    draft = draft_bytes(head, policy, draft_tokens(policy, tokens), item)
    return states + max(activations, waits + draft - others)
