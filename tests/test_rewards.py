"""Rewards: reductions, bounds and shaping."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import rewards
from rlkit.errors import ConfigError, DataError
from tests.each import for_each
from tests.golden import Case, assert_close, cases, each_case
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
laws = examples(50)
numbers = st.floats(-10, 10)
ragged = st.lists(st.lists(numbers, min_size=1, max_size=5), min_size=1, max_size=5)


@each_case(cases("rewards"))
def test_reference_values(case: Case) -> None:
    """A shaping term gives what the independent reference gives."""
    assert_close(case.find("rlkit.rewards")(**case.inputs, **case.settings), case.expected["value"])


@laws
@given(st.lists(st.lists(st.none() | numbers, min_size=1, max_size=5), min_size=1, max_size=5))
def test_reduction(rows: list[list[float | None]]) -> None:
    """Each trajectory gives the sum, mean, largest, smallest or last of its rewards; of none it is unscored."""
    reductions = {"sum": sum, "mean": np.mean, "max": max, "min": min, "last": lambda row: row[-1]}
    scored = [[x for x in row if x is not None] for row in rows]
    for how, function in reductions.items():
        expected = [function(row) if row else NAN for row in scored]
        np.testing.assert_allclose(rewards.reduction(rows, how), expected, atol=1e-9)
        np.testing.assert_allclose(rewards.reduction(rows[0], how), expected[0], atol=1e-9)
    assert type(rewards.reduction(rows[0])) is float


def test_unscored_stays_unscored() -> None:
    """NaN, a reward that could not be scored, comes out as NaN wherever nothing else is asked for, and stays put."""
    r = np.array([1.0, NAN])
    for result in (
        rewards.clamp(r, low=2.0),
        rewards.affine(r, scale=2.0),
        rewards.mapping(r, {1.0: 0.0}, default=5.0),
        rewards.whitening(r),
        rewards.whitening([0.0, NAN, 1.0])[:2],
        rewards.stop_properly(r, [False, True], coef=-1.0),
        rewards.stop_properly(r, [False, True], coef=0.5),
        rewards.efficiency_bonus(r, [1, 1]),
    ):
        assert np.isnan(result).tolist() == [False, True]
    np.testing.assert_array_equal(r, [1.0, NAN], "the rewards were written to")
    for how in ("sum", "mean", "max", "min", "last"):
        assert np.isnan(rewards.reduction([[1.0, NAN], [NAN, 2.0], [1.0, 2.0]], how)).tolist() == [True, True, False]
    np.testing.assert_array_equal(rewards.nonterminal_override([1.0, NAN], [True, False]), [1.0, 0.0])


@for_each(("how", "end", "expected"), [("sum", 0.0, 0.6), ("sum", -1.0, -0.4), ("max", 0.0, 0.3), ("mean", 0.0, 0.2)])
def test_a_nonterminal_reward_joins_the_others(how: str, end: float, expected: float) -> None:
    """A cut trajectory that earned .3 and .3 keeps that; one that came to its own end gets nothing more."""
    assert rewards.reduction(rewards.nonterminal_reward([0.3, 0.3], False, value=end), how) == pytest.approx(expected)
    joined = rewards.nonterminal_reward([[0.3, 0.3], [], [0.3]], [True, False, False], value=end)
    assert [row.tolist() for row in joined] == [[0.3, 0.3], [end], [0.3, end]]
    assert rewards.nonterminal_override([0.6], [False], value=end).tolist() == [end]
    np.testing.assert_array_equal(rewards.nonterminal_reward([NAN], False, value=end), [NAN, end])


@laws
@given(ragged, numbers, numbers)
def test_clamp(rows: list[list[float]], a: float, b: float) -> None:
    """Clamping moves into the bounds and no further."""
    low, high = min(a, b), max(a, b)
    for before, after in zip(rows, rewards.clamp(rows, low=low, high=high), strict=True):
        np.testing.assert_array_equal(after, [min(max(x, low), high) for x in before])
    assert rewards.clamp([-5.0, 5.0], low=0.0).tolist() == [0.0, 5.0]
    assert rewards.clamp([-5.0, 5.0], high=0.0).tolist() == [-5.0, 0.0]


def test_length_cost() -> None:
    """The cost is in proportion to the length up to the limit, the penalty of a buffer of one token begins there."""
    assert rewards.overlong_penalty([0, 1, 2], max_length=1, buffer=1).tolist() == [0.0, -1.0, -1.0]
    np.testing.assert_allclose(rewards.length_cost([[0, 5], [10]], max_length=10)[0], [0.0, -0.5])
    np.testing.assert_allclose(rewards.length_cost([20, 3], max_length=10, coef=0.1), [-0.1, -0.03])


def test_efficiency_bonus() -> None:
    """Only the best samples of a group that has any gain, at most their reward again, and by their group alone."""
    found = rewards.efficiency_bonus([[1.0, 1.0, 0.5], [0.0, -1.0], [2.0]], [[0, 20, 1], [1, 1], [7]])
    assert [row.tolist() for row in found] == [[2.0, 1.0, 0.5], [0.0, -1.0], [2.0]]
    np.testing.assert_allclose(rewards.efficiency_bonus([1.0, 1.0], [0, 0]), [1.0, 1.0])


def test_stop_properly() -> None:
    """From 0 on the coefficient scales a cut answer's reward, below 0 it replaces it; -0.0 does not come out."""
    np.testing.assert_array_equal(rewards.stop_properly([2.0, -2.0], [True, True]), [0.0, 0.0])
    assert not np.signbit(rewards.stop_properly([-2.0], [True])).any()
    assert rewards.stop_properly([2.0, 2.0], [True, False], coef=-0.5).tolist() == [-0.5, 2.0]
    np.testing.assert_array_equal(rewards.stop_properly([[2.0], [1.0, 4.0]], [[1], [0, 1]], coef=1.0)[1], [1.0, 4.0])


def test_mapping() -> None:
    """Rewards are looked up exactly; others are refused, or get the default; NaN in the table marks unscored."""
    np.testing.assert_array_equal(rewards.mapping([[1, 0], [0, 1]], {0: -1, 1: 1}), [[1, -1], [-1, 1]])
    np.testing.assert_array_equal(rewards.mapping([0.5, 1.0], {1: 2}, default=-3.0), [-3.0, 2.0])
    assert np.isnan(rewards.mapping([-1.0], {-1: NAN})).all()
    for unknown, where in (([[1.0, 1.0], [0.5]], r"rewards\[1\]\[0\]"), ([1.0, 0.5, 0.25], r"rewards\[1\]")):
        with pytest.raises(DataError, match=rf"^{where}: is 0.5"):
            rewards.mapping(unknown, {1: 2})


@laws
@given(ragged)
def test_whitening(rows: list[list[float]]) -> None:
    """Mean 0 and deviation 1 over everything, or exactly 0 where nothing varies."""
    if np.ptp(np.concatenate(rows)) > 1e-2:
        result = np.concatenate([np.ravel(row) for row in rewards.whitening(rows, eps=0.0)])
        assert abs(result.mean()) < 1e-9
        assert result.std(ddof=1) == pytest.approx(1.0)
    assert (rewards.whitening(np.full(9, np.float32(0.1))) == 0.0).all()
    assert np.isfinite(rewards.whitening([0.0, 5e-324], eps=0.0)).all()


def test_cosine_length() -> None:
    """The paper's form: from the first value at length 0 to the last at the limit, and what exceeds it."""
    paper = {"max_length": 10, "right": (2.0, 1.0), "wrong": (-10.0, 0.0), "exceeded": -7.0}
    found = rewards.cosine_length([[True] * 4, [False] * 4], [[0, 2, 9, 10]] * 2, **paper)
    quarter, late = np.cos(np.pi * np.array([0.2, 0.9]))
    np.testing.assert_allclose(found[0], [2.0, 1 + (1 + quarter) / 2, 1 + (1 + late) / 2, -7.0])
    np.testing.assert_allclose(found[1], [-10.0, -5 * (1 + quarter), -5 * (1 + late), -7.0])
    np.testing.assert_allclose(rewards.cosine_length([True, False], [10, 99], max_length=10), [0.5, -0.5])  # as at it


@laws
@given(st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=4), st.integers(1, 4))
def test_repetition_penalty(tokens: list[list[int]], n: int) -> None:
    """The share of n-grams that stood before, as a loop; arrays and lists give the same."""
    for array in (tokens, [np.array(row, np.int64) for row in tokens]):
        found = rewards.repetition_penalty(array, ngram=n, factor=0.5)
        for value, row in zip(found, tokens, strict=True):
            grams = [tuple(row[i : i + n]) for i in range(len(row) - n + 1)]
            again = sum(gram in grams[:i] for i, gram in enumerate(grams))
            assert value == pytest.approx(-0.5 * again / len(grams) if grams else 0.0)


def test_think_format() -> None:
    """One block at the beginning; where the prompt opened it, the answer may not open it again."""
    good = ["<think>a</think>b", "<think></think>", "<think>a\nb</think>\nc", "<think>a</think>b</think>"]
    bad = ["", "<think>a", "a</think>", " <think>a</think>", "<think><think>a</think>", "<think>a</think><think>"]
    assert rewards.think_format(good + bad).tolist() == [1.0] * len(good) + [0.0] * len(bad)
    opened = rewards.think_format(["a</think>b", "</think>", "<think>a</think>", "a"], opened=True)
    assert opened.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert rewards.think_format(["[a]b"], tags=("[", "]")).tolist() == [1.0]


@for_each(
    ("name", "arguments", "settings", "error", "message"),
    [
        ("reduction", ([1.0, INF],), {}, DataError, r"rewards\[1\]"),
        ("reduction", ([],), {}, DataError, "rewards"),
        ("reduction", ([1.0],), {"how": "first"}, ConfigError, "how"),
        ("reduction", ([None, [1.0]],), {}, DataError, r"rewards"),
        ("clamp", ([1.0],), {}, ConfigError, "low"),
        ("clamp", ([1.0],), {"low": 1.0, "high": 0.0}, ConfigError, "low"),
        ("clamp", ([1.0],), {"low": NAN}, ConfigError, "low"),
        ("nonterminal_reward", ([1.0], 2), {}, DataError, r"finished\[0\]"),
        ("nonterminal_reward", ([[1.0], [INF]], [True, False]), {}, DataError, r"rewards\[1\]\[0\]"),
        ("mapping", ([1.0], {}), {}, ConfigError, "table"),
        ("mapping", ([1.0], [1.0]), {}, ConfigError, "table"),
        ("mapping", ([1.0], {"1": 1.0}), {}, ConfigError, "table key"),
        ("mapping", ([1.0], {1: "x"}), {}, ConfigError, r"table\["),
        ("overlong_penalty", ([-1],), {"max_length": 9, "buffer": 3}, DataError, r"lengths\[0\]"),
        ("length_cost", ([NAN],), {"max_length": 9}, DataError, r"lengths\[0\]"),
        ("cosine_length", ([2.0], [1]), {"max_length": 9}, DataError, "correct"),
        ("cosine_length", ([True], [1]), {"max_length": 9, "right": 1.0}, ConfigError, "right"),
        ("cosine_length", ([True], [1]), {"max_length": 9, "wrong": (0.0, NAN)}, ConfigError, r"wrong\[1\]"),
        ("cosine_length", ([True], [1]), {"max_length": 9, "exceeded": INF}, ConfigError, "exceeded"),
        ("repetition_penalty", ([1, 2, 3],), {}, DataError, "tokens"),
        ("think_format", ([["a"]],), {}, DataError, r"texts\[0\]"),
        ("think_format", (["a"],), {"tags": "<>"}, ConfigError, "tags"),
        ("think_format", (["a"],), {"opened": 1}, ConfigError, "opened"),
        ("efficiency_bonus", ([1.0], [0.5]), {}, DataError, r"lengths\[0\]"),
    ],
)
def test_refused(name: str, arguments: Any, settings: Any, error: type[Exception], message: str) -> None:
    """Bad input is named; tests/test_types.py has the ranges."""
    with pytest.raises(error, match=rf"^{message}"):
        getattr(rewards, name)(*arguments, **settings)
