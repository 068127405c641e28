"""A decoder layer for GPUs, where every operation is a launch: few of them, and torch's fused norms among them."""

from __future__ import annotations

import functools
from functools import cached_property

import attrs
import torch

from rlkit._warn import warn
from rlkit.backends.local.gemm.lora_linear import LoraLinear
from rlkit.backends.local.model.decoder_layer import Layer, Tensors

__all__ = ["FusedLayer", "fused_works", "layer_class", "pass_through"]


@attrs.frozen(eq=False)
class FusedLayer(Layer):
    """As ``Layer``. All heads go through norm and rotation together, and are rounded once behind both.

    A rotation by the angles t takes the halves (a, b) of a head to (a cos t - b sin t, b cos t + a sin t), which is
    x cos t + roll(x) sin t, where roll exchanges the halves and the first half of the sines is negative.
    """

    @staticmethod
    def rope_tables(cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        """Return cosines and signed sines [N, 1, D]."""
        half = sin.shape[-1] // 2
        return cos[:, None].contiguous(), torch.cat([-sin[:, :half], sin[:, half:]], dim=-1)[:, None]

    @cached_property
    def _head_weight(self) -> torch.Tensor:
        """What queries and keys are multiplied by before they are rotated: [H + H / G, D], or 1 for D."""
        one = torch.ones(1, device=self.input_norm.device, dtype=self.input_norm.dtype)
        q, k = (one, one) if self.qk_norms is None else self.qk_norms
        return torch.cat([(q * self.scaling).expand(self.heads, -1), k.expand(self.key_heads, -1)])

    def heads_of(self, qkv: torch.Tensor, rope: Tensors) -> Tensors:
        count = self.heads + self.key_heads
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        x = parts if self.qk_norms is None else fused_norm(parts, None, self.eps)[0]
        rotated = _rotate(x[:, :count] * self._head_weight, rope, torch.empty_like(x[:, :count]))
        return rotated[:, : self.heads], rotated[:, self.heads :], parts[:, count:]

    def queries(self, qkv: torch.Tensor, rope: Tensors) -> torch.Tensor:
        return self.heads_of(qkv, rope)[0]

    def keys_values(self, qkv: torch.Tensor, rope: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        _, k, v = self.heads_of(qkv, rope)
        return k, v

    def backward_to_projection(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, raw: torch.Tensor | None, rope: Tensors
    ) -> torch.Tensor:
        count = self.heads + self.key_heads
        d = torch.cat([dq, dk], dim=1)
        rotated = _rotate(d, rope, torch.empty_like(d, dtype=rope[0].dtype), sign=-1)
        out = torch.cat([d, dv], dim=1)
        torch.mul(rotated, self._head_weight, out=out[:, :count])
        if raw is not None:  # the values are there as well, since the norm wants whole rows; they have none
            parts = raw.view(out.shape)
            out = fused_norm_backward(out, parts, fused_norm(parts, None, self.eps)[1], None)
            out[:, count:] = dv
        return out.flatten(1)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, scale = fused_norm(x, weight, self.eps)
        return y.to(self.qkv.weight.dtype), scale

    def normed(self, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        del scale
        return self.norm(x, weight)[0]

    def norm_backward(
        self, d: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return fused_norm_backward(d.to(x.dtype), x, scale, weight)

    def silu_backward(self, d: torch.Tensor, gate: torch.Tensor, out: torch.Tensor) -> None:
        torch.ops.aten.silu_backward.grad_input(d, gate, grad_input=out)


def fused_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm over the last dimension in the dtype of x, and its scale [..., 1] in float32; one kernel on a GPU."""
    y, scale = torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, eps)  # noqa: SLF001  # F.rms_norm keeps the scale
    return y, scale


def fused_norm_backward(
    d: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient of x from that of ``fused_norm``; there is none for CPUs."""
    shape, wanted = [x.shape[-1]], [True, False]
    dx: torch.Tensor = torch.ops.aten._fused_rms_norm_backward(d, x, shape, scale, weight, wanted)[0]  # noqa: SLF001
    return dx


def _rotate(x: torch.Tensor, rope: Tensors, out: torch.Tensor, *, sign: int = 1) -> torch.Tensor:
    """Write x [N, H, D] rotated to ``out``, whose dtype it is rounded to; with ``sign`` -1 the other way round."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, value=sign, out=out)


def layer_class(device: torch.device, dtype: torch.dtype) -> type[Layer]:
    """Return ``FusedLayer`` on a GPU of CUDA where it computes what ``Layer`` does, else ``Layer``."""
    if device.type == "meta":  # which computes nothing: to count operations
        return FusedLayer
    return FusedLayer if device.type == "cuda" and fused_works(device, dtype) else Layer


@functools.cache
def fused_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether both kinds of layer give the same, forward and backward, for random weights and tokens."""
    results: list[list[torch.Tensor]] = []
    try:
        for kind in (Layer, FusedLayer):
            numbers: list[torch.Tensor] = []
            for normed in (True, False):
                numbers += pass_through(kind, device, dtype, normed=normed)
            results.append(numbers)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        warn(f"layers are computed without fused norms, which do not work here: {error}")
        return False
    tolerance = 1e-3 if dtype == torch.float32 else 0.05
    pairs = [(a.float(), b.float()) for a, b in zip(*results, strict=True)]
    right = all(bool((a - b).norm() < tolerance * a.norm()) for a, b in pairs)
    if not right:
        warn("layers are computed without fused norms, which give other numbers here")
    return right


class _Adding:
    """Stands for attention: each query gets its key and its value added."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
        group = q.shape[1] // k.shape[1]
        return (q + (k + v).repeat_interleave(group, dim=1)).flatten(1), (q, k, v)

    def backward(self, grad: torch.Tensor, saved: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, _ = saved
        dq = grad.view(q.shape)
        both = dq.unflatten(1, (k.shape[1], -1)).sum(2)
        return dq.clone(), both, both


@torch.no_grad()
def pass_through(kind: type[Layer], device: torch.device, dtype: torch.dtype, *, normed: bool) -> list[torch.Tensor]:
    """Output, and gradients of the input and of adapters, of a small layer of 4 heads and 2 for keys, of 16 each."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, at: torch.dtype = dtype) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(device, at)

    def linear(sizes: list[int], width: int) -> LoraLinear:
        pairs = [(random(4, width, at=torch.float32), random(size, 4, at=torch.float32)) for size in sizes]
        product = LoraLinear(random(sum(sizes), width), None, sizes, pairs, 0.5)
        product.prepare()
        return product

    qkv, out, gate_up, down = linear([64, 32, 32], 48), linear([48], 64), linear([40, 40], 48), linear([48], 40)
    weights = [1 + random(n, at=torch.float32) for n in (48, 48, 16, 16)]
    norms = weights[0], weights[1], (weights[2], weights[3]) if normed else None
    layer = kind(qkv, out, gate_up, down, *norms, heads=4, key_heads=2, head_dim=16, scaling=0.25, eps=1e-6)
    angles = torch.rand(7, 8, generator=generator).to(device).repeat(1, 2)
    rope, attention = layer.rope_tables(angles.cos(), angles.sin()), _Adding()
    y, saved = layer.forward(random(7, 48, at=torch.float32), rope, attention)
    dx, gradients = layer.backward(random(7, 48, at=torch.float32), saved, rope, attention, inputs=True)
    return [y, *([] if dx is None else [dx]), *gradients]
