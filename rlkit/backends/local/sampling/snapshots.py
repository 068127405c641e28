"""Snapshots of the adapter."""

from __future__ import annotations

import attrs
from torch import nn

from rlkit.backends.local.gemm.lora_linear import Adapter
from rlkit.backends.local.model.lora import adapter_of

__all__ = ["Snapshot", "take_snapshot"]


@attrs.frozen(eq=False, weakref_slot=True)
class Snapshot:
    """An adapter, frozen; empty for the base model."""

    version: int
    scale: float
    adapter: Adapter


def take_snapshot(peft_model: nn.Module, version: int, scale: float) -> Snapshot:
    """Return a copy of the adapter as it is."""
    pairs = adapter_of(peft_model)
    return Snapshot(version, scale, {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()})
