"""Seeds of tasks, by split: what one split uses, no other does."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlkit import _check

SPLITS = ("train", "test", "validation")
_ROOM = 2**30  # tasks per split, so that seeds stay below numpy's 2**32


def seeds(split: str, seed: int) -> Callable[[int], int]:
    """Index -> seed in [0, 2**32): another one for each index, and for each split, whatever their ``seed`` is."""
    kind = SPLITS.index(_check.choice("split", split, SPLITS))
    start = int(np.random.SeedSequence(_check.integer("seed", seed, low=0)).generate_state(1)[0])
    return lambda index: 4 * ((start + index) % _ROOM) + kind
