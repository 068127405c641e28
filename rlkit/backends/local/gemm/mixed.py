"""Products of bfloat16 weights with results in float32, on GPUs: what they add up in float32 is not rounded again.

The output head is computed in float32, but its weight is a model's, in bfloat16. ``wide_matmul`` needs no float32 copy
of it and no products in float32, which are slow there. A float32 number with its 24 bits is the sum of three in
bfloat16 with 8 bits each, so that x W^T = x1 W^T + x2 W^T + x3 W^T, with an error as of a product in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["add_product", "product", "wide_matmul", "works"]

FEW = 64  # up to as many rows the three products are one, which reads the weight once


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """[n, k] and [k, m] in bfloat16 -> [n, m] in float32."""
    return torch.mm(x, w, out_dtype=torch.float32)


def add_product(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return y + x w, of [n, m] in float32 and [n, k], [k, m] in bfloat16."""
    return torch.addmm(y, x, w, out_dtype=torch.float32)


def wide_matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x W^T in float32, of x [n, in] in float32 and a frozen W [out, in] in bfloat16."""
    y: torch.Tensor = _WideMatmul.apply(x, weight)
    return y


class _WideMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return _by_parts(x, weight.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _by_parts(grad, weight), None


def _by_parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    first = x.to(torch.bfloat16)
    rest = x - first
    second = rest.to(torch.bfloat16)
    third = (rest - second).to(torch.bfloat16)
    if len(x) <= FEW:
        return product(torch.cat([first, second, third]), w).view(3, len(x), -1).sum(0)
    return add_product(add_product(product(third, w), second, w), first, w)  # the smallest first


def works(device: torch.device) -> bool:
    """Return whether these products can be computed on ``device``, and are right."""
    return device.type == "meta" or (device.type == "cuda" and _right(device))


@functools.cache
def _right(device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 80, generator=generator).to(torch.bfloat16)
    for rows in (1, 2, FEW, 2 * FEW):
        x = torch.randn(rows, 80, generator=generator)
        expected = x.double() @ weight.double().t()
        try:
            y = wide_matmul(x.to(device), weight.to(device)).cpu()
            added = add_product(y.to(device), x.to(device, torch.bfloat16), weight.t().to(device)).cpu()
        except (AttributeError, RuntimeError, TypeError, NotImplementedError):
            return False
        both = expected + x.to(torch.bfloat16).double() @ weight.double().t()
        if not all(bool((a - b).abs().max() < 1e-4) for a, b in ((y, expected), (added, both))):
            return False
    return True
