"""The forward pass that trains a peft model's adapter."""

from __future__ import annotations

import numpy as np
import torch

from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import Forward, LibraryForward, LlamaForward
from rlkit.backends.local.model.lora import adapter_of
from rlkit.backends.local.model.probe import FAILURES
from rlkit.backends.local.training.micro_batches import pack
from rlkit.types import Datum

__all__ = ["training_forward"]


def training_forward(model: object, base: Base, scale: float) -> Forward:
    """Return rlkit's own forward where it computes what the library's does, else the library's.

    Args:
        model: the peft model.
        base: what it adapts.
        scale: of its adapters.
    """
    if base.llama:
        return LlamaForward(base, adapter_of(model), scale)
    if "trees" not in base.known:
        base.known["trees"] = base.plain and _trees_agree(base)
    return LibraryForward(model, trees=base.known["trees"])


@torch.no_grad()
def _trees_agree(base: Base) -> bool:
    """Return whether sequences that share tokens get the logits that each gets alone."""
    tokens, places = base.probe.tokens, base.probe.places
    half = tokens.size // 2
    data = []
    for sequence in (tokens, np.concatenate([tokens[:half], tokens[: half - 2]]), tokens[1:]):
        mask = np.isin(np.arange(sequence.size + 1), places + 1)
        data.append(Datum(np.append(sequence, 0), mask))
    forward = LibraryForward(base.trial(), trees=True)
    (batch,) = pack(data, 4 * tokens.size)
    try:
        together = forward.logits(batch)
        alone = [forward.logits(*pack([data[i]], tokens.size)) for i in batch.members]
    except FAILURES:
        return False
    return base.probe.agrees(together, torch.cat(alone))
