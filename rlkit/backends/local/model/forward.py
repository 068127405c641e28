"""The forward pass of a model of the library, at the places of a batch whose logits are read.

``LibraryModel`` is what training and sampling have in common; ``SamplingForward`` has a snapshot's adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.attention.tree import narrowed, windows_by_type
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.model.output_head import CHUNK, KEPT, hidden_to_keep, logits_to_keep
from rlkit.backends.local.products.linear import Adapter, Product, install_norms, widen

if TYPE_CHECKING:
    from rlkit.backends.local.training.micro_batches import MicroBatch

__all__ = ["LibraryModel", "SamplingForward", "layers_of"]


class LibraryModel:
    """A model of the library, and its logits at some places of a batch.

    Args:
        model: a causal language model, with an adapter or without.

    Attributes:
        layers: of the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._config = model.config.get_text_config()
        self.layers = layers_of(model)
        self.splits: bool | None = None

    @property
    def device(self) -> torch.device:
        """Return where the model is."""
        device: torch.device = self.model.get_output_embeddings().weight.device
        return device

    def hidden_at(self, arguments: Mapping[str, object], index: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [n, hidden] at the flat ``index`` of the model's tokens."""
        with hidden_to_keep(self.model, index) as kept:
            self.model(**arguments)
        return kept[0]

    def logits_at(self, arguments: Mapping[str, object], index: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, V] there."""
        with logits_to_keep(self.model, index):
            logits: torch.Tensor = self.model(**arguments).logits[0]
        return logits

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden] to [n, V], with the scale or cap that some architectures apply."""
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden)
        scale = getattr(self._config, "logit_scale", None)
        divisor = getattr(self._config, "logits_scaling", None)
        cap = getattr(self._config, "final_logit_softcapping", None)
        logits = logits * scale if scale else logits
        logits = logits / divisor if divisor else logits
        return torch.tanh(logits / cap) * cap if cap else logits

    def arguments_of(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the model's arguments for tokens [B, T] that follow nothing."""
        return {"input_ids": to_device(rows, self.device), "use_cache": False}

    def in_parts(self, tokens: np.ndarray, rows: int) -> bool:
        """Return whether logits of ``rows`` tokens are many, and ``head`` is right on some of ``tokens``."""
        many: bool = rows * self._config.vocab_size > KEPT
        return many and self.head_splits(tokens.ravel()[:8])

    @torch.no_grad()
    def head_splits(self, tokens: np.ndarray) -> bool:
        """Return whether ``head`` is all that this architecture does after its last hidden state; tried once."""
        if self.splits is None:
            arguments = self.arguments_of(tokens[None])
            index = torch.arange(tokens.size, device=self.device)
            expected, split = self.logits_at(arguments, index), self.head(self.hidden_at(arguments, index))
            self.splits = bool(torch.allclose(split, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())))
        return self.splits


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of transformers, those that are not within another one (as in Zamba2)."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inner = {id(m) for layer in layers for m in layer.modules() if m is not layer}
    return [layer for layer in layers if id(layer) not in inner]


class SamplingForward(LibraryModel):
    """The forward pass of a snapshot, whose adapter is in the model's modules; the base's tensors are never written.

    Args:
        base: the model.
        model: a tree of its modules for ``load`` alone.

    Attributes:
        addresses: of what ``load`` made; on a GPU they stay from adapter to adapter.
    """

    def __init__(self, base: Base, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._windows = windows_by_type(self._config)
        install_norms(model)
        if base.wide:
            widen(model, self.layers, base.head)
        linears = {
            name: module
            for name, module in model.named_modules()
            # Whatever else a subclass may give, where an adapter learns it gives the product.
            if type(module) in (nn.Linear, Conv1D) or (name in base.linear and isinstance(module, nn.Linear))
        }
        self.addresses: tuple[int, ...] = ()
        self._products = Product.for_all(linears, base.prepacked)

    def load(self, adapter: Adapter, scale: float, *, merge: bool) -> None:
        """Take an adapter, merged into copies of the weights or separate from them."""
        for product in self._products:
            product.load(adapter, scale, merge=merge)
        self.addresses = tuple(x for product in self._products for x in product.addresses)

    def logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Cache, index: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits [n, V] at the flat ``index`` of tokens whose keys and values go to a cache.

        Args:
            tokens, positions: [B, T], padding included.
            mask: which keys of the cache they see, numbers that are added to the scores, [B, 1, T, S].
            cache: of keys and values.
            index: [n].
        """
        arguments = {"input_ids": tokens, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        mask = mask if mask.device.type == "cpu" else mask.to(self.model.dtype)  # as torch's kernel wants it
        each = {window: narrowed(mask, window, positions[: mask.shape[0]]) for window in set(self._windows.values())}
        masks = {kind: each[window] for kind, window in self._windows.items()}
        arguments["attention_mask"] = masks if len(each) > 1 else next(iter(each.values()))
        return self.logits_at(arguments, index)

    def logits_in_parts(self, batch: MicroBatch) -> Iterator[torch.Tensor]:
        """Yield logits [n, V] of a micro-batch's rows, ``CHUNK`` at a time where they are many."""
        rows, places = batch.rows()
        arguments, index = self.arguments_of(rows), to_device(places, self.device)
        if not self.in_parts(rows, places.size):
            yield self.logits_at(arguments, index)
            return
        for hidden in self.hidden_at(arguments, index).split(CHUNK):
            yield self.head(hidden)
