"""Snapshots of the adapter, and a tree of modules that samples from one of them at a time."""

from __future__ import annotations

import weakref
from typing import Any

import attrs
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.gemm.prepacked import Product
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.llama import Llama
from rlkit.backends.local.model.logits_to_keep import selected_logits
from rlkit.backends.local.model.lora import adapter_of
from rlkit.backends.local.model.unembedding import Unembedding
from rlkit.backends.local.sampling.kv_attention import Shared, SlotAttention
from rlkit.backends.local.sampling.kv_cache import Slots
from rlkit.errors import BackendError

__all__ = ["SamplingLlama", "SamplingModel", "Snapshot", "merged_weight", "take_snapshot"]


@attrs.frozen(eq=False, weakref_slot=True)
class Snapshot:
    """An adapter, frozen: full module name -> (A [r, in], B [out, r]); empty for the base model."""

    version: int
    scale: float
    adapter: dict[str, tuple[torch.Tensor, torch.Tensor]]


def take_snapshot(peft_model: Any, version: int, scale: float) -> Snapshot:
    """A copy of the adapter as it is."""
    pairs = adapter_of(peft_model)
    return Snapshot(version, scale, {name: (a.detach().clone(), b.detach().clone()) for name, (a, b) in pairs.items()})


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
        self._low: list[torch.Tensor] = []  # what the hooks multiply by

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
                self._low += [a, b]
        self._current = weakref.ref(snapshot)
        return True

    def factors(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """[out, in] of every product of the layers, and of the output embedding."""
        last = self.model.get_output_embeddings()
        linear = [m for m in self._modules.values() if isinstance(m, (nn.Linear, Conv1D)) and m is not last]
        weights = [m.weight if isinstance(m, nn.Linear) else m.weight.t() for m in linear]
        return [*weights, *self._low], [last.weight, *self._low]

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        slots: Slots,
        index: torch.Tensor,
        shared: Shared | None = None,  # noqa: ARG002  # the library's modules do not pass it on
    ) -> torch.Tensor:
        """[n, V] at the flat ``index`` of ``tokens`` [B, T], whose keys and values go to ``slots``."""
        with selected_logits(self.model, index):
            out = self.model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=slots, use_cache=True
            )
        logits: torch.Tensor = out.logits[0]
        return logits

    def release(self) -> None:
        """Back to the base's own weights; the merged copy is freed."""
        for name, weight in self._base_weights.items():
            self._modules[name].weight = weight
        for hook in self._hooks:
            hook.remove()
        self._base_weights.clear()
        self._hooks.clear()
        self._low.clear()
        self._current = None


class SamplingLlama:
    """``Llama`` with one snapshot's adapter at a time; otherwise like ``SamplingModel``.

    Attributes:
        addresses: where the weights of products are; on a GPU they stay from snapshot to snapshot.
    """

    def __init__(self, base: Base, *, merge: bool) -> None:
        self.base = base
        self._merge = merge
        self._current: weakref.ref[Snapshot] | None = None
        self._llama: Llama | None = None
        self._head: Unembedding | None = None
        self.addresses: tuple[int, ...] = ()

    @torch.no_grad()
    def use(self, snapshot: Snapshot) -> bool:
        """Makes the model that of ``snapshot``; True where it was another's."""
        if self._current is not None and snapshot is self._current():
            return False
        self._current = None
        if self._llama is None or self._head is None:
            self._llama, self._head = Llama(self.base.model, {}, 0.0), Unembedding(self.base.head)
        self._llama.adapt(snapshot.adapter, snapshot.scale)
        self._head.adapt(snapshot.adapter.get("lm_head"), snapshot.scale, merge=self._merge)
        if self._merge:
            self._llama.merge()
        else:
            self._llama.prepare()
        self.addresses = tuple(x.data_ptr() for part in self.factors() for x in part if isinstance(x, torch.Tensor))
        self._current = weakref.ref(snapshot)
        return True

    def factors(self) -> tuple[list[Product], list[Product]]:
        """[out, in] of every product of the layers, and of the output embedding."""
        llama, head = self._parts()
        return [x for product in llama.products for x in product.factors], head.factors

    def logits(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        slots: Slots,
        index: torch.Tensor,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        """[n, V] at the flat ``index`` of ``tokens`` [B, T], whose keys and values go to ``slots``."""
        llama, head = self._parts()
        attention = SlotAttention(slots, mask, tokens.shape, shared)
        hidden = llama.hidden(tokens.flatten(), positions.flatten(), attention)
        return head.logits(llama.normed(hidden[index]))

    def _parts(self) -> tuple[Llama, Unembedding]:
        if self._llama is None or self._head is None:
            raise BackendError("no snapshot was given")
        return self._llama, self._head


def merged_weight(module: Any, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """A new tensor W + scale B A, computed in float32 and cast to the dtype of the module's weight."""
    delta = (b.float() @ a.float()) * scale
    if not isinstance(module, nn.Linear):  # transformers' Conv1D keeps [in, out]
        delta = delta.T
    return (module.weight.float() + delta).to(module.weight.dtype)


def _adds(a: torch.Tensor, b: torch.Tensor, scale: float) -> Any:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        low = args[0].to(a.dtype) @ a.T
        return (output + (low @ b.T) * scale).to(output.dtype)  # rounded once, as in training

    return hook
