"""The forward of the architectures of Llama's kind, on the tensors of a transformers model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from rlkit.backends.local.gemm.lora_linear import Adapter, Fused, fuse, joined, wide
from rlkit.backends.local.model.decoder_layer import Attention, Layer, run_layer

__all__ = ["Llama", "fuse_layers", "is_llama"]

KINDS = ("llama", "mistral", "qwen2", "qwen3")
TOGETHER = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def is_llama(model: Any) -> bool:
    """Whether ``Llama`` may compute what ``model`` does, as far as its config and modules tell."""
    config = model.config
    if config.model_type not in KINDS or config.hidden_act != "silu":
        return False
    linear = [m for name, m in model.named_modules() if name.endswith("_proj")]  # none of them quantised
    return all(type(m) is nn.Linear and m.weight.dtype == model.dtype for m in linear) and model.dtype.is_floating_point


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
        self.width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.layers: list[Layer] = []
        self._names: list[list[str]] = []  # of the modules of each product
        for i, layer in enumerate(self._model.layers):
            at, mlp = layer.self_attn, layer.mlp
            name = f"model.layers.{i}."
            normed = getattr(at, "q_norm", None) is not None
            self.layers.append(
                Layer(
                    qkv=self._fused(f"{name}self_attn.", at, ("q_proj", "k_proj", "v_proj")),
                    out=self._fused(f"{name}self_attn.", at, ("o_proj",)),
                    gate_up=self._fused(f"{name}mlp.", mlp, ("gate_proj", "up_proj")),
                    down=self._fused(f"{name}mlp.", mlp, ("down_proj",)),
                    before_attention=wide(layer.input_layernorm.weight),
                    before_mlp=wide(layer.post_attention_layernorm.weight),
                    head_norms=(wide(at.q_norm.weight), wide(at.k_norm.weight)) if normed else None,
                    heads=self.heads,
                    key_heads=self.key_heads,
                    width=self.width,
                    scaling=at.scaling,
                    eps=config.rms_norm_eps,
                )
            )
        self.device = self._model.norm.weight.device
        self._last = wide(self._model.norm.weight)
        self._eps = config.rms_norm_eps
        self.adapt(adapter, scale)

    @property
    def products(self) -> list[Fused]:
        """Of all layers, in order."""
        return [product for layer in self.layers for product in layer.products]

    def adapt(self, adapter: Adapter, scale: float) -> None:
        """Takes other adapters, from the next ``prepare`` or ``merge`` on."""
        for product, names in zip(self.products, self._names, strict=True):
            product.adapt([adapter.get(name) for name in names], scale)

    def prepare(self) -> None:
        """Reads the adapters as they are now."""
        for product in self.products:
            product.prepare()

    def merge(self) -> None:
        """Takes the adapters into copies of the weights."""
        for product in self.products:
            product.merge()

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

    def _fused(self, prefix: str, parent: Any, names: Sequence[str]) -> Fused:
        modules = [getattr(parent, name) for name in names]
        biases = [module.bias for module in modules]
        self._names.append([prefix + name for name in names])
        sizes = [module.weight.shape[0] for module in modules]
        bias = torch.cat(biases) if biases[0] is not None else None
        return Fused(joined(modules), bias, sizes, [None] * len(sizes), 0.0)
