"""The order of data: endless passes over a set, each shuffled."""

from __future__ import annotations

import functools
import zlib

import numpy as np

from rlkit import _check

__all__ = ["epoch_order", "epoch_places"]


@functools.lru_cache(maxsize=16)
def epoch_order(size: int, seed: tuple[int, ...], epoch: int, salt: str) -> np.ndarray:
    """Return int64 [size], the order of one pass. Sorting raw draws gives the same order in all versions of numpy."""
    stream = np.random.PCG64(np.random.SeedSequence([*seed, epoch, zlib.crc32(salt.encode())]))
    return _check.frozen(np.argsort(stream.random_raw(size), kind="stable"))


def epoch_places(size: int, step: int, count: int, seed: int, salt: str) -> list[int]:
    """Return the places of a step's ``count`` items in a set of ``size``; no remainder of a pass is dropped.

    >>> [place for step in range(3) for place in epoch_places(3, step, 2, 0, "data")]  # two passes over three items
    [1, 2, 0, 2, 1, 0]
    """
    places = [divmod(position, size) for position in range(step * count, (step + 1) * count)]
    return [int(epoch_order(size, (seed,), epoch, salt)[place]) for epoch, place in places]
