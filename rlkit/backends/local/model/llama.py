"""The forward of Llama's architecture (Llama, Mistral, Qwen2, Qwen3), on the tensors of a transformers model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rlkit.backends.local.gemm.lora_linear import Adapter, LoraLinear, fuse_weights, fused_weight, upcast
from rlkit.backends.local.gemm.prepacked import Weight
from rlkit.backends.local.model.decoder_layer import Attention, Layer, run_layer
from rlkit.backends.local.model.fused_layer import layer_class
from rlkit.backends.local.model.gathering import gathered, weights_of
from rlkit.backends.local.model.windows import layer_windows

__all__ = ["Llama", "fuse_layers", "is_llama"]

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
FUSED = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


def is_llama(model: Any) -> bool:
    """Return whether ``Llama`` may compute what ``model`` does, as far as its config and modules tell."""
    config = model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        return False
    linear = [m for name, m in model.named_modules() if name.endswith("_proj")]  # none of them quantised
    return all(type(m) is nn.Linear and m.weight.dtype == model.dtype for m in linear) and model.dtype.is_floating_point


def fuse_layers(model: Any) -> None:
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

    def __init__(self, model: Any, adapter: Adapter, scale: float) -> None:
        self._config = config = model.config
        self._model = model.model
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.windows = layer_windows(config) or [None] * config.num_hidden_layers
        self.layers: list[Layer] = []
        layer_kind = layer_class(model.device, model.dtype)
        self._names: list[list[str]] = []  # of the modules of each product
        for i, layer in enumerate(self._model.layers):
            with gathered(weights_of(layer)):
                self.layers.append(self._layer(f"model.layers.{i}.", layer, layer_kind))
        self.device, self.dtype = self._model.norm.weight.device, model.dtype
        self._last_norm = upcast(self._model.norm.weight)
        self.attach(adapter, scale)

    @property
    def linears(self) -> list[LoraLinear]:
        """Of all layers, in order."""
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
        self, tokens: torch.Tensor, positions: torch.Tensor, attentions: Sequence[Attention], index: torch.Tensor
    ) -> torch.Tensor:
        """Tokens [N] at ``positions`` [N] -> the last hidden states [n, hidden] at ``index`` [n], at least float32.

        ``attentions`` says for each layer how the tokens see one another.
        """
        x, rope = self.embed(tokens), self.rope(positions)
        for layer, attention in zip(self.layers, attentions, strict=True):
            x = run_layer(x, layer, rope, attention)
        return self.last_norm(x[index])

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens [N] -> the residual stream [N, hidden] before the first layer, at least float32."""
        return upcast(self._model.embed_tokens(tokens))

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layers' tables of RoPE at ``positions`` [N]."""
        cos, sin = self._model.rotary_emb(self._last_norm, positions[None])  # [1, N, D], the second half as the first
        return self.layers[0].rope_tables(cos[0], sin[0])

    def last_norm(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states of the residual stream behind the last layer, [n, hidden]."""
        return nn.functional.rms_norm(x, (x.shape[-1],), self._last_norm, self._config.rms_norm_eps)

    def _layer(self, name: str, layer: Any, kind: type[Layer]) -> Layer:
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
            weights=weights_of(layer),
        )

    def _fused(self, prefix: str, parent: nn.Module, names: Sequence[str]) -> LoraLinear:
        modules = [getattr(parent, name) for name in names]
        biases = [module.bias for module in modules]
        self._names.append([prefix + name for name in names])
        sizes = [module.weight.shape[0] for module in modules]
        bias = torch.cat(biases) if biases[0] is not None else None
        return LoraLinear(fused_weight(modules), bias, sizes, [None] * len(sizes), 0.0)
