"""The keys and values of running sequences, a row for each, and pages of those that others may begin with.

The attention kernel reads dense rows in place, without a gather of pages at every step; what a sequence
begins with is copied once from pages to its row. The price is the room behind short sequences, so admission
counts rows times the longest. Storage grows by reallocation, layer by layer.

New tokens continue rows: a decoding step each by one token, or by one and its drafts, and a prompt whose
beginning is cached its own by the rest. Where rows of a product round in the same way (`whole_places`), the
outputs are the same to the bit, however many tokens of a row are computed together; where rows of one prompt
attend to one copy of it (`SharedBeginnings`), they are the same up to rounding. Who drives a network with
such a cache sees a `Runner`; a `PromptReader` has it read what no page holds.
"""

import importlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nemorl.device import has_dense_attention_with_lse, takes_flash_attention, upload

# Numbers of places that the attention kernel reads, within each of its blocks of 512. With 256 or 320 the
# CPU's matrix product splits a row's sum elsewhere, and a sequence's rounding would depend on the longest one
# in the batch (seen with MKL 2024.2 on x86-64; elsewhere the only loss is the bit).
_BLOCK = 512
_READ_IN_BLOCK = (64, 128, 192, 384, 448, 512)

PAGE_TOKENS = 8

# Rows share the read of their beginnings where it saves this number of places for each, which is a kernel
# call more. Their own parts are read from a multiple of _ALIGNMENT on, since kernels sum in blocks.
_FEWEST_PLACES, _ALIGNMENT = 1024, 64

# Tokens of a prompt that attend in one kernel call, and of a row up to which masks are kept for all layers:
# together they bound the memory of masks, which grow with tokens times places.
_PROMPT_TOKENS, _KEPT_MASK_TOKENS = 256, 64
_QUERY_MULTIPLE = 4  # query rows of one kernel call: with others the CPU's kernel rounds by what shares it


def whole_places(places: int) -> int:
    """The least number of places, at least `places`, for which every row sums in the same order."""
    blocks, rest = divmod(places - 1, _BLOCK)
    return blocks * _BLOCK + next(count for count in _READ_IN_BLOCK if count > rest)


# Attention of one query a row: queries [rows, heads, dim], keys and values [rows, places, kv_heads, dim], how
# many of these each row has [rows], the scale -> [rows, heads, dim].
DecodeKernel = Callable[[Tensor, Tensor, Tensor, Tensor, float | None], Tensor]


def decode_kernel(device: torch.device, dtype: torch.dtype) -> DecodeKernel | None:
    """Flash-decoding (`flash_attn_with_kvcache`) where it is installed; None for torch's attention.

    It splits the keys of a row over a GPU's processors, which one query would not fill, and reads only the
    places that a row has, without a mask. Not run on hardware.
    """
    if not takes_flash_attention(device, dtype):
        return None
    try:
        flash_attn_with_kvcache = importlib.import_module("flash_attn").flash_attn_with_kvcache
    except (ImportError, OSError):  # missing, or built for another torch
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Tensor, scale: float | None) -> Tensor:
        out: Tensor = flash_attn_with_kvcache(
            query.unsqueeze(1), key, value, cache_seqlens=lengths.int(), softmax_scale=scale, causal=True
        )
        return out.squeeze(1)

    return attend


class KVCache:
    """Rows 0..n-1 for each layer; keys are as attention sees them, rotated, so that any family can use it."""

    def __init__(self, max_tokens: int, first: int = 0, whole: tuple[int, int] = (0, 0)) -> None:
        """`whole`: rows and their length that are reserved at once if they fit, so that they never move."""
        self.max_tokens = max_tokens  # rows times the longest
        self._whole = whole
        self.kernel: DecodeKernel | None = None  # for steps of one token a row, instead of torch's
        self.empty_places = first  # before the first token of each row
        self.rows = self.length = 0  # sequences, and tokens of each, for which there is room
        # [values, rows, places, *], two values for keys and values; each is made when it is first written
        self._layers: dict[int, Tensor] = {}
        self._pages: dict[int, Tensor] = {}  # the same of pages: [values, pages, PAGE_TOKENS, *]

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    @property
    def layout(self) -> tuple[int, ...]:
        """Where and how keys and values lie; another one after they moved."""
        return (self.rows, self.length, *(layer.data_ptr() for layer in self._layers.values()))

    def fits(self, rows: int, length: int) -> bool:
        return rows * length <= self.max_tokens

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what they hold. Raises ValueError for too many."""
        if rows <= self.rows and length <= self.length:
            return
        if not self.fits(rows, length):
            problem = f"may hold {self.max_tokens} tokens, and {rows} rows of {length} tokens are requested"
            raise ValueError(f"the KV cache {problem}; raise generation.max_kv_tokens")
        whole = max(rows, self._whole[0]), max(length, self._whole[1])
        if not self.rows and self.fits(*whole):
            rows, length = whole
        kept_rows, kept_places = min(self.rows, rows), self.length + self.empty_places
        if self.fits(self.rows, length):
            rows = max(rows, self.rows)
        # With what it may grow into where the limit leaves room for that.
        needed = whole_places(length + self.empty_places) - self.empty_places
        grown = whole_places(max(length, self.length * 3 // 2) + self.empty_places) - self.empty_places
        sizes = (grown, max(needed, self.length), needed, self.max_tokens // rows)
        self.rows, self.length = rows, next(size for size in sizes if self.fits(rows, size))
        kept_places = min(kept_places, self.length + self.empty_places)
        for layer, old in self._layers.items():
            # Zeros, not garbage: masked keys and values still enter the products, where a NaN would spread.
            new = old.new_zeros(len(old), rows, self.length + self.empty_places, *old.shape[3:])
            new[:, :kept_rows, :kept_places] = old[:, :kept_rows, :kept_places]
            self._layers[layer] = new

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""
        if not sources or not self._layers:
            return
        device = next(iter(self._layers.values())).device
        source, target = upload(device, sources, targets)
        end = length + self.empty_places
        for stored in self._layers.values():
            stored[:, target, :end] = stored[:, source, :end]

    def save_pages(self, row: int, first: int, pages: Sequence[int], num_pages: int) -> None:
        """Copy the tokens of a row from the position `first` on to `pages`, of at most `num_pages`."""
        if not pages or not self._layers:
            return
        (index,) = upload(next(iter(self._layers.values())).device, pages)
        start, most = first + self.empty_places, max(pages) + 1
        end = start + len(pages) * PAGE_TOKENS
        for layer, stored in self._layers.items():
            held = self._pages.get(layer)
            if held is None or held.shape[1] < most:
                room = most if held is None else min(max(most, held.shape[1] * 2), num_pages)
                grown = stored.new_zeros(len(stored), room, PAGE_TOKENS, *stored.shape[3:])
                if held is not None:
                    grown[:, : held.shape[1]] = held
                held = self._pages[layer] = grown
            held[:, index] = stored[:, row, start:end].unflatten(1, (-1, PAGE_TOKENS))

    def load_pages(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Copy `pages`, which were saved, to the beginnings of `rows`."""
        if not pages:
            return
        index, targets = upload(next(iter(self._pages.values())).device, pages, rows)
        start, end = self.empty_places, self.empty_places + len(pages) * PAGE_TOKENS
        for layer, held in self._pages.items():
            self._layers[layer][:, targets, start:end] = held[:, index].flatten(1, 2).unsqueeze(1)

    def release(self) -> None:
        self.rows = self.length = 0
        self._layers, self._pages = {}, {}

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        return rows * (self.length + self.empty_places) + positions + self.empty_places

    def keep(self, layer: int, slots: Tensor, *values: Tensor) -> None:
        """Put keys and values, or others [n, *] of tokens, at their slots [n]."""
        if layer not in self._layers:
            size = (len(values), self.rows, self.length + self.empty_places, *values[0].shape[1:])
            with torch.inference_mode(False):  # it is written in and outside of that mode
                self._layers[layer] = torch.zeros(size, dtype=values[0].dtype, device=values[0].device)
        for stored, value in zip(self._layers[layer].flatten(1, 2), values, strict=True):
            stored.index_copy_(0, slots, value)

    def read(self, layer: int, rows: range, longest: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, kv_heads, places, dim] of rows of which the longest has `longest` tokens.

        They begin at the place `first`.
        """
        end = min(first + whole_places(longest + self.empty_places - first), self.length + self.empty_places)
        key, value = self._layers[layer][:, rows.start : rows.stop, first:end].transpose(2, 3)
        return key, value

    def stored(self, layer: int, rows: range) -> tuple[Tensor, Tensor]:
        """Keys and values [rows, places, kv_heads, dim] of rows, with the places behind their tokens."""
        key, value = self._layers[layer][:, rows.start : rows.stop]
        return key, value

    def at(self, layer: int, slots: Tensor) -> Tensor:
        """[values, n, *] of the tokens at `slots` [n]."""
        return self._layers[layer].flatten(1, 2).index_select(1, slots)

    def tokens(self, layer: int, row: int, first: int, end: int) -> Tensor:
        """[values, end - first, *] of the tokens at these positions of a row."""
        return self._layers[layer][:, row, first + self.empty_places : end + self.empty_places]


PrefixKey = tuple[int, bytes]  # the page before, -1 for none, and the tokens of a page


class PrefixIndex:
    """A tree of pages by their tokens; the least recently used one is given to others first.

    A page is used whenever one behind it is, so none is lost before those that only it leads to.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._pages: OrderedDict[PrefixKey, int] = OrderedDict()  # the most recently used one last

    def clear(self) -> None:
        self._pages.clear()

    def find(self, tokens: NDArray[np.int32]) -> tuple[list[int], PrefixKey | None]:
        """The pages that `tokens` begin with, and the next one, if they have it and it is not known.

        At least one token is not in them: a model has to read something to say what follows.
        """
        keys, following = self._known(tokens, (len(tokens) - 1) // PAGE_TOKENS)
        self._use(keys)
        return [self._pages[key] for key in keys], following

    def add(self, tokens: NDArray[np.int32]) -> tuple[int, list[int]]:
        """Pages for what is not known of `tokens`, in order, and the number of pages before them."""
        count = min(len(tokens) // PAGE_TOKENS, self.num_pages)
        keys, _ = self._known(tokens, count)
        self._use(keys)
        first, added = len(keys), []
        while len(keys) < count:
            key = self._key(tokens, keys)
            if len(self._pages) < self.num_pages:
                page = len(self._pages)
            else:
                _, page = self._pages.popitem(last=False)
            self._pages[key] = page
            keys.append(key)
            added.append(page)
        self._use(keys)
        return first, added

    def _known(self, tokens: NDArray[np.int32], count: int) -> tuple[list[PrefixKey], PrefixKey | None]:
        """Keys of the first pages of at most `count` that are known, and that of the next one."""
        keys: list[PrefixKey] = []
        while len(keys) < min(count, self.num_pages):
            key = self._key(tokens, keys)
            if key not in self._pages:
                return keys, key
            keys.append(key)
        return keys, None

    def _key(self, tokens: NDArray[np.int32], before: list[PrefixKey]) -> PrefixKey:
        start = len(before) * PAGE_TOKENS
        parent = self._pages[before[-1]] if before else -1
        return parent, tokens[start : start + PAGE_TOKENS].tobytes()

    def _use(self, keys: list[PrefixKey]) -> None:
        for key in reversed(keys):  # the first page last
            self._pages.move_to_end(key)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt to read once, and the cache rows that start with it."""

    tokens: NDArray[np.int32]  # [P]
    rows: Sequence[int]
    start: int = 0  # tokens that these rows hold already, fewer than P

    @property
    def num_new(self) -> int:
        return len(self.tokens) - self.start


class Beginning(NamedTuple):
    """Cache rows with the same first `length` tokens, and thus the same keys and values of these."""

    rows: Sequence[int]
    length: int


class StepTokens(NamedTuple):
    """What each of the cache rows 0..n-1 reads next: one token, and drafts of those that may follow."""

    tokens: Sequence[int]  # [N], row after row
    positions: Sequence[int]  # [N]
    counts: Sequence[int]  # [n] tokens of each row
    uploaded: tuple[Tensor, ...]  # tokens, positions and their `padded_slots`, [N] int64
    beginnings: Sequence[Beginning] = ()  # with each row in one of them; empty where no two rows share one


class RowCache(Protocol):
    """Keys and values of running sequences, in rows."""

    def fits(self, rows: int, length: int) -> bool:
        """True if `rows` sequences of which the longest has `length` tokens can be held at one time."""

    def reserve(self, rows: int, length: int) -> None:
        """Make room for `rows` of `length` tokens, keeping what the first `rows` hold."""

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the rows `sources` to the rows `targets`; no row is in both."""

    def save_pages(self, row: int, first: int, pages: Sequence[int], num_pages: int) -> None:
        """Copy the tokens of a row from the position `first` on to `pages`, of at most `num_pages`."""

    def load_pages(self, pages: Sequence[int], rows: Sequence[int]) -> None:
        """Copy `pages`, which were saved, to the beginnings of `rows`."""


class Runner(Protocol):
    """The network with its cache: turns tokens into logits."""

    @property
    def cache(self) -> RowCache: ...

    def prefill(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Fill the cache rows of `prompts`; for each the input of `logits`."""

    def logits(self, hidden: Sequence[Tensor]) -> Tensor:
        """Logits [n, vocabulary], float32, after `n` prompts, of what `prefill` gave for them."""

    def decode(self, step: StepTokens) -> Tensor:
        """One step of the cache rows 0..n-1: logits [N, vocabulary] after each of their tokens."""


class PromptReader:
    """Reads prompts into the rows of a cache, and keeps pages of what was read for those that begin so."""

    def __init__(self, runner: Runner, max_cached_tokens: int) -> None:
        self._runner = runner
        self._prefixes = PrefixIndex(max_cached_tokens // PAGE_TOKENS)
        self.tokens_read = self.tokens_copied = 0  # of prompts

    def forget(self) -> None:
        """Give up all pages: the weights that computed them are replaced."""
        self._prefixes.clear()

    def read(self, prompts: Sequence[Prompt]) -> list[Tensor]:
        """Read prompts, for each the input of `Runner.logits`.

        One waits for another that begins in the same way, and then begins with its pages.
        """
        hidden: dict[int, Tensor] = {}
        waiting = dict(enumerate(prompts))
        while waiting:
            together: dict[int, Prompt] = {}
            missing: set[PrefixKey] = set()
            for place, prompt in waiting.items():
                pages, following = self._prefixes.find(prompt.tokens)
                if following is None or following not in missing:
                    together[place] = replace(prompt, start=len(pages) * PAGE_TOKENS)
                    self._runner.cache.load_pages(pages, prompt.rows)
                    if following is not None:
                        missing.add(following)
            hidden |= zip(together, self._runner.prefill(list(together.values())), strict=True)
            for place, prompt in together.items():
                self.save(prompt.tokens, prompt.rows[0])
                del waiting[place]
            self.tokens_read += sum(prompt.num_new for prompt in together.values())
            self.tokens_copied += sum(prompt.start for prompt in together.values())
        return [hidden[place] for place in range(len(prompts))]

    def save(self, tokens: NDArray[np.int32], row: int) -> None:
        """Keep the pages of `tokens`, which a cache row holds, for sequences that begin with them."""
        first, pages = self._prefixes.add(tokens)
        self._runner.cache.save_pages(row, first * PAGE_TOKENS, pages, self._prefixes.num_pages)


def padded_slots(counts: Sequence[int]) -> NDArray[np.int64]:
    """Where tokens, `counts` of each row, lie if all rows are as wide as the widest."""
    sizes = np.asarray(counts, dtype=np.int64)
    starts = np.arange(len(sizes)) * sizes.max() - (sizes.cumsum() - sizes)
    slots: NDArray[np.int64] = np.arange(sizes.sum()) + np.repeat(starts, sizes)
    return slots


@dataclass(frozen=True)
class SharedBeginnings:
    """What several rows of a step begin with; their queries attend to one row's copy of it, in one call.

    The softmax over a row is joined from those over its beginning and over its own part, by their sums.
    """

    cache: KVCache
    beginnings: Sequence[Beginning]
    first: int  # position from which the rows' own parts are read; what lies before is in all beginnings
    lengths: Tensor  # [rows] of the beginning of each
    order: Tensor  # [rows] the rows, those of a beginning side by side
    places: Tensor  # [rows] where each is in this order

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None
    ) -> Tensor:
        """Outputs [rows, kv_heads, q, dim] of queries; keys, values and mask are of the rows' own parts."""
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        own, own_lse = attention(query, key, value, attn_mask=mask, scale=scale)
        outs, all_lse = [], []
        queries = query.index_select(0, self.order).split([len(rows) for rows, _ in self.beginnings])
        for (rows, length), of_rows in zip(self.beginnings, queries, strict=True):
            of_first = self.cache.read(layer, range(rows[0], rows[0] + 1), length)
            k, v = (stored[:, :, :length] for stored in of_first)
            found = attention(of_rows.transpose(0, 1).flatten(1, 2).unsqueeze(0), k, v, scale=scale)
            out, lse = (x[0].unflatten(1, (len(rows), -1)).transpose(0, 1) for x in found)
            outs.append(out)
            all_lse.append(lse)
        before, lse_before = (torch.cat(parts).index_select(0, self.places) for parts in (outs, all_lse))
        share = torch.sigmoid(own_lse - lse_before).unsqueeze(-1).type_as(own)
        return torch.lerp(before, own, share)


@dataclass
class ContinuedRows:
    """New tokens of neighboring cache rows: of each row some, at consecutive positions."""

    cache: KVCache
    rows: range  # of the cache
    width: int  # new tokens of the row that has most
    positions: Tensor  # [n] of the new tokens in their sequences, row after row
    longest: int  # the largest position, plus one
    dtype: torch.dtype  # of scores
    slots: Tensor | None = None  # [n], see `padded_slots`; None where all rows are as wide
    shared: SharedBeginnings | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(
        self, layer: int, query: Tensor, scale: float | None, window: int | None, sinks: Tensor | None
    ) -> Tensor:
        """Outputs [n, heads, dim] of the queries [n, heads, dim] of the new tokens. `sinks` [heads]."""
        rows, width, slots = len(self.rows), self.width, self.slots
        one_each = width == 1 and slots is None and window is None and sinks is None
        if self.cache.kernel is not None and one_each and not self.cache.empty_places:
            key, value = self.cache.stored(layer, self.rows)
            return self.cache.kernel(query, key, value, self.positions + 1, scale)
        first = 0 if self.shared is None else self.shared.first
        key, value = self.cache.read(layer, self.rows, self.longest, first)
        heads, dim = query.shape[1:]
        kv_heads, group = key.shape[1], heads // key.shape[1]
        if slots is not None:
            query = query.new_zeros(rows * width, heads, dim).index_copy_(0, slots, query)
        # The query heads that share a key-value head are rows of one kernel call.
        q = query.view(rows, width, kv_heads, group, dim).transpose(1, 2).flatten(2, 3)
        q = F.pad(q, (0, 0, 0, -q.shape[2] % _QUERY_MULTIPLE))
        mask = self._mask(window, key.shape[2], group, q.shape[2])
        if sinks is not None:
            of_rows = sinks.to(mask.dtype).view(kv_heads, 1, group).expand(-1, width, -1).flatten(1)
            mask = mask.expand(-1, kv_heads, q.shape[2], -1).clone()
            mask[..., : width * group, 0] = of_rows
        if self.shared is None:
            out = F.scaled_dot_product_attention(q, key, value, mask, scale=scale)
        else:
            assert window is None, "a layer with a window shares no beginnings"
            assert sinks is None, "a layer with sinks shares no beginnings"
            out = self.shared.attend(layer, q, key, value, mask, scale)
        out = out[:, :, : width * group].unflatten(2, (width, group)).transpose(1, 2)
        packed: Tensor = out.reshape(rows * width, heads, value.shape[-1])
        return packed if slots is None else packed.index_select(0, slots)

    def _mask(self, window: int | None, places: int, group: int, num_queries: int) -> Tensor:
        """[rows, 1, queries or 1, places] to be added to scores; -inf also at the empty places before."""
        if (kept := self._masks.get(window)) is not None:
            return kept
        own, rows, width = self.positions, len(self.rows), self.width
        if self.slots is not None:
            own = own.new_zeros(rows * width).index_copy_(0, self.slots, own)
        own = own.view(rows, width, 1)
        first: int | Tensor = 0
        position = torch.arange(places, device=own.device) - self.cache.empty_places
        if self.shared is not None:
            first = self.shared.lengths.view(rows, 1, 1)
            position += self.shared.first
        sees = (position >= first) & (position <= own)
        if window is not None:
            sees &= position > own - window
        mask = torch.zeros(sees.shape, device=own.device, dtype=self.dtype).masked_fill_(~sees, -torch.inf)
        if width > 1:
            mask = mask.repeat_interleave(group, dim=1)
            mask = F.pad(mask, (0, 0, 0, num_queries - width * group))
        mask = mask.unsqueeze(1)
        if width <= _KEPT_MASK_TOKENS:
            self._masks[window] = mask
        return mask


@dataclass
class CachedPass:
    """Access of a forward pass to the cache: it stores new keys and values, and continues rows."""

    cache: KVCache
    slots: Tensor  # [m] where keys and values are stored
    sources: Tensor | None = None  # [m] of which packed tokens; one may be in several rows. None: the first m
    continued: Sequence[ContinuedRows] = ()  # empty: prompts from their start, which see themselves only

    def keep(self, layer: int, *values: Tensor) -> None:
        """Store a layer's keys, rotated, and values [N, kv_heads, dim] of packed tokens, or their experts."""
        m, sources = len(self.slots), self.sources
        kept = (value[:m] if sources is None else value.index_select(0, sources) for value in values)
        self.cache.keep(layer, self.slots, *kept)

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """[N, heads, dim] of the continued rows' queries, in their order; 0 for those that pad."""
        outs, start = [], 0
        for rows in self.continued:
            end = start + len(rows.positions)
            outs.append(rows.attend(layer, query[start:end], scale, window, sinks))
            start = end
        out = outs[0] if len(outs) == 1 else torch.cat(outs)
        return F.pad(out, (0, 0, 0, 0, 0, len(query) - start))


def share_beginnings(
    cache: KVCache, beginnings: Sequence[Beginning], longest: int, device: torch.device
) -> SharedBeginnings | None:
    """None where reading each row as a whole takes no longer; rows have at most `longest` tokens."""
    if not beginnings or cache.empty_places or not has_dense_attention_with_lse(device):
        return None
    first = min(length for _, length in beginnings) // _ALIGNMENT * _ALIGNMENT
    rows = [row for beginning in beginnings for row in beginning.rows]
    apart = len(rows) * longest
    together = sum(length for _, length in beginnings) + len(rows) * (longest - first)
    if apart - together < _FEWEST_PLACES * len(beginnings):
        return None
    lengths = [beginning.length for beginning in beginnings for _ in beginning.rows]
    places = np.argsort(rows)
    uploaded = upload(device, np.array(lengths)[places], rows, places)
    return SharedBeginnings(cache, beginnings, first, *uploaded)


def next_tokens(cache: KVCache, step: StepTokens, dtype: torch.dtype) -> CachedPass:
    _, positions, slots = step.uploaded
    width = max(step.counts)
    ragged = None if min(step.counts) == width else slots
    longest = max(step.positions) + 1
    shared = share_beginnings(cache, step.beginnings, longest, positions.device)
    rows = ContinuedRows(cache, range(len(step.counts)), width, positions, longest, dtype, ragged, shared)
    return CachedPass(cache, cache.slots(slots // width, positions), continued=[rows])


def in_passes(prompts: Sequence[Prompt], most: int) -> list[list[Prompt]]:
    """Neighbors which together have at most `most` tokens to read, or one that alone has more."""
    passes: list[list[Prompt]] = []
    room = 0
    for prompt in prompts:
        if not passes or prompt.num_new > room:
            passes.append([])
            room = most
        passes[-1].append(prompt)
        room -= prompt.num_new
    return passes


def rest_of_prompts(
    cache: KVCache, prompts: Sequence[Prompt], device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, CachedPass]:
    """Continue rows by the tokens of prompts behind `start`, end to end: their positions, and the pass."""
    spans, first = [], 0
    for prompt in prompts:
        spans.append(range(first, first + prompt.num_new))
        first = spans[-1].stop
    at = np.concatenate([np.arange(prompt.start, len(prompt.tokens)) for prompt in prompts])
    of_rows = [
        (row, np.array(span)) for prompt, span in zip(prompts, spans, strict=True) for row in prompt.rows
    ]
    positions, sources, rows = upload(
        device,
        at,
        np.concatenate([places for _, places in of_rows]),
        np.repeat([row for row, _ in of_rows], [len(places) for _, places in of_rows]),
    )
    continued = []
    for prompt, span in zip(prompts, spans, strict=True):
        row, own = prompt.rows[0], positions[span.start : span.stop]
        longest = prompt.start
        for part in own.split(_PROMPT_TOKENS):
            longest += len(part)
            continued.append(ContinuedRows(cache, range(row, row + 1), len(part), part, longest, dtype))
    return positions, CachedPass(cache, cache.slots(rows, positions[sources]), sources, continued)
