"""A micro-batch of more tokens than the library's modules compute at once: the model on one part after the other.

The forward pass computes the parts from the first to the last, as a prompt is computed in parts with a KV cache, and
keeps keys and values, and recurrent states at the ends of parts. The backward pass goes from the last part to the
first: it computes a part again, now with all that autograd wants of it, and goes back through it at once, with the
gradients that later parts gave its keys, values and states. So in memory at once are the activations of one part and,
of every token, keys, values and their gradients; ``Storage`` may have these elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch
from transformers.configuration_utils import PreTrainedConfig

from rlkit.backends.local.gemm.lora_linear import upcast
from rlkit.backends.local.model.device import to_device
from rlkit.backends.local.model.windows import window_of_each_layer
from rlkit.backends.local.training.long_micro_batch import Outputs
from rlkit.backends.local.training.micro_batches import MicroBatch
from rlkit.backends.local.training.part_attention import PartAttention
from rlkit.backends.local.training.part_cache import (
    StateName,
    has_states,
    part_cache,
    set_states,
    states_of,
)
from rlkit.backends.local.training.parts import Part, PartInputs, parts_of, parts_with_states
from rlkit.backends.local.training.rows import Rows, Storage
from rlkit.backends.worker import breathe

__all__ = ["LibraryParts", "ReadPart"]

ReadPart: TypeAlias = Callable[[PartInputs, torch.Tensor], Outputs]


class LibraryParts:
    """One forward and one backward pass.

    Args:
        config: of the model's text part.
        takes: names of the arguments of the model's forward.
        batch: the micro-batch.
        size: tokens of a part.
        storage: number of rows -> what is kept of so many.
        read: a part, and which of the ``n`` outputs of the batch are its own, int64 [m] -> these outputs, by name.
        parameters: of the model that have a gradient.
        device: where it is.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        takes: Collection[str],
        batch: MicroBatch,
        size: int,
        storage: Callable[[int], Storage],
        read: ReadPart,
        parameters: Sequence[torch.Tensor],
        device: torch.device,
    ) -> None:
        self.parameters = parameters
        self._size = size
        self._graphs: list[_Computed] = []
        self._config, self._takes, self._batch, self._read, self._device = config, takes, batch, read, device
        cut = parts_with_states if has_states(part_cache(config)) else parts_of
        self._parts = cut(batch.runs, size)
        self._states = _States(storage(len(self._parts)))
        self._attention = PartAttention(batch, storage(batch.tokens.size), window_of_each_layer(config))

    def forward(self, *, keep: bool) -> Outputs:
        """See ``InParts``.

        Of the last parts, as many as are computed at once keep what autograd wants.
        """
        outputs: Outputs = {}
        first = len(self._parts)
        room = self._size if keep else 0
        while first and math.prod(self._parts[first - 1].shape) <= room:
            first -= 1
            room -= math.prod(self._parts[first].shape)
        for number, part in enumerate(self._parts):
            with torch.set_grad_enabled(number >= first):
                computed = self._compute(part)
            for name, values in computed.outputs.items():
                if name not in outputs:
                    outputs[name] = values.new_empty(self._batch.index.size, *values.shape[1:])
                outputs[name][computed.which] = values.detach()[: computed.which.numel()]
            if part.continued:
                self._states.write(number, computed.after)
            if number >= first:
                self._graphs.append(computed)
            breathe()
        return outputs

    def backward(self, grads: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
        """See ``InParts``."""
        sums: list[torch.Tensor | None] = [None] * len(self.parameters)
        for number, part in reversed([*enumerate(self._parts)]):
            with torch.enable_grad():
                computed = self._graphs.pop() if self._graphs else self._compute(part)
            roots = [computed.outputs[name] for name in grads]
            above = [torch.zeros_like(x) for x in roots]
            for zeros, grad in zip(above, grads.values(), strict=True):
                zeros[: computed.which.numel()] = grad[computed.which]
            if part.continued:
                roots += computed.after.values()
                above += self._states.gradients(number, computed.after)
            pairs = [pair for pair in zip(roots, above, strict=True) if pair[0].requires_grad]
            leaves = [*self.parameters, *computed.before]
            found = torch.autograd.grad([x for x, _ in pairs], leaves, [x for _, x in pairs], allow_unused=True)
            count = len(self.parameters)
            sums = [_sum(a, b) for a, b in zip(sums, found[:count], strict=True)]
            if computed.before:
                self._states.add_gradients(part.before, found[count:])
            del computed, roots, pairs, leaves
            breathe()
        return sums

    def _compute(self, part: Part) -> _Computed:
        index, cache = self._batch.index, part_cache(self._config)
        which = np.flatnonzero((part.places.start <= index) & (index < part.places.stop))
        before: list[torch.Tensor] = []
        if part.before[0] >= 0 and self._states.known:
            states = self._states.read(part.before)
            before = [state.requires_grad_(torch.is_grad_enabled()) for state in states.values()]
            set_states(cache, states)
        # Where nothing is read of a part, its first place is, so that there is something to go back from.
        places = index[which] - part.places.start if which.size else np.zeros(1, np.int64)
        some = to_device(which if which.size else np.zeros(1, np.int64), self._device)
        with self._attention.of(part):
            outputs = self._read(PartInputs(self._batch, part, places, cache, self._takes), some)
        return _Computed(outputs, some[: which.size], before, states_of(cache) if part.continued else {})


@attrs.frozen
class _Computed:
    """What was computed of a part.

    Attributes:
        outputs: [m, ...] by name.
        which: of the batch's outputs these are; fewer than m where nothing is to be read.
        before: states that it began with, leaves of autograd.
        after: states at its end.
    """

    outputs: Outputs
    which: torch.Tensor
    before: list[torch.Tensor]
    after: dict[StateName, torch.Tensor]


@attrs.define
class _Kept:
    shape: torch.Size
    rows: Rows
    grads: Rows


class _States:
    """Recurrent states at the ends of parts, and their gradients.

    Args:
        storage: of a row for each part.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept: dict[StateName, _Kept] = {}

    @property
    def known(self) -> bool:
        """Whether there are any."""
        return bool(self._kept)

    def write(self, part: int, states: Mapping[StateName, torch.Tensor]) -> None:
        """Keep the states [1, ...] at the end of a part."""
        for name, state in states.items():
            if name not in self._kept:
                kinds = state.dtype, upcast(state).dtype
                rows = [self._storage.rows(state.numel(), dtype, large=True) for dtype in kinds]
                self._kept[name] = _Kept(state.shape[1:], *rows)
            self._kept[name].rows.write(slice(part, part + 1), state.flatten()[None])

    def read(self, parts: Sequence[int]) -> dict[StateName, torch.Tensor]:
        """Return new tensors [B, ...] of the states at the ends of parts."""
        return {
            name: torch.cat([kept.rows.read(slice(part, part + 1)) for part in parts]).view(-1, *kept.shape)
            for name, kept in self._kept.items()
        }

    def gradients(self, part: int, states: Mapping[StateName, torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of a part's states [1, ...], in their order."""
        row = slice(part, part + 1)
        return [self._kept[name].grads.read(row).view_as(state).to(state.dtype) for name, state in states.items()]

    def add_gradients(self, parts: Sequence[int], grads: Sequence[torch.Tensor | None]) -> None:
        """Add gradients [B, ...], in the order of ``read``, to those of the states at the ends of parts."""
        for kept, grad in zip(self._kept.values(), grads, strict=True):
            if grad is not None:
                for part, one in zip(parts, grad, strict=True):
                    row = slice(part, part + 1)
                    kept.grads.write(row, kept.grads.read(row) + one.flatten()[None])


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return a if b is None else b if a is None else a.add_(b)
