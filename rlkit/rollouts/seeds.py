"""Seeds of a rollout: functions of where in the run something happens, never of when it arrives."""

from __future__ import annotations

import numpy as np

__all__ = ["env_seed", "pauses", "sampling_seed", "start_seed"]

_ENV, _START, _TURN, _PAUSE = range(4)
_LIMIT = 2**31 - 2**16  # every backend takes such a seed as it is, so that one plan samples alike on all of them


def env_seed(seed: int, step: int, group: int) -> int:
    """Return what ``reset`` is given, the same for all of a group; in [0, 2^31), which every generator takes."""
    return _words(seed, _ENV, step, group) >> 33


def start_seed(seed: int, step: int, group: int) -> int:
    """Return the seed of the request that samples the first turns of a whole group; in [0, 2^31)."""
    return _words(seed, _START, step, group) % _LIMIT


def sampling_seed(seed: int, step: int, group: int, member: int, turn: int) -> int:
    """Return the seed of the request that samples one turn of one member; in [0, 2^31)."""
    return _words(seed, _TURN, step, group, member, turn) % _LIMIT


def pauses(seed: int, step: int, group: int, member: int) -> np.random.Generator:
    """Return a generator for the lengths of pauses between attempts."""
    return np.random.default_rng(_words(seed, _PAUSE, step, group, member))


def _words(seed: int, *key: int) -> int:
    """Return 64 bits; the key is spawned from the seed, so that no two places share a stream."""
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(state[0])
