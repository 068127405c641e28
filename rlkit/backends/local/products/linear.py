"""What the library's modules compute by while an adapter is trained: products with frozen weights, and norms.

Autograd of peft's modules keeps and adds more than the numbers need. ``install`` gives each linear module one function,
x W^T + bias + scale (x A^T) B^T, with a backward pass of its own; W is never written, and is read when it is called,
since sharded weights are there then alone.

In bfloat16 an addition to the residual stream loses what is smaller than a 256th of it. ``widen`` keeps the stream in
float32 while products stay in bfloat16: the embedding gives float32, and norms give the products what they read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.products.prepacked import plain_matmul, wide_matmul

__all__ = ["install", "linear", "widen"]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 0.0,
) -> torch.Tensor:
    """Return x W^T + bias + scale (x A^T) B^T, with gradients of x, A and B.

    Args:
        x: [..., in], in the weight's dtype, or in float32 where ``wide_matmul`` works.
        weight: [out, in], of any strides.
        bias: [out].
        a: [r, in], in any dtype.
        b: [out, r].
        scale: of the adapter.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.eye(2), None, torch.ones(1, 2), torch.ones(2, 1), 0.5)
    tensor([[2.5000, 3.5000]])
    """
    y: torch.Tensor = _Linear.apply(x, weight, bias, a, b, scale)
    return y


class _Linear(torch.autograd.Function):
    # Of y = x W^T + s low B^T with low = x A^T:
    #   dlow = s dy B,  dx = dy W + dlow A,  dA = dlow^T x,  dB = s dy^T low.

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        rows, low = x.reshape(-1, x.shape[-1]), None
        y = _multiply(rows, weight, bias)
        ctx.dtypes = None if a is None or b is None else (a.dtype, b.dtype)
        if a is not None and b is not None:
            a, b = a.to(y.dtype), b.to(y.dtype)
            low = plain_matmul(rows, a)
            y.addmm_(low, b.t(), alpha=scale)
        ctx.scale, ctx.shape = scale, x.shape
        ctx.save_for_backward(None if a is None else rows, weight, a, b, low)
        # No view, since modules write to outputs, which autograd forbids for views that a function returns.
        out: torch.Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])  # noqa: SLF001
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, a, b, low = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        dx = _multiply(grad, weight.t()) if ctx.needs_input_grad[0] else None
        da = db = None
        if a is not None:
            dlow = plain_matmul(grad, b.t())  # without the scale, which the products below have
            if dx is not None:
                dx.addmm_(dlow, a, alpha=ctx.scale)
            scaled, none = {"beta": 0, "alpha": ctx.scale}, grad.new_empty(1)
            da = torch.addmm(none, dlow.t(), rows, **scaled).to(ctx.dtypes[0])
            db = torch.addmm(none, grad.t(), low, **scaled).to(ctx.dtypes[1])
        return None if dx is None else dx.view(ctx.shape), None, None, da, db, None


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.dtype == weight.dtype:
        return plain_matmul(x, weight, bias)
    y = wide_matmul(x, weight)
    return y if bias is None else y + bias


def install(model: nn.Module) -> None:
    """Make the linear modules of a peft model compute by ``linear``, and its norms by ``rms_norm`` where they are that.

    Trained weights and modules of other kinds, such as quantised ones, stay as they are.
    """
    within = {id(m.base_layer) for m in model.modules() if hasattr(m, "base_layer")}  # an adapter calls it no more
    for module in (m for m in model.modules() if id(m) not in within):
        inner: Any = getattr(module, "base_layer", module)
        if any(p.requires_grad for p in inner.parameters(recurse=False)):
            continue
        if type(inner) in (nn.Linear, Conv1D):
            module.forward = partial(_by_linear, module)
        elif type(inner).__name__.endswith("RMSNorm") and (eps := _eps_of(inner)) is not None:
            module.forward = partial(_by_rms_norm, module, eps)


def _by_linear(module: Any, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    inner = getattr(module, "base_layer", module)
    weight = inner.weight if isinstance(inner, nn.Linear) else inner.weight.t()
    wide = getattr(module, "wide_weight", None)  # of a head that reads float32
    x, weight = (x.to(weight.dtype), weight) if wide is None else (x.float(), wide)
    if inner is module:
        return linear(x, weight, inner.bias)
    a, b = (half["default"].weight for half in (module.lora_A, module.lora_B))
    return linear(x, weight, inner.bias, a, b, module.scaling["default"])


def _by_rms_norm(module: Any, eps: float, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    return F.rms_norm(x, weight.shape, weight if weight.dtype == x.dtype else weight.to(x.dtype), eps)


@torch.no_grad()
def _eps_of(module: nn.Module) -> float | None:
    """Return what a norm adds to the mean square, if it is ``rms_norm`` with a weight as it is; else None."""
    weight = getattr(module, "weight", None)
    eps = next((x for name in ("variance_epsilon", "eps") if isinstance(x := getattr(module, name, None), float)), None)
    reads = inspect.signature(module.forward).parameters  # some take a gate besides
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or eps is None or len(reads) != 1:
        return None
    x = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    same = torch.allclose(module(x), F.rms_norm(x, weight.shape, weight.to(x.dtype), eps), rtol=1e-5, atol=1e-6)
    return eps if same else None


def widen(model: Any, layers: Sequence[nn.Module], head: torch.Tensor | None) -> None:
    """Keep the residual stream of a model in bfloat16 in float32, from its embedding to its head, after ``install``.

    Args:
        model: each of whose layers reads the stream through norms alone and adds to it what linear modules give.
        layers: of it.
        head: the weight of the output head, as ``linear`` takes it with float32; None if nobody reads logits.
    """
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.float())
    for module in (m for layer in layers for m in layer.modules() if type(m).__name__.endswith("RMSNorm")):
        module.forward = partial(_rounded, module, module.forward)
    if head is not None:
        module = model.get_output_embeddings()
        module.register_buffer("wide_weight", head, persistent=False)  # so that it goes where the model goes
        module.forward = partial(_by_linear, module)


def _rounded(module: Any, norm: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return norm(x).to(module.weight.dtype)
