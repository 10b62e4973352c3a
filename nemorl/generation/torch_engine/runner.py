"""The network, its weights and its cache: what turns tokens into logits."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nemorl.models.hf_folder import HfFolder
from nemorl.models.rope import RotaryTable
from nemorl.models.shape import ModelShape
from nemorl.models.slices import TensorSlice
from nemorl.trajectories import Int32Array

from .attention import Attention, DecodeAttention, PrefillAttention
from .cache import KVCache
from .linear import ROW_MULTIPLE
from .model import Decoder
from .parameters import decoder_parameters

_PREFILL_TOKENS = 2048  # of one forward pass, padding included; bounds the activations
_PREFILL_STEP = 8  # tokens; prompts are padded to multiples of this, or of an eighth of their size


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt to compute once, and the cache rows that start with it."""

    tokens: Int32Array  # [P]
    rows: Sequence[int]

    @property
    def padded_length(self) -> int:
        """Tokens with padding; a function of the prompt alone, so that its result depends on nothing else."""
        step = max(_PREFILL_STEP, (1 << len(self.tokens).bit_length()) >> 4)
        return -(-len(self.tokens) // step) * step


class ModelRunner:
    """Runs prefills and decoding steps with one version of the weights; takes new weights between them."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        max_kv_tokens: int,
        max_positions: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.cache = KVCache(
            shape.num_layers, shape.num_key_value_heads * shape.head_dim, max_kv_tokens, device, dtype
        )
        self._shape = shape
        self._device, self._dtype = device, dtype
        self._table = RotaryTable(
            shape.head_dim, shape.rope, max_positions=max_positions, dtype=dtype, device=device
        )
        self._parameters = decoder_parameters(shape)
        self._staging = {p.name: torch.zeros(p.shape, device=device, dtype=dtype) for p in self._parameters}
        self._decoder: Decoder | None = None

    def slices(self) -> list[TensorSlice]:
        """Which boxes of the HF checkpoint the parameters hold."""
        return [part for parameter in self._parameters for part in parameter.slices()]

    def staging_parameters(self) -> Mapping[str, Tensor]:
        """Where new weights are written, by parameter name; always these tensors, which no step reads."""
        return self._staging

    def load(self, folder: Path) -> None:
        """Read an HF folder into the staging parameters and commit them."""
        HfFolder(folder).load_into(self._staging, self.slices())
        self.commit()

    @torch.inference_mode()
    def commit(self) -> None:
        """From the next step on, run with a copy of the staging parameters."""
        self._decoder = Decoder(self._shape, self._staging, self._table)

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; the hidden state [hidden] of each prompt's last token."""
        hidden: dict[Prompt, Tensor] = {}
        for batch in _prefill_batches(prompts):
            hidden.update(zip(batch, self._prefill(batch), strict=True))
        return [hidden[prompt] for prompt in prompts]

    def _prefill(self, batch: Sequence[Prompt]) -> Tensor:
        length = batch[0].padded_length
        tokens = np.zeros((len(batch), length), dtype=np.int64)
        for index, prompt in enumerate(batch):
            tokens[index, : len(prompt.tokens)] = prompt.tokens
        attention = PrefillAttention(
            self.cache,
            len(batch),
            rows=self._indices([row for prompt in batch for row in prompt.rows]),
            owners=self._indices([index for index, prompt in enumerate(batch) for _ in prompt.rows]),
        )
        positions = torch.arange(length).repeat(len(batch))
        hidden = self._hidden(torch.from_numpy(tokens).flatten(), positions, attention)
        last = [index * length + len(prompt.tokens) - 1 for index, prompt in enumerate(batch)]
        return hidden[self._indices(last)]

    @torch.inference_mode()
    def decode(self, tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
        """One step of the cache rows 0..n-1: logits [n, vocabulary] after `tokens` at `positions`."""
        padding = [0] * (-len(tokens) % ROW_MULTIPLE)
        attention = DecodeAttention(self.cache, self._indices(positions), max(positions) + 1, self._dtype)
        hidden = self._hidden(
            torch.tensor([*tokens, *padding]), torch.tensor([*positions, *padding]), attention
        )
        return self._network.logits(hidden)[: len(tokens)]

    @torch.inference_mode()
    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary] of `n` hidden states from `prefill`."""
        rows = torch.stack(list(hidden))
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % ROW_MULTIPLE))
        return self._network.logits(padded)[: len(rows)]

    @property
    def _network(self) -> Decoder:
        if self._decoder is None:
            raise RuntimeError("the engine has no weights: call load() or commit() before the first step")
        return self._decoder

    def _hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        return self._network.hidden(tokens.to(self._device), positions.to(self._device), attention)

    def _indices(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _prefill_batches(prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
    """Prompts of one padded length together, as many as one pass may hold."""
    by_length = sorted(prompts, key=lambda prompt: prompt.padded_length)
    for length, same in groupby(by_length, key=lambda prompt: prompt.padded_length):
        batch: list[Prompt] = []
        for prompt in same:
            if batch and (len(batch) + 1) * length > _PREFILL_TOKENS:
                yield batch
                batch = []
            batch.append(prompt)
        yield batch
