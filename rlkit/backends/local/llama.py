"""The forward of the architectures of Llama's kind, on the tensors of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any

import torch
from torch import nn

from rlkit.backends.local.layer import Attention, Layer, run_layer
from rlkit.backends.local.linear import Adapter, Fused, fuse, joined, wide

__all__ = ["Llama", "fuse_layers", "is_llama", "plain_attention"]

KINDS = ("llama", "mistral", "qwen2", "qwen3")
TOGETHER = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def is_llama(model: Any) -> bool:
    """Whether ``Llama`` may compute what ``model`` does, as far as its config and modules tell."""
    config = model.config
    if config.model_type not in KINDS or config.hidden_act != "silu":
        return False
    linear = [m for name, m in model.named_modules() if name.endswith("_proj")]  # none of them quantised
    return all(type(m) is nn.Linear and m.weight.dtype == model.dtype for m in linear) and model.dtype.is_floating_point


def plain_attention(config: Any) -> bool:
    """Whether every layer sees all earlier tokens, as far as the config tells."""
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return all(kind == "full_attention" for kind in kinds) if kinds else window is None


def fuse_layers(model: Any) -> None:
    """Makes the weights of a layer that read the same input slices of one tensor; their values stay."""
    for layer in model.model.layers:
        for parent, names in TOGETHER:
            fuse([getattr(getattr(layer, parent), name) for name in names])


class Llama:
    """Embedding, layers and last norm; the head is read apart.

    Args:
        model: a transformers model after ``fuse_layers``; its tensors are used, not copied.
        adapter: the adapters of its modules.
        scale: of the adapters.
    """

    def __init__(self, model: Any, adapter: Adapter, scale: float) -> None:
        config = model.config
        self._model = model.model
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.layers: list[Layer] = []
        for i, layer in enumerate(self._model.layers):
            at, mlp = layer.self_attn, layer.mlp
            name = f"model.layers.{i}."
            normed = getattr(at, "q_norm", None) is not None
            self.layers.append(
                Layer(
                    qkv=_fused(f"{name}self_attn.", at, ("q_proj", "k_proj", "v_proj"), adapter, scale),
                    out=_fused(f"{name}self_attn.", at, ("o_proj",), adapter, scale),
                    gate_up=_fused(f"{name}mlp.", mlp, ("gate_proj", "up_proj"), adapter, scale),
                    down=_fused(f"{name}mlp.", mlp, ("down_proj",), adapter, scale),
                    before_attention=wide(layer.input_layernorm.weight),
                    before_mlp=wide(layer.post_attention_layernorm.weight),
                    head_norms=(wide(at.q_norm.weight), wide(at.k_norm.weight)) if normed else None,
                    heads=self.heads,
                    key_heads=self.key_heads,
                    width=width,
                    scaling=at.scaling,
                    eps=config.rms_norm_eps,
                )
            )
        self.device = self._model.norm.weight.device
        self._last = wide(self._model.norm.weight)
        self._eps = config.rms_norm_eps

    @property
    def products(self) -> list[Fused]:
        """Of all layers, in order."""
        return [product for layer in self.layers for product in layer.products]

    def prepare(self, old: Llama | None = None) -> None:
        """Reads the adapters as they are now, into the memory of ``old`` if that is given."""
        for product, place in zip(self.products, old.products if old else repeat(None), strict=False):
            product.prepare(place)

    def merge(self, old: Llama | None = None) -> None:
        """Takes the adapters into copies of the weights, in the memory of ``old``'s if that is given."""
        for product, place in zip(self.products, old.products if old else repeat(None), strict=False):
            product.merge(place)

    def hidden(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Tokens [N] at ``positions`` [N] -> the residual stream after the last layer, float32 [N, hidden]."""
        x = wide(self._model.embed_tokens(tokens))
        rope = self.rope(x, positions)
        for layer in self.layers:
            x = run_layer(x, layer, rope, attention)
        return x

    def rope(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) [N, 1, D / 2]."""
        cos, sin = self._model.rotary_emb(x, positions[None])
        half = cos.shape[-1] // 2
        return cos[0, :, None, :half].contiguous(), sin[0, :, None, :half].contiguous()

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """The last norm of [n, hidden]."""
        return nn.functional.rms_norm(x, (x.shape[-1],), self._last, self._eps)


def _fused(prefix: str, parent: Any, names: Sequence[str], adapter: Adapter, scale: float) -> Fused:
    modules = [getattr(parent, name) for name in names]
    biases = [module.bias for module in modules]
    return Fused(
        joined(modules),
        torch.cat(biases) if biases[0] is not None else None,
        [module.weight.shape[0] for module in modules],
        [adapter.get(prefix + name) for name in names],
        scale,
    )
