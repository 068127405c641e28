"""The trainer's logprobs of a few tokens, also as they would be with another scale of the adapter."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.local.training.trainer import LocalTrainer
from rlkit.types import Datum

__all__ = ["OwnLogprobs"]


@attrs.frozen(eq=False)
class OwnLogprobs:
    """What a sampling engine is compared with. Called in the trainer's thread, between its calls."""

    trainer: LocalTrainer

    @torch.no_grad()
    def __call__(self, tokens: np.ndarray, temperature: float = 1.0, scale: float = 1.0) -> np.ndarray:
        """Return float32 [T] of tokens int64 [T], entry 0 is 0; ``scale`` times the adapter is what they are of."""
        halves = [p for name, p in self.trainer.parameters.items() if "lora_B" in name] if scale != 1.0 else []
        saved = [p.detach().clone() for p in halves]
        try:
            for p in halves:
                p.data.mul_(scale)
            return self._logprobs(Datum(tokens, np.arange(len(tokens)) > 0, temperature=temperature))
        finally:
            for p, before in zip(halves, saved, strict=True):
                p.data.copy_(before)  # to the bit

    def _logprobs(self, datum: Datum) -> np.ndarray:
        run = self.trainer.run([datum], None, (), backward=False)
        while True:
            try:
                next(run)
            except StopIteration as end:
                outputs: dict[str, Sequence[torch.Tensor]] = end.value[0]
                return datum.expand(outputs["logprobs"][0].numpy())
