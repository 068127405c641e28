"""Snapshots of the adapter."""

from __future__ import annotations

import attrs
from torch import nn

from rlkit.backends.local.gemm.lora_linear import Adapter
from rlkit.backends.local.model.lora import adapter_of

__all__ = ["Snapshot", "take_snapshot"]


@attrs.define(eq=False, weakref_slot=True)
class Snapshot:
    """An adapter, frozen; empty for the base model. A live sampler has one of its own, which becomes newer ones."""

    version: int
    scale: float
    adapter: Adapter

    def become(self, other: Snapshot) -> None:
        """Take the version and the tensors of another, which stays as it is."""
        self.version, self.scale, self.adapter = other.version, other.scale, other.adapter


def take_snapshot(peft_model: nn.Module, version: int, scale: float) -> Snapshot:
    """Return a copy of the adapter as it is."""
    pairs = adapter_of(peft_model)
    return Snapshot(version, scale, {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()})
