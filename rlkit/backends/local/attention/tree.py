"""Which earlier tokens a token sees, and attention over a prefix tree: each run of tokens sees its own sequence alone.

Windows: a token sees all tokens before it, those of a sliding window, or those of its chunk. Layers of one model differ
in it. Windows go by positions in a sequence, and so they hold as well for the rows of a KV cache, which have different
lengths, and for the runs of a prefix tree.

Trees: the tokens of a micro-batch lie one after the other, [N]; a run is some of them in a row that continue what is at
the places ``before``. The products are made run by run, so that the pairs which a mask would throw away are never
computed, and the weights are computed again in the backward pass, so that they are never kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np
import torch

from rlkit.backends.local.products.prepacked import upcast

__all__ = [
    "Segment",
    "TreeAttention",
    "Window",
    "announced",
    "context",
    "layer_windows",
    "narrowed",
    "spans",
    "visible",
    "window_of_each_layer",
    "windows_by_type",
]


ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
Places = TypeVar("Places", int, np.ndarray, torch.Tensor)


@attrs.frozen
class Window:
    """The earlier tokens that a token sees, besides itself.

    Attributes:
        size: in tokens, at least 1.
        chunks: whether the window is the chunk that a token is in, counted from the sequence's beginning (Llama 4),
            and not the last ``size`` tokens.
    """

    size: int
    chunks: bool = False

    def first(self, positions: Places) -> Places:
        """Return the first position that is seen from each of ``positions``; below 0 where that is the beginning.

        >>> [Window(4).first(t) for t in (0, 3, 4, 9)], [Window(4, chunks=True).first(t) for t in (0, 3, 4, 9)]
        ([-3, 0, 1, 6], [0, 0, 4, 8])
        """
        return positions // self.size * self.size if self.chunks else positions - (self.size - 1)


def layer_windows(config: object) -> list[Window | None] | None:
    """Return the window of each layer, None for a layer without one; None if the config tells of layers of other kinds.

    A window that is not shorter than the context is none. No config of a family without windows tells that it has none.

    >>> from types import SimpleNamespace
    >>> layer_windows(SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=512))
    [Window(size=512, chunks=False), None]
    >>> layer_windows(SimpleNamespace(layer_types=["full_attention", "mamba"]))
    """
    return window_of_each_layer(config) if set(layer_types(config)) <= ATTENTION else None


def window_of_each_layer(config: object) -> list[Window | None]:
    """Return the window of each layer, None for a layer without one, also where it has no attention at all."""
    longest = context(config)
    sliding = getattr(config, "sliding_window", None) or 0 if getattr(config, "use_sliding_window", True) else 0
    chunk = getattr(config, "attention_chunk_size", None) or 0
    windows = {
        "sliding_attention": Window(sliding) if 0 < sliding < longest else None,
        "chunked_attention": Window(chunk, chunks=True) if 0 < chunk < longest else None,
    }
    return [windows.get(kind) for kind in layer_types(config)]


def layer_types(config: object) -> Sequence[str]:
    """Return the type of each layer, as transformers names them."""
    every = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return getattr(config, "layer_types", None) or [every] * getattr(config, "num_hidden_layers", 1)


def windows_by_type(config: object) -> dict[str, Window | None]:
    """Return the window of each type of layer, as the model's forward wants its masks."""
    return dict(zip(layer_types(config), window_of_each_layer(config), strict=True))


def narrowed(mask: torch.Tensor, window: Window | None, positions: torch.Tensor) -> torch.Tensor:
    """Return ``mask`` without the keys that lie before the window of their query.

    Args:
        mask: [B, 1, T, S], numbers that are added to the scores, of keys at positions 0, 1, ...
        window: of the layers that it is for; None changes nothing.
        positions: of queries, [B, T].
    """
    if window is None:
        return mask
    keys = torch.arange(mask.shape[3], device=mask.device)
    hidden = keys < window.first(positions)[:, None, :, None]
    return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)


UNBOUNDED = 2**20  # the context of a model if its config names none


def announced(config: object) -> int | None:
    """Return the context that a config announces, in tokens."""
    limits = (getattr(config, x, None) for x in ("max_position_embeddings", "max_seq_len", "max_sequence_length"))
    return next((int(x) for x in limits if isinstance(x, int) and x > 0), None)


def context(config: object) -> int:
    """Return how many tokens a sequence that is trained or sampled may have.

    Rotary positions of the type "longrope" choose their frequencies by the longest sequence computed: beyond
    ``original_max_position_embeddings`` a token's logprob would depend on the tokens after it. So the context ends
    there. ("dynamic" ones do so beyond ``max_position_embeddings``, which is the context anyway.) Sparse attention that
    picks which tokens are seen does so by scores of which many are equal, and which of those it takes depends on the
    length of the row: its context ends where it begins to pick.
    """
    whole = announced(config) or UNBOUNDED
    ends = [whole]
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            end = rope.get("original_max_position_embeddings")
            ends.append(int(end or getattr(config, "original_max_position_embeddings", None) or whole))
    picked = (getattr(config, name, None) for name in ("index_topk", "keep_window_size"))
    return min([*ends, *(x for x in picked if isinstance(x, int) and x > 0)])


def _ropes(config: object) -> list[Mapping[str, int | str]]:
    """Return the settings of its rotary positions: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(x for x in rope.values() if isinstance(x, Mapping))]


# Of how many scores are computed at once, by some heads' queries at a time: as many as stay in a core's second cache
# (1 MB), through which five products and the softmax go. So most keys after a query are left out, too.
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
        """Return the position of its first token in its own sequence."""
        return sum(s.stop - s.start for s in self.before)

    @property
    def places(self) -> tuple[slice, ...]:
        """Return the places of the tokens of its own sequence, in order."""
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
    after a part have the numbers after its own: place k is seen from place q if the number of q is in the span of k,
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
    for i in reversed(range(len(parents))):  # a part comes before those that continue it
        if parents[i] >= 0:
            sizes[parents[i]] += sizes[i]
    # Numbers in preorder: ``free[i]`` is the next number in the span of part i, where a child's span begins.
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
        cap: c tanh(s / c) instead of the scores s (Gemma 2, arXiv 2408.00118).
        sinks: [H], a score of each head that takes its share of the weights and gives nothing (arXiv 2309.17453).
    """

    def __init__(
        self,
        runs: Sequence[Segment],
        heads: int,
        key_heads: int,
        window: Window | None = None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self._runs, self._window, self._cap, self._sinks = runs, window, cap, sinks
        self._key_heads = key_heads
        self._group = heads // key_heads
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Map q [N, H, D], scaled, k [N, H / G, D] and v [N, H / G, E] to [N, H E], and what ``backward`` needs."""
        q, k, v = self._stacked(q), k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous()
        out, wide = q.new_empty(*q.shape[:2], v.shape[2]), upcast(q)
        for run in self._runs:
            keys, values = (_at(x, run.places) for x in (k, v))
            for tile, weights, _ in self._weights(run, wide, keys):
                out[tile.heads, tile.rows] = weights.to(v.dtype) @ values[tile.heads, tile.keys]
        return self._flat(out), (q, k, v)

    def backward(
        self, grad: torch.Tensor, saved: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v from that of the output [N, H E]."""
        # Of one tile: o = p v with p = softmax(s) and s = q k^T. From do: dv = p^T do, dp = do v^T,
        # ds = p * (dp - sum(dp * p)), dq = ds k, dk = ds^T q. Keys that several tiles see get the sum of theirs. A cap
        # has the slope 1 - tanh^2; a sink's value is 0, and so it only makes p smaller.
        q, k, v = saved
        grad = self._stacked(grad.view(grad.shape[0], -1, v.shape[2]))
        dq, wide = torch.empty_like(q), upcast(q)
        dk, dv = torch.zeros_like(upcast(k)), torch.zeros_like(upcast(v))
        for run in self._runs:
            keys, values = (_at(x, run.places) for x in (k, v))
            dkeys, dvalues = (torch.zeros_like(upcast(x)) for x in (keys, values))
            for tile, weights, slope in self._weights(run, wide, keys):
                heads, rows, seen = tile.heads, tile.rows, tile.keys
                above, weights = grad[heads, rows], weights.to(v.dtype)
                dvalues[heads, seen] += weights.transpose(1, 2) @ above
                scores = above @ values[heads, seen].transpose(1, 2)
                scores.sub_((scores * weights).sum(-1, keepdim=True)).mul_(weights)
                if slope is not None:
                    scores.mul_(slope)
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

    def _weights(
        self, run: Segment, q: torch.Tensor, keys: torch.Tensor
    ) -> Iterator[tuple[_Tile, torch.Tensor, torch.Tensor | None]]:
        """Yield a run's tiles, the softmax [heads, rows, keys] of each in float32, and the slope of a cap.

        Args:
            run: the run that the queries belong to.
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
                slope = None
                if self._cap is not None:
                    scores.div_(self._cap).tanh_()
                    slope = 1 - scores.square()
                    scores.mul_(self._cap)
                if least > 0:
                    scores += self._mask(position, last - first, low, q.device)
                else:
                    # No window hides a key: all before ``position`` are seen by every query of the tile, and which of
                    # the others are is the same at every position.
                    scores[:, :, position:] += self._mask(0, last - first, 0, q.device)
                yield _Tile(heads, rows, seen), self._softmax(scores, heads), slope

    def _softmax(self, scores: torch.Tensor, heads: slice) -> torch.Tensor:
        """Return the weights of keys from scores [heads, rows, keys]."""
        if self._sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self._sinks.to(scores.dtype).view(self._key_heads, 1, self._group)[heads]
        column = sinks.expand(-1, scores.shape[1] // self._group, -1).reshape(*scores.shape[:2], 1)
        return torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]

    def _lowest(self, *positions: int) -> tuple[int, ...]:
        """Return the first position that is seen from each."""
        return tuple(0 if self._window is None else max(0, self._window.first(position)) for position in positions)

    def _mask(self, position: int, length: int, low: int, device: torch.device) -> torch.Tensor:
        """Return [length G, S], of queries at ``position``.. and keys at ``low``..: -inf at keys that are not seen."""
        key = (position, length, low)
        if key not in self._masks:
            queries = torch.arange(position, position + length, device=device)[:, None]
            keys = torch.arange(low, position + length, device=device)
            hidden = keys > queries
            if self._window is not None:
                hidden |= keys < self._window.first(queries)
            mask = torch.zeros(hidden.shape, device=device).masked_fill_(hidden, -torch.inf)
            self._masks[key] = mask.repeat_interleave(self._group, dim=0)
        return self._masks[key]

    def _stacked(self, x: torch.Tensor) -> torch.Tensor:
        """Map [N, H, D] to [H / G, N G, D]: the queries that read one key head, below one another."""
        n, _, width = x.shape
        x = x.view(n, self._key_heads, self._group, width).transpose(0, 1)
        return x.reshape(self._key_heads, n * self._group, width)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """Map [H / G, N G, D] to [N, H D]."""
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
    """Map [H, N, D] to [H, S, D]."""
    return x[:, places[0]] if len(places) == 1 else torch.cat([x[:, s] for s in places], dim=1)


def _add(x: torch.Tensor, places: Sequence[slice], values: torch.Tensor) -> None:
    start = 0
    for s in places:
        x[:, s] += values[:, start : start + s.stop - s.start]
        start += s.stop - s.start
