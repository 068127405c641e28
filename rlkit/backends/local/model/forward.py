"""The forward pass of sampling: rlkit's own, or the library's.

``Forward`` has two implementations, ``LlamaForward`` and ``LibraryForward``; ``Inputs`` are a step over the KV cache,
in the form that either reads. ``LibraryModel`` is what training has in common with the latter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.attention.tree import LayerMasks
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.llama import Attention, Llama
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.model.output_head import CHUNK, KEPT, Unembedding, hidden_to_keep, logits_to_keep
from rlkit.backends.local.products.lora_linear import Adapter
from rlkit.backends.local.products.prepacked import PackedLinear, Prepacked, Weight

if TYPE_CHECKING:
    from rlkit.backends.local.training.micro_batches import MicroBatch

__all__ = ["Forward", "Inputs", "LibraryForward", "LibraryModel", "LlamaForward", "merged_weight"]


class Inputs(Protocol):
    """The tokens of one forward."""

    def for_llama(self, llama: Llama) -> tuple[torch.Tensor, torch.Tensor, Sequence[Attention], torch.Tensor]:
        """Return tokens [N], positions [N], how they see one another in each layer, and the places [n] of outputs."""

    def for_library(self, masks: LayerMasks) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the model's keyword arguments, and the places [n] of its flattened tokens [B T]."""


class Forward(Protocol):
    """A causal language model with one LoRA in it."""

    def load(self, adapter: Adapter, scale: float, *, merge: bool) -> None:
        """Take an adapter, merged into copies of the weights or separate from them."""

    def weights(self) -> tuple[list[Weight], list[Weight]]:
        """Return [out, in] of every product of the layers, and of the output embedding."""

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Return logits [n, V]."""


class LlamaForward:
    """rlkit's own forward of ``Llama``.

    Args:
        base: a model for which ``base.llama`` holds.

    Attributes:
        addresses: of the weights that ``load`` made; on a GPU they stay from adapter to adapter.
    """

    def __init__(self, base: Base) -> None:
        self._base = base
        self._llama, self._head = Llama(base.model, {}, 0.0), Unembedding(base.head)
        self.addresses: tuple[int, ...] = ()

    def load(self, adapter: Adapter, scale: float, *, merge: bool) -> None:
        self._llama.attach(adapter, scale)
        packed, in_place = self._base.packed(self._base.head), self._base.device.type != "cpu"
        self._head.load(adapter.get("lm_head"), scale, packed, merge=merge, in_place=in_place)
        if merge and (adapter or not isinstance(packed, Prepacked)):  # all who sample the base share its packed weights
            self._llama.merge()
        else:
            self._llama.prepare(self._base.packed)
        self.addresses = tuple(x.data_ptr() for part in self.weights() for x in part if isinstance(x, torch.Tensor))

    def weights(self) -> tuple[list[Weight], list[Weight]]:
        return [x for linear in self._llama.linears for x in linear.weights], self._head.weights

    def logits(self, inputs: Inputs) -> torch.Tensor:
        return self._head.logits(self._llama.hidden(*inputs.for_llama(self._llama)))


class LibraryModel:
    """A model of the library, and its logits at some places of a batch.

    Args:
        model: a causal language model, with an adapter or without.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        scale_queries_by_position(model)
        self._config = model.config.get_text_config()
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


class LibraryForward(LibraryModel):
    """The model's own forward.

    Its modules hold one adapter at a time. Merged, they get the weight W + scale B A, one copy, computed
    in float32 and cast, and prepacked on a CPU; unmerged, the adapter is added to each module's output. The base's own
    tensors are never written, and a tied head is untied by its own weight.

    Args:
        model: a tree of modules for ``load`` alone.
        packed: gives a weight of the base's prepacked, as sampling multiplies by it; None leaves them to the modules.
    """

    def __init__(self, model: PreTrainedModel, *, packed: Callable[[torch.Tensor], Weight] | None = None) -> None:
        super().__init__(model)
        self._prepack = packed
        self._masks = LayerMasks(self._config, model.dtype)
        self._packed: dict[str, PackedLinear] = {}
        self._undo: list[Callable[[], object]] = []  # takes the adapter out of a module
        self._low_rank: list[torch.Tensor] = []  # what the hooks multiply by

    @torch.no_grad()
    def load(self, adapter: Adapter, scale: float, *, merge: bool) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._low_rank.clear()
        for name, (a, b) in adapter.items():
            module = self.model.get_submodule(name)
            if not merge:
                self._undo.append(module.register_forward_hook(_add_lora(a, b, scale), prepend=True).remove)
                self._low_rank += [a, b]
            elif self._packs(module):
                if name in self._packed:
                    self._unpack(name)
                self._packed[name] = PackedLinear(module, merged_weight(module, a, b, scale))
                self._undo.append(partial(self._unpack, name))
            else:
                self._undo.append(partial(setattr, module, "weight", module.weight))
                module.weight = nn.Parameter(merged_weight(module, a, b, scale), requires_grad=False)
        if self._prepack is not None:  # the others, which stay so from adapter to adapter
            for name, module in self.model.named_modules():
                if name not in self._packed and self._packs(module):
                    self._packed[name] = PackedLinear(module, prepack_own=self._prepack)

    def _unpack(self, name: str) -> None:
        self._packed.pop(name).remove()

    def _packs(self, module: nn.Module) -> bool:
        return type(module) is nn.Linear and self.device.type == "cpu"

    def weights(self) -> tuple[list[Weight], list[Weight]]:
        head = self.model.get_output_embeddings()
        layers: list[Weight] = list(self._low_rank)
        last: list[Weight] = list(self._low_rank)
        for name, module in self.model.named_modules():
            if name in self._packed:
                (last if module is head else layers).append(self._packed[name].weight)
            elif isinstance(module, (nn.Linear, Conv1D)):
                weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
                (last if module is head else layers).append(weight)
        return layers, last

    def logits(self, inputs: Inputs) -> torch.Tensor:
        return self.logits_at(*inputs.for_library(self._masks))

    def logits_in_parts(self, batch: MicroBatch) -> Iterator[torch.Tensor]:
        """Yield logits [n, V] of a micro-batch's rows, ``CHUNK`` at a time where they are many."""
        rows, places = batch.rows()
        arguments, index = self.arguments_of(rows), to_device(places, self.device)
        if not self.in_parts(rows, places.size):
            yield self.logits_at(arguments, index)
            return
        for hidden in self.hidden_at(arguments, index).split(CHUNK):
            yield self.head(hidden)


def merged_weight(module: nn.Module, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a new tensor W + scale B A, computed in float32 and cast to the dtype of the module's weight."""
    delta = (b.float() @ a.float()) * scale
    if not isinstance(module, nn.Linear):  # transformers' Conv1D keeps [in, out]
        delta = delta.T
    merged: torch.Tensor = (module.weight.float() + delta).to(module.weight.dtype)
    return merged


def _add_lora(
    a: torch.Tensor, b: torch.Tensor, scale: float
) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor]:
    def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        low = args[0].to(a.dtype) @ a.T
        return (output + (low @ b.T) * scale).to(output.dtype)  # rounded once, as in training

    return hook


def scale_queries_by_position(model: nn.Module) -> None:
    """Make the layers of ``model`` that scale queries use the positions that they are given.

    In Llama 4's layers without rotary embeddings, a query at position t is multiplied by
    1 + a ln(1 + floor((t + 1) / f)) (arXiv 2501.19399). The library takes for t the columns that its cache has, which
    are positions only where a row is alone and begins in the first of them. Here t is the position that the forward
    pass is given, and so rows of unequal lengths and packed sequences are right.

    The modules are this model's own. Adapters of queries are in them already, or are hooks that run first.
    """
    for layer in model.modules():
        attention = getattr(layer, "self_attn", None)
        if (
            attention is None
            or not getattr(attention, "attn_temperature_tuning", False)
            or getattr(attention, "use_rope", True)
        ):
            continue
        attention.attn_temperature_tuning = False  # which is the library's way
        scale = _Scale(float(attention.floor_scale), float(attention.attn_scale))
        layer.register_forward_pre_hook(scale.take_positions, with_kwargs=True)
        attention.q_proj.register_forward_hook(scale.multiply)


class _Scale:
    def __init__(self, floor: float, factor: float) -> None:
        self._floor, self._factor = floor, factor
        self._scale = torch.ones(1)

    def take_positions(self, _: nn.Module, __: tuple[object, ...], arguments: Mapping[str, torch.Tensor]) -> None:
        """Compute the scales [B, T, 1] of a layer's tokens, at the ``position_ids`` [B, T] among its arguments."""
        steps = torch.floor((arguments["position_ids"].float() + 1.0) / self._floor)
        self._scale = (torch.log1p(steps) * self._factor + 1.0)[..., None]

    def multiply(self, _: nn.Module, __: tuple[object, ...], queries: torch.Tensor) -> torch.Tensor:
        """Return the scaled queries [B, T, H D]."""
        return (queries * self._scale).to(queries.dtype)
