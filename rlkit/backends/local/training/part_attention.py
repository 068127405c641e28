"""Attention of the library's modules over a micro-batch that they compute in parts.

Each call of a layer's attention in a part has a number; the same call in another part has the same one. What it kept
of its keys and values is read block by block, and their gradients are added up, until the backward pass, which goes
from the last part to the first, has come to the part that they are of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from rlkit.backends.local.gemm.lora_linear import upcast
from rlkit.backends.local.model.device import to_device
from rlkit.backends.local.model.windows import Window
from rlkit.backends.local.training.chunked_attention import ChunkedAttention
from rlkit.backends.local.training.micro_batches import MicroBatch
from rlkit.backends.local.training.parts import Part
from rlkit.backends.local.training.rows import Rows, Storage

__all__ = ["IN_PARTS", "PartAttention"]

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
        """While open, modules whose attention is ``IN_PARTS`` compute a part."""
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
        """[B, H, T, d] -> [C, H, D]: the part's tokens without padding."""
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
        raise NotImplementedError("a mask of the model's own")
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return _current.get()(getattr(module, "layer_idx", None), query, key, value, softcap, s_aux), None


def _no_mask(*_: object, **__: object) -> None:
    return None


AttentionInterface.register(IN_PARTS, attend)
AttentionMaskInterface.register(IN_PARTS, _no_mask)
