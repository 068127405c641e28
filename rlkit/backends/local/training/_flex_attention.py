"""Attention over a prefix tree by kernels that are given all tokens of a micro-batch at once, for GPUs.

One kernel for all pairs costs less there than many for few. ``FlexAttention`` leaves out the blocks of pairs that
no token sees; where it does not work, ``MaskedAttention`` computes them too.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlkit._fallback import Outcome, try_path
from rlkit.backends.local.attention.tree import Segment, TreeAttention, Window, positions, spans, visible
from rlkit.backends.local.model.llama import Attention
from rlkit.backends.local.model.memory import to_device

__all__ = ["FlexAttention", "KernelAttention", "MaskedAttention", "gpu_attention", "tree_attention"]

Tensors: TypeAlias = tuple[torch.Tensor, ...]


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


def tree_attention(
    runs: Sequence[Segment],
    heads: int,
    key_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    window: Window | None = None,
) -> Attention:
    """Return attention over a prefix tree: run by run on a CPU; on a GPU what works, the better kernel first."""
    if device.type == "cpu":
        return TreeAttention(runs, heads, key_heads, window)
    return gpu_attention(runs, heads, key_heads, head_dim, dtype, device, window)


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
