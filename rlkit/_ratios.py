"""Ratios between the trainer's and the sampler's probability of a token: parsing and bounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check, _rows
from rlkit._forms import RowsLike
from rlkit.errors import ConfigError, DataError

HIGHEST = 0.1  # a log-sum-exp of 30, rounded to bfloat16, is off by up to 0.0625; beyond this it is no logprob
LARGEST = 300.0  # exp(2 * 300) is still finite; a token beyond it is broken, and its exact size does not matter


def logprobs(where: str, value: Any, *, some: bool = True) -> _rows.Rows:
    """Finite logprobs of tokens: one sequence or several, which may be empty; ``some`` asks for at least one token."""
    rows = _rows.parse(where, value, empty=True)
    if some and rows.flat.size == 0:
        raise DataError(where, "holds no tokens", "at least one")
    check(rows, rows.flat, where)
    return rows


def check(rows: _rows.Rows, flat: np.ndarray, where: str, among: np.ndarray | None = None) -> None:
    """Raise for the first entry of ``flat`` [N] (``among`` those that count) that can be no logprob."""
    rows.check_finite(flat, where=where, among=among)
    high = flat > HIGHEST if among is None else among & (flat > HIGHEST)
    if high.any():
        index = int(np.argmax(high))
        why = f"a logprob is at most 0, but for rounding up to {HIGHEST}; is it a probability, or its sign reversed?"
        raise DataError(rows.name(index, where), f"is {flat[index]}", "a logprob", why)


def log_ratios(
    trainer_logprobs: RowsLike, sampling_logprobs: RowsLike, *, some: bool = True
) -> tuple[_rows.Rows, np.ndarray]:
    """Return the rows, and trainer - sampling for each token [N]."""
    rows = logprobs("trainer_logprobs", trainer_logprobs, some=some)
    sampling = rows.like("sampling_logprobs", sampling_logprobs)
    check(rows, sampling, "sampling_logprobs")
    return rows, np.subtract(rows.flat, sampling)


def bounded(log_ratio: np.ndarray) -> np.ndarray:
    """Log-ratios whose exponentials and their squares stay finite."""
    return np.asarray(np.minimum(log_ratio, LARGEST))


def ratios(log_ratio: np.ndarray) -> np.ndarray:
    """Their finite exponentials."""
    return np.asarray(np.exp(bounded(log_ratio)))


def check_bounds(low: float, high: float) -> tuple[float, float]:
    """Bounds on a ratio: 0 <= low <= 1 <= high, so that a policy that has not moved lies within.

    Raises:
        ConfigError: they are others, such as the distances from 1 that other libraries take.
    """
    low = _check.real("clip_low_threshold", low, low=0.0, why="a bound on the ratio itself, 1 - 0.2 for a clip of 0.2")
    high = _check.real("clip_high_threshold", high, low=0.0, why="a bound on the ratio itself, 1 + 0.2 for one of 0.2")
    if low > 1.0:
        raise ConfigError(_bound("clip_low_threshold", low, "at most 1"))
    if high < 1.0:
        raise ConfigError(_bound("clip_high_threshold", high, "at least 1"))
    return low, high


def _bound(name: str, value: float, expected: str) -> str:
    why = "it bounds the ratio itself: for a clip of 0.2 write 1 - 0.2 and 1 + 0.2"
    return _check.problem(name, f"is {value}", expected, why)
