"""Every derivation of randomness: of requests, of their samples, and of the order of data.

The entropies, spawn keys and names below are data: another one changes every seeded run.
"""

from __future__ import annotations

import functools
import threading
import zlib
from typing import TYPE_CHECKING

import numpy as np

from rlkit import _check

if TYPE_CHECKING:
    from rlkit.types import SamplingParams

__all__ = ["SeedStream", "epoch_order", "epoch_places", "resolve_seed", "streams"]


class SeedStream:
    """Seeds for requests that bring none: a function of the backend's seed and of how many came before."""

    def __init__(self, entropy: int, count: int = 0) -> None:
        self.entropy = entropy
        self.count = count
        self.params: SamplingParams | None = None  # of the last request
        self._lock = threading.Lock()

    def of(self, seed: int | None, params: SamplingParams) -> int:
        """Return the seed of a request: ``seed``, or the next one."""
        self.params = params
        return self.next() if seed is None else seed

    def next(self) -> int:
        """Return the next request's seed."""
        with self._lock:
            count, self.count = self.count, self.count + 1
        words = np.random.SeedSequence(self.entropy, spawn_key=(1, count)).generate_state(4, np.uint32)
        return int.from_bytes(words.tobytes(), "little")


def resolve_seed(seed: int | None) -> int:
    """Return ``seed``, checked, or a fresh one from the system."""
    if seed is not None:
        return _check.integer("seed", seed, low=0)
    return int.from_bytes(np.random.SeedSequence().generate_state(4, np.uint32).tobytes(), "little")


def streams(seed: int, n: int) -> list[np.random.Generator]:
    """Return one generator per sample: number i draws from SeedSequence([seed, i]), one float64 uniform per token."""
    return [np.random.default_rng(np.random.SeedSequence([seed, i])) for i in range(n)]


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
