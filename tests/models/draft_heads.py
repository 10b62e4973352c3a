"""The EAGLE-3 head and its loss as written out in its paper, sequence by sequence and in any precision."""

from collections.abc import Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemorl.models.eagle3 import Eagle3Head
from nemorl.models.eagle3_shape import Eagle3Shape

TOKENS = 17


def states_of(model: PreTrainedModel, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """[n, len(layers) * H] the hidden states after these numbers of layers, and logits [n, V]."""
    seen: dict[int, Tensor] = {}

    def keep(number: int) -> object:
        def hook(_module: object, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            seen[number] = output[0] if isinstance(output, tuple) else output

        return hook

    inside = model.model.layers
    hooks = [layer.register_forward_hook(keep(number)) for number, layer in enumerate(inside, 1)]
    with torch.no_grad():
        logits = model(tokens.unsqueeze(0)).logits[0]
        seen[0] = model.get_input_embeddings()(tokens).unsqueeze(0)
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[number][0] for number in layers], -1), logits


def head_logits(shape: Eagle3Shape, w: Mapping[str, Tensor], embedded: Tensor, states: Tensor) -> Tensor:
    """[n, V] of the first step of `draft_logits`."""
    return draft_logits(shape, w, embedded, states, 1)[0]


def draft_logits(
    shape: Eagle3Shape, w: Mapping[str, Tensor], embedded: Tensor, states: Tensor, steps: int
) -> list[Tensor]:
    """By step k from 0 [n - k, V], of the drafts that start at each token of a sequence; rope unscaled.

    From embeddings of the next tokens [n, H] and states [n, 3 H]. All keys of all steps lie side by side, and
    a mask says which of them a query sees.
    """
    dim = shape.head_dim

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + shape.rms_norm_eps).sqrt()

    def rotated(x: Tensor, places: Tensor) -> Tensor:
        angles = places[:, None] / shape.rope.theta ** (torch.arange(0, dim, 2, dtype=x.dtype) / dim)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    hidden = states @ w["fc.weight"].T
    layer = "midlayer."
    logits, keys, values, columns = [], [], [], []  # columns: step and start of each key
    for step in range(min(steps, len(embedded))):
        rows = torch.arange(len(embedded) - step)
        hidden, next_tokens = hidden[: len(rows)], embedded[step:]
        both = torch.cat(
            (
                norm(next_tokens, w[f"{layer}input_layernorm.weight"]),
                norm(hidden, w[f"{layer}hidden_norm.weight"]),
            ),
            -1,
        )
        query, key, value = (
            (both @ w[f"{layer}self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, dim)) for name in "qkv"
        )
        repeats = query.shape[1] // key.shape[1]
        keys.append(rotated(key, rows + step).repeat_interleave(repeats, 1))
        values.append(value.repeat_interleave(repeats, 1))
        columns += [(step, start) for start in rows.tolist()]
        scores = torch.einsum("ihd,jhd->hij", rotated(query, rows + step), torch.cat(keys)) / dim**0.5
        sees = [
            [start <= row if of_step == 0 else start == row for of_step, start in columns]
            for row in rows.tolist()
        ]
        scores = scores.masked_fill(~torch.tensor(sees), -torch.inf)
        mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), torch.cat(values)).flatten(1)
        hidden = hidden + mixed @ w[f"{layer}self_attn.o_proj.weight"].T
        normed = norm(hidden, w[f"{layer}post_attention_layernorm.weight"])
        gate, up = (normed @ w[f"{layer}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ w[f"{layer}mlp.down_proj.weight"].T
        logits.append(norm(hidden, w["norm.weight"]) @ w["lm_head.weight"].T)
    return logits


def drawn_head(shape: Eagle3Shape) -> Eagle3Head:
    """No weight is constant."""
    head = Eagle3Head(shape)
    head.draw(seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, weight in head.named_parameters():
        if "norm" in name or name.startswith("lm_head"):
            weight.data += 0.2 * torch.randn(weight.shape, generator=generator)
    return head


def head_inputs(shape: Eagle3Shape) -> tuple[Tensor, Tensor]:
    """Embeddings of the next tokens and states of a sequence of `TOKENS`."""
    generator = torch.Generator().manual_seed(5)
    embedded = torch.randn(TOKENS, shape.hidden_size, generator=generator)
    return embedded, 3 * torch.randn(TOKENS, 3 * shape.hidden_size, generator=generator)
