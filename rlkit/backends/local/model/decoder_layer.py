"""A Llama decoder layer, forward and backward, with few passes over memory and few activations kept.

The backward pass is written by hand. Kept of a token and a layer are the residual stream twice, queries, keys, values,
the attention's output, and the two inputs of the gated product; the rest is recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import attrs
import torch
import torch.nn.functional as F

from rlkit.backends.local.gemm.lora_linear import LoraLinear
from rlkit.backends.local.model.gathering import Weights, gathered
from rlkit.backends.worker import breathe

__all__ = ["Attention", "Layer", "run_layer"]

Tensors: TypeAlias = tuple[torch.Tensor, ...]


class Attention(Protocol):
    """How the tokens of one forward see one another."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> tuple[torch.Tensor, Tensors]:
        """From q [N, H, D], already scaled, k and v [N, H / G, D] -> [N, H D], and what ``backward`` wants."""

    def backward(self, grad: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of q, k and v."""


@attrs.frozen(eq=False)
class Layer:
    """The weights of one layer.

    Attributes:
        input_norm, post_attention_norm: float32 [hidden].
        qk_norms: float32 [D] of the norms of queries and of keys (Qwen3), or None.
        head_dim: D.
        weights: what gathers them, where they are not always there.
    """

    qkv: LoraLinear
    out: LoraLinear
    gate_up: LoraLinear
    down: LoraLinear
    input_norm: torch.Tensor
    post_attention_norm: torch.Tensor
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    heads: int
    key_heads: int
    head_dim: int
    scaling: float
    eps: float
    weights: Weights | None = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The adapters' tensors, in the order of the gradients."""
        return [x for linear in self.linears for x in linear.parameters]

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        """The four products."""
        return self.qkv, self.out, self.gate_up, self.down

    def forward(self, x: torch.Tensor, rope: Tensors, attention: Attention) -> tuple[torch.Tensor, list[Any]]:
        """Return the residual stream, float32 [N, hidden], after this layer, and what ``backward`` wants."""
        qkv, projected = self.project(x)
        attended, saved = attention.forward(*self.heads_of(qkv, rope))
        inner = self.up_to_down(x, attended)
        out, low_down = self.output(inner)
        return out, [x, *projected, *saved, attended, *inner, low_down]

    def backward(
        self, grad: torch.Tensor, saved: list[Any], rope: Tensors, attention: Attention, *, inputs: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Return the gradients of x, if ``inputs``, and of ``parameters``.

        The layer is two residual blocks, middle = x + out(attention(norm(x))) and out = middle + down(swiglu(norm(
        middle))). So a block's input gets the gradient of its output as it is, and what comes back through the block.
        Below, d is the gradient of what stands behind the block's last product, then of what stands behind its first.
        """
        x, scale, low, raw, *qkv, attended = saved[:-6]
        grad, d, after = self.backward_to_attention(grad, attended, saved[-6:])
        dqkv = self.backward_to_projection(*attention.backward(d, tuple(qkv)), raw, rope)
        dx, before = self.backward_to_input(grad, dqkv, x, [scale, low, raw], inputs=inputs)
        return dx, [*before, *after]

    # The parts of a layer. ``forward`` and ``backward`` call them for all tokens at once; what a micro-batch is too
    # long for is computed by some tokens at a time, for which only attention needs the others' keys and values.

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return the product [N, (H + 2 H / G) D] behind queries, keys and values, and what its backward wants."""
        n, scale = self.norm(x, self.input_norm)
        qkv, low = self.qkv(n)
        return qkv, [scale, low, qkv if self.qk_norms is not None else None]

    def heads_of(self, qkv: torch.Tensor, rope: Tensors) -> Tensors:
        """Return ``queries``, and ``keys_values``."""
        return self.queries(qkv, rope), *self.keys_values(qkv, rope)

    def queries(self, qkv: torch.Tensor, rope: Tensors) -> torch.Tensor:
        """Return the scaled queries [N, H, D] with their positions."""
        q = self._split(qkv)[0]
        if self.qk_norms is not None:
            q = _norm(q, self.qk_norms[0], self.eps, q.dtype)[0]
        return _rotate(q, rope).mul_(self.scaling)

    def keys_values(self, qkv: torch.Tensor, rope: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys with their positions and values, [N, H / G, D] each."""
        _, k, v = self._split(qkv)
        if self.qk_norms is not None:
            k = _norm(k, self.qk_norms[1], self.eps, k.dtype)[0]
        return _rotate(k, rope), v

    def up_to_down(self, x: torch.Tensor, attended: torch.Tensor) -> list[Any]:
        """Return what stands between attention and the last product: low_out, middle, scale, gate_up, low_gate_up."""
        middle, low_out = self.out(attended, x)
        n, scale = self.norm(middle, self.post_attention_norm)
        return [low_out, middle, scale, *self.gate_up(n)]

    def output(self, inner: Sequence[Any]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the layer's output from what ``up_to_down`` gave, and x A^T of the last product."""
        _, middle, _, gate_up, _ = inner
        return self.down(_swiglu(gate_up), middle)

    def backward_to_attention(
        self, grad: torch.Tensor, attended: torch.Tensor, saved: list[Any]
    ) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Return the gradients of the residual stream at ``middle``, of ``attended`` and of the parameters behind it.

        Args:
            grad: of the layer's output.
            attended: attention's output [N, H D].
            saved: of ``up_to_down``, and x A^T of the last product, or None where it was not made.
        """
        low_out, middle, scale, gate_up, low_gate_up, low_down = saved
        dtype = attended.dtype

        # The MLP: h = silu(gate) * up, so d up = dh * silu(gate) and d gate = dh * up * silu'(gate). The two are
        # written side by side, as ``gate_up`` has them; ``d`` and ``act`` are overwritten once they were read.
        dy = grad.to(dtype)
        d, dlow = self.down.backward(dy)
        gate, up = gate_up.chunk(2, dim=1)
        act = F.silu(gate)
        dgate_up = torch.empty_like(gate_up)
        torch.mul(d, act, out=dgate_up[:, act.shape[1] :])
        self.silu_backward(d.mul_(up), gate, dgate_up[:, : act.shape[1]])
        act.mul_(up)
        g_down = self.down.gradients(act, dy, self.down.low(act) if low_down is None else low_down, dlow)
        del d, act, gate, up
        d, dlow = self.gate_up.backward(dgate_up)
        n = self.normed(middle, scale, self.post_attention_norm)
        g_gate_up = self.gate_up.gradients(n, dgate_up, low_gate_up, dlow)
        del dgate_up
        grad = grad + self.norm_backward(d, middle, scale, self.post_attention_norm)

        dy = grad.to(dtype)
        d, dlow = self.out.backward(dy)
        return grad, d, [*self.out.gradients(attended, dy, low_out, dlow), *g_gate_up, *g_down]

    def backward_to_projection(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, raw: torch.Tensor | None, rope: Tensors
    ) -> torch.Tensor:
        """Return the gradient of ``project``'s product from those of queries, keys and values."""
        back = (rope[0], -rope[1])  # a rotation's transpose is the rotation by the negative angle
        dq, dk = _rotate(dq.mul_(self.scaling), back), _rotate(dk, back)
        if raw is not None and self.qk_norms is not None:
            q, k, _ = self._split(raw)
            dq, dk = (
                _norm_backward(d, y, _rsqrt_mean_square(y, self.eps), w).to(d.dtype)
                for d, y, w in zip((dq, dk), (q, k), self.qk_norms, strict=True)
            )
        return torch.cat([dq, dk, dv], dim=1).flatten(1)

    def backward_to_input(
        self, grad: torch.Tensor, dqkv: torch.Tensor, x: torch.Tensor, saved: list[Any], *, inputs: bool
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Return the gradients of x and of the parameters of ``qkv``; the former is written over ``grad``.

        The first layer with an adapter needs none of its input.
        """
        scale, low, _ = saved
        dx = None
        if inputs:
            d, dlow = self.qkv.backward(dqkv)
            dx = grad.add_(self.norm_backward(d, x, scale, self.input_norm))
        else:
            dlow = self.qkv.backward_low(dqkv)
        n = self.normed(x, scale, self.input_norm)
        return dx, self.qkv.gradients(n, dqkv, low, dlow)

    # What is done besides the products; ``FusedLayer`` has other ways.

    @staticmethod
    def rope_tables(cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        """Return what is read as ``rope``, from the angles [N, D] whose second half is as the first: [N, 1, D / 2]."""
        half = cos.shape[-1] // 2
        return cos[:, None, :half].contiguous(), sin[:, None, :half].contiguous()

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm of the residual stream, in the products' dtype, and its scale (mean(x^2) + eps)^-1/2."""
        return _norm(x, weight, self.eps, self.qkv.weight.dtype)

    def normed(self, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the norm once more, from its scale."""
        return _normed(x, scale, weight, self.qkv.weight.dtype)

    def norm_backward(
        self, d: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of x from that of the norm."""
        return _norm_backward(d, x, scale, weight)

    def silu_backward(self, d: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
        """Write the gradient of ``gate`` to ``out``, from that of silu(gate)."""
        out.copy_(torch.ops.aten.silu_backward(d, gate))

    def _split(self, qkv: torch.Tensor) -> Tensors:
        """[N, (H + 2 H / G) D] -> q [N, H, D], k and v [N, H / G, D]."""
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = parts.split([self.heads, self.key_heads, self.key_heads], dim=1)
        return q, k, v


class _RunLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer, rope: Tensors, attention: Attention, *_: torch.Tensor) -> Any:
        with gathered(layer.weights):
            out, saved = layer.forward(x, rope, attention)
        ctx.layer, ctx.rope, ctx.attention = layer, rope, attention
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with gathered(ctx.layer.weights):
            dx, gradients = ctx.layer.backward(
                grad, list(ctx.saved_tensors), ctx.rope, ctx.attention, inputs=ctx.needs_input_grad[0]
            )
        breathe()
        return dx, None, None, None, *gradients


def run_layer(x: torch.Tensor, layer: Layer, rope: Tensors, attention: Attention) -> torch.Tensor:
    """``Layer.forward`` as autograd sees it."""
    if torch.is_grad_enabled():
        out: torch.Tensor = _RunLayer.apply(x, layer, rope, attention, *layer.parameters)
    else:
        with gathered(layer.weights):
            out = layer.forward(x, rope, attention)[0]
    breathe()
    return out


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension, computed in float32: x s w with s = (mean(x^2) + eps)^-1/2; and s."""
    scale = _rsqrt_mean_square(x, eps)
    return _normed(x, scale, weight, dtype), scale


def _rsqrt_mean_square(x: torch.Tensor, eps: float) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    return square.div_(x.shape[-1]).add_(eps).rsqrt_()


def _normed(x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (x * scale).mul_(weight).to(dtype)


def _norm_backward(d: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    # With n numbers in x and y_i = x_i s w_i, ds/dx_j = -s^3 x_j / n. Let g = d w and u = x s. Then
    #   dx_j = s g_j + sum_i(g_i x_i) ds/dx_j = s (g_j - u_j mean(g u)).
    d = d * weight
    unit = x * scale
    along = (d * unit).mean(-1, keepdim=True)
    return d.sub_(unit.mul_(along)).mul_(scale)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def _rotate(x: torch.Tensor, rope: Tensors) -> torch.Tensor:
    """RoPE: [N, H, D], the halves of each head rotated by the angles of (cos, sin) [N, 1, D / 2]."""
    cos, sin = rope
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    y = torch.empty_like(x, dtype=cos.dtype, memory_format=torch.contiguous_format)
    first, second = y.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return y.to(x.dtype)
