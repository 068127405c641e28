"""Snapshots of the adapter, and a tree of modules that samples from one of them at a time."""

from __future__ import annotations

import weakref
from typing import Any

import attrs
import torch
from torch import nn

from rlkit.backends.local.model import Base

__all__ = ["SamplingModel", "Snapshot", "merged_weight", "take_snapshot"]


@attrs.frozen(eq=False, weakref_slot=True)
class Snapshot:
    """An adapter, frozen: full module name -> (A [r, in], B [out, r]); empty for the base model."""

    version: int
    scale: float
    adapter: dict[str, tuple[torch.Tensor, torch.Tensor]]


def take_snapshot(peft_model: Any, version: int, scale: float) -> Snapshot:
    """A copy of the adapter as it is."""
    adapter = {}
    for name, module in peft_model.base_model.model.named_modules():
        pair = getattr(module, "lora_A", None)
        if pair is not None and "default" in pair:
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            adapter[name] = (a.detach().clone(), b.detach().clone())
    return Snapshot(version, scale, adapter)


class SamplingModel:
    """The base's modules, with one snapshot's adapter in them at a time.

    Merged, the targeted modules hold W + scale B A, computed in float32 and cast: one copy of those weights, made
    when a snapshot is first used. Unmerged, the adapter is added to each module's output. The base's own tensors are
    never written, and a tied head is untied by having a weight of its own.
    """

    def __init__(self, base: Base, attention: str | None, *, merge: bool) -> None:
        self.model = base.tree(attention)
        self.base = base
        self._merge = merge
        self._current: weakref.ref[Snapshot] | None = None
        self._modules = dict(self.model.named_modules())
        self._base_weights: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []

    @torch.no_grad()
    def use(self, snapshot: Snapshot) -> bool:
        """Makes the model that of ``snapshot``; True where it was another's."""
        if self._current is not None and snapshot is self._current():
            return False
        self.release()
        for name, (a, b) in snapshot.adapter.items():
            module: Any = self._modules[name]
            if self._merge:
                self._base_weights[name] = module.weight
                merged = merged_weight(module, a, b, snapshot.scale)
                if isinstance(module, nn.Linear):  # [in, out] in memory: some tens of rows take a quarter less time
                    merged = merged.T.contiguous().T
                module.weight = nn.Parameter(merged, requires_grad=False)
            else:
                self._hooks.append(module.register_forward_hook(_adds(a, b, snapshot.scale)))
        self._current = weakref.ref(snapshot)
        return True

    def release(self) -> None:
        """Back to the base's own weights; the merged copy is freed."""
        for name, weight in self._base_weights.items():
            self._modules[name].weight = weight
        for hook in self._hooks:
            hook.remove()
        self._base_weights.clear()
        self._hooks.clear()
        self._current = None


def merged_weight(module: Any, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """A new tensor W + scale B A, computed in float32 and cast to the dtype of the module's weight."""
    delta = (b.float() @ a.float()) * scale
    if not isinstance(module, nn.Linear):  # transformers' Conv1D keeps [in, out]
        delta = delta.T
    return (module.weight.float() + delta).to(module.weight.dtype)


def _adds(a: torch.Tensor, b: torch.Tensor, scale: float) -> Any:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        low = args[0].to(a.dtype) @ a.T
        return output + ((low @ b.T) * scale).to(output.dtype)

    return hook
