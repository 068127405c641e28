"""Parts of a micro-batch, for modules that compute some tokens from what they keep of those before.

Attention of the library's modules over a micro-batch that they compute in parts.

Each call of a layer's attention in a part has a number; the same call in another part has the same one. What it kept
of its keys and values is read block by block, and their gradients are added up, until the backward pass, which goes
from the last part to the first, has come to the part that they are of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, DynamicCache
from transformers.masking_utils import AttentionMaskInterface

from rlkit._fallback import NotSupportedHere
from rlkit.backends.local.attention.tree import LayerMasks, Segment, Window
from rlkit.backends.local.cache.rows import Rows, Storage
from rlkit.backends.local.model.llama import Llama
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.products.lora_linear import upcast
from rlkit.backends.local.training._chunked_attention import ChunkedAttention
from rlkit.backends.local.training.micro_batches import MicroBatch

__all__ = ["BLOCK", "IN_PARTS", "Part", "PartAttention", "PartInputs", "parts_of", "parts_with_states"]

BLOCK = 16
PADDING = 1.5  # times the tokens of a part at most with its padding


@attrs.frozen
class Part:
    """Tokens that are computed at once: a row, or several rows that nothing continues.

    Attributes:
        places: in the micro-batch.
        lengths: tokens of each row.
        before: for each row the part at whose end its recurrent states are known, -1 where a sequence begins.
        continued: whether another part begins at its end.
    """

    places: slice
    lengths: tuple[int, ...]
    before: tuple[int, ...] = (-1,)
    continued: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Return rows, and tokens of each with padding on the right: at least two where a row need not end exactly."""
        return len(self.lengths), max(*self.lengths, 1 if self.continued else 2)

    @property
    def padded(self) -> np.ndarray:
        """Return the places of its tokens in the flattened rows."""
        return np.concatenate([r * self.shape[1] + np.arange(n) for r, n in enumerate(self.lengths)])


@attrs.frozen(eq=False)
class PartInputs:
    """``Inputs`` of a part.

    Attributes:
        batch: the micro-batch.
        part: of it.
        outputs: int64 [n], the places in the part that need logits.
        cache: what the modules keep, as it is at the part's beginning.
        takes: names of the arguments of the model's forward.
    """

    batch: MicroBatch
    part: Part
    outputs: np.ndarray
    cache: DynamicCache
    takes: Collection[str]

    def for_llama(self, _: Llama) -> Any:
        """See ``Inputs.for_llama``; a part is the library's."""
        raise NotImplementedError("the library's forward, not rlkit's, computes a part of a datum")

    def for_library(self, device: torch.device, _: LayerMasks, *, trees: bool) -> tuple[dict[str, Any], torch.Tensor]:
        """See ``Inputs.for_library``: rows without a mask: attention makes its own."""
        del trees
        padded, shape = self.part.padded, self.part.shape
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        tokens.flat[padded] = self.batch.tokens[self.part.places]
        positions.flat[padded] = self.batch.positions[self.part.places]
        ids, at, index = (to_device(x, device) for x in (tokens, positions, padded[self.outputs]))
        cache = "cache_params" if "cache_params" in self.takes else "past_key_values"
        where = {"position_ids": at} if "position_ids" in self.takes else {}
        return {"input_ids": ids, **where, cache: self.cache, "use_cache": True}, index


def parts_of(runs: Sequence[Segment], size: int) -> list[Part]:
    """Return parts of at most ``size`` tokens, wherever runs begin and end; all but the first have as many.

    >>> [part.places for part in parts_of([Segment(0, 3), Segment(3, 5)], 4)]
    [slice(0, 1, None), slice(1, 5, None)]
    """
    end = runs[-1].end
    cuts = [0, *range(end % size or size, end, size), end]
    return [Part(slice(a, b), (b - a,)) for a, b in pairwise(cuts)]


def parts_with_states(runs: Sequence[Segment], size: int) -> list[Part]:
    """Return parts whose rows begin at the end of an earlier part, or where a sequence begins.

    They have at most ``size`` tokens with their padding, but ``BLOCK`` at least. Runs branch off at multiples of
    ``BLOCK``; so do parts, and none that is continued has a single token, which the library computes by other code.

    >>> tree = [Segment(0, 18), Segment(18, 20, (slice(0, 16),)), Segment(20, 21, (slice(0, 16),))]
    >>> for part in parts_with_states(tree, 16):
    ...     print(part)
    Part(places=slice(0, 16, None), lengths=(16,), before=(-1,), continued=True)
    Part(places=slice(16, 21, None), lengths=(2, 2, 1), before=(0, 0, 0), continued=False)
    """
    size = max(size - size % BLOCK, BLOCK)
    pieces = _pieces(runs, size)
    continued = {front for *_, front in pieces}
    parts: list[Part] = []
    for begin, end, front in pieces:
        before = -1 if front < 0 else bisect_right(parts, front, key=lambda part: part.places.start) - 1
        last = parts[-1] if parts else None
        if last is not None and not last.continued and end - 1 not in continued:
            lengths = (*last.lengths, end - begin)
            padded = max(lengths) * len(lengths)
            if (last.before[0] < 0) == (before < 0) and padded <= min(size, PADDING * sum(lengths)):
                parts[-1] = Part(slice(last.places.start, end), lengths, (*last.before, before))
                continue
        parts.append(Part(slice(begin, end), (end - begin,), (before,), end - 1 in continued))
    return parts


def _pieces(runs: Sequence[Segment], size: int) -> list[tuple[int, int, int]]:
    """Return begins and ends of tokens in a row that no run branches off, and the place before each, or -1."""
    branches = {s.stop for run in runs for s in run.before}
    pieces: list[tuple[int, int, int]] = []
    for run in runs:
        front = run.before[-1].stop - 1 if run.before else -1
        for first, last in pairwise(sorted({run.begin, run.end, *(x for x in branches if run.begin < x < run.end)})):
            for begin in range(first, last, size):
                pieces.append((begin, min(begin + size, last), front))
                front = pieces[-1][1] - 1
    return pieces


IN_PARTS = "rlkit_in_parts"


@attrs.frozen(eq=False)
class _Call:
    """One call of attention, of all parts.

    Attributes:
        attention: how tokens see one another.
        kv: keys and values, [N, 2 H / G D].
        dkv: their gradients, float32 at least.
    """

    attention: ChunkedAttention
    kv: Rows
    dkv: Rows


class PartAttention:
    """All calls in one micro-batch.

    Args:
        batch: it.
        storage: where keys and values are kept.
        windows: of the layers.
    """

    def __init__(self, batch: MicroBatch, storage: Storage, windows: Sequence[Window | None]) -> None:
        self._batch, self._storage, self._windows = batch, storage, windows
        self._calls: list[_Call] = []
        self._attentions: dict[tuple[object, ...], ChunkedAttention] = {}
        self._part = Part(slice(0, 0), (0,))
        self._number = 0

    @contextmanager
    def of(self, part: Part) -> Iterator[None]:
        """Make modules with the attention ``IN_PARTS`` compute a part while the context is open."""
        self._part, self._number = part, 0
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def __call__(
        self,
        layer: int | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the output [B, T, H, D] of the next call.

        Args:
            layer: its number.
            query: [B, H, T, D], scaled.
            key, value: [B, H / G, T, D]; either may have fewer dimensions D.
            softcap, sinks: see ``ChunkedAttention``.
        """
        rows, length = query.shape[0], query.shape[2]
        width, values = key.shape[3], value.shape[3]
        flat = [self._tokens(x, max(width, values)) for x in (query, key, value)]
        call = self._next(layer, flat[0], flat[1], softcap)
        out: torch.Tensor = _Attend.apply(call, self._part.places, sinks, *flat)
        if rows * length > out.shape[0]:
            padded = to_device(self._part.padded, out.device)
            out = out.new_zeros(rows * length, out.shape[1]).index_copy(0, padded, out)
        return out.view(rows, length, query.shape[1], -1)[..., :values]

    def _tokens(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """Map [B, H, T, d] to [C, H, D]: the part's tokens without padding."""
        x = x.transpose(1, 2).flatten(0, 1)
        if x.shape[0] > sum(self._part.lengths):
            x = x[to_device(self._part.padded, x.device)]
        return F.pad(x, (0, width - x.shape[2]))

    def _next(self, layer: int | None, q: torch.Tensor, k: torch.Tensor, softcap: float | None) -> _Call:
        number, self._number = self._number, self._number + 1
        if number == len(self._calls):
            window = self._windows[layer] if layer is not None and layer < len(self._windows) else None
            name = (q.shape[1], k.shape[1], window, softcap)
            if name not in self._attentions:
                runs, positions = self._batch.runs, self._batch.positions
                self._attentions[name] = ChunkedAttention(runs, positions, *name[:3], softcap=softcap)
            width = 2 * k.shape[1] * k.shape[2]
            kept = [self._storage.rows(width, dtype, large=True) for dtype in (k.dtype, upcast(k).dtype)]
            self._calls.append(_Call(self._attentions[name], *kept))
        return self._calls[number]


class _Attend(torch.autograd.Function):
    """Attention of a part's scaled queries [C, H, D], keys and values [C, H / G, D] -> [C, H D]."""

    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        places: slice,
        sinks: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        call.kv.write(places, torch.stack([k, v], dim=1).flatten(1))
        out, saved = call.attention.forward(places, q, call.kv, sinks)
        ctx.call, ctx.places, ctx.shape, ctx.dtype = call, places, k.shape, k.dtype
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dq = ctx.call.attention.backward(ctx.places, grad.contiguous(), ctx.saved_tensors, ctx.call.kv, ctx.call.dkv)
        tokens, heads, width = ctx.shape
        dk, dv = ctx.call.dkv.read(ctx.places).to(ctx.dtype).view(tokens, 2, heads, width).unbind(1)
        return None, None, None, dq, dk, dv


_current: ContextVar[PartAttention] = ContextVar("part")


def attend(
    module: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output [B, T, H, D] in the part that is computed, and no weights."""
    if attention_mask is not None:
        raise NotSupportedHere("the model builds its own attention mask")
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return _current.get()(getattr(module, "layer_idx", None), query, key, value, softcap, s_aux), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(IN_PARTS, attend)
AttentionMaskInterface.register(IN_PARTS, _no_mask)
