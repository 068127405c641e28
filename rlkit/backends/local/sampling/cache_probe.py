"""What the library's cache is tried for before it is used: one row, rows that enter and leave, prompts in parts."""

from __future__ import annotations

import numpy as np
import torch

from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.probe import FAILURES, logits_at
from rlkit.backends.local.sampling.library_batching import LibraryBatching

__all__ = ["cache_agrees", "parts_agree", "rows_agree"]


class _Trial:
    """Rows of the probe's tokens, whose logits are compared with those of the model's own forward."""

    def __init__(self, base: Base) -> None:
        self.base, self.tokens = base, base.probe.tokens
        self.decoder = LibraryBatching(base, 0, merge=False)
        self.cache = self.decoder.new_cache()
        self.lengths: list[int] = []
        self.logits: list[torch.Tensor] = []
        self.places: list[int] = []

    def enter(self, *ends: int, rows: int = 1) -> None:
        """Compute the first tokens, up to each of ``ends`` at once, and let that many rows of them enter."""
        cache, begin = self.decoder.new_cache(), 0
        for end in ends:
            self.logits.append(self.decoder.decode(cache, self.tokens[None, begin:end]))
            self.places.append(end - 1)
            begin = end
        self.cache.add(cache, [0] * rows)
        self.lengths += [begin] * rows

    def leave(self, slot: int) -> None:
        """Remove a row."""
        self.cache.remove(slot)
        last = self.lengths.pop()
        if slot < len(self.lengths):
            self.lengths[slot] = last

    def step(self) -> None:
        """Compute one more token of every row."""
        self.logits.append(self.decoder.decode(self.cache, self.tokens[self.lengths][:, None]))
        self.places += self.lengths
        self.lengths = [length + 1 for length in self.lengths]

    def agrees(self) -> bool:
        """Return whether the logits are the model's own."""
        expected = logits_at(self.base.model, self.tokens[None], np.array(self.places))
        return self.base.probe.agrees(torch.cat(self.logits), expected, slack=10 if self.base.probe.exact else 1)


@torch.no_grad()
def cache_agrees(base: Base) -> bool:
    """Return whether it is right for two rows of one prompt, a token at a time."""
    n = base.probe.tokens.size
    try:
        for first, last in {(5, min(n, 5 + base.probe.steps)), (n - 4, n)}:
            trial = _Trial(base)
            trial.enter(first, rows=2)
            for _ in range(first, last):
                trial.step()
            if not trial.agrees():
                return False
    except FAILURES:
        return False
    return True


@torch.no_grad()
def rows_agree(base: Base) -> bool:
    """Return whether it is right for rows of unequal lengths, which enter while others run, and which leave.

    There are rows that come to each of the lengths at which something may change.
    """
    longest = base.probe.tokens.size - 5
    try:
        trial = _Trial(base)
        for length in [*sorted({2, longest, *(min(end - 2, longest) for end in base.probe.ends if end > 2)}), 3]:
            trial.enter(length, rows=2)
            trial.step()
        for slot in (0, 1):
            trial.leave(slot)
            trial.step()
        return trial.agrees()
    except FAILURES:
        return False


@torch.no_grad()
def parts_agree(base: Base) -> bool:
    """Return whether it is right for several tokens at once that continue a cache."""
    n = base.probe.tokens.size
    try:
        trial = _Trial(base)
        trial.enter(3, 5)
        trial.enter(n // 2, n - 2, n)
        return trial.agrees()
    except FAILURES:
        return False
