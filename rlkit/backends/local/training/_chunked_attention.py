"""Attention of some queries at a time, over keys and values that are read block by block.

As in FlashAttention (arXiv 2205.14135) the softmax is put together from those of blocks of keys, so that neither all
scores of a query nor all keys are ever there at once, and the backward pass computes the weights of a block again from
the sum that the forward pass kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import attrs
import numpy as np
import torch

from rlkit.backends.local.attention.tree import Segment, Window
from rlkit.backends.local.cache.rows import Rows
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.products.lora_linear import upcast

__all__ = ["ChunkAttention", "ChunkedAttention", "Tile", "tiles", "within"]

KEYS = 512  # of a block
# Numbers computed at once at most, by looking at fewer queries at a time; on a CPU those that its second cache holds.
SCORES = {"cpu": 2**18, "other": 2**26}

Tensors: TypeAlias = tuple[torch.Tensor, ...]


class ChunkAttention(Protocol):
    """How a chunk of tokens sees the keys and values up to its own."""

    def forward(self, chunk: slice, q: torch.Tensor, kv: Rows, /) -> tuple[torch.Tensor, Tensors]:
        """Map the chunk's scaled q [C, H, D] to [C, H D], and what ``backward`` needs.

        Args:
            chunk: places in the micro-batch.
            q: of these.
            kv: of all places up to the chunk's last: keys and values, [N, 2 H / G D].
        """

    def backward(self, chunk: slice, grad: torch.Tensor, saved: Tensors, kv: Rows, dkv: Rows, /) -> torch.Tensor:
        """Return the gradient of q, and add those of keys and values to ``dkv``, which is float32 at least."""


@attrs.frozen
class Tile:
    """Queries and keys that see one another.

    Attributes:
        rows: places of queries in their chunk.
        keys: places in the micro-batch.
        causal: whether both are the same tokens, each of which sees those up to itself.
        windowed: whether some keys are before the windows of some queries. Else every query sees every key.
    """

    rows: slice
    keys: slice
    causal: bool = False
    windowed: bool = False


def tiles(runs: Sequence[Segment], chunk: slice, keys: int = KEYS) -> list[Tile]:
    """Return what the tokens of a chunk see, first of all themselves; runs that see the same keys have common tiles.

    Args:
        runs: of the micro-batch.
        chunk: places in it.
        keys: of a tile, at most.

    >>> tree = [Segment(0, 4), Segment(4, 6, (slice(0, 3),)), Segment(6, 8, (slice(0, 3),))]
    >>> for tile in tiles(tree, slice(3, 8)):
    ...     print(tile.rows, tile.keys, tile.causal)
    slice(0, 1, None) slice(3, 4, None) True
    slice(1, 3, None) slice(4, 6, None) True
    slice(3, 5, None) slice(6, 8, None) True
    slice(0, 5, None) slice(0, 3, None) False
    """
    causal: list[Tile] = []
    full: dict[tuple[int, int], list[slice]] = {}
    for run in runs:
        first, last = max(run.begin, chunk.start), min(run.end, chunk.stop)
        for begin in range(first, last, keys):
            end = min(begin + keys, last)
            rows = slice(begin - chunk.start, end - chunk.start)
            causal.append(Tile(rows, slice(begin, end), causal=True))
            for before in [*run.before, slice(run.begin, begin)]:
                for block in _blocks(before, keys):
                    together = full.setdefault(block, [])
                    if together and together[-1].stop == rows.start:
                        rows_before = together.pop()
                        together.append(slice(rows_before.start, rows.stop))
                    else:
                        together.append(rows)
    return [*causal, *(Tile(rows, slice(*block)) for block, each in full.items() for rows in each)]


def within(window: Window, positions: np.ndarray, chunk: slice, tile: Tile) -> Tile | None:
    """Return the tile of those queries whose windows may have some of its keys, None if there are none.

    Args:
        window: of the layers that it is for.
        positions: of all places of the micro-batch.
        chunk: that the tile is of.
        tile: it.
    """
    first, keys = window.first(positions[chunk][tile.rows]), positions[tile.keys]
    seeing = np.flatnonzero(first <= keys.max())
    if not seeing.size:
        return None
    rows = slice(tile.rows.start + int(seeing[0]), tile.rows.start + int(seeing[-1]) + 1)
    windowed = bool(keys.min() < first[seeing[0] : seeing[-1] + 1].max())
    return Tile(tile.rows if tile.causal else rows, tile.keys, tile.causal, windowed)


class ChunkedAttention:
    """``ChunkAttention`` by matrix products, on any device.

    Args:
        runs: of the micro-batch.
        positions: int64 [N], of each token in its own sequence.
        heads: of the queries.
        key_heads: of keys and values.
        window: of the layers that it is for.
        keys: of a block.
        softcap: c tanh(scores / c) instead of the scores.
    """

    def __init__(
        self,
        runs: Sequence[Segment],
        positions: np.ndarray,
        heads: int,
        key_heads: int,
        window: Window | None = None,
        keys: int = KEYS,
        softcap: float | None = None,
    ) -> None:
        self._runs, self._keys = runs, keys
        self._positions, self._window = positions, window
        self._softcap = softcap
        self._key_heads, self._group = key_heads, heads // key_heads
        self._tiles: dict[tuple[int, int], list[Tile]] = {}

    def forward(
        self, chunk: slice, q: torch.Tensor, kv: Rows, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Tensors]:
        """See ``ChunkAttention``.

        Args:
            chunk, q, kv: as there.
            sinks: the scores [H] of attention sinks, which are seen as a key without a value.
        """
        # Of one query: m is the largest score so far, total = sum exp(s - m), out = sum exp(s - m) v; with a larger m
        # both shrink by exp(old - new).
        q = self._stacked(q)
        wide = upcast(q)
        out = torch.zeros_like(wide)
        if sinks is None:
            top = wide.new_full((*q.shape[:2], 1), -torch.inf)
            total = torch.zeros_like(top)
        else:
            top = sinks.detach().to(wide).view(self._key_heads, -1).repeat(1, q.shape[1] // self._group)[..., None]
            total = torch.ones_like(top)
        for rows, tile, k, v in self._steps(chunk, kv):
            scores = self._scores(wide, rows, k, tile, chunk)
            new = torch.maximum(top[:, rows], scores.amax(-1, keepdim=True))
            shrunk = (top[:, rows] - new).exp_()
            weights = scores.sub_(new).exp_()
            top[:, rows] = new
            total[:, rows] = total[:, rows].mul_(shrunk).add_(weights.sum(-1, keepdim=True))
            out[:, rows] = torch.baddbmm(out[:, rows].mul_(shrunk), weights, upcast(v))
        out = out.div_(total).to(q.dtype)
        return self._flat(out), (q, out, top.add_(total.log_()))

    def backward(self, chunk: slice, grad: torch.Tensor, saved: Tensors, kv: Rows, dkv: Rows) -> torch.Tensor:
        """See ``ChunkAttention``."""
        # With p = exp(s - log sum exp(s)), as in ``TreeAttention``; sum(dp * p) over all keys is do . o.
        q, out, logsumexp = saved
        wide, above = upcast(q), upcast(self._stacked(grad.view(grad.shape[0], -1, q.shape[2])))
        dq = torch.zeros_like(wide)
        along = (above * out).sum(-1, keepdim=True)
        for rows, tile, k, v in self._steps(chunk, kv):
            weights = self._scores(wide, rows, k, tile, chunk)
            slope = None if self._softcap is None else 1 - (weights / self._softcap).clamp_(-1, 1).square_()
            weights = weights.sub_(logsumexp[:, rows]).exp_()
            dv = weights.transpose(1, 2) @ above[:, rows]
            scores = above[:, rows] @ upcast(v).transpose(1, 2)
            scores.sub_(along[:, rows]).mul_(weights)
            if slope is not None:  # of c tanh(s / c): 1 - tanh(s / c)^2
                scores.mul_(slope)
            dq[:, rows] += scores @ upcast(k)
            dk = scores.transpose(1, 2) @ wide[:, rows]
            both = torch.stack([dk, dv]).permute(2, 0, 1, 3).flatten(1)
            dkv.write(tile.keys, dkv.read(tile.keys) + both)
        return self._flat(dq).to(q.dtype).view(-1, self._key_heads * self._group, q.shape[2])

    def _steps(self, chunk: slice, kv: Rows) -> Iterator[tuple[slice, Tile, torch.Tensor, torch.Tensor]]:
        """Yield rows of stacked queries, the tile that they are of, its keys and values [H / G, S, D]."""
        part = (chunk.start, chunk.stop)
        if part not in self._tiles:
            self._tiles[part] = self._seen(chunk)
        for tile in self._tiles[part]:
            both = kv.read(tile.keys)
            k, v = both.view(both.shape[0], 2, self._key_heads, -1).permute(1, 2, 0, 3)
            limit = SCORES["cpu" if both.device.type == "cpu" else "other"]
            step = max(1, limit // (self._key_heads * self._group * both.shape[0]))
            for first in range(tile.rows.start, tile.rows.stop, step):
                last = min(first + step, tile.rows.stop)
                yield slice(first * self._group, last * self._group), tile, k, v

    def _seen(self, chunk: slice) -> list[Tile]:
        all_tiles = tiles(self._runs, chunk, self._keys)
        if self._window is None:
            return all_tiles
        narrowed = (within(self._window, self._positions, chunk, tile) for tile in all_tiles)
        return [tile for tile in narrowed if tile is not None]

    def _scores(self, q: torch.Tensor, rows: slice, k: torch.Tensor, tile: Tile, chunk: slice) -> torch.Tensor:
        scores = q[:, rows] @ upcast(k).transpose(1, 2)
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if tile.causal:
            query = torch.arange(rows.start, rows.stop, device=q.device) // self._group - tile.rows.start
            key = torch.arange(k.shape[1], device=q.device)
            scores.masked_fill_(key > query[:, None], -torch.inf)
        if tile.windowed and self._window is not None:
            begin = chunk.start * self._group
            places = slice((begin + rows.start) // self._group, (begin + rows.stop) // self._group)
            query, key = (to_device(self._positions[x], q.device) for x in (places, tile.keys))
            first = self._window.first(query).repeat_interleave(self._group)
            scores.masked_fill_(key < first[:, None], -torch.inf)
        return scores

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """Map [C, H, D] to [H / G, C G, D]: the queries that read one key head, below one another."""
        x = x.view(x.shape[0], self._key_heads, self._group, x.shape[2]).transpose(0, 1)
        return x.flatten(1, 2)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """Map [H / G, C G, D] to [C, H D]."""
        x = x.unflatten(1, (-1, self._group)).transpose(0, 1)
        return x.flatten(1)


def _blocks(keys: slice, size: int) -> Iterator[tuple[int, int]]:
    """Yield begins and ends of parts of ``keys`` that end at multiples of ``size``."""
    begin = keys.start
    while begin < keys.stop:
        end = min(begin - begin % size + size, keys.stop)
        yield begin, end
        begin = end
