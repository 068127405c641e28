"""Rewards: reductions, bounds and shaping, as pure functions. NaN is a reward that could not be scored, and stays."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, cast

import numpy as np

from rlkit import _check
from rlkit._rows import LARGEST, Arrays, Row, Rows, RowsLike, check_settings, fill_missing, whiten
from rlkit.errors import ConfigError, DataError

__all__ = [
    "affine",
    "clamp",
    "cosine_length",
    "efficiency_bonus",
    "length_cost",
    "mapping",
    "nonterminal_override",
    "nonterminal_reward",
    "overlong_penalty",
    "reduction",
    "repetition_penalty",
    "stop_properly",
    "think_format",
    "whitening",
]

T = TypeVar("T")


def reduction(rewards: RowsLike, how: str = "sum") -> Any:
    """Reduce the rewards of each trajectory's steps to one number.

    Args:
        rewards: per step: one trajectory [T], [B, T] or a list of [T_i]; finite, or NaN for unscored. In lists None is
            a step without a reward, and is ignored.
        how: "sum", "mean", "max", "min" or "last".

    Returns:
        float64 [B], or a float for one trajectory. A trajectory with an unscored step is unscored: NaN. So is one
        without a single reward.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: how is unknown.

    >>> reduction([[0.0, 1.0], [0.5]], "mean")
    array([0.5, 0.5])
    >>> reduction([None, 0.5, 1.0], "mean")
    0.75

    Source: none needed. Peers: OpenReward's reward_reduction.
    """
    _check.choice("how", how, ("sum", "mean", "max", "min", "last"))
    rows = Rows.parse("rewards", _drop_none(rewards), nan=True)
    ufunc = {"max": np.maximum, "min": np.minimum}.get(how, np.add)  # NaN spreads in all three
    reduced = rows.reduce(ufunc, rows.flat)
    if how == "last":
        reduced = np.where(np.isnan(reduced), np.nan, rows.flat[rows.ends - 1])
    if how == "mean":
        reduced = reduced / rows.lengths
    return float(reduced[0]) if rows.form == "row" else reduced


def _drop_none(rewards: RowsLike) -> RowsLike:
    """Drop the Nones of trajectories; a trajectory of only Nones is unscored."""
    if not isinstance(rewards, (list, tuple)):
        return rewards
    if any(isinstance(row, (list, tuple, np.ndarray)) for row in rewards):
        return cast("list[Row]", [_drop_none(row) for row in rewards])
    if not any(reward is None for reward in rewards):
        return rewards
    return [reward for reward in rewards if reward is not None] or [float("nan")]


def clamp(rewards: RowsLike, *, low: float | None = None, high: float | None = None) -> Arrays:
    """Clip rewards to [low, high]; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        low, high: bounds that do not cross, or None for none.

    Raises:
        DataError: as for ``reduction``.
        ConfigError: no bound, a bound that is not finite, or bounds that cross.

    >>> clamp([-3.0, 0.5, 2.0], low=-1.0, high=1.0)
    array([-1. ,  0.5,  1. ])

    Source: none needed. Peers: every library has it.
    """
    if low is None and high is None:
        raise ConfigError("low", "is None, and high is None", "at least one bound")
    high = _check.optional(_check.real, "high", high)
    low = _check.optional(_check.real, "low", low, high=high)
    rows = Rows.parse("rewards", rewards, nan=True)
    return rows.restore(np.clip(rows.flat, low, high))


def nonterminal_reward(rewards: RowsLike, finished: RowsLike | bool, *, value: float = 0.0) -> Any:
    """Append ``value`` to the step rewards of each trajectory that did not reach its own end.

    Args:
        rewards: per step: one trajectory [T], [B, T] or a list of [T_i]; a trajectory may have none.
        finished: one per trajectory, or one for one: False where a limit of turns, tokens or time cut it.
        value: one more reward for such a trajectory, finite.

    Returns:
        A list of [T_i] or [T_i + 1], or an array for one trajectory: what ``reduction`` takes.

    Raises:
        DataError: as for ``reduction``, or there are not as many flags as trajectories.
        ConfigError: value is not finite.

    >>> reduction(nonterminal_reward([[0.3, 0.3], [1.0]], [False, True], value=-1.0))
    array([-0.4,  1. ])

    Source: none needed. Peers: OpenReward's nonterminal_reward, which joins the rewards before they are reduced.
    """
    value = _check.real("value", value, low=-LARGEST, high=LARGEST)
    rows = Rows.parse("rewards", rewards, nan=True, empty=True)
    one = rows.form == "row"
    flags = Rows.read("finished", cast("RowsLike", [finished] if one else finished), boolean=True)
    if flags.form != "row" or flags.flat.size != rows.lengths.size:
        raise DataError("finished", f"has length {flags.flat.size}", f"{rows.lengths.size}", "one per trajectory")
    parts = np.split(rows.flat, rows.ends[:-1])
    joined = [part if end else np.append(part, value) for part, end in zip(parts, flags.flat, strict=True)]
    return joined[0] if one else joined


def nonterminal_override(rewards: RowsLike, finished: RowsLike, *, value: float = 0.0) -> Arrays:
    """Replace the rewards of trajectories that did not reach their own end by ``value``.

    Args:
        rewards: one per trajectory: [N], [B, G] or a list of [G_i].
        finished: shaped like ``rewards``; False where the trajectory was cut by a limit of turns, tokens or time.
        value: the reward of such a trajectory, in place of its own.

    Raises:
        DataError: as for ``reduction``, or shapes differ.
        ConfigError: value is not finite.

    >>> nonterminal_override([1.0, 0.3], [True, False])
    array([1., 0.])

    Source: none needed. ``nonterminal_reward`` adds to what such a trajectory got instead.
    """
    value = _check.real("value", value, low=-LARGEST, high=LARGEST)
    rows = Rows.parse("rewards", rewards, nan=True)
    return rows.restore(np.where(rows.read_like("finished", finished, boolean=True), rows.flat, value))


def affine(rewards: RowsLike, *, scale: float = 1.0, bias: float = 0.0) -> Arrays:
    """Return rewards times scale, plus bias; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        scale, bias: finite.

    Raises:
        DataError: as for ``reduction``.
        ConfigError: scale or bias is not finite.

    >>> affine([0.0, 1.0], scale=2.0, bias=-1.0)
    array([-1.,  1.])

    Source: none needed. Peers: AReaL's reward_scaling and reward_bias add first and multiply then.
    """
    scale = _check.real("scale", scale, low=-LARGEST, high=LARGEST)
    bias = _check.real("bias", bias, low=-LARGEST, high=LARGEST)
    rows = Rows.parse("rewards", rewards, nan=True)
    return rows.restore(scale * rows.flat + bias)


def mapping(rewards: RowsLike, table: Mapping[float, float], *, default: float | None = None) -> Arrays:
    """Look up rewards in a table; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        table: reward -> its replacement; a value NaN marks rewards as unscored.
        default: the value of rewards that are not in the table; None refuses them.

    Raises:
        DataError: as for ``reduction``; a reward is not in the table.
        ConfigError: the table is empty, or holds other values than numbers.

    >>> mapping([1.0, 0.0, 1.0], {1.0: 1.0, 0.0: -1.0})
    array([ 1., -1.,  1.])

    Source: none needed.
    """
    if not isinstance(table, Mapping) or not table:
        raise ConfigError("table", f"got {_check.describe(table)}", "a mapping that is not empty")
    pairs = [(_check.real("table key", key), _read_value(key, value)) for key, value in table.items()]
    keys, values = np.array(sorted(pairs)).T
    other = np.nan if default is None else _check.real("default", default)
    rows = Rows.parse("rewards", rewards, nan=True)
    index = np.minimum(np.searchsorted(keys, rows.flat), keys.size - 1)
    known, unscored = keys[index] == rows.flat, np.isnan(rows.flat)
    if default is None:
        expected = f"one of {keys.tolist()[:8]}"
        rows.require("rewards", rows.flat, known | unscored, expected, "set default= for other keys")
    return rows.restore(np.where(known, values[index], np.where(unscored, np.nan, other)))


def _read_value(key: float, value: object) -> float:
    return value if isinstance(value, float) and np.isnan(value) else _check.real(f"table[{key!r}]", value)


def whitening(rewards: RowsLike, *, ddof: int = 1, eps: float = 1e-6) -> Arrays:
    """Return (R - mean) / (standard deviation + eps) over all scored rewards; unscored ones stay NaN.

    Args:
        rewards: [N], [B, G] or a list of [G_i]; finite, or NaN for unscored.
        ddof: 1 divides squares by n - 1 (unbiased), 0 by n.
        eps: >= 0.

    Returns:
        float64 in the form of ``rewards``; exactly 0 where all scored rewards are equal.

    Raises:
        DataError: as for ``reduction``.
        ConfigError: a setting is out of range.

    >>> whitening([1.0, 2.0, 3.0], eps=0.0)
    array([-1.,  0.,  1.])

    Source: none needed. Peers: the advantage estimators do this themselves; use one or the other.
    """
    check_settings(ddof=ddof, eps=eps)
    rows = Rows.parse("rewards", rewards, nan=True)
    return rows.restore(whiten(rows.flat, ddof, eps))


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
    rows = _read_lengths(lengths)
    part = np.clip((rows.flat - (max_length - buffer)) / buffer, 0.0, 1.0)
    return rows.restore(0.0 - factor * part)


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
    rows = _read_lengths(lengths)
    return rows.restore(0.0 - coef * np.minimum(rows.flat / max_length, 1.0))


def cosine_length(
    correct: RowsLike,
    lengths: RowsLike,
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    exceeded: float | None = None,
) -> Arrays:
    """Return rewards that favour short right answers and long wrong ones, along a cosine of the length.

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
        DataError: correct are not booleans, lengths are negative or shaped differently.
        ConfigError: a setting is out of range.

    >>> cosine_length([True, True, False, False], [0, 50, 0, 100], max_length=100)
    array([ 1.  ,  0.75, -1.  , -0.5 ])

    Source: "Demystifying long chain-of-thought reasoning", arXiv:2502.03373, appendix C.1, where right is (2, 1), wrong
    (-10, 0) and exceeded -10. Peers: the defaults are open-r1's, which has no ``exceeded``.
    """
    max_length = _check.integer("max_length", max_length, low=1)
    ends = np.array([_read_ends("wrong", wrong), _read_ends("right", right)])  # [2, 2], by correct
    rows = Rows.read("correct", correct, boolean=True)
    n = rows.read_like("lengths", lengths)
    rows.require("lengths", n, (n >= 0) & (n <= LARGEST), "a number >= 0")
    first, last = ends[rows.flat.astype(np.int64)].T
    worth = last + (first - last) * (1.0 + np.cos(np.pi * np.minimum(n / max_length, 1.0))) / 2.0
    if exceeded is not None:
        worth = np.where(n >= max_length, _check.real("exceeded", exceeded), worth)
    return rows.restore(worth)


def efficiency_bonus(rewards: RowsLike, lengths: RowsLike) -> Arrays:
    """Return rewards in which a group's best samples get up to twice their reward for being short.

    R_i (1 + clip(1 - n_i / mean of n over the best, 0, 1)) for the best of the group, R_i for the others

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which stays.
        lengths: shaped like ``rewards``: tokens (or turns) of each sample, integers >= 0.

    Returns:
        float64 in the form of ``rewards``, unchanged in groups whose best reward is not positive.

    Raises:
        DataError: rewards are infinite or not numbers; lengths are not integers >= 0 or shaped differently.

    >>> efficiency_bonus([1.0, 1.0, 0.0], [10, 30, 5])  # mean length of the best 20
    array([1.5, 1. , 0. ])

    Source: prime-rl's length penalty.
    """
    rows = Rows.parse("rewards", rewards, nan=True)
    n = rows.read_counts("lengths", lengths)
    best = rows.repeat(rows.reduce(np.fmax, rows.flat))
    short = np.where((rows.flat == best) & (best > 0), n, np.nan)  # lengths of the best
    average = rows.repeat(rows.mean(short))
    saved = np.clip(1.0 - short / np.maximum(average, 1e-300), 0.0, 1.0)
    return rows.restore(rows.flat * (1.0 + np.where(average > 0, fill_missing(saved), 0.0)))


def stop_properly(rewards: RowsLike, truncated: RowsLike, *, coef: float = 0.0) -> Arrays:
    """Scale down or replace the rewards of answers that were cut instead of ending by themselves.

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
    coef = _check.real("coef", coef, high=1.0, low=-LARGEST)
    rows = Rows.parse("rewards", rewards, nan=True)
    cut = rows.read_like("truncated", truncated, boolean=True)
    worth = coef * rows.flat + 0.0 if coef >= 0 else np.where(np.isnan(rows.flat), np.nan, coef)
    return rows.restore(np.where(cut, worth, rows.flat))


def _read_ends(where: str, value: object) -> tuple[float, float]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(where, f"got {_check.describe(value)}", "two numbers, at length 0 and at the limit")
    return _check.real(f"{where}[0]", value[0]), _check.real(f"{where}[1]", value[1])


def _read_lengths(lengths: RowsLike) -> Rows:
    rows = Rows.parse("lengths", lengths)
    rows.require("lengths", rows.flat, rows.flat >= 0, "a number >= 0")
    return rows


def repetition_penalty(
    tokens: Sequence[Sequence[Hashable] | np.ndarray], *, ngram: int = 3, factor: float = 1.0
) -> np.ndarray:
    """Return the penalty of answers that repeat themselves, to be added: -factor (1 - unique / all n-grams).

    Args:
        tokens: token ids of each answer: a list of [n_i], or [N, n]. Lists of words work too.
        ngram: >= 1, how many tokens make an n-gram.
        factor: >= 0, the penalty of an answer that is one n-gram repeated for ever.

    Returns:
        float64 [N] in [-factor, 0]; 0 for answers of fewer than ``ngram`` tokens.

    Raises:
        DataError: tokens are not a list of sequences.
        ConfigError: a setting is out of range.

    >>> repetition_penalty([[1, 2, 3, 4], [5, 5, 5, 5, 5]], ngram=2)  # 3 of 3 bigrams are unique, and 1 of 4
    array([ 0.  , -0.75])

    Source: "Demystifying long chain-of-thought reasoning", arXiv:2502.03373, appendix C.2. Peers: TRL's
    repetition_penalty_reward, whose max_penalty is -factor; open-r1 counts words.
    """
    ngram = _check.integer("ngram", ngram, low=1)
    factor = _check.real("factor", factor, low=0.0)
    rows = _read_list("tokens", tokens, "one sequence of token ids per answer")
    return np.array([0.0 - factor * _measure_repetition(row, ngram) for row in rows])


def think_format(
    texts: Sequence[str], *, tags: tuple[str, str] = ("<think>", "</think>"), opened: bool = False
) -> np.ndarray:
    """Return 1 for texts that begin with one closed block of thinking, 0 for the others.

    Args:
        texts: the answers, with their tags.
        tags: how a block begins and ends.
        opened: whether the prompt ends with the opening tag already, as many chat templates do; it must not occur in
            the text again then.

    Returns:
        float64 [N].

    Raises:
        DataError: texts are not a list of strings.
        ConfigError: tags are not two texts.

    >>> think_format(["<think>2 + 2 is 4</think>4", "<think>for ever", "so <think>late</think>4"])
    array([1., 0., 0.])
    >>> think_format(["2 + 2 is 4</think>4"], opened=True)
    array([1.])

    Source: TRL's think_format_reward.
    """
    opened = _check.flag("opened", opened)
    if len(tags) != 2 or isinstance(tags, str) or not all(isinstance(tag, str) and tag for tag in tags):
        raise ConfigError("tags", f"got {_check.describe(tags)}", "two texts, the start and the end of a block")
    begin, end = tags
    scores = []
    for i, text in enumerate(_read_list("texts", texts, "one text per answer")):
        if not isinstance(text, str):
            raise DataError(f"texts[{i}]", f"is {_check.describe(text)}", "a text")
        begins = opened or text.startswith(begin)
        scores.append(float(begins and text.count(begin) == (not opened) and end in text))
    return np.array(scores)


def _read_list(where: str, value: Sequence[T], expected: str) -> list[T]:
    _check.entries(where, value, why=expected)
    rows = list(value)
    if not rows or not all(hasattr(row, "__len__") for row in rows):
        raise DataError(where, f"got {_check.describe(value)}", f"a list of at least one: {expected}")
    return rows


def _measure_repetition(row: Sequence[Hashable] | np.ndarray, ngram: int) -> float:
    items = row.tolist() if isinstance(row, np.ndarray) else list(row)
    grams = list(zip(*(islice(items, i, None) for i in range(ngram)), strict=False))
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0
