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

SCORES = 2**22  # numbers computed at once at most, by looking at fewer queries at a time
QUERIES = 128  # at once at least where there is a window


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
        out = torch.empty_like(q)
        for rows, weights, places in self._weights(q, k):
            out[:, rows] = weights.to(v.dtype) @ _at(v, places)
        return self._flat(out), (q, k, v)

    def backward(
        self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v from that of the output [N, H D]."""
        # Of one run: o = p v with p = softmax(s) and s = q k^T. From do: dv = p^T do, dp = do v^T,
        # ds = p * (dp - sum(dp * p)), dq = ds k, dk = ds^T q. Keys that several runs see get the sum of theirs.
        q, k, v = saved
        grad = self._stacked(grad.view(grad.shape[0], -1, q.shape[2]))
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(upcast(k)), torch.zeros_like(upcast(v))
        for rows, weights, places in self._weights(q, k):
            above, weights = grad[:, rows], weights.to(v.dtype)
            _add(dv, places, weights.transpose(1, 2) @ above)
            scores = above @ _at(v, places).transpose(1, 2)
            scores.sub_((scores * weights).sum(-1, keepdim=True)).mul_(weights)
            dq[:, rows] = scores @ _at(k, places)
            _add(dk, places, scores.transpose(1, 2) @ q[:, rows])
        dk, dv = dk.to(k.dtype), dv.to(v.dtype)
        return (
            self._flat(dq).view(-1, self._key_heads * self._group, q.shape[2]),
            dk.transpose(0, 1),
            dv.transpose(0, 1),
        )

    def _weights(self, q: torch.Tensor, k: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor, list[slice]]]:
        """Of some queries at a time: their rows, the softmax [H / G, rows, S] in float32, the places of their keys."""
        q, k = upcast(q), upcast(k)
        for run in self._runs:
            start, length = run.start, run.end - run.begin
            step = max(1, SCORES // (self._key_heads * self._group * (start + length)))
            if self._window is not None:  # of more queries at once most keys are outside of the windows of most
                step = min(step, max(self._window.size, QUERIES))
            for first in range(run.begin, run.end, step):
                last = min(first + step, run.end)
                position = start + first - run.begin
                low, least = self._lowest(position, position + last - first - 1)
                places = _without(low, [*run.before, slice(run.begin, last)])
                rows = slice(first * self._group, last * self._group)
                scores = q[:, rows] @ _at(k, places).transpose(1, 2)
                if least > 0:
                    scores += self._mask_of_window(position, last - first, low, q.device)
                else:
                    scores[:, :, position:] += self._mask(last - first, q.device)
                yield rows, torch.softmax(scores, dim=-1), places

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


def _without(count: int, places: Sequence[slice]) -> list[slice]:
    """Return ``places`` without the first ``count``.

    >>> _without(3, [slice(0, 2), slice(5, 9)])
    [slice(6, 9, None)]
    """
    rest = []
    for s in places:
        skipped = min(count, s.stop - s.start)
        count -= skipped
        if s.start + skipped < s.stop:
            rest.append(slice(s.start + skipped, s.stop))
    return rest


def _at(x: torch.Tensor, places: Sequence[slice]) -> torch.Tensor:
    """[H, N, D] -> [H, S, D]."""
    return x[:, places[0]] if len(places) == 1 else torch.cat([x[:, s] for s in places], dim=1)


def _add(x: torch.Tensor, places: Sequence[slice], values: torch.Tensor) -> None:
    start = 0
    for s in places:
        x[:, s] += values[:, start : start + s.stop - s.start]
        start += s.stop - s.start
