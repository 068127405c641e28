"""Attention over a prefix tree by kernels that are given all tokens of a micro-batch at once, for GPUs.

One kernel for all pairs costs less there than many for few. ``FlexAttention`` leaves out the blocks of pairs that
nobody sees; where it does not work, ``MaskedAttention`` computes them too.
"""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from rlkit.backends.local.model.tree_attention import Run, spans, visible
from rlkit.backends.local.training.micro_batches import Batch

__all__ = ["FlexAttention", "KernelAttention", "MaskedAttention", "attention_for"]

Tensors = tuple[torch.Tensor, ...]


class KernelAttention(ABC):
    """As ``TreeAttention``; the forward pass is made again in the backward pass."""

    @abstractmethod
    def _out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """[1, H, N, D] of q, k and v with heads first."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        """From q [N, H, D], already scaled, k and v [N, H / G, D] -> [N, H D], and what ``backward`` wants."""
        return self._flat(q, k, v), (q, k, v.contiguous())

    def backward(self, grad: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v from that of the output [N, H D]."""
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

    def _out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))  # kernels with a mask want it
        return scaled_dot_product_attention(q, k, v, attn_mask=self._visible, scale=1.0)


class FlexAttention(KernelAttention):
    """By a kernel that is compiled for the tree's mask (flex_attention, arXiv 2412.05496).

    Args:
        runs: of the micro-batch.
        device: where q, k and v are.
        compiled: False computes the same slowly, on any device, without gradients on a CPU.
    """

    def __init__(self, runs: Sequence[Run], device: torch.device, *, compiled: bool = True) -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        enter, leave = (torch.from_numpy(x).to(device) for x in spans(runs))

        def seen(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            below = (enter[key] <= enter[query]) & (enter[query] < leave[key])
            return below & (key <= query)

        self._mask = create_block_mask(seen, None, None, enter.numel(), enter.numel(), device=str(device))
        self._kernel = _flex(compiled)

    def _out(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._kernel(q, k, v, block_mask=self._mask, scale=1.0, enable_gqa=True)
        return out


def attention_for(
    batch: Batch, device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int
) -> Any:
    """What works on a GPU, the better one first."""
    if _flex_works(device, dtype, heads, key_heads, width):
        return FlexAttention(batch.runs, device)
    return MaskedAttention(torch.from_numpy(batch.visible()).to(device))


@functools.cache
def _flex(compiled: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = torch.compile(flex_attention, dynamic=True) if compiled else flex_attention
    return kernel


@functools.cache
def _flex_works(device: torch.device, dtype: torch.dtype, heads: int, key_heads: int, width: int) -> bool:
    """Whether the compiled kernel gives what masked attention gives, forward and backward, on a short probe."""
    found: list[list[torch.Tensor]] = [[], []]
    try:
        for length in (300, 60):  # few queries may get another kernel
            runs = [Run(0, 20), Run(20, length - 10, (slice(0, 12),)), Run(length - 10, length, (slice(0, 20),))]
            generator = torch.Generator().manual_seed(0)
            each = (heads, key_heads, key_heads, heads)
            q, k, v, grad = (torch.randn(length, h, width, generator=generator).to(device, dtype) for h in each)
            masked = MaskedAttention(torch.from_numpy(visible(runs, length)).to(device))
            for numbers, attention in zip(found, (FlexAttention(runs, device), masked), strict=True):
                out, saved = attention.forward(q / width**0.5, k, v)
                numbers += [out, *attention.backward(grad.flatten(1), saved)]
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises
        warnings.warn(f"training goes on without flex_attention, which does not work here: {error}", stacklevel=2)
        return False
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    right = all(bool((a - b).norm() < tolerance * b.norm()) for a, b in zip(*found, strict=True))
    if not right:
        warnings.warn("training goes on without flex_attention, which gives other numbers here", stacklevel=2)
    return right
