"""One forward pass for training and sampling: rlkit's own, or the library's.

``Forward`` has two implementations, ``LlamaForward`` and ``LibraryForward``. ``Inputs`` has two as well, a micro-batch
and a step over the KV cache; each gives its tokens in the form that either forward reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.attention.tree import LayerMasks
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.llama import Attention, Llama
from rlkit.backends.local.model.output_head import (
    CHUNK,
    KEPT,
    Unembedding,
    hidden_to_keep,
    logits_to_keep,
    read_in_chunks,
    read_logits,
)
from rlkit.backends.local.products.lora_linear import Adapter
from rlkit.backends.local.products.prepacked import PackedLinear, Prepacked, Weight

__all__ = ["Forward", "Inputs", "LibraryForward", "LlamaForward", "merged_weight", "read_values"]


class Inputs(Protocol):
    """The tokens of one forward."""

    def for_llama(self, llama: Llama) -> tuple[torch.Tensor, torch.Tensor, Sequence[Attention], torch.Tensor]:
        """Return tokens [N], positions [N], how they see one another in each layer, and the places [n] of outputs."""

    def for_library(
        self, device: torch.device, masks: LayerMasks, *, trees: bool
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the model's keyword arguments, and the places [n] of its flattened tokens [B T]."""


class Forward(Protocol):
    """A causal language model with one LoRA in it."""

    @property
    def shares(self) -> bool:
        """Return whether what sequences of a micro-batch begin with is computed once."""

    def prepare(self) -> None:
        """Read the trained adapter as it is now."""

    def load(self, adapter: Adapter, scale: float, *, merge: bool) -> None:
        """Take another adapter for sampling, merged into copies of the weights or separate from them."""

    def weights(self) -> tuple[list[Weight], list[Weight]]:
        """Return [out, in] of every product of the layers, and of the output embedding."""

    def values(self, inputs: Inputs, head: nn.Module) -> torch.Tensor:
        """Return what a value head, [hidden] -> 1, reads off the last hidden states, float32 [n]."""

    def logits(self, inputs: Inputs) -> torch.Tensor:
        """Return logits [n, V]."""

    def outputs(
        self, inputs: Inputs, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return ``read_logits`` of ``logits(inputs)``, without keeping all logits where they are many."""


class LlamaForward:
    """rlkit's own forward of ``Llama``.

    Args:
        base: a model for which ``base.llama`` holds.
        adapter: the adapter that is trained; none for sampling, which loads one.
        scale: of that adapter.
        budget: of more tokens than that each layer is computed again in the backward pass, whose input alone is kept.

    Attributes:
        addresses: of the weights that ``load`` made; on a GPU they stay from adapter to adapter.
    """

    shares = True

    def __init__(
        self, base: Base, adapter: Adapter | None = None, scale: float = 0.0, budget: int | None = None
    ) -> None:
        self._base, self._adapter, self._scale, self._budget = base, adapter or {}, scale, budget
        self._llama = Llama(base.model, self._adapter, scale)
        self.addresses: tuple[int, ...] = ()

    @cached_property
    def _head(self) -> Unembedding:  # not made for a critic, which has no use for it
        base = self._base
        return Unembedding(base.head, self._adapter.get("lm_head"), self._scale)

    def prepare(self) -> None:
        self._llama.prepare()

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

    def values(self, inputs: Inputs, head: nn.Module) -> torch.Tensor:
        return read_values(self.hidden(inputs), head)

    def logits(self, inputs: Inputs) -> torch.Tensor:
        return self._head.logits(self.hidden(inputs))

    def outputs(
        self, inputs: Inputs, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        return self._read(self.hidden(inputs), wanted, temperatures)

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """Return the last hidden states [n, hidden], which the output embedding reads."""
        tokens, *rest = inputs.for_llama(self._llama)
        long = self._budget is not None and tokens.numel() > self._budget and torch.is_grad_enabled()
        return self._llama.hidden(tokens, *rest, recompute=long)

    def _read(
        self, hidden: torch.Tensor, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        ids = wanted["logprobs"]
        if len(wanted) == 1 and ids is not None:
            return {"logprobs": self._head.logprobs(hidden, ids, temperatures)}
        return read_in_chunks(self._head.logits, hidden, wanted, temperatures)


class LibraryForward:
    """The model's own forward.

    For sampling its modules hold one adapter at a time. Merged, they get the weight W + scale B A, one copy, computed
    in float32 and cast, and prepacked on a CPU; unmerged, the adapter is added to each module's output. The base's own
    tensors are never written, and a tied head is untied by its own weight.

    Args:
        model: a causal language model: peft's, which trains its adapter, or a tree of modules for ``load`` alone.
        trees: whether the architecture does as a mask and positions say.
        packed: gives a weight of the base's prepacked, as sampling multiplies by it; None leaves them to the modules.
    """

    def __init__(
        self, model: PreTrainedModel, *, trees: bool = False, packed: Callable[[torch.Tensor], Weight] | None = None
    ) -> None:
        self.model, self.trees, self._prepack = model, trees, packed
        scale_queries_by_position(model)
        self._config = model.config.get_text_config()
        self._masks = LayerMasks(self._config, model.dtype)
        self.splits: bool | None = None
        self._packed: dict[str, PackedLinear] = {}
        self._undo: list[Callable[[], object]] = []  # takes the adapter out of a module
        self._low_rank: list[torch.Tensor] = []  # what the hooks multiply by

    @property
    def shares(self) -> bool:
        return self.trees

    def prepare(self) -> None:
        pass  # peft's modules read their adapters by themselves

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
        return type(module) is nn.Linear and self._device.type == "cpu"

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

    def values(self, inputs: Inputs, head: nn.Module) -> torch.Tensor:
        return read_values(self.hidden(inputs), head)

    def hidden(self, inputs: Inputs) -> torch.Tensor:
        """Return the last hidden states [n, hidden], which the output embedding reads."""
        return self.hidden_at(*inputs.for_library(self._device, self._masks, trees=self.trees))

    def logits(self, inputs: Inputs) -> torch.Tensor:
        return self._logits_at(*inputs.for_library(self._device, self._masks, trees=self.trees))

    def outputs(
        self, inputs: Inputs, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        tokens = wanted["logprobs"]
        if tokens is None or tokens.numel() * self._config.vocab_size <= KEPT or not self.head_splits(tokens[:8]):
            return read_logits(self.logits(inputs), wanted, temperatures)
        return read_in_chunks(self.head, self.hidden(inputs), wanted, temperatures)

    def logits_in_parts(self, inputs: Inputs) -> Iterator[torch.Tensor]:
        """Yield ``logits(inputs)``, ``CHUNK`` rows at a time where they are many."""
        arguments, index = inputs.for_library(self._device, self._masks, trees=self.trees)
        few = index.numel() * self._config.vocab_size <= KEPT
        if few or not self.head_splits(arguments["input_ids"].flatten()[:8]):
            yield self._logits_at(arguments, index)
            return
        for hidden in self.hidden_at(arguments, index).split(CHUNK):
            yield self.head(hidden)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.get_output_embeddings().weight.device
        return device

    def hidden_at(self, arguments: Mapping[str, object], index: torch.Tensor) -> torch.Tensor:
        """Return the last hidden states [n, hidden] at the flat ``index`` of the model's tokens."""
        with hidden_to_keep(self.model, index) as kept:
            self.model(**arguments)
        return kept[0]

    def _logits_at(self, arguments: Mapping[str, object], index: torch.Tensor) -> torch.Tensor:
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

    @torch.no_grad()
    def head_splits(self, tokens: torch.Tensor) -> bool:
        """Return whether ``head`` is all that this architecture does after its last hidden state; tried once."""
        if self.splits is None:
            arguments = {"input_ids": tokens[None], "use_cache": False}
            index = torch.arange(tokens.numel(), device=tokens.device)
            expected, split = self._logits_at(arguments, index), self.head(self.hidden_at(arguments, index))
            self.splits = torch.allclose(split, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        return self.splits


def read_values(hidden: torch.Tensor, head: nn.Module) -> torch.Tensor:
    """Return the values [n] that ``head`` reads off ``hidden`` [n, hidden]."""
    values: torch.Tensor = head(hidden.float())[:, 0]
    return values


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
