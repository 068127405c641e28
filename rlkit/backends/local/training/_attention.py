"""The attention of the library's modules over a prefix tree: run by run on a CPU, by one kernel on a GPU.

transformers calls what is registered as ``TREE`` in place of its own; ``Tree`` says which tokens see which.

One kernel for all pairs costs less on a GPU than many for few. ``FlexAttention`` leaves out the blocks of pairs that
no token sees; where it does not work, ``MaskedAttention`` computes them too.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlkit._fallback import Outcome, try_path
from rlkit.backends.local.attention.tree import Segment, TreeAttention, Window, positions, spans, visible
from rlkit.backends.local.model.memory import to_device

__all__ = ["TREE", "FlexAttention", "KernelAttention", "MaskedAttention", "Tree", "gpu_attention"]

Tensors: TypeAlias = tuple[torch.Tensor, ...]

TREE = "rlkit_tree"


class Tree:
    """Which tokens of the micro-batch that is computed see which, for all layers of a model.

    Args:
        model: whose attention is ``TREE``. Its modules know the tree, since a layer that is computed again in the
            backward pass may be so in another thread.
        windows: of each layer.
    """

    def __init__(self, model: nn.Module, windows: Sequence[Window | None]) -> None:
        self._windows = windows
        self._runs: Sequence[Segment] = ()
        self._made: dict[object, TreeAttention | KernelAttention] = {}
        for module in model.modules():
            module.rlkit_tree = self

    def grow(self, runs: Sequence[Segment]) -> None:
        """Take the runs of the micro-batch to compute next."""
        self._runs = runs
        self.forget()

    def forget(self) -> None:
        """Drop the masks; a layer that is computed again makes its own."""
        self._made.clear()

    def attention(
        self,
        module: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cap: float | None,
        sinks: torch.Tensor | None,
    ) -> TreeAttention | KernelAttention:
        """Return what computes a layer's attention, of q [N, H, D], k [N, H / G, D] and v [N, H / G, E]."""
        window, shape = self._windows[module.layer_idx], (q.shape[1], k.shape[1])
        key = (window, shape, q.shape[2], cap, None if sinks is None else module.layer_idx)
        if key not in self._made:  # one for all layers that are alike: they share masks
            if q.device.type == "cpu" or cap is not None or sinks is not None or v.shape[2] != q.shape[2]:
                self._made[key] = TreeAttention(self._runs, *shape, window, cap, sinks)
            else:
                self._made[key] = gpu_attention(self._runs, *shape, q.shape[2], v.dtype, q.device, window)
        return self._made[key]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,  # noqa: ARG001
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output [1, N, H, E], and no weights, as modules of transformers want it.

    Args:
        module: what calls it.
        query: [1, H, N, D].
        key, value: [1, H / G, N, D] and [1, H / G, N, E].
        attention_mask: None, or what the model makes by itself; the tree says it all.
        scaling: of the scores; None is D ** -0.5.
        softcap, s_aux: see ``TreeAttention``.
    """
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    q = q.to(v.dtype) * (q.shape[-1] ** -0.5 if scaling is None else scaling)  # rounded as in sampling
    attention = module.rlkit_tree.attention(module, q, k, v, softcap, s_aux)
    return _Attend.apply(q, k.to(v.dtype), v, attention).view(1, q.shape[0], q.shape[1], -1), None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attention: TreeAttention | KernelAttention
    ) -> torch.Tensor:
        out, saved = attention.forward(q, k, v)
        ctx.attention = attention
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.attention.backward(grad.contiguous(), ctx.saved_tensors), None


AttentionInterface.register(TREE, _attend)  # and no mask: transformers makes none for what it does not know


class KernelAttention(ABC):
    """As ``TreeAttention``; the forward pass is made again in the backward pass."""

    @abstractmethod
    def _out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return [1, H, N, D] of q, k and v with heads first."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """Map q [N, H, D], already scaled, k and v [N, H / G, D] to [N, H D], and what ``backward`` needs."""
        return self._flat(q, k, v), (q, k, v.contiguous())

    def backward(self, grad: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v from that of the output [N, H D]."""
        with torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in saved]
            dq, dk, dv = torch.autograd.grad(self._flat(*leaves), leaves, grad)
        return dq, dk, dv

    def _flat(self, *qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in qkv)
        return self._out(q, k, v)[0].transpose(0, 1).flatten(1)


class MaskedAttention(KernelAttention):
    """By the library's attention, with a mask over all pairs.

    Args:
        visible: bool [N, N], which places each one sees.
    """

    def __init__(self, visible: torch.Tensor) -> None:
        self._visible = visible
        self._mask: torch.Tensor | None = None

    def _out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self._mask is None:  # once for all layers: torch would convert one of bools each time
            self._mask = torch.zeros(self._visible.shape, dtype=q.dtype, device=q.device)
            self._mask.masked_fill_(~self._visible, -torch.inf)
        # Kernels with a mask want as many heads of keys as of queries.
        group = q.shape[1] // k.shape[1]
        k, v = (x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2) for x in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=self._mask, scale=1.0)


class FlexAttention(KernelAttention):
    """By a kernel that is compiled for the tree's mask (flex_attention, arXiv 2412.05496).

    Args:
        runs: of the micro-batch.
        device: where q, k and v are.
        window: of the layers that it is for.
        compiled: False computes the same slowly, on any device, without gradients on a CPU.
    """

    def __init__(
        self, runs: Sequence[Segment], device: torch.device, window: Window | None = None, *, compiled: bool = True
    ) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        enter, leave = (to_device(x, device) for x in spans(runs))

        at = positions(runs)
        first = to_device(np.zeros_like(at) if window is None else window.first(at), device)
        position = to_device(at, device)

        def seen(_: torch.Tensor, __: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            below = (enter[key] <= enter[query]) & (enter[query] < leave[key]) & (key <= query)
            return below if window is None else below & (position[key] >= first[query])

        # Compiled, it compares block by block; else all pairs are in memory, several times.
        length, options = enter.numel(), {"device": str(device), "_compile": compiled}
        self._mask = create_block_mask(seen, None, None, length, length, **options)
        self._kernel = _flex(compiled)

    def _out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self._kernel(q, k, v, block_mask=self._mask, scale=1.0, enable_gqa=True)


def gpu_attention(
    runs: Sequence[Segment],
    heads: int,
    key_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    window: Window | None = None,
) -> KernelAttention:
    """Return ``FlexAttention`` where it works, else ``MaskedAttention``."""
    if device.type != "mps" and _flex_works(device, dtype, heads, key_heads, head_dim):  # which has no such kernel
        return FlexAttention(runs, device, window)
    return MaskedAttention(to_device(visible(runs, runs[-1].end, window), device))


@functools.cache
def _flex(compiled: bool) -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    return kernel


@functools.cache
def _flex_works(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, head_dim: int) -> bool:
    """Return whether the compiled kernel gives what masked attention gives, forward and backward, on a short probe."""

    def trial() -> Outcome:
        offs, bound = [], 1e-3 if dtype == torch.float32 else 0.05
        for length in (300, 60):  # few queries may get another kernel
            runs = [
                Segment(0, 20),
                Segment(20, length - 10, (slice(0, 12),)),
                Segment(length - 10, length, (slice(0, 20),)),
            ]
            generator = torch.Generator().manual_seed(0)
            each = (heads, key_heads, key_heads, heads)
            q, k, v, grad = (torch.randn(length, h, head_dim, generator=generator).to(device, dtype) for h in each)
            q, grad = q / head_dim**0.5, grad.flatten(1)
            masked = MaskedAttention(to_device(visible(runs, length), device))
            out, saved = masked.forward(q, k, v)
            expected = [out, *masked.backward(grad, saved)]
            flex = FlexAttention(runs, device)
            out, saved = flex.forward(q, k, v)
            found = [out, *flex.backward(grad, saved)]
            offs += [(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)]
        off = float(torch.stack(offs).max())
        return Outcome(off < bound, f"numbers differ by {off:.2g} >= {bound:g}")

    return try_path("flex_attention", trial, "training is slower", refusals=(Exception,), loud=True)  # of a compiler
