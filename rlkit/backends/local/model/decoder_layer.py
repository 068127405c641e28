"""A decoder layer of Llama's kind, forward and backward, with few passes over memory and little of it kept.

Written out by hand: of a token and a layer, what is kept for the backward pass is the residual stream twice, queries,
keys, values, the attention's output, and the two inputs of the gated product; the rest is computed again.
"""

from __future__ import annotations

from typing import Any, Protocol

import attrs
import torch
import torch.nn.functional as F

from rlkit.backends.local.gemm.lora_linear import Fused

__all__ = ["Attention", "Layer", "run_layer"]

Tensors = tuple[torch.Tensor, ...]


class Attention(Protocol):
    """How the tokens of a micro-batch see one another."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> tuple[torch.Tensor, Tensors]:
        """From q [N, H, D], already scaled, k and v [N, H / G, D] -> [N, H D], and what ``backward`` wants."""

    def backward(self, grad: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of q, k and v."""


@attrs.frozen(eq=False)
class Layer:
    """The weights of one layer.

    Attributes:
        before_attention, before_mlp: float32 [hidden], of the two norms.
        head_norms: float32 [D] of the norms of queries and of keys (Qwen3), or None.
        width: D, of a head.
    """

    qkv: Fused
    out: Fused
    gate_up: Fused
    down: Fused
    before_attention: torch.Tensor
    before_mlp: torch.Tensor
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    heads: int
    key_heads: int
    width: int
    scaling: float
    eps: float

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The adapters' tensors, in the order of the gradients."""
        return [x for part in self.products for x in part.parameters]

    @property
    def products(self) -> tuple[Fused, ...]:
        """The four of them."""
        return self.qkv, self.out, self.gate_up, self.down

    def forward(self, x: torch.Tensor, rope: Tensors, attention: Attention) -> tuple[torch.Tensor, list[Any]]:
        """The residual stream, float32 [N, hidden] -> the same after this layer, and what ``backward`` wants."""
        dtype = self.qkv.weight.dtype
        n, scale1 = _norm(x, self.before_attention, self.eps, dtype)
        qkv, low_qkv = self.qkv(n)
        q, k, v = self._split(qkv)
        q, k = self._turned(q, k, rope)
        found, kept = attention.forward(q, k, v)
        middle, low_out = self.out(found, x)
        n, scale2 = _norm(middle, self.before_mlp, self.eps, dtype)
        gate_up, low_gate_up = self.gate_up(n)
        out, low_down = self.down(_gated(gate_up), middle)
        raw = qkv if self.head_norms is not None else None
        return out, [x, scale1, low_qkv, raw, *kept, found, low_out, middle, scale2, gate_up, low_gate_up, low_down]

    def backward(
        self, grad: torch.Tensor, saved: list[Any], rope: Tensors, attention: Attention, *, inputs: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The gradients of x, if ``inputs``, and of ``parameters``."""
        x, scale1, low_qkv, raw, *kept, found, low_out, middle, scale2, gate_up, low_gate_up, low_down = saved
        dtype = found.dtype

        dy = grad.to(dtype)
        d, dlow = self.down.backward(dy)
        gate, up = gate_up.chunk(2, dim=1)
        act = F.silu(gate)
        dgate_up = torch.empty_like(gate_up)
        torch.mul(d, act, out=dgate_up[:, act.shape[1] :])
        dgate_up[:, : act.shape[1]] = torch.ops.aten.silu_backward(d.mul_(up), gate)
        g_down = self.down.gradients(act.mul_(up), dy, low_down, dlow)
        del d, act, gate, up
        d, dlow = self.gate_up.backward(dgate_up)
        n = _normed(middle, scale2, self.before_mlp, dtype)
        g_gate_up = self.gate_up.gradients(n, dgate_up, low_gate_up, dlow)
        del dgate_up
        grad = grad + _norm_backward(d, middle, scale2, self.before_mlp)

        dy = grad.to(dtype)
        d, dlow = self.out.backward(dy)
        g_out = self.out.gradients(found, dy, low_out, dlow)
        dq, dk, dv = attention.backward(d, tuple(kept))
        dqkv = self._turned_back(dq, dk, dv, raw, rope)
        dx = None
        if inputs:
            d, dlow = self.qkv.backward(dqkv)
            dx = grad.add_(_norm_backward(d, x, scale1, self.before_attention))
        else:
            dlow = self.qkv.backward_low(dqkv)
        n = _normed(x, scale1, self.before_attention, dtype)
        g_qkv = self.qkv.gradients(n, dqkv, low_qkv, dlow)
        return dx, [*g_qkv, *g_out, *g_gate_up, *g_down]

    def _split(self, qkv: torch.Tensor) -> Tensors:
        """[N, (H + 2 H / G) D] -> q [N, H, D], k and v [N, H / G, D]."""
        parts = qkv.view(qkv.shape[0], -1, self.width)
        q, k, v = parts.split([self.heads, self.key_heads, self.key_heads], dim=1)
        return q, k, v

    def _turned(self, q: torch.Tensor, k: torch.Tensor, rope: Tensors) -> Tensors:
        if self.head_norms is not None:
            q, k = (_norm(y, w, self.eps, y.dtype)[0] for y, w in zip((q, k), self.head_norms, strict=True))
        return _rotated(q, rope).mul_(self.scaling), _rotated(k, rope)

    def _turned_back(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, raw: torch.Tensor | None, rope: Tensors
    ) -> torch.Tensor:
        back = (rope[0], -rope[1])
        dq, dk = _rotated(dq.mul_(self.scaling), back), _rotated(dk, back)
        if raw is not None and self.head_norms is not None:
            found = []
            for d, y, w in zip((dq, dk), self._split(raw), self.head_norms, strict=False):
                found.append(_norm_backward(d, y, _scale(y, self.eps), w).to(d.dtype))
            dq, dk = found
        return torch.cat([dq, dk, dv], dim=1).flatten(1)


class _RunLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer, rope: Tensors, attention: Attention, *_: torch.Tensor) -> Any:
        out, saved = layer.forward(x, rope, attention)
        ctx.layer, ctx.rope, ctx.attention = layer, rope, attention
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dx, gradients = ctx.layer.backward(
            grad, list(ctx.saved_tensors), ctx.rope, ctx.attention, inputs=ctx.needs_input_grad[0]
        )
        return dx, None, None, None, *gradients


def run_layer(x: torch.Tensor, layer: Layer, rope: Tensors, attention: Attention) -> torch.Tensor:
    """``Layer.forward`` as autograd sees it."""
    if not torch.is_grad_enabled():
        return layer.forward(x, rope, attention)[0]
    out: torch.Tensor = _RunLayer.apply(x, layer, rope, attention, *layer.parameters)
    return out


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """This is x / rms(x) * weight over the last dimension, computed in float32, and 1 / rms(x)."""
    scale = _scale(x, eps)
    return _normed(x, scale, weight, dtype), scale


def _scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
    return square.div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x * scale).mul_(weight).to(dtype)


def _norm_backward(d: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    d = d * weight
    unit = x * scale
    along = (d * unit).mean(-1, keepdim=True)
    return d.sub_(unit.mul_(along)).mul_(scale)


def _gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def _rotated(x: torch.Tensor, rope: Tensors) -> torch.Tensor:
    """Rotary positions: [N, H, D], the halves of each head turned by the angles of (cos, sin) [N, 1, D / 2]."""
    cos, sin = rope
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    y = torch.empty_like(x, dtype=cos.dtype, memory_format=torch.contiguous_format)
    first, second = y.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return y.to(x.dtype)
