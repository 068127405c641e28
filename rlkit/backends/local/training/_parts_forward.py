"""The library's forward of micro-batches of any length.

A micro-batch of more tokens than the library's modules compute at once: the model on one part after the other.

The forward pass computes the parts from the first to the last, as a prompt is computed in parts with a KV cache, and
keeps keys and values, and recurrent states at the ends of parts. The backward pass goes from the last part to the
first: it computes a part again, now with all that autograd wants of it, and goes back through it at once, with the
gradients that later parts gave its keys, values and states. So in memory at once are the activations of one part and,
of every token, keys, values and their gradients; ``Storage`` may have these elsewhere.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
import torch
from peft import PeftModel
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from rlkit._fallback import Outcome
from rlkit.backends.local.attention.tree import shorten, window_of_each_layer
from rlkit.backends.local.cache.library_cache import StateName, has_states, part_cache, set_states, states_of
from rlkit.backends.local.cache.rows import Rows, Storage
from rlkit.backends.local.model.base import Base, use_attention
from rlkit.backends.local.model.forward import Inputs, LibraryForward, read_values
from rlkit.backends.local.model.memory import to_device
from rlkit.backends.local.model.output_head import KEPT
from rlkit.backends.local.products.lora_linear import upcast
from rlkit.backends.local.training._long_micro_batch import Outputs, outputs_in_chunks
from rlkit.backends.local.training._part_attention import (
    BLOCK,
    IN_PARTS,
    Part,
    PartAttention,
    PartInputs,
    parts_of,
    parts_with_states,
)
from rlkit.backends.local.training.micro_batches import MicroBatch, pack
from rlkit.types import Datum

__all__ = ["LibraryParts", "PartsForward", "ReadPart", "parts_agree"]

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
        """Return whether there are any."""
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


LENGTH, WINDOW, ALL = 2 * BLOCK + 5, 7, 10**6  # of the probe


class PartsForward(LibraryForward):
    """The library's forward, which computes micro-batches of more than ``budget`` tokens in parts.

    Args:
        model, trees: see ``LibraryForward``.
        budget: tokens computed at once.
        stay: tokens whose keys, values and states stay in the device's memory.
        folder: see ``Storage``.
    """

    chunked = True

    def __init__(self, model: Any, budget: int, stay: int, folder: Path | None, *, trees: bool) -> None:
        super().__init__(model, trees=trees)
        self._budget, self._stay, self._folder = budget, stay, folder
        library = model.get_base_model() if isinstance(model, PeftModel) else model
        self._takes = inspect.signature(library.forward).parameters.keys()

    @property
    def shares(self) -> int:
        return BLOCK if has_states(part_cache(self._config)) else 1

    def values(self, inputs: Inputs, head: nn.Module) -> torch.Tensor:
        if not self._is_long(inputs):
            return super().values(inputs, head)

        def read(part: PartInputs, _: torch.Tensor) -> Outputs:
            return {"values": read_values(self.hidden(part), head)}

        return self._in_parts(inputs, read, list(head.parameters()))["values"]

    def outputs(
        self, inputs: Inputs, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        if not self._is_long(inputs):
            return super().outputs(inputs, wanted, temperatures)
        tokens = wanted["logprobs"]
        if tokens is not None and tokens.numel() * self._config.vocab_size > KEPT:
            self.head_splits(tokens[:8])  # is asked for within parts, and runs its own forwards

        def read(part: PartInputs, which: torch.Tensor) -> Outputs:
            some = {name: None if ids is None else ids[which] for name, ids in wanted.items()}
            return LibraryForward.outputs(self, part, some, None if temperatures is None else temperatures[which])

        return self._in_parts(inputs, read, [])

    def logits(self, inputs: Inputs) -> torch.Tensor:
        if not self._is_long(inputs):
            return super().logits(inputs)
        return self._in_parts(inputs, lambda part, _: {"logits": LibraryForward.logits(self, part)}, [])["logits"]

    def _is_long(self, inputs: Inputs) -> bool:
        if not isinstance(inputs, MicroBatch):
            return False
        size = inputs.tokens.size if self.trees else inputs.padded
        return size > self._budget or (inputs.shares and not self.trees)

    def _in_parts(self, inputs: Inputs, read: ReadPart, head: Sequence[torch.Tensor]) -> Outputs:
        assert isinstance(inputs, MicroBatch)  # noqa: S101
        device, away = self._device, inputs.tokens.size > self._stay

        def storage(rows: int) -> Storage:
            return Storage(rows, device, away=away, folder=self._folder)

        def read_part(part: PartInputs, which: torch.Tensor) -> Outputs:
            with _attention(self.model, IN_PARTS):
                return read(part, which)

        parameters = [*dict.fromkeys(p for p in [*self.model.parameters(), *head] if p.requires_grad)]
        batch = LibraryParts(self._config, self._takes, inputs, self._budget, storage, read_part, parameters, device)
        return outputs_in_chunks(batch)


@contextmanager
def _attention(model: Any, name: str) -> Iterator[None]:
    before = model.config.get_text_config()._attn_implementation  # noqa: SLF001  # no public switch for one tree
    use_attention(model, name)
    try:
        yield
    finally:
        use_attention(model, before)


def parts_agree(base: Base) -> Outcome:
    """Return whether a model gives the same logits and the same gradient when it is computed in parts.

    The gradient is that of a vector that is added to all input embeddings, so that it comes through every key, value
    and state. The sequences are a few tokens that have a beginning in common, longer than windows are here.
    """
    model: Any = base.tree()
    shorten(model.config.get_text_config(), WINDOW)
    embeddings = model.get_input_embeddings().weight
    mark = nn.Parameter(embeddings.new_zeros(embeddings.shape[1]))
    model.register_parameter("mark", mark)
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: out + mark)
    tokens = np.resize(base.probe.tokens, min(LENGTH, base.max_length - 1))
    branch = np.concatenate([tokens[: BLOCK + 3], tokens[:9]])
    data = [Datum.supervised(x[:2], x[2:]) for x in (tokens, branch, branch[:-1])]
    (whole,) = pack(data, ALL, share=0)
    (tree,) = pack(data, ALL, share=BLOCK)
    in_parts = PartsForward(model, tokens.size // 4, tokens.size, None, trees=False)
    logits, gradient = _marked(LibraryForward(model), whole, data, mark)
    other_logits, other_gradient = _marked(in_parts, tree, data, mark)
    off, size, bound = (other_gradient - gradient).norm(), gradient.norm(), 1e-3 if base.probe.exact else 0.1
    same = Outcome(bool(off <= bound * size), f"gradients differ by {float(off / size):.2g} > {bound:g}")
    return same and base.probe.agrees(other_logits, logits)


def _marked(
    forward: LibraryForward, batch: MicroBatch, data: Sequence[Datum], mark: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits [n, V] in the order of the data, and a gradient."""
    owner = np.repeat(batch.members, [int(data[i].mask.sum()) for i in batch.members])
    with torch.enable_grad():
        logits = forward.logits(batch)[torch.from_numpy(np.argsort(owner, kind="stable")).to(mark.device)]
        generator = torch.Generator().manual_seed(0)
        above = torch.randn(logits.shape, generator=generator).to(logits)
        (gradient,) = torch.autograd.grad(logits, [mark], above)
    return logits.detach(), gradient
