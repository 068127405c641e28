"""The KV cache, keys and values of many rows in preallocated slots, and batch-invariant attention over it.

What a token computes depends on the tokens before it alone, bit for bit, on a CPU in float32. Products of weights have
a multiple of ``ROW_UNIT`` rows. Keys past a token's own are masked before the softmax, where they add exact zeros.
Libraries choose by the number of queries and by the length of a sum in which order it is added; so queries come in
multiples of ``QUERIES``, and not more than ``TERMS`` are summed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from rlkit.backends.local.products.prepacked import upcast
from rlkit.backends.requests import round_up

__all__ = [
    "ATTENTION",
    "LENGTHS",
    "TERMS",
    "KVCache",
    "SharedPrefix",
    "causal_mask",
    "matmul_attention",
    "sdpa_attention",
    "sharing",
]


def causal_mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """Return what is added to the scores of queries at ``positions`` [B, T]: [B, 1, T, keys], lowest after each."""
    hidden = torch.arange(keys, device=positions.device) > positions[:, None, :, None]
    mask = torch.zeros(hidden.shape, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(torch.float32).min)


class KVCache(Cache):
    """One slot per row; slot b holds the keys and values of its row's first tokens.

    transformers' modules see a cache: ``update`` writes at the places that ``at`` named and returns what to attend
    to.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.store: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows = 0
        self._length = 0
        self._slots = slice(0, 0)
        self._places: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self._read = 0

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens; what is stored stays."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
        if length > self._length:
            self._length = round_up(length + length // 2, LENGTHS)  # growing moves everything, so do it seldom
        self._move()

    def resize(self, rows: int, length: int) -> None:
        """Make room for exactly ``rows`` rows of ``length`` tokens where there is less; what is in these stays.

        Slots that more rows had, or longer ones, are given up: rows times length is what memory is spent on.
        """
        if rows > self._rows or length > self._length:
            self._rows, self._length = rows, length
            self._move()

    @property
    def nbytes(self) -> int:
        """Return the bytes of all slots."""
        return sum(x.nbytes for x in self._tensors())

    def free(self) -> None:
        """Free the memory."""
        self._rows, self._length = 0, 0
        self.store = [(self._empty(k), self._empty(v)) for k, v in self.store]

    def at(self, first: int, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Set where the next forward's tokens are, and return its mask [B, 1, T, S].

        Args:
            first: slot of the first row.
            positions: [B, T], places in slots first..first+B-1, all less than ``longest``.
            longest: how many keys of each slot are looked at, rounded up.
        """
        rows = torch.arange(first, first + positions.shape[0], device=positions.device)[:, None]
        self._slots, self._places = slice(first, first + positions.shape[0]), (rows, positions)
        self._read = round_up(longest, LENGTHS)
        return causal_mask(positions, self._read)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return where keys and values are; they move when slots grow or are freed."""
        return (self._rows, self._length, *(x.data_ptr() for x in self._tensors()))

    def clear(self) -> None:
        """Zero everything: what is masked is multiplied by zero, which would not make infinities harmless."""
        for x in self._tensors():
            x.zero_()

    def copy(self, source: int, first: int, last: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` to slots first..last-1."""
        for x in self._tensors():
            x[first:last, :, :length] = x[source : source + 1, :, :length].clone()

    def block_bytes(self, length: int) -> int:
        """Return the bytes of the keys and values of all layers for ``length`` tokens of a row."""
        return sum(x.shape[1] * length * x.shape[3] * x.element_size() for x in self._tensors())

    def read_blocks(self, places: Sequence[tuple[int, int]], length: int) -> list[torch.Tensor]:
        """Return copies of the keys and values of all layers, in one dimension for each place.

        Two kernels for each tensor of a layer, however many blocks there are.

        Args:
            places: (slot, first token) of each block.
            length: tokens of a block.
        """
        if not places:
            return []
        like = self.store[0][0]
        slots, starts = torch.tensor(places, device=like.device).T
        tokens = starts[:, None] + torch.arange(length, device=like.device)
        both = like.new_empty(len(places), self.block_bytes(length) // like.element_size())
        for x, part in self._parts(both, length):
            part.copy_(x[slots[:, None], :, tokens].transpose(1, 2))
        return [block.clone() for block in both]  # each frees its memory by itself

    def write_blocks(self, slot: int, blocks: Sequence[torch.Tensor]) -> None:
        """Put ``blocks`` of equal lengths, one after the other, at the beginning of a slot."""
        both = torch.stack(list(blocks))
        length = both.shape[1] // sum(x.shape[1] * x.shape[3] for x in self._tensors())
        for x, part in self._parts(both, length):
            x[slot, :, : len(blocks) * length] = part.transpose(0, 1).flatten(1, 2)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [P, H, T, D], padding aside, and return keys and values [B, H, S, D]; called by the attention."""
        states = key_states.to(value_states.dtype), value_states  # keys may come in float32 from their positions
        while len(self.store) <= layer_idx:
            self.store.append((self._empty(states[0]), self._empty(states[1])))
        rows, places = self._places
        out = []
        for stored, new in zip(self.store[layer_idx], states, strict=True):
            stored[rows, :, places] = new[: rows.shape[0]].transpose(1, 2)
            out.append(stored[self._slots, :, : self._read])
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: rows differ in it, and positions are always given. The probe detects a model that reads it."""
        del layer_idx
        return 0

    def _tensors(self) -> list[torch.Tensor]:
        return [x for pair in self.store for x in pair]

    def _parts(self, blocks: torch.Tensor, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor of ``store``, and its part [n, H, length, D] of ``blocks`` [n, numbers]."""
        tensors = self._tensors()
        parts = blocks.split([x.shape[1] * length * x.shape[3] for x in tensors], dim=1)
        for x, part in zip(tensors, parts, strict=True):
            yield x, part.view(len(blocks), x.shape[1], length, x.shape[3])

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])

    def _move(self) -> None:
        """Move all to slots of the shape that is now asked for, one tensor at a time: none is there twice for long."""
        for i in range(len(self.store)):
            self.store[i] = (self._grow(self.store[i][0]), self.store[i][1])
            self.store[i] = (self.store[i][0], self._grow(self.store[i][1]))

    def _grow(self, x: torch.Tensor) -> torch.Tensor:
        grown = self._empty(x)
        rows, length = min(x.shape[0], self._rows), min(x.shape[2], self._length)
        grown[:rows, :, :length] = x[:rows, :, :length]
        return grown


LENGTHS = 16  # the number of keys looked at is a multiple of it
TERMS = 64  # summed at once; longer sums are split by their length
QUERIES = 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8  # their number is a multiple of it
ATTENTION = "rlkit_matmul"
CAST = 2**17  # numbers of keys in float32 at once, 512 kB: they stay in a core's second cache, new memory costs more


@attrs.frozen
class SharedPrefix:
    """Rows that begin with the same tokens.

    Attributes:
        length: of what they share, a multiple of ``TERMS``, so that sums are cut as for a row that is alone.
        groups: indices of the rows, every row in one of them.
    """

    length: int
    groups: list[list[int]]

    @classmethod
    def of(cls, beginnings: Sequence[np.ndarray], versions: Sequence[int]) -> SharedPrefix | None:
        """Return what rows that begin so have in common; None where that is not worth it.

        Args:
            beginnings: tokens of each row.
            versions: of the weights that computed their keys and values.

        >>> a, b = np.arange(600), np.append(np.arange(300), np.zeros(9))
        >>> SharedPrefix.of([a, b, a, b], [0] * 4)
        SharedPrefix(length=256, groups=[[0, 1, 2, 3]])
        >>> SharedPrefix.of([a, b, a, b], [0, 0, 1, 1])
        SharedPrefix(length=256, groups=[[0, 1], [2, 3]])
        >>> SharedPrefix.of([a, b, a[:40]], [0] * 3)
        """
        length = min(x.size for x in beginnings) // TERMS * TERMS
        groups: dict[tuple[bytes, int], list[int]] = {}
        for i, x in enumerate(beginnings if length else ()):
            groups.setdefault((x[:length].astype(np.int64).tobytes(), versions[i]), []).append(i)
        return cls(length, list(groups.values())) if 0 < 2 * len(groups) <= len(beginnings) else None


def matmul_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shared: SharedPrefix | None = None,
) -> torch.Tensor:
    """Compute attention by two matrix products; queries that share a key head are stacked, so that no key is copied.

    Args:
        query: [B, H, T, D], already scaled.
        key, value: [B, H / G, S, D] and [B, H / G, S, E].
        mask: added to the scores, [B, 1, T, S].
        softcap: c tanh(scores / c), for the architectures that have it.
        sinks: the scores [H] of attention sinks, which take their share of each softmax and have no value (gpt-oss).
        shared: which rows begin with the same keys and values; each of those is then read once.

    Returns:
        [B, T, H, E].
    """
    rows, heads, length, width = query.shape
    key_heads = key.shape[1]
    stacked = query.reshape(rows, key_heads, heads // key_heads * length, width)
    each = mask if length == 1 else mask.repeat(1, 1, heads // key_heads, 1)
    if sinks is not None:
        sinks = sinks.view(key_heads, -1, 1).expand(-1, -1, length).reshape(key_heads, -1, 1)
    out = _attend(stacked, key, value, each, softcap=softcap, sinks=sinks, shared=shared)
    return out.reshape(rows, heads, length, value.shape[-1]).transpose(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shared: SharedPrefix | None = None,
) -> torch.Tensor:
    """Attend from [B, H, C, D] to keys and values [B, H, S, D]; mask [B, 1, 1 or C, S], sinks [H, C, 1]."""
    count = query.shape[2]
    missing = -count % QUERIES if _cuts_sums(query) else 0
    stacked = torch.nn.functional.pad(query, (0, 0, 0, missing)) if missing else query
    scores = _scores(upcast(stacked), key, shared)  # scores of 20 have two digits in bfloat16
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores[:, :, :count] += mask
    if sinks is not None:  # as many keys as leave the others where sums are cut
        before = scores.new_full((*scores.shape[:3], LENGTHS), torch.finfo(scores.dtype).min)
        before[:, :, :count, :1] = sinks
        scores = torch.cat([before, scores], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)[..., 0 if sinks is None else LENGTHS :]
    return _weighted(weights, value, shared)[:, :, :count]


def sdpa_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute attention by torch's kernel; queries that share a key head are rows of it, so that no key is copied.

    Args:
        query: [B, H, T, D], already scaled.
        key, value: [B, H / G, S, D].
        mask: added to the scores, [B, 1, T, S], in the dtype of the queries, to which torch would convert it each time.

    Returns:
        [B, T, H, D].
    """
    rows, heads, length, width = query.shape
    group = heads // key.shape[1]
    stacked = query.reshape(rows, key.shape[1], group * length, width)
    each = mask if length == 1 else mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(stacked, key, value, attn_mask=each, scale=1.0)
    return out.reshape(rows, heads, length, width).transpose(1, 2)


def _scores(queries: torch.Tensor, key: torch.Tensor, shared: SharedPrefix | None) -> torch.Tensor:
    """Multiply [B, H, C, D] by [B, H, S, D]: [B, H, C, S]."""
    if shared is None:
        return _product(queries, key)
    scores = queries.new_empty(*queries.shape[:3], key.shape[2])
    for rows in shared.groups:
        same = key[rows[0], :, : shared.length].to(queries.dtype).transpose(-1, -2)
        scores[rows, ..., : shared.length] = _apart(_multiply(_together(queries[rows]), same), len(rows))
    scores[..., shared.length :] = _product(queries, key[:, :, shared.length :])
    return scores


def _product(queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Multiply [B, H, C, D] by [B, H, S, D]: [B, H, C, S]. Keys of another dtype are cast some rows at a time."""
    if key.dtype == queries.dtype:
        return _multiply(queries, key.transpose(-1, -2))
    rows, heads, keys, width = key.shape
    step = max(1, CAST // max(1, heads * keys * width))
    cast = queries.new_empty(min(step, rows), heads, keys, width)
    scores = queries.new_empty(rows, heads, queries.shape[2], keys)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        some = cast[: min(step, rows - start)].copy_(key[part]).flatten(0, 1)
        torch.bmm(queries[part].flatten(0, 1), some.transpose(-1, -2), out=scores[part].flatten(0, 1))
    return scores


def _weighted(weights: torch.Tensor, value: torch.Tensor, shared: SharedPrefix | None) -> torch.Tensor:
    """Multiply [B, H, C, S] by [B, H, S, E]: [B, H, C, E]."""
    if shared is None:
        return _multiply(weights, value)
    length, out = shared.length, weights.new_empty(*weights.shape[:3], value.shape[3])
    for rows in shared.groups:
        same = _multiply(_together(weights[rows, ..., :length]), value[rows[0], :, :length])
        out[rows] = _apart(same, len(rows))
    return _multiply(weights[..., length:], value[:, :, length:], out)


def _cuts_sums(x: torch.Tensor) -> bool:
    return bool(x.device.type == "cpu" and x.dtype == torch.float32)


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return out + a b of [..., C, K] and [..., K, N], where bits are promised ``TERMS`` of K at once.

    These begin at the same places in any batch and are added in order, so that longer rows in the batch only append
    exact zeros.
    """
    count = a.shape[-1]
    step = TERMS if _cuts_sums(a) else max(1, count)
    for start in range(0, count, step):
        part = a[..., start : start + step] @ b[..., start : start + step, :]
        out = part if out is None else out.add_(part)
    assert out is not None, "nothing to sum"  # noqa: S101
    return out


def _together(x: torch.Tensor) -> torch.Tensor:
    """Map [n, H, C, K] to [H, n C, K]."""
    return x.transpose(0, 1).flatten(1, 2)


def _apart(x: torch.Tensor, n: int) -> torch.Tensor:
    """Map [H, n C, K] to [n, H, C, K]."""
    return x.unflatten(1, (n, -1)).transpose(0, 1)


_shared: ContextVar[SharedPrefix | None] = ContextVar("shared", default=None)


@contextmanager
def sharing(shared: SharedPrefix | None) -> Iterator[None]:
    """Tell the attention what rows of a forward pass begin alike, while open."""
    token = _shared.set(shared)
    try:
        yield
    finally:
        _shared.reset(token)


def _attend_in_slots(
    _: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output [P, T, H, E], and no weights, as modules of transformers want it.

    Args:
        query: [P, H, T, D]; the rows after the first B are padding.
        key, value: what ``KVCache.update`` returned, [B, H / G, S, D] and [B, H / G, S, E].
        attention_mask, softcap, s_aux: see ``matmul_attention``.
        scaling: of the scores; None is D ** -0.5.
    """
    rows, width = key.shape[0], query.shape[-1]
    # Scaled here: that are N D numbers, not N S scores. Rounded as in training.
    scaled = query[:rows].to(value.dtype) * (width**-0.5 if scaling is None else scaling)
    if query.device.type == "cpu" or softcap is not None or s_aux is not None or value.shape[-1] != width:
        out = matmul_attention(scaled, key, value, attention_mask, softcap, s_aux, _shared.get())
    else:
        out = sdpa_attention(scaled, key, value, attention_mask)
    missing = query.shape[0] - rows
    return (torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 0, 0, missing)) if missing else out.contiguous()), None


AttentionInterface.register(ATTENTION, _attend_in_slots)
