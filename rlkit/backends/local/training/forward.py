"""From the tokens of a micro-batch to the last hidden states: rlkit's own forward, or the library's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.llama import Llama
from rlkit.backends.local.model.logits_to_keep import selected_hidden, selected_logits
from rlkit.backends.local.model.lora import adapter_of
from rlkit.backends.local.model.probe import FAILURES
from rlkit.backends.local.model.tree_attention import TreeAttention
from rlkit.backends.local.model.unembedding import Unembedding
from rlkit.backends.local.training.flex_attention import attention_for
from rlkit.backends.local.training.micro_batches import Batch, pack
from rlkit.types import Datum

__all__ = ["Body", "LibraryBody", "LlamaBody", "body_of"]


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
        shares: whether the architecture does as a mask and positions say, so that sequences may share tokens.
    """

    def __init__(self, model: Any, *, shares: bool) -> None:
        self._model = model
        self.shares = shares

    def prepare(self) -> None:
        """Nothing: the modules read them by themselves."""

    def hidden(self, batch: Batch) -> torch.Tensor:
        """[n, hidden] at ``batch.index``, what the output embedding reads."""
        inputs, index = self._inputs(batch)
        with selected_hidden(self._model, index) as found:
            self._model(**inputs, use_cache=False)
        return found[0]

    def logits(self, batch: Batch) -> torch.Tensor:
        """[n, V] at ``batch.index``."""
        inputs, index = self._inputs(batch)
        with selected_logits(self._model, index):
            logits: torch.Tensor = self._model(**inputs, use_cache=False).logits[0]
        return logits

    def _inputs(self, batch: Batch) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        device = self._model.get_output_embeddings().weight.device
        if self.shares and len(batch.runs) > 1:
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


Body: TypeAlias = LlamaBody | LibraryBody


def body_of(model: Any, base: Base, scale: float) -> Body:
    """The own forward where it computes what the library's does."""
    return LlamaBody(model, base, scale) if base.llama else LibraryBody(model, shares=_shares(base))


def _shares(base: Base) -> bool:
    """Whether sequences that share tokens get the logits that each gets alone; found once for a base."""
    if "shares" not in base.known:
        base.known["shares"] = base.plain and _packs_alike(base)
    found: bool = base.known["shares"]
    return found


@torch.no_grad()
def _packs_alike(base: Base) -> bool:
    tokens, places = base.probe.tokens, base.probe.places
    half = tokens.size // 2
    data = []
    for sequence in (tokens, np.concatenate([tokens[:half], tokens[: half - 2]]), tokens[1:]):
        mask = np.isin(np.arange(sequence.size + 1), places + 1)
        data.append(Datum(np.append(sequence, 0), mask))
    body = LibraryBody(base.model, shares=True)
    (batch,) = pack(data, 4 * tokens.size)
    try:
        found = body.logits(batch)
        alone = [body.logits(*pack([data[i]], tokens.size)) for i in batch.members]
    except FAILURES:
        return False
    return base.probe.agrees(found, torch.cat(alone))
