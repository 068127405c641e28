"""Filters: masks with counts, and that they filter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit.advantages as adv
from rlkit import filters
from rlkit.errors import ConfigError, DataError
from tests.each import for_each
from tests.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
NAN, INF = float("nan"), float("inf")
laws = examples(50)
batches = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, NAN]), min_size=1, max_size=6), min_size=1, max_size=6)


def scored(batch: list[list[float]]) -> list[list[float]]:
    return [[r for r in group if not np.isnan(r)] for group in batch]


@laws
@given(batches, st.sampled_from([0.0123, 0.0777, 0.313, 0.6]))
def test_zero_variance(batch: list[list[float]], threshold: float) -> None:
    """Dropped are groups whose GRPO advantages are all exactly 0, or whose unbiased deviation is not above one."""
    selection = filters.zero_variance(batch)
    assert selection.keep.tolist() == [bool((row != 0).any()) for row in adv.grpo(batch)]
    assert selection.kept + selection.dropped["zero_variance"] == len(batch)
    np.testing.assert_array_equal(selection.indices, np.flatnonzero(selection.keep))
    expected = [len(group) > 1 and bool(np.std(group, ddof=1) > threshold) for group in scored(batch)]
    assert filters.zero_variance(batch, threshold=threshold).keep.tolist() == expected


def test_what_is_on_an_end_counts_as_inside() -> None:
    """Rewards on a band's bounds, a deviation on the threshold; a group of one has a mean."""
    assert filters.difficulty_band([[0.1, 0.1], [0.9, 0.9]], low=0.1, high=0.9).keep.tolist() == [True, True]
    assert filters.difficulty_band([[0.5], [0.9]], high=0.6).keep.tolist() == [True, False]
    spread = float(np.std([0.0, 1.0], ddof=1))
    assert [filters.zero_variance([[0.0, 1.0]], threshold=spread - x).kept for x in (0.0, 0.1)] == [0, 1]


def test_refilled() -> None:
    """Kept groups are repeated in order until there are as many as before, or as asked; of none there are none."""
    selection = filters.zero_variance([[1, 1], [1, 0], [0, 0], [0, 1], [1, 1]])
    assert selection.refilled().tolist() == [1, 3, 1, 3, 1]
    assert [selection.refilled(count).tolist() for count in (3, 1, 0)] == [[1, 3, 1], [1], []]
    with pytest.raises(ConfigError, match="^count"):
        selection.refilled(-1)
    tied = filters.zero_variance(np.full((5, 7), 0.1, np.float32))
    assert (tied.kept, dict(tied.dropped), tied.refilled().size) == (0, {"zero_variance": 5}, 0)


@laws
@given(batches, st.integers(1, 6))
def test_dynamic_sampling(batch: list[list[float]], needed: int) -> None:
    """Kept are groups with some but not all right; no more than needed; the rest only where asked for."""
    mixed = [any(r >= 1 for r in g) and any(r < 1 for r in g) for g in batch]
    assert filters.dynamic_sampling(batch).keep.tolist() == mixed
    first = np.flatnonzero(mixed)[:needed].tolist()
    assert filters.dynamic_sampling(batch, needed=needed).indices.tolist() == first
    filled = filters.dynamic_sampling(batch, needed=needed, keep_when_insufficient=True)
    others = [i for i, m in enumerate(mixed) if not m]
    assert filled.indices.tolist() == sorted(first + others[: needed - len(first)])
    assert filled.kept == min(needed, len(batch))


@laws
@given(st.lists(st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=6), min_size=1, max_size=6))
def test_difficulty_band(batch: list[list[float]]) -> None:
    """Kept are groups whose mean over scored rewards lies in the band, ends included."""
    expected = [bool(group) and len(group) <= 10 * sum(group) <= 5 * len(group) for group in scored(batch)]
    assert filters.difficulty_band(batch, high=0.5).keep.tolist() == expected


def test_samples() -> None:
    """Filters of samples look at one thing each."""
    assert filters.truncated(["length", "stop"]).keep.tolist() == [False, True]
    assert filters.overlong([4, 5], max_length=4).keep.tolist() == [True, False]
    assert filters.stale([0, 1, 2, 3], current=3, max_lag=2).keep.tolist() == [False, True, True, True]
    assert filters.unscored([0.0, NAN, 1.0]).keep.tolist() == [True, False, True]
    errors = [None, False, True, ValueError("x"), np.bool_(False), np.bool_(True)]
    assert filters.failed(errors).keep.tolist() == [True, True, False, False, True, False]
    sequences = [[1, 2], np.array([1, 2], np.int32), [1], (1, 2), [2, 1], [], []]
    assert filters.duplicates(sequences).keep.tolist() == [True, False, True, False, True, True, False]


def test_and() -> None:
    """Joined selections keep what both keep, and count what each would drop."""
    one, two = filters.unscored([NAN, 1.0, 2.0]), filters.overlong([9, 9, 1], max_length=5)
    both = one & two
    assert both.keep.tolist() == [False, False, True]
    assert dict(both.dropped) == {"unscored": 1, "overlong": 2}
    assert dict((both & two).dropped) == {"unscored": 1, "overlong": 4}
    with pytest.raises(DataError, match="3 and 1"):
        _ = both & filters.unscored([1.0])
    with pytest.raises(TypeError):
        _ = both & [True, True, True]  # type: ignore[operator]
    with pytest.raises(TypeError):
        both.dropped["unscored"] = 0  # type: ignore[index]


def test_selection_of_your_own() -> None:
    """A mask is copied, so that what was checked stays; a list is as good; nothing may be selected; it is itself."""
    keep = np.array([True, False])
    mine = filters.Selection(keep, {"mine": 1})
    keep[:] = True
    assert mine.keep.tolist() == [True, False]
    with pytest.raises(ValueError, match="read-only"):
        mine.keep[1] = True
    other, empty = filters.Selection([True, False], {"mine": 1}), filters.Selection([], {})  # type: ignore[arg-type]
    assert other.kept == 1
    assert (empty.kept, empty.keep.dtype, empty.indices.size) == (0, bool, 0)
    assert len({mine, mine, other}) == 2


MASKS: tuple[Any, ...] = ([0, 1], np.array([1.0, 0.0]), [[True], [False]], np.zeros((0, 2), bool), True, ["a"])


@for_each(
    ("call", "error", "message"),
    [
        *[(lambda x=x: filters.Selection(x, {}), DataError, "keep: got") for x in MASKS],
        (lambda: filters.Selection([True], None), DataError, "dropped: got None"),
        (lambda: filters.Selection([True], {1: 1}), DataError, "dropped: got {1: 1}"),
        (lambda: filters.Selection([True], {"mine": -1}), DataError, r"dropped\['mine'\]: got -1"),
        (lambda: filters.Selection([True], {"mine": 0.5}), DataError, r"dropped\['mine'\]: got 0.5"),
        (lambda: filters.zero_variance([]), DataError, "rewards"),
        (lambda: filters.zero_variance([[1.0], []]), DataError, r"rewards\[1\]"),
        (lambda: filters.zero_variance([1.0, INF]), DataError, r"rewards\[1\]"),
        (lambda: filters.dynamic_sampling([1.0], keep_when_insufficient=True), ConfigError, "needed"),
        (lambda: filters.dynamic_sampling([1.0], keep_when_insufficient=1, needed=1), ConfigError, "keep_when"),
        (lambda: filters.dynamic_sampling([1.0], correct=NAN), ConfigError, "correct"),
        (lambda: filters.difficulty_band([None]), DataError, r"rewards\[0\]"),
        (lambda: filters.truncated(["stop", "eos"]), DataError, r"stop_reasons\[1\]"),
        (lambda: filters.duplicates([[1], "text"]), DataError, r"sequences\[1\]"),
        (lambda: filters.duplicates([[1], [0.5]]), DataError, r"sequences\[1\]"),
        (lambda: filters.failed([None, "error"]), DataError, r"failures\[1\]"),
        (lambda: filters.unscored([INF]), DataError, r"rewards\[0\]"),
    ],
)
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    """Bad input is named; a mask is booleans in one row (indices are none). tests/test_types.py has the ranges."""
    with pytest.raises(error, match=rf"^{message}"):
        call()
