"""The one order of data: endless passes over a set, each shuffled."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlkit import _check

__all__ = ["epoch_places", "shuffled"]


def shuffled(size: int, stream: np.random.SeedSequence) -> np.ndarray:
    """Return int64 [size], a permutation. Sorting raw draws stays the same across numpy's versions."""
    return _check.frozen(np.argsort(np.random.PCG64(stream).random_raw(size), kind="stable"))


def epoch_places(size: int, step: int, count: int, order: Callable[[int], np.ndarray]) -> list[int]:
    """Return the places of a step's ``count`` items in a set of ``size``; no remainder of a pass is dropped.

    Args:
        size: >= 1.
        step: >= 0.
        count: >= 1; more than ``size`` repeats items.
        order: epoch -> the permutation of that pass.

    >>> epoch_places(3, 1, 2, lambda epoch: np.arange(3) if epoch == 0 else np.array([2, 1, 0]))
    [2, 2]
    """
    passes = [divmod(position, size) for position in range(step * count, (step + 1) * count)]
    orders = {epoch: order(epoch) for epoch, _ in passes}
    return [int(orders[epoch][place]) for epoch, place in passes]
