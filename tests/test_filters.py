"""Filters: masks with counts, and that they filter."""

from __future__ import annotations

import inspect
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
rewards = st.sampled_from([0.0, 0.1, 0.5, 1.0, NAN])
batches = st.lists(st.lists(rewards, min_size=1, max_size=6), min_size=1, max_size=6)


@laws
@given(batches)
def test_zero_variance_drops_what_has_no_advantage(batch: list[list[float]]) -> None:
    """The groups that are dropped are those whose GRPO advantages are all exactly 0."""
    selection = filters.zero_variance(batch)
    assert selection.keep.tolist() == [bool((row != 0).any()) for row in adv.grpo(batch)]
    assert selection.kept + selection.dropped["zero_variance"] == len(batch)
    np.testing.assert_array_equal(selection.indices, np.flatnonzero(selection.keep))


@laws
@given(batches, st.sampled_from([0.0123, 0.0777, 0.313, 0.6]))
def test_zero_variance_threshold(batch: list[list[float]], threshold: float) -> None:
    """With a threshold, groups are kept whose unbiased deviation is larger."""
    expected = []
    for group in batch:
        scored = [r for r in group if not np.isnan(r)]
        expected.append(len(scored) > 1 and bool(np.std(scored, ddof=1) > threshold))
    assert filters.zero_variance(batch, threshold=threshold).keep.tolist() == expected


def test_all_tied() -> None:
    """A batch in which every group is constant keeps nothing, and refilling it gives nothing."""
    for dtype in (np.float16, np.float32, np.float64):
        selection = filters.zero_variance(np.full((5, 7), 0.1, dtype))
        assert selection.kept == 0
        assert dict(selection.dropped) == {"zero_variance": 5}
        assert selection.refilled().size == 0


def test_refilled() -> None:
    """Kept groups are repeated in order until there are as many as before, or as asked."""
    selection = filters.zero_variance([[1, 1], [1, 0], [0, 0], [0, 1], [1, 1]])
    assert selection.refilled().tolist() == [1, 3, 1, 3, 1]
    assert selection.refilled(3).tolist() == [1, 3, 1]
    assert selection.refilled(1).tolist() == [1]
    assert selection.refilled(0).tolist() == []
    with pytest.raises(ConfigError, match="^count"):
        selection.refilled(-1)


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
    expected = []
    for group in batch:
        scored = [r for r in group if not np.isnan(r)]
        expected.append(bool(scored) and 10 * sum(scored) >= len(scored) and 2 * sum(scored) <= len(scored))
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
    """A mask is copied, so that what was checked stays; a list is as good as an array; nothing may be selected."""
    keep = np.array([True, False])
    mine = filters.Selection(keep, {"mine": 1})
    keep[:] = True
    assert mine.keep.tolist() == [True, False]
    with pytest.raises(ValueError, match="read-only"):
        mine.keep[1] = True
    assert filters.Selection([True, False], {}).kept == 1  # type: ignore[arg-type]
    empty = filters.Selection([], {})  # type: ignore[arg-type]
    assert (empty.kept, empty.keep.dtype, empty.indices.size) == (0, bool, 0)


@for_each(
    ("keep", "dropped", "message"),
    [
        ([0, 1], {}, "keep: got"),
        (np.array([2, 5]), {}, "keep: got"),
        (np.array([1.0, 0.0]), {}, "keep: got"),
        ([[True], [False]], {}, "keep: got"),
        (np.zeros((0, 2), bool), {}, "keep: got"),
        ([[True], [True, False]], {}, "keep: got"),
        (True, {}, "keep: got"),
        (None, {}, "keep: is None"),
        (["a"], {}, "keep: got"),
        ([True], None, "dropped: got None"),
        ([True], ["mine"], "dropped: got"),
        ([True], {1: 1}, "dropped: got {1: 1}"),
        ([True], {"mine": -1}, r"dropped\['mine'\]: got -1"),
        ([True], {"mine": 0.5}, r"dropped\['mine'\]: got 0.5"),
    ],
)
def test_selection_refuses(keep: Any, dropped: Any, message: str) -> None:
    """A mask is booleans in one row (indices are none), and what was dropped are counts by name."""
    with pytest.raises(DataError, match=rf"^{message}"):
        filters.Selection(keep, dropped)


@for_each(
    ("name", "arguments", "settings", "error", "message"),
    [
        ("zero_variance", ([],), {}, DataError, "rewards"),
        ("zero_variance", ([[1.0], []],), {}, DataError, r"rewards\[1\]"),
        ("zero_variance", ([1.0, INF],), {}, DataError, r"rewards\[1\]"),
        ("zero_variance", ([1.0],), {"threshold": -1.0}, ConfigError, "threshold"),
        ("dynamic_sampling", ([1.0],), {"needed": 0}, ConfigError, "needed"),
        ("dynamic_sampling", ([1.0],), {"keep_when_insufficient": True}, ConfigError, "needed"),
        ("dynamic_sampling", ([1.0],), {"keep_when_insufficient": 1, "needed": 1}, ConfigError, "keep_when"),
        ("dynamic_sampling", ([1.0],), {"correct": NAN}, ConfigError, "correct"),
        ("difficulty_band", ([1.0],), {"low": 1.0}, ConfigError, "low"),
        ("difficulty_band", ([None],), {}, DataError, r"rewards\[0\]"),
        ("truncated", (["stop", "eos"],), {}, DataError, r"stop_reasons\[1\]"),
        ("truncated", ("stop",), {}, DataError, "stop_reasons"),
        ("overlong", ([1, -1],), {"max_length": 3}, DataError, r"lengths\[1\]"),
        ("overlong", ([1],), {"max_length": -3}, ConfigError, "max_length"),
        ("duplicates", ([[1], "text"],), {}, DataError, r"sequences\[1\]"),
        ("duplicates", ([[1], [0.5]],), {}, DataError, r"sequences\[1\]"),
        ("failed", ([None, "error"],), {}, DataError, r"failures\[1\]"),
        ("failed", (None,), {}, DataError, "failures"),
        ("stale", ([1, 7],), {"current": 6, "max_lag": 1}, DataError, r"versions\[1\]"),
        ("stale", ([1],), {"current": -1, "max_lag": 1}, ConfigError, "current"),
        ("stale", ([1],), {"current": 1, "max_lag": 0.5}, ConfigError, "max_lag"),
        ("unscored", ([[1.0]],), {}, DataError, "rewards"),
        ("unscored", ([INF],), {}, DataError, r"rewards\[0\]"),
    ],
)
def test_refused(name: str, arguments: Any, settings: Any, error: type[Exception], message: str) -> None:
    """Bad input is named."""
    with pytest.raises(error, match=rf"^{message}"):
        getattr(filters, name)(*arguments, **settings)


def test_defaults_and_public_names() -> None:
    """Defaults are pinned; every public name has an example."""
    found = {}
    for name in filters.__all__:
        public = getattr(filters, name)
        assert ">>>" in public.__doc__
        if name != "Selection":
            parameters = inspect.signature(public).parameters.values()
            found[name] = {p.name: p.default for p in parameters if p.default is not p.empty}
    assert {name: defaults for name, defaults in found.items() if defaults} == {
        "difficulty_band": {"low": 0.1, "high": 0.95},
        "dynamic_sampling": {"correct": 1.0, "needed": None, "keep_when_insufficient": False},
        "zero_variance": {"threshold": 0.0},
    }
