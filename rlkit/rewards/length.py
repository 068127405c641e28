"""Rewards that depend on length: what is added to, or made of, a reward because of how long the answer was."""

from __future__ import annotations

import numpy as np

from rlkit import _check, _groups, _rows
from rlkit._forms import Arrays, RowsLike, row_wise
from rlkit._groups import Groups
from rlkit.errors import ConfigError

__all__ = ["cosine_length", "efficiency_bonus", "length_cost", "overlong_penalty", "stop_properly"]


@row_wise
def overlong_penalty(lengths: RowsLike, *, max_length: int, buffer: int, factor: float = 1.0) -> Arrays:
    """Return the penalty of an answer that comes near the limit, to be added: 0 at first, then down to -factor (DAPO).

    -factor clip((n - (max_length - buffer)) / buffer, 0, 1)

    Args:
        lengths: tokens of each answer: [N], [B, G] or a list of [G_i]; numbers >= 0.
        max_length: >= 1, where the penalty is largest.
        buffer: in [1, max_length], how many tokens before that it begins.
        factor: >= 0.

    Raises:
        DataError: lengths are negative, not finite or no numbers.
        ConfigError: a setting is out of range.

    >>> overlong_penalty([80, 90, 100, 120], max_length=100, buffer=20)
    array([ 0. , -0.5, -1. , -1. ])

    Source: DAPO, arXiv:2503.14476, equation 13. Peers: AReaL does not bound it beyond max_length.
    """
    max_length = _check.integer("max_length", max_length, low=1)
    buffer = _check.integer("buffer", buffer, low=1, high=max_length)
    factor = _check.real("factor", factor, low=0.0)
    rows = _lengths(lengths)
    part = np.clip((rows.flat - (max_length - buffer)) / buffer, 0.0, 1.0)
    return rows.restore(0.0 - factor * part)


@row_wise
def length_cost(lengths: RowsLike, *, max_length: int, coef: float = 1.0) -> Arrays:
    """Return the penalty of length, to be added to the reward: -coef min(n / max_length, 1).

    Args:
        lengths: tokens of each answer: [N], [B, G] or a list of [G_i]; numbers >= 0.
        max_length: >= 1.
        coef: >= 0, the cost of an answer of that length.

    Raises:
        DataError, ConfigError: as for ``overlong_penalty``.

    >>> length_cost([0, 50, 200], max_length=100, coef=0.5)
    array([ 0.  , -0.25, -0.5 ])

    Source: none needed. Peers: prime-rl's form, which only prefers short answers among right ones, is
    ``efficiency_bonus``.
    """
    max_length = _check.integer("max_length", max_length, low=1)
    coef = _check.real("coef", coef, low=0.0)
    rows = _lengths(lengths)
    return rows.restore(0.0 - coef * np.minimum(rows.flat / max_length, 1.0))


@row_wise
def cosine_length(
    correct: RowsLike,
    lengths: RowsLike,
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    exceeded: float | None = None,
) -> Arrays:
    """Rewards that pay right answers more the shorter they are, and charge wrong ones less the longer they are.

    last + (first - last) (1 + cos(pi min(n, L) / L)) / 2, with (first, last) those of right or of wrong answers

    Args:
        correct: whether each answer is right: booleans [N], [B, G] or a list of [G_i].
        lengths: tokens of each answer, shaped like ``correct``; numbers >= 0.
        max_length: L >= 1.
        right, wrong: the rewards at length 0 and at L.
        exceeded: the reward of an answer of L tokens or more, right or wrong; None: that at L.

    Returns:
        float64 in the form of ``correct``.

    Raises:
        DataError: correct are no booleans, lengths are negative or shaped differently.
        ConfigError: a setting is out of range.

    >>> cosine_length([True, True, False, False], [0, 50, 0, 100], max_length=100)
    array([ 1.  ,  0.75, -1.  , -0.5 ])

    Source: "Demystifying long chain-of-thought reasoning", arXiv:2502.03373, appendix C.1, where right is (2, 1), wrong
    (-10, 0) and exceeded -10. Peers: the defaults are open-r1's, which has no ``exceeded``.
    """
    max_length = _check.integer("max_length", max_length, low=1)
    ends = np.array([_ends("wrong", wrong), _ends("right", right)])  # [2, 2], by correct
    rows = _rows.parse("correct", correct, boolean=True)
    n = rows.like("lengths", lengths)
    rows.require("lengths", n, (n >= 0) & (n <= _rows.LARGEST), "a number >= 0")
    first, last = ends[rows.flat.astype(np.int64)].T
    worth = last + (first - last) * (1.0 + np.cos(np.pi * np.minimum(n / max_length, 1.0))) / 2.0
    if exceeded is not None:
        worth = np.where(n >= max_length, _check.real("exceeded", exceeded), worth)
    return rows.restore(worth)


@row_wise
def efficiency_bonus(rewards: RowsLike, lengths: RowsLike) -> Arrays:
    """Rewards of groups in which the best samples get up to twice their reward for being short.

    R_i (1 + clip(1 - n_i / mean of n over the best, 0, 1)) for the best of the group, R_i for the others

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which stays.
        lengths: shaped like ``rewards``: tokens (or turns) of each sample, integers >= 0.

    Returns:
        float64 in the form of ``rewards``, unchanged in groups whose best reward is not positive.

    Raises:
        DataError: rewards are infinite or no numbers; lengths are no integers >= 0 or shaped differently.

    >>> efficiency_bonus([1.0, 1.0, 0.0], [10, 30, 5])  # mean length of the best 20
    array([1.5, 1. , 0. ])

    Source: none of its own; prime-rl's length penalty.
    """
    groups = Groups.parse(rewards)
    n = _groups.lengths_like(groups, lengths)
    spread = groups.rows.spread
    best = groups.scored & (groups.rewards == spread(groups.highest)) & (spread(groups.highest) > 0)
    average = groups.rows.sum(n * best) / np.maximum(groups.rows.sum(best.astype(np.int64)), 1)
    saved = np.clip(1.0 - n / np.maximum(spread(average), 1e-300), 0.0, 1.0)
    bonus = np.where(best & (spread(average) > 0), saved, 0.0)
    return groups.rows.restore(groups.rows.flat * (1.0 + bonus))


@row_wise
def stop_properly(rewards: RowsLike, truncated: RowsLike, *, coef: float = 0.0) -> Arrays:
    """Rewards of answers, made smaller or replaced where the answer was cut instead of ending by itself.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored, which stays.
        truncated: shaped like ``rewards``; True where the answer stopped at the limit (``stop_reason`` "length").
        coef: at most 1. From 0 on a cut answer's reward is multiplied by it; below 0 it becomes its reward.

    Raises:
        DataError: rewards are infinite or no numbers, or shapes differ.
        ConfigError: coef is out of range.

    >>> stop_properly([1.0, 1.0], [False, True], coef=0.25)
    array([1.  , 0.25])
    >>> stop_properly([1.0, 1.0], [False, True], coef=-0.5)
    array([ 1. , -0.5])

    Source: ProRL, arXiv:2505.24864. Peers: OpenRLHF's and NeMo's stop_properly_penalty_coef.
    """
    coef = _check.real("coef", coef, high=1.0, low=-_rows.LARGEST)
    rows = _rows.parse("rewards", rewards)
    rows.check_finite(rows.flat, nan=True)
    cut = rows.like("truncated", truncated, boolean=True)
    worth = coef * rows.flat + 0.0 if coef >= 0 else np.where(np.isnan(rows.flat), np.nan, coef)
    return rows.restore(np.where(cut, worth, rows.flat))


def _ends(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(where, f"got {_check.shown(value)}", "two numbers, at length 0 and at the limit")
    return _check.real(f"{where}[0]", value[0]), _check.real(f"{where}[1]", value[1])


def _lengths(lengths: RowsLike) -> _rows.Rows:
    rows = _rows.parse("lengths", lengths)
    rows.require("lengths", rows.flat, (rows.flat >= 0) & (rows.flat <= _rows.LARGEST), "a number >= 0")
    return rows
