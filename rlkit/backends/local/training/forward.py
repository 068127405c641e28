"""The forward pass that trains a peft model's adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlkit.backends.local.attention.tree import Segment, Window
from rlkit.backends.local.model.base import Base, use_attention
from rlkit.backends.local.model.forward import LibraryModel
from rlkit.backends.local.model.memory import return_freed, to_device
from rlkit.backends.local.model.output_head import read_in_chunks, read_logits
from rlkit.backends.local.products.linear import install, widen
from rlkit.backends.local.training._attention import TREE, Tree
from rlkit.backends.local.training.micro_batches import MicroBatch
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.types import Datum, Lora

__all__ = ["OwnLogprobs", "TrainingForward", "loud", "training_forward"]


def training_forward(model: Any, base: Base, budget: int) -> TrainingForward:
    """Return the forward pass of a peft model, and make its modules compute as it wants them to.

    Args:
        model: the peft model.
        base: what it adapts.
        budget: tokens; a micro-batch of more keeps what goes into each layer, which is computed again.
    """
    install(model)
    packed = base.layout == "packed"
    forward = TrainingForward(model, budget, windows=base.windows if packed else None)
    if packed:
        use_attention(model, TREE)
    if base.wide:
        widen(model, forward.layers, None if hasattr(model, "value_head") else base.head)
    return forward


class TrainingForward(LibraryModel):
    """The forward pass of micro-batches. Of more than ``budget`` tokens nothing is kept but what goes into each layer.

    So the memory of a layer is needed for one layer at a time (arXiv 1604.06174), but for all tokens at once. The
    library does this in training mode only; here modules stay in eval mode, and so the numbers are the same.

    Args:
        model: peft's, which trains its adapter.
        budget: tokens.
        windows: of each layer of a model whose attention is ``TREE``; None computes every sequence as a row.

    Attributes:
        shares: whether what sequences of a micro-batch begin with is computed once.
    """

    def __init__(self, model: Any, budget: int, *, windows: Sequence[Window | None] | None) -> None:
        super().__init__(model)
        self._budget = budget
        self._tree = None if windows is None else Tree(model, windows)
        self.shares = windows is not None

    def outputs(
        self, batch: MicroBatch, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Return ``read_logits`` of a micro-batch's logits, without keeping all of them where they are many."""
        many = self.in_parts(batch.tokens, batch.index.size)
        with self._layers_alone(batch):
            if not many:
                return read_logits(self.logits_at(*self._inputs(batch)), wanted, temperatures)
            hidden = self.hidden_at(*self._inputs(batch))
        return read_in_chunks(self.head, hidden, wanted, temperatures)

    def values(self, batch: MicroBatch, head: nn.Module) -> torch.Tensor:
        """Return what a value head, [hidden] -> 1, reads off the last hidden states, float32 [n]."""
        with self._layers_alone(batch):
            hidden = self.hidden_at(*self._inputs(batch))
        values: torch.Tensor = head(hidden.float())[:, 0]
        return values

    def _inputs(self, batch: MicroBatch) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the model's arguments, and the places of outputs: one row of all tokens, or a row for every run."""
        if self._tree is None:
            rows, places = batch.rows()
            return self.arguments_of(rows), to_device(places, self.device)
        arguments = self.arguments_of(batch.tokens[None])
        arguments["position_ids"] = to_device(batch.positions[None], self.device)
        self._tree.grow(batch.runs)
        return arguments, to_device(batch.index, self.device)

    def arguments_of(self, rows: np.ndarray) -> dict[str, Any]:
        if self._tree is not None:  # of one row, since all others share what they begin with
            self._tree.grow([Segment(0, rows.shape[1])])
        return super().arguments_of(rows)

    def _compute_layer(self, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        if self.device.type == "cpu":
            return_freed()  # of the layer before
        return forward(*inputs, **named)

    @contextmanager
    def _layers_alone(self, batch: MicroBatch) -> Iterator[None]:
        long = torch.is_grad_enabled() and batch.tokens.size > self._budget
        layers: list[Any] = list(self.layers) if long else []
        for layer in layers:
            compute = partial(self._compute_layer, layer.forward)
            layer.forward = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward  # which was the instance's; the class has its own
            if self._tree is not None:
                self._tree.forget()


@attrs.frozen(eq=False)
class OwnLogprobs:
    """The trainer's own logprobs, to compare a sampling engine with. Called in its thread, between its calls."""

    trainer: LocalTrainer

    @torch.no_grad()
    def __call__(self, tokens: np.ndarray, temperature: float = 1.0, scale: float = 1.0) -> np.ndarray:
        """Return float32 [T] of tokens int64 [T], entry 0 is 0; the adapter is multiplied by ``scale``."""
        with _restored(self.trainer if scale != 1.0 else None) as halves:
            for p in halves:
                p.data.mul_(scale)
            return self._logprobs(Datum(tokens, np.arange(len(tokens)) > 0, temperature=temperature))

    def _logprobs(self, datum: Datum) -> np.ndarray:
        run = self.trainer.run([datum], None, (), backward=False)
        while True:
            try:
                next(run)
            except StopIteration as end:
                outputs: dict[str, Sequence[torch.Tensor]] = end.value[0]
                return datum.expand(outputs["logprobs"][0].numpy())


@contextlib.contextmanager
def loud(trainer: LocalTrainer, lora: Lora, strength: float) -> Iterator[None]:
    """Make the adapter change every module's output by about that share while the context is open.

    Inputs of unit size give A x of variance 1/3, so B's deviation is strength * sqrt(3 / rank) over the scale.
    """
    deviation = strength * (3.0 / lora.rank) ** 0.5 / (lora.alpha / lora.rank)
    generator = torch.Generator().manual_seed(0)
    with _restored(trainer) as halves:
        for p in halves:
            p.data.copy_(torch.randn(p.shape, generator=generator) * deviation)
        yield


@contextlib.contextmanager
def _restored(trainer: LocalTrainer | None) -> Iterator[Sequence[torch.nn.Parameter]]:
    """Yield the adapter's B matrices, which are afterwards what they were, to the bit."""
    named = trainer.parameters.items() if trainer is not None else ()
    halves = [p for name, p in named if "lora_B" in name]
    saved = [p.detach().clone() for p in halves]
    try:
        yield halves
    finally:
        for p, before in zip(halves, saved, strict=True):
            p.data.copy_(before)
