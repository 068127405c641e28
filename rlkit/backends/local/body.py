"""From the tokens of a micro-batch to the last hidden states: rlkit's own forward, or the library's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import nn

from rlkit.backends.local.kernels import attention_for
from rlkit.backends.local.llama import Llama, plain_attention
from rlkit.backends.local.logprobs import Unembedding
from rlkit.backends.local.model import Base
from rlkit.backends.local.packing import Batch, pack
from rlkit.backends.local.tree import TreeAttention
from rlkit.types import Datum

__all__ = ["Body", "LibraryBody", "LlamaBody", "adapter_of", "body_of", "selected_hidden", "selected_logits"]


class LlamaBody:
    """``Llama`` on a peft model's adapters.

    Args:
        model: the peft model.
        base: what it adapts.
        scale: of its adapters.
    """

    shares = True

    def __init__(self, model: Any, base: Base, scale: float) -> None:
        self._base, self._scale, self._pairs = base, scale, adapter_of(model)
        self._llama = Llama(model.base_model.model, self._pairs, scale)

    @cached_property
    def unembedding(self) -> Unembedding:
        """The head; a critic never asks for it."""
        return Unembedding(self._base.head, self._pairs.get("lm_head"), self._scale)

    def prepare(self) -> None:
        """Reads the adapters as they are now."""
        self._llama.prepare()

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[n, hidden] at ``batch.index``, what the output embedding reads."""
        llama = self._llama
        device = llama.device
        tokens, positions, index = (
            torch.from_numpy(x).to(device) for x in (batch.tokens, batch.positions, batch.index)
        )
        attention: Any
        if device.type == "cpu":
            attention = TreeAttention(batch.runs, llama.heads, llama.key_heads)
        else:
            dtype = self._base.model.dtype
            attention = attention_for(batch, device, dtype, llama.heads, llama.key_heads, llama.width)
        return llama.normed(llama.hidden(tokens, positions, attention)[index])


class LibraryBody:
    """The model's own forward.

    Args:
        model: a causal language model, with or without an adapter.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._shares: bool | None = None

    @property
    def shares(self) -> bool:
        """Whether the architecture does as a mask and positions say, seen on a short probe."""
        if self._shares is None:
            self._shares = plain_attention(self._model.config.get_text_config()) and self._packs_alike()
        return self._shares

    def prepare(self) -> None:
        """Nothing: the modules read them by themselves."""

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[n, hidden] at ``batch.index``, what the output embedding reads."""
        inputs, index = self._inputs(batch, self.shares)
        with selected_hidden(self._model, index) as found:
            self._model(**inputs, use_cache=False)
        return found[0]

    def logits(self, batch: Batch, *, share: bool | None = None) -> torch.Tensor:
        """[n, V] at ``batch.index``."""
        inputs, index = self._inputs(batch, self.shares if share is None else share)
        with selected_logits(self._model, index):
            logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits

    def _inputs(self, batch: Batch, share: bool) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        device = self._model.get_output_embeddings().weight.device
        if share and len(batch.runs) > 1:
            arrays = {
                "input_ids": batch.tokens[None],
                "attention_mask": batch.visible()[None, None],
                "position_ids": batch.positions[None],
            }
            index = batch.index
        else:
            rows, index = batch.rows()
            arrays = {"input_ids": rows}
        return {name: torch.from_numpy(x).to(device) for name, x in arrays.items()}, torch.from_numpy(index).to(device)

    @torch.no_grad()
    def _packs_alike(self) -> bool:
        """Whether two datums behind one prefix give the logits that each gives alone."""
        data = [Datum([1, 2, 3, *rest], [0, 0, 0, 1, 1, 1]) for rest in ([4, 5, 6], [7, 8, 9])]
        found = []
        for share in (True, False):
            (batch,) = pack(data, 64, share=share)
            try:
                found.append(self.logits(batch, share=share).float())
            except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError):
                return False
        close = 1e-4 if next(self._model.parameters()).dtype == torch.float32 else 0.1
        return bool((found[0] - found[1]).abs().max() < close * found[1].abs().max())


def adapter_of(model: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Full module name in the base -> (A [r, in], B [out, r]), the parameters of a peft model themselves."""
    pairs = {}
    for name, module in model.base_model.model.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            pairs[name] = (module.lora_A["default"].weight, module.lora_B["default"].weight)
    return pairs


@contextmanager
def selected_logits(model: Any, index: torch.Tensor) -> Iterator[None]:
    """While open, the model computes logits only at the flat positions ``index`` [n] of its [B, T] input.

    The output embedding sees [1, n, H] instead of [B, T, H]; whatever the architecture does to logits afterwards is
    kept.
    """

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_at(args[0], index)[None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def selected_hidden(model: Any, index: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """While open, a forward appends the hidden states [n, H] at ``index`` to the list and computes one logit row."""
    found: list[torch.Tensor] = []

    def take(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found.append(_at(args[0], index))
        return (found[-1][:1][None].detach(), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(take)
    try:
        yield found
    finally:
        handle.remove()


def _at(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])[index]


Body: TypeAlias = LlamaBody | LibraryBody


def body_of(model: Any, base: Base, scale: float) -> Body:
    """The own forward where it computes what the library's does."""
    return LlamaBody(model, base, scale) if base.llama else LibraryBody(model)
