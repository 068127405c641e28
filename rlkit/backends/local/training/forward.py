"""The forward pass that trains a peft model's adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from rlkit._fallback import Outcome
from rlkit.backends.local.attention.tree import RECOMPUTED
from rlkit.backends.local.model.base import Base, use_attention
from rlkit.backends.local.model.forward import Forward, LibraryForward, LlamaForward
from rlkit.backends.local.model.llama import recomputed
from rlkit.backends.local.products.lora_linear import adapter_of
from rlkit.backends.local.training.micro_batches import pack
from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.types import Datum, Lora

__all__ = ["OwnLogprobs", "RecomputingForward", "layers_of", "loud", "training_forward"]


def training_forward(model: Any, base: Base, scale: float, budget: int, *, library: bool = False) -> Forward:
    """Return rlkit's own forward where it computes what the library's does, else the library's.

    Args:
        model: the peft model.
        base: what it adapts.
        scale: of its adapters.
        budget: tokens; a micro-batch of more keeps what goes into each layer, which is computed again.
        library: whether the library's modules compute it, whatever it is, as ``shard=True`` needs.
    """
    if base.llama and not library:
        return LlamaForward(base, adapter_of(model), scale, budget)
    trees = _computed_as_tree(base)
    if trees and _recomputes(model, base):
        use_attention(model, RECOMPUTED)
    forward = RecomputingForward(model, budget, trees=trees)
    if library:
        forward.head_splits(torch.as_tensor(base.probe.tokens[:8], device=base.device))  # here: it calls layers twice
    return forward


def _computed_as_tree(base: Base) -> bool:
    """Return whether the library's modules compute a micro-batch as a tree."""
    if base.known.trees is None:
        slower = "a prefix that sequences share is computed once for each of them"
        base.known.trees = base.tries("a tree of sequences", _trees_agree, slower, eligible=base.plain)
    return base.known.trees


def _recomputes(model: Any, base: Base) -> bool:
    """Return whether a tree's attention is computed block by block: on a CPU, and where torch has no kernel for it.

    Models that compute attention by themselves take no other; they keep their own.
    """
    eager = getattr(model.config.get_text_config(), "_attn_implementation", None) == "eager"
    return (eager or base.device.type == "cpu") and bool(model.is_backend_compatible())


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of transformers, those that are not within another one (as in Zamba2)."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    inner = {id(m) for layer in layers for m in layer.modules() if m is not layer}
    return [layer for layer in layers if id(layer) not in inner]


class RecomputingForward(LibraryForward):
    """The library's forward, which keeps nothing but what goes into each layer of more than ``budget`` tokens.

    So the memory of a layer is needed for one layer at a time (arXiv 1604.06174), but for all tokens at once. The
    library does this in training mode only; here modules stay in eval mode, and so the numbers are the same.

    Args:
        model, trees: see ``LibraryForward``.
        budget: tokens.
    """

    def __init__(self, model: Any, budget: int, *, trees: bool) -> None:
        super().__init__(model, trees=trees)
        self._budget, self._layers = budget, layers_of(model)

    def hidden_at(self, arguments: Mapping[str, Any], index: torch.Tensor) -> torch.Tensor:
        with self._layers_alone(arguments):
            return super().hidden_at(arguments, index)

    def _logits_at(self, arguments: Mapping[str, Any], index: torch.Tensor) -> torch.Tensor:
        with self._layers_alone(arguments):
            return super()._logits_at(arguments, index)

    @contextmanager
    def _layers_alone(self, arguments: Mapping[str, Any]) -> Iterator[None]:
        long = torch.is_grad_enabled() and arguments["input_ids"].numel() > self._budget
        layers: list[Any] = list(self._layers) if long else []
        for layer in layers:
            layer.forward = recomputed(layer.forward)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward  # which was the instance's; the class has its own


@torch.no_grad()
def _trees_agree(base: Base) -> Outcome:
    """Return whether sequences that share tokens get the logits that each gets alone."""
    tokens, places = base.probe.tokens, base.probe.places
    half = tokens.size // 2
    data = []
    for sequence in (tokens, np.concatenate([tokens[:half], tokens[: half - 2]]), tokens[1:]):
        mask = np.isin(np.arange(sequence.size + 1), places + 1)
        data.append(Datum(np.append(sequence, 0), mask))
    library = base.trial()
    trained = base.trial(RECOMPUTED) if _recomputes(library, base) else library
    forward = LibraryForward(library)
    (batch,) = pack(data, 4 * tokens.size)
    together = LibraryForward(trained, trees=True).logits(batch)
    alone = [forward.logits(*pack([data[i]], tokens.size)) for i in batch.members]
    return base.probe.agrees(together, torch.cat(alone))


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
