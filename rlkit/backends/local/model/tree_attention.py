"""Attention over a prefix tree: every run of tokens sees what its own sequence has before it, and nothing else.

The tokens of a micro-batch lie one after the other, [N]; a run is some of them in a row that continue what is at the
places ``before``. The products are made run by run, so that the pairs which a mask would throw away are never computed,
and the weights are computed again in the backward pass, so that they are never kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.local.gemm.lora_linear import upcast
from rlkit.backends.local.model.windows import Window

__all__ = ["Segment", "TreeAttention", "spans", "visible"]

# Of how many scores are computed at once, by some heads' queries at a time: as many as stay in a core's second cache
# (1 MB), through which five products and the softmax go. So most keys behind a query are left out, too.
SCORES = 2**18
QUERIES = 64  # at once at least; products of fewer rows are slower


@attrs.frozen
class Segment:
    """Tokens begin..end-1, which continue the tokens at ``before``.

    Attributes:
        begin, end: places in the micro-batch.
        before: slices of places, first tokens first; empty where a sequence begins.
    """

    begin: int
    end: int
    before: tuple[slice, ...] = ()

    @property
    def start(self) -> int:
        """The position of its first token in its own sequence."""
        return sum(s.stop - s.start for s in self.before)

    @property
    def places(self) -> tuple[slice, ...]:
        """Of the tokens of its own sequence, in order."""
        return (*self.before, slice(self.begin, self.end))


@attrs.frozen
class _Tile:
    """What is computed at once.

    Attributes:
        heads: of the keys.
        rows: of the stacked queries.
        keys: of the run's own sequence.
    """

    heads: slice
    rows: slice
    keys: slice


def positions(runs: Sequence[Segment]) -> np.ndarray:
    """Return the position of each place in its own sequence, int64 [N].

    >>> positions([Segment(0, 3), Segment(3, 5, (slice(0, 2),))])
    array([0, 1, 2, 2, 3])
    """
    return np.concatenate([np.arange(run.start, run.start + run.end - run.begin) for run in runs])


def visible(runs: Sequence[Segment], length: int, window: Window | None = None) -> np.ndarray:
    """Return which of ``length`` places each one sees, bool [N, N], in layers with this window.

    >>> visible([Segment(0, 2), Segment(2, 3, (slice(0, 1),))], 3).astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    """
    seen = np.zeros((length, length), bool)
    for run in runs:
        for before in run.before:
            seen[run.begin : run.end, before] = True
        seen[run.begin : run.end, run.begin : run.end] = np.tri(run.end - run.begin, dtype=bool)
    if window is not None:
        at = positions(runs)
        seen &= at >= window.first(at)[:, None]
    return seen


def spans(runs: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Return of each place the span of numbers that its part of the tree has, int32 [N] each: where it begins and ends.

    The runs are cut into parts which every sequence sees as a whole or not at all. Parts are numbered so that those
    behind a part have the numbers after its own: place k is seen from place q if the number of q is in the span of k,
    and k is not after q.

    >>> spans([Segment(0, 3), Segment(3, 5, (slice(0, 2),))])
    (array([0, 0, 1, 2, 2], dtype=int32), array([3, 3, 2, 3, 3], dtype=int32))
    """
    cuts = sorted({x for run in runs for s in (slice(run.begin, run.end), *run.before) for x in (s.start, s.stop)})
    part = {start: i for i, start in enumerate(cuts[:-1])}
    parents = [-1] * len(part)
    for run in runs:
        behind = bisect_left(cuts, run.before[-1].stop) - 1 if run.before else -1
        for start in cuts[part[run.begin] : part.get(run.end, len(part))]:
            parents[part[start]], behind = behind, part[start]
    sizes = [1] * len(parents)
    for i in reversed(range(len(parents))):  # what continues a part stands behind it
        if parents[i] >= 0:
            sizes[parents[i]] += sizes[i]
    numbers: list[int] = []
    free: list[int] = []
    top = 0
    for i, parent in enumerate(parents):
        number = free[parent] if parent >= 0 else top
        if parent >= 0:
            free[parent] += sizes[i]
        else:
            top += sizes[i]
        numbers.append(number)
        free.append(number + 1)
    lengths = np.diff(cuts)
    begins = np.repeat(np.array(numbers, np.int32), lengths)
    return begins, begins + np.repeat(np.array(sizes, np.int32), lengths)


class TreeAttention:
    """Forward and backward for one micro-batch, by matrix products.

    Args:
        runs: of the micro-batch.
        heads: of the queries.
        key_heads: of keys and values; ``heads // key_heads`` query heads read the same one.
        window: of the layers that it is for; keys before the windows of all queries at once are left out.
    """

    def __init__(self, runs: Sequence[Segment], heads: int, key_heads: int, window: Window | None = None) -> None:
        self._runs, self._window = runs, window
        self._key_heads = key_heads
        self._group = heads // key_heads
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """From q [N, H, D], already scaled, k and v [N, H / G, D] -> [N, H D], and what ``backward`` wants."""
        q, k, v = self._stacked(q), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out, wide = torch.empty_like(q), upcast(q)
        for run in self._runs:
            keys, values = (_at(x, run.places) for x in (k, v))
            for tile, weights in self._weights(run, wide, keys):
                out[tile.heads, tile.rows] = weights.to(v.dtype) @ values[tile.heads, tile.keys]
        return self._flat(out), (q, k, v)

    def backward(
        self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v from that of the output [N, H D]."""
        # Of one tile: o = p v with p = softmax(s) and s = q k^T. From do: dv = p^T do, dp = do v^T,
        # ds = p * (dp - sum(dp * p)), dq = ds k, dk = ds^T q. Keys that several tiles see get the sum of theirs.
        q, k, v = saved
        grad = self._stacked(grad.view(grad.shape[0], -1, q.shape[2]))
        dq, wide = torch.empty_like(q), upcast(q)
        dk, dv = torch.zeros_like(upcast(k)), torch.zeros_like(upcast(v))
        for run in self._runs:
            keys, values = (_at(x, run.places) for x in (k, v))
            dkeys, dvalues = (torch.zeros_like(upcast(x)) for x in (keys, values))
            for tile, weights in self._weights(run, wide, keys):
                heads, rows, seen = tile.heads, tile.rows, tile.keys
                above, weights = grad[heads, rows], weights.to(v.dtype)
                dvalues[heads, seen] += weights.transpose(1, 2) @ above
                scores = above @ values[heads, seen].transpose(1, 2)
                scores.sub_((scores * weights).sum(-1, keepdim=True)).mul_(weights)
                dq[heads, rows] = scores @ keys[heads, seen]
                dkeys[heads, seen] += scores.transpose(1, 2) @ q[heads, rows]
            _add(dk, run.places, dkeys)
            _add(dv, run.places, dvalues)
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
        return (
            self._flat(dq).view(-1, self._key_heads * self._group, q.shape[2]),
            dk.transpose(0, 1),
            dv.transpose(0, 1),
        )

    def _weights(self, run: Segment, q: torch.Tensor, keys: torch.Tensor) -> Iterator[tuple[_Tile, torch.Tensor]]:
        """Yield a run's tiles and the softmax [heads, rows, keys] of each, in float32.

        Args:
            run: whose queries.
            q: all queries, stacked, in float32 at least.
            keys: [H / G, S, D], of the run's own sequence.
        """
        keys = upcast(keys)
        most = SCORES // (self._group * self._key_heads * keys.shape[1])
        for first, last in _parts(run.end - run.begin, most, QUERIES):
            rows = slice((run.begin + first) * self._group, (run.begin + last) * self._group)
            position = run.start + first
            low, least = self._lowest(position, run.start + last - 1)
            seen = slice(low, run.start + last)
            size = self._group * (last - first) * (seen.stop - seen.start)
            for some in _parts(self._key_heads, SCORES // size, 1):
                heads = slice(*some)
                scores = q[heads, rows] @ keys[heads, seen].transpose(1, 2)
                if least > 0:
                    scores += self._mask_of_window(position, last - first, low, q.device)
                else:
                    scores[:, :, position:] += self._mask(last - first, q.device)
                yield _Tile(heads, rows, seen), torch.softmax(scores, dim=-1)

    def _lowest(self, *positions: int) -> tuple[int, ...]:
        """Return the first position that is seen from each."""
        return tuple(0 if self._window is None else max(0, self._window.first(position)) for position in positions)

    def _mask(self, length: int, device: torch.device) -> torch.Tensor:
        """[length G, length]: -inf at keys behind the query."""
        key = (length, self._group)
        if key not in self._masks:
            mask = torch.full((length, length), -torch.inf, device=device).triu(1)
            self._masks[key] = mask.repeat_interleave(self._group, dim=0)
        return self._masks[key]

    def _mask_of_window(self, position: int, length: int, low: int, device: torch.device) -> torch.Tensor:
        """[length G, S], of queries at ``position``.. and keys at ``low``..: -inf at keys that are not seen."""
        assert self._window is not None  # noqa: S101
        key = (position, length, low)
        if key not in self._masks:
            queries = torch.arange(position, position + length, device=device)[:, None]
            keys = torch.arange(low, position + length, device=device)
            hidden = (keys > queries) | (keys < self._window.first(queries))
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask.repeat_interleave(self._group, dim=0)
        return self._masks[key]

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """[N, H, D] -> [H / G, N G, D]: the queries that read one key head, below one another."""
        n, _, width = x.shape
        x = x.view(n, self._key_heads, self._group, width).transpose(0, 1)
        return x.reshape(self._key_heads, n * self._group, width)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """[H / G, N G, D] -> [N, H D]."""
        heads, rows, width = x.shape
        n = rows // self._group
        return x.view(heads, n, self._group * width).transpose(0, 1).reshape(n, heads * self._group * width)


def _parts(length: int, most: int, least: int) -> Iterator[tuple[int, int]]:
    """Yield where to begin and end equal parts of at most ``most``, or of ``least`` where that is less.

    >>> list(_parts(200, 90, 64)), list(_parts(3, 0, 1))
    ([(0, 67), (67, 134), (134, 200)], [(0, 1), (1, 2), (2, 3)])
    """
    size = -(-length // -(-length // max(most, least)))
    for first in range(0, length, size):
        yield first, min(first + size, length)


def _at(x: torch.Tensor, places: Sequence[slice]) -> torch.Tensor:
    """[H, N, D] -> [H, S, D]."""
    return x[:, places[0]] if len(places) == 1 else torch.cat([x[:, s] for s in places], dim=1)


def _add(x: torch.Tensor, places: Sequence[slice], values: torch.Tensor) -> None:
    start = 0
    for s in places:
        x[:, s] += values[:, start : start + s.stop - s.start]
        start += s.stop - s.start
