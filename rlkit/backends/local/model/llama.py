"""The forward of Llama's architecture (Llama, Mistral, Qwen2, Qwen3), on the tensors of a transformers model: samples.

A decoder layer makes few passes over memory. It has no gradient; training computes the library's modules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import attrs
import torch
import torch.nn.functional as F
from torch import nn

from rlkit._fallback import Outcome, try_path
from rlkit.backends.local.attention.tree import layer_windows
from rlkit.backends.local.products.lora_linear import Adapter, LoraLinear, fuse_weights, fused_weight, upcast
from rlkit.backends.local.products.prepacked import Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "Attention",
    "FusedLayer",
    "Layer",
    "Llama",
    "fuse_layers",
    "fused_works",
    "is_llama",
    "layer_class",
    "pass_through",
]


Tensors: TypeAlias = tuple[torch.Tensor, ...]
# How the tokens of one forward see one another: q [N, H, D], already scaled, k and v [N, H / G, D] to [N, H D].
Attention: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@attrs.frozen(eq=False)
class Layer:
    """The weights of one layer.

    Attributes:
        input_norm, post_attention_norm: float32 [hidden].
        qk_norms: float32 [D] of the norms of queries and of keys (Qwen3), or None.
        head_dim: D.
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

    @property
    def linears(self) -> tuple[LoraLinear, ...]:
        """Return the four products."""
        return self.qkv, self.out, self.gate_up, self.down

    def forward(self, x: torch.Tensor, rope: Tensors, attention: Attention) -> torch.Tensor:
        """Return the residual stream, float32 [N, hidden], after this layer."""
        attended = attention(*self.heads_of(self.qkv(self.norm(x, self.input_norm)), rope))
        middle = self.out(attended, x)
        gate_up = self.gate_up(self.norm(middle, self.post_attention_norm))
        return self.down(_swiglu(gate_up), middle)

    def heads_of(self, qkv: torch.Tensor, rope: Tensors) -> Tensors:
        """Return scaled queries [N, H, D], keys and values [N, H / G, D]; queries and keys with their positions."""
        q, k, v = self._split(qkv)
        if self.qk_norms is not None:
            q, k = (_norm(x, w, self.eps, x.dtype) for x, w in zip((q, k), self.qk_norms, strict=True))
        # Scaled here: an attention gets N D numbers to scale, not N S scores.
        return _rotate(q, rope).mul_(self.scaling), _rotate(k, rope), v

    # What is done besides the products; ``FusedLayer`` has other ways.

    @staticmethod
    def rope_tables(cos: torch.Tensor, sin: torch.Tensor) -> Tensors:
        """Return what is read as ``rope``, from the angles [N, D] whose second half is as the first: [N, 1, D / 2]."""
        half = cos.shape[-1] // 2
        return cos[:, None, :half].contiguous(), sin[:, None, :half].contiguous()

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute the RMSNorm of the residual stream, in the products' dtype."""
        return _norm(x, weight, self.eps, self.qkv.weight.dtype)

    def _split(self, qkv: torch.Tensor) -> Tensors:
        """Split [N, (H + 2 H / G) D] into q [N, H, D], k and v [N, H / G, D]."""
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        q, k, v = parts.split([self.heads, self.key_heads, self.key_heads], dim=1)
        return q, k, v


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the RMSNorm over the last dimension, x (mean(x^2) + eps)^-1/2 w, computed in float32."""
    # vector_norm sums the squares without a tensor of x^2, which would be as large as x in float32.
    wide = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).square_()
    return (x * square.div_(x.shape[-1]).add_(eps).rsqrt_()).mul_(weight).to(dtype)


def _swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=1)
    return F.silu(gate).mul_(up)


def _rotate(x: torch.Tensor, rope: Tensors) -> torch.Tensor:
    """Apply RoPE: rotate the halves of each head of [N, H, D] by the angles of (cos, sin) [N, 1, D / 2]."""
    cos, sin = rope
    a, b = x.to(cos.dtype).chunk(2, dim=-1)
    y = torch.empty_like(x, dtype=cos.dtype, memory_format=torch.contiguous_format)
    first, second = y.chunk(2, dim=-1)
    torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=second).addcmul_(a, sin)
    return y.to(x.dtype)


@attrs.frozen(eq=False)
class FusedLayer(Layer):
    """A ``Layer`` whose heads go through norm and rotation together, and are rounded once after both.

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
        """Return the factors of queries and keys before they are rotated: [H + H / G, D], or 1 for D."""
        one = torch.ones(1, device=self.input_norm.device, dtype=self.input_norm.dtype)
        q, k = (one, one) if self.qk_norms is None else self.qk_norms
        return torch.cat([(q * self.scaling).expand(self.heads, -1), k.expand(self.key_heads, -1)])

    def heads_of(self, qkv: torch.Tensor, rope: Tensors) -> Tensors:
        count = self.heads + self.key_heads
        parts = qkv.view(qkv.shape[0], -1, self.head_dim)
        # One kernel for all heads: the values are normed as well, and nothing reads that.
        x = parts if self.qk_norms is None else fused_norm(parts, None, self.eps)
        rotated = _rotate_fused(x[:, :count] * self._head_weight, rope, torch.empty_like(x[:, :count]))
        return rotated[:, : self.heads], rotated[:, self.heads :], parts[:, count:]

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fused_norm(x, weight, self.eps).to(self.qkv.weight.dtype)


def fused_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return the RMSNorm of the last dimension in x's dtype; one kernel on a GPU."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate_fused(x: torch.Tensor, rope: Tensors, out: torch.Tensor) -> torch.Tensor:
    """Write x [N, H, D] rotated to ``out``, whose dtype it is rounded to."""
    cos, sin = rope
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin, out=out)


def layer_class(device: torch.device, dtype: torch.dtype) -> type[Layer]:
    """Return ``FusedLayer`` on a GPU of CUDA where it computes what ``Layer`` does, else ``Layer``."""
    if device.type == "meta":  # which computes nothing: to count operations
        return FusedLayer
    return FusedLayer if device.type == "cuda" and fused_works(device, dtype) else Layer


@functools.cache
def fused_works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether both kinds of layer give the same for random weights and tokens."""

    def trial() -> Outcome:
        offs, bound = [], 1e-3 if dtype == torch.float32 else 0.05
        for normed in (True, False):
            expected = pass_through(Layer, device, dtype, normed=normed)
            found = pass_through(FusedLayer, device, dtype, normed=normed)
            offs.append((expected - found).norm() / expected.norm())
        off = float(torch.stack(offs).max())
        return Outcome(off < bound, f"numbers differ by {off:.2g} >= {bound:g}")

    refusals = AttributeError, RuntimeError  # torch without the kernels, or a device
    return try_path("a layer with fused norms", trial, "layers take longer", refusals=refusals, loud=True)


@torch.no_grad()
def pass_through(kind: type[Layer], device: torch.device, dtype: torch.dtype, *, normed: bool) -> torch.Tensor:
    """Return a small layer's output, float32: 4 heads and 2 for keys, of 16 each; attention adds keys and values."""
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
    rope = layer.rope_tables(angles.cos(), angles.sin())

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (q + (k + v).repeat_interleave(2, dim=1)).flatten(1)

    return layer.forward(random(7, 48, at=torch.float32), rope, attention)


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def is_llama(model: PreTrainedModel) -> bool:
    """Return whether ``Llama`` may compute what ``model`` does, as far as its config and modules tell."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    linear = [m for name, m in model.named_modules() if name.endswith("_proj")]  # none of them quantised
    return all(type(m) is nn.Linear and m.weight.dtype == model.dtype for m in linear) and model.dtype.is_floating_point


def fuse_layers(model: PreTrainedModel) -> None:
    """Make the weights of a layer that read the same input slices of one tensor; their values stay."""
    for layer in model.model.layers:
        for parent, names in FUSED:
            fuse_weights([getattr(getattr(layer, parent), name) for name in names])


class Llama:
    """Embedding, layers and last norm; the output head is separate.

    Args:
        model: a transformers model after ``fuse_layers``; its tensors are used, not copied.
        adapter: the adapters of its modules.
        scale: of the adapters.

    Attributes:
        windows: of each layer, None for one whose tokens see all that are before them.
    """

    def __init__(self, model: PreTrainedModel, adapter: Adapter, scale: float) -> None:
        self._config = config = model.config
        self._model = model.model
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.windows = layer_windows(config) or [None] * config.num_hidden_layers
        self.layers: list[Layer] = []
        layer_kind = layer_class(model.device, model.dtype)
        self._names: list[list[str]] = []  # of the modules of each product
        for i, layer in enumerate(self._model.layers):
            self.layers.append(self._layer(f"model.layers.{i}.", layer, layer_kind))
        self.device, self.dtype = self._model.norm.weight.device, model.dtype
        self._last_norm = upcast(self._model.norm.weight)
        self.attach(adapter, scale)

    @property
    def linears(self) -> list[LoraLinear]:
        """Return the products of all layers, in order."""
        return [linear for layer in self.layers for linear in layer.linears]

    def attach(self, adapter: Adapter, scale: float) -> None:
        """Take other adapters, from the next ``prepare`` or ``merge`` on."""
        for linear, names in zip(self.linears, self._names, strict=True):
            linear.attach([adapter.get(name) for name in names], scale)

    def prepare(self, packed: Callable[[torch.Tensor], Weight | None] = lambda _: None) -> None:
        """Read the adapters as they are now; ``packed`` gives a weight prepacked, for calls without a gradient."""
        for linear in self.linears:
            linear.prepare(packed(linear.weight))

    def merge(self) -> None:
        """Merge the adapters into copies of the weights."""
        for linear in self.linears:
            linear.merge()

    def hidden(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attentions: Sequence[Attention],
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Return the last hidden states [n, hidden], in float32 at least.

        Args:
            tokens: int64 [N].
            positions: int64 [N].
            attentions: how the tokens see one another in each layer.
            index: int64 [n], the places of those that are returned.
        """
        x = upcast(self._model.embed_tokens(tokens))
        cos, sin = self._model.rotary_emb(self._last_norm, positions[None])  # [1, N, D], the second half as the first
        rope = self.layers[0].rope_tables(cos[0], sin[0])
        for layer, attention in zip(self.layers, attentions, strict=True):
            x = layer.forward(x, rope, attention)
        return F.rms_norm(x[index], (x.shape[-1],), self._last_norm, self._config.rms_norm_eps)

    def _layer(self, name: str, layer: nn.Module, kind: type[Layer]) -> Layer:
        at, mlp, config = layer.self_attn, layer.mlp, self._config
        has_qk_norms = getattr(at, "q_norm", None) is not None
        return kind(
            qkv=self._fused(f"{name}self_attn.", at, ("q_proj", "k_proj", "v_proj")),
            out=self._fused(f"{name}self_attn.", at, ("o_proj",)),
            gate_up=self._fused(f"{name}mlp.", mlp, ("gate_proj", "up_proj")),
            down=self._fused(f"{name}mlp.", mlp, ("down_proj",)),
            input_norm=upcast(layer.input_layernorm.weight),
            post_attention_norm=upcast(layer.post_attention_layernorm.weight),
            qk_norms=(upcast(at.q_norm.weight), upcast(at.k_norm.weight)) if has_qk_norms else None,
            heads=self.heads,
            key_heads=self.key_heads,
            head_dim=self.head_dim,
            scaling=at.scaling,
            eps=config.rms_norm_eps,
        )

    def _fused(self, prefix: str, parent: nn.Module, names: Sequence[str]) -> LoraLinear:
        modules = [getattr(parent, name) for name in names]
        biases = [module.bias for module in modules]
        self._names.append([prefix + name for name in names])
        sizes = [module.weight.shape[0] for module in modules]
        bias = torch.cat(biases) if biases[0] is not None else None
        return LoraLinear(fused_weight(modules), bias, sizes, [None] * len(sizes), 0.0)
