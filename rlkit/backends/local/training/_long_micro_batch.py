"""A micro-batch of more tokens than are computed at once: layer by layer, a chunk of tokens at a time.

The forward pass keeps only each layer's input. The backward pass begins at the top: of one layer at
a time it computes queries, keys and values of all tokens again, and then, from the last chunk to the first, everything
else, so that a chunk's keys and values have the gradients of all later queries when their turn comes. In memory at once
are a chunk's part of one layer and, of every token,

- the input of each layer that has an adapter or is above one that has: 4 bytes * hidden * (layers + 1),
- of one layer queries, keys and values, the products with the adapter's A, and gradients of keys and values.

``Storage`` may have these elsewhere. The output head is computed by chunks as well, again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from rlkit.backends.local.cache.rows import Rows, Storage
from rlkit.backends.local.model.llama import Layer, Llama
from rlkit.backends.local.training._chunked_attention import ChunkAttention
from rlkit.backends.local.training.micro_batches import MicroBatch

__all__ = ["InParts", "LongMicroBatch", "Outputs", "Read", "outputs_in_chunks"]

Outputs: TypeAlias = dict[str, torch.Tensor]
Read: TypeAlias = Callable[[torch.Tensor, torch.Tensor], Outputs]


class InParts(Protocol):
    """A micro-batch that is computed in parts, once forward and once backward."""

    @property
    def parameters(self) -> Sequence[torch.Tensor]:
        """Return the tensors that have a gradient."""

    def forward(self, *, keep: bool) -> Outputs:
        """Return the outputs [n, ...] without a gradient, and keep what ``backward`` wants."""

    def backward(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients of ``parameters`` from those of outputs, and free what was kept."""


class LongMicroBatch:
    """One forward and one backward pass.

    Args:
        llama: what computes it.
        batch: its tokens.
        chunk: tokens computed at once.
        attentions: how they see one another, for each layer.
        storage: what is kept.
        read: last hidden states [n, hidden], and which of the ``n`` outputs of the batch these are, int64 [n] -> the
            outputs, by name.
        head: parameters of ``read``.
    """

    def __init__(
        self,
        llama: Llama,
        batch: MicroBatch,
        chunk: int,
        attentions: Sequence[ChunkAttention],
        storage: Storage,
        read: Read,
        head: Sequence[torch.Tensor],
    ) -> None:
        self._llama, self._attentions, self._storage = llama, attentions, storage
        self._read, self._head = read, head
        self._tokens, self._positions = (torch.from_numpy(x) for x in (batch.tokens, batch.positions))
        size = batch.tokens.size
        self._chunks = [slice(begin, min(begin + chunk, size)) for begin in range(0, size, chunk)]
        self._outputs = batch.index.size
        self._reads = _reads(batch.index, self._chunks, llama.device)
        # Layers below the first adapter have no gradient, and nothing is kept of them.
        self._first = next((i for i, layer in enumerate(llama.layers) if layer.parameters), len(llama.layers))
        self._inputs: list[Rows] = []
        layer = llama.layers[0]
        self._width = layer.input_norm.numel()
        keys = 2 * layer.key_heads * layer.head_dim
        self._kv = storage.rows(keys, llama.dtype)
        self._wide = torch.promote_types(llama.dtype, torch.float32)

    @property
    def parameters(self) -> list[torch.Tensor]:
        """Return those of the layers and the head, in the order of ``backward``."""
        return [*(x for layer in self._llama.layers for x in layer.parameters), *self._head]

    def forward(self, *, keep: bool) -> Outputs:
        """See ``InParts``."""
        with torch.no_grad():
            return self._forward(keep=keep)

    def _forward(self, *, keep: bool) -> Outputs:
        x = self._new_rows()
        for chunk in self._chunks:
            x.write(chunk, self._llama.embed(self._tokens[chunk].to(self._llama.device)))
        for i in range(len(self._llama.layers)):
            out = x
            if keep and i >= self._first:
                self._inputs.append(x)
                out = self._new_rows()
            for chunk in self._chunks:
                out.write(chunk, self._layer(i, chunk, x.read(chunk)))
            x = out
        self._last = x
        outputs: Outputs = {}
        for chunk, places, which in self._reads:
            for name, values in self._read(self._llama.last_norm(x.read(chunk)[places]), which).items():
                if name not in outputs:
                    outputs[name] = values.new_empty(self._outputs, *values.shape[1:])
                outputs[name][which] = values
        return outputs

    def backward(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """See ``InParts``."""
        head = self._backward_head(grads)
        sums: list[torch.Tensor] = []
        with torch.no_grad():
            if self._first < len(self._llama.layers):
                work = _LayerRows(self._storage, self._llama.layers, self._wide)
                for i in reversed(range(self._first, len(self._llama.layers))):
                    sums = self._backward_layer(i, self._inputs.pop(), work) + sums
        return [*sums, *head]

    def _layer(self, i: int, chunk: slice, x: torch.Tensor) -> torch.Tensor:
        layer, rope = self._llama.layers[i], self._rope(chunk)
        qkv, _ = layer.project(x)
        self._kv.write(chunk, _side_by_side(*layer.keys_values(qkv, rope)))
        attended, _ = self._attentions[i].forward(chunk, layer.queries(qkv, rope), self._kv)
        return layer.output(layer.up_to_down(x, attended))[0]

    def _backward_head(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """Return the gradients of the head's parameters; those of the residual stream are written over it."""
        sums: list[torch.Tensor | None] = [None] * len(self._head)
        reads = iter(self._reads)
        read = next(reads, None)
        for chunk in self._chunks:
            x = self._last.read(chunk)
            dx = torch.zeros_like(x)
            while read is not None and read[0] == chunk:
                _, places, which = read
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    outputs = self._read(self._llama.last_norm(x[places]), which)
                    tensors = [outputs[name] for name in grads]
                    above = [grad[which] for grad in grads.values()]
                    found = torch.autograd.grad(tensors, [x, *self._head], above, allow_unused=True)
                dx += found[0]
                sums = [_sum(a, b) for a, b in zip(sums, found[1:], strict=True)]
                read = next(reads, None)
            self._last.write(chunk, dx)
        return sums

    def _backward_layer(self, i: int, inputs: Rows, work: _LayerRows) -> list[torch.Tensor]:
        """Return the gradients of a layer's parameters; that of its input is written over that of its output."""
        layer, attention, grads = self._llama.layers[i], self._attentions[i], self._last
        for chunk in self._chunks:
            qkv, saved = layer.project(inputs.read(chunk))
            self._kv.write(chunk, _side_by_side(*layer.keys_values(qkv, self._rope(chunk))))
            work.write(chunk, qkv, saved)
        sums: list[torch.Tensor] = []
        for chunk in reversed(self._chunks):
            x, rope = inputs.read(chunk), self._rope(chunk)
            qkv, saved = work.read(chunk)
            attended, seen = attention.forward(chunk, layer.queries(qkv, rope), self._kv)
            inner = layer.up_to_down(x, attended)
            grad, d, after = layer.backward_to_attention(grads.read(chunk), attended, [*inner, None])
            del inner
            dq = attention.backward(chunk, d, seen, self._kv, work.dkv)
            dk, dv = work.take_dkv(chunk, layer, qkv.dtype)
            raw = qkv if layer.qk_norms is not None else None
            dqkv = layer.backward_to_projection(dq, dk, dv, raw, rope)
            dx, before = layer.backward_to_input(grad, dqkv, x, saved, inputs=i > self._first)
            if dx is not None:
                grads.write(chunk, dx)
            new = [*before, *after]
            sums = [a.add_(b) for a, b in zip(sums, new, strict=True)] if sums else new
        return sums

    def _rope(self, chunk: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self._llama.rope(self._positions[chunk].to(self._llama.device))

    def _new_rows(self) -> Rows:
        return self._storage.rows(self._width, self._wide, large=True)


class _LayerRows:
    """What the backward pass of one layer keeps of every token; all layers use it in turn."""

    def __init__(self, storage: Storage, layers: Sequence[Layer], wide: torch.dtype) -> None:
        layer = layers[0]
        dtype, keys = layer.qkv.weight.dtype, 2 * layer.key_heads * layer.head_dim
        self._most = max(0 if each.qkv.a is None else each.qkv.a.shape[0] for each in layers)
        self._ranks = self._most
        self._qkv = storage.rows(layer.heads * layer.head_dim + keys, dtype)
        self._low = storage.rows(self._most, dtype)
        self._scale = storage.rows(1, wide)
        self.dkv = storage.rows(keys, wide)

    def write(self, chunk: slice, qkv: torch.Tensor, saved: Sequence[torch.Tensor | None]) -> None:
        """Keep what ``Layer.project`` gave."""
        scale, low, _ = saved
        self._qkv.write(chunk, qkv)
        if scale is not None:
            self._scale.write(chunk, scale)
        self._ranks = 0 if low is None else low.shape[1]
        if low is not None:
            self._low.write(chunk, F.pad(low, (0, self._most - low.shape[1])))

    def read(self, chunk: slice) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """Return it."""
        low = self._low.read(chunk)[:, : self._ranks] if self._ranks else None
        return self._qkv.read(chunk), [self._scale.read(chunk), low, None]

    def take_dkv(self, chunk: slice, layer: Layer, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of keys and values [C, H / G, D], and leave zeros for the next layer."""
        rows = self.dkv.read(chunk).to(dtype, copy=True)
        self.dkv.write(chunk, torch.zeros_like(rows))
        dk, dv = rows.view(rows.shape[0], 2, layer.key_heads, layer.head_dim).unbind(1)
        return dk, dv


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, batch: InParts, names: list[str], *_: torch.Tensor) -> Any:
        outputs = batch.forward(keep=True)
        names += outputs
        ctx.batch, ctx.names = batch, names
        ctx.set_materialize_grads(False)
        return tuple(outputs.values())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wanted = {name: grad for name, grad in zip(ctx.names, grads, strict=True) if grad is not None}
        return None, None, *ctx.batch.backward(wanted)


def outputs_in_chunks(batch: InParts) -> Outputs:
    """Return the outputs of the batch as autograd sees them."""
    if not torch.is_grad_enabled():
        return batch.forward(keep=False)
    names: list[str] = []
    values: tuple[torch.Tensor, ...] = _Outputs.apply(batch, names, *batch.parameters)
    return Outputs(zip(names, values, strict=True))


def _reads(
    index: np.ndarray, chunks: Sequence[slice], device: torch.device
) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Return what is read off each chunk: the chunk, places in it, and which outputs these are; at most its length."""
    order = np.argsort(index, kind="stable")
    places = index[order]
    reads = []
    for chunk in chunks:
        first, last = np.searchsorted(places, [chunk.start, chunk.stop])
        size = chunk.stop - chunk.start
        for begin in range(first, last, size):
            some = slice(begin, min(begin + size, last))
            here, which = (torch.from_numpy(x[some]).to(device) for x in (places, order))
            reads.append((chunk, here - chunk.start, which))
    return reads


def _side_by_side(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Map [C, H, D] each to [C, 2 H D]."""
    return torch.stack([k, v], dim=1).flatten(1)


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a if b is None else b if a is None else a + b
