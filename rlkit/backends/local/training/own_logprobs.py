"""The trainer's logprobs of a few tokens, also as they would be with another scale of the adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.types import Datum, Lora

__all__ = ["OwnLogprobs", "loud"]


@attrs.frozen(eq=False)
class OwnLogprobs:
    """What a sampling engine is compared with. Called in the trainer's thread, between its calls."""

    trainer: LocalTrainer

    @torch.no_grad()
    def __call__(self, tokens: np.ndarray, temperature: float = 1.0, scale: float = 1.0) -> np.ndarray:
        """Return float32 [T] of tokens int64 [T], entry 0 is 0; ``scale`` times the adapter is what they are of."""
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
    """Have the adapter change every module's output by about that share, as long as the context is open.

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
