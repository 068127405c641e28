"""The library's forward of micro-batches of any length."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import PeftModel
from torch import nn

from rlkit.backends.local.model.base import Base, use_attention
from rlkit.backends.local.model.forward import Inputs, LibraryForward, read_values
from rlkit.backends.local.model.output_head import KEPT
from rlkit.backends.local.model.probe import BATCHED, FAILURES, NOT_IN_PARTS, SLOTS
from rlkit.backends.local.model.windows import shorten
from rlkit.backends.local.training.library_parts import LibraryParts, ReadPart
from rlkit.backends.local.training.long_micro_batch import Outputs, outputs_in_chunks
from rlkit.backends.local.training.micro_batches import MicroBatch, pack
from rlkit.backends.local.training.part_attention import IN_PARTS
from rlkit.backends.local.training.part_cache import has_states, part_cache
from rlkit.backends.local.training.parts import BLOCK, PartInputs
from rlkit.backends.local.training.rows import Storage
from rlkit.types import Datum

__all__ = ["PartsForward", "parts_agree"]

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
            self.head_splits(tokens[:8])  # is asked for within parts, and takes forwards of its own

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


def parts_agree(base: Base) -> bool:
    """Return whether a model gives the same logits and the same gradient when it is computed in parts.

    The gradient is that of a vector that is added to all input embeddings, so that it comes through every key, value
    and state. The sequences are a few tokens that have a beginning in common, longer than windows are here.
    """
    kind = base.model.config.get_text_config().model_type
    if not (base.probe.exact or kind in (SLOTS | BATCHED) - NOT_IN_PARTS):
        return False
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
    try:
        logits, gradient = _marked(LibraryForward(model), whole, data, mark)
        other_logits, other_gradient = _marked(in_parts, tree, data, mark)
    except FAILURES:
        return False
    close = 1e-3 if base.probe.exact else 0.1
    right = bool((other_gradient - gradient).norm() <= close * gradient.norm())
    return right and base.probe.agrees(other_logits, logits)


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
