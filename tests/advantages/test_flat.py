"""Flat batches with labels, and token weights."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest

import rlkit.advantages as adv
from rlkit import _rows
from rlkit.errors import ConfigError, DataError, UnknownNameError
from tests.each import for_each

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
NAN = float("nan")


@for_each("name", ["grpo", "rloo", "loo_std", "maxrl"])
@for_each("seed", range(5))
def test_by_group_is_the_estimator_of_each_label(name: str, seed: int) -> None:
    """Each label's rewards get what the estimator gives them as a group, wherever they are; labels may be anything."""
    rng = np.random.default_rng(seed)
    rewards = np.where(rng.random(20) < 0.1, NAN, rng.normal(size=20))
    labels = [["a", 3, ("x", 1), 2.5, "3"][i] for i in rng.integers(5, size=20)]
    result = adv.by_group(name, rewards, labels)
    for label in set(labels):
        places = [i for i, other in enumerate(labels) if other == label]
        np.testing.assert_array_equal(result[places], adv.registry[name](rewards[places]))


@for_each("dtype", ["int8", "int16", "uint8", "int64", "uint64"])
@for_each("shift", [0, -100, 2**62, 2**63])
@for_each(("factor", "order"), [(1, list), (1000, list), (1, sorted)])
def test_integer_labels(dtype: str, shift: int, factor: int, order: Any) -> None:
    """Arrays of integers are coded without a loop, and as other labels are: by order of appearance."""
    numbers, info = np.random.default_rng(0).integers(0, 120, size=30).tolist(), np.iinfo(dtype)
    labels = order([min(max(n * factor + shift, int(info.min)), int(info.max)) for n in numbers])
    codes = _rows.read_labels("groups", np.array(labels, dtype), len(labels))
    assert codes.tolist() == _rows.read_labels("groups", labels, len(labels)).tolist()


def test_by_group_settings() -> None:
    """Settings are passed on and lengths are regrouped; a group may be a sequence in time; arrays are labels, too."""
    rewards, labels = [1.0, 5.0, 0.0, 3.0], np.array([7, 8, 7, 8])
    assert adv.by_group("grpo", rewards, labels, scale="none").tolist() == [0.5, 1.0, -0.5, -1.0]
    found = adv.by_group("opo", rewards, labels, lengths=[1, 2, 3, 4])
    np.testing.assert_allclose(found, [0.75, 4 / 3, -0.25, -2 / 3])
    rewards, labels = [0.0, 0.0, 1.0, 0.0, 2.0], [4, 9, 4, 4, 9]
    assert adv.by_group("discounted_returns", rewards, labels, gamma=0.5).tolist() == [0.5, 1.0, 1.0, 0.0, 2.0]
    np.testing.assert_allclose(adv.by_group("rebn", rewards, labels), adv.rebn(rewards))


def test_by_group_takes_any_callable() -> None:
    """An estimator is any function of a list of groups; what it returns is checked."""
    for function, settings, expected in (
        (lambda groups: [g - g.max() for g in groups], {}, [-4.0, 0.0, 0.0]),
        (lambda groups, **kw: [g * kw["by"] for g in groups], {"by": 2.0}, [2.0, 4.0, 10.0]),
        (lambda groups, by: [g * by for g in groups], {"by": 3.0}, [3.0, 6.0, 15.0]),
        (functools.partial(adv.grpo, scale="none"), {}, [-2.0, 0.0, 2.0]),
        (lambda *groups: groups[0], {}, [1.0, 2.0, 5.0]),
        (list, {}, [1.0, 2.0, 5.0]),  # some versions of Python read no signature of it
    ):
        assert adv.by_group(function, [1.0, 2.0, 5.0], ["a", "b", "a"], **settings).tolist() == expected
    with pytest.raises(DataError, match="expected 2 rows"):
        adv.by_group(lambda groups: groups[:1], [1.0, 2.0, 5.0], ["a", "b", "a"])
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        adv.by_group("grpoo", [1.0], ["a"])
    with pytest.raises(ConfigError):
        adv.by_group(3, [1.0], ["a"])  # type: ignore[arg-type]


def test_per_group() -> None:
    """A function of one group becomes an estimator, with its settings; what it returns is checked."""
    centred = adv.per_group(lambda group, *, by=1.0: (group - group.mean()) * by)
    found = centred([[1.0, 3.0], [2.0], [0.0, 1.0, 5.0]], by=2.0)
    assert [row.tolist() for row in found] == [[-2.0, 2.0], [0.0], [-4.0, -2.0, 6.0]]
    shares = adv.per_group(lambda group, *, lengths: group / lengths)
    assert [row.tolist() for row in shares([[1.0], [2.0, 3.0]], lengths=[[2], [1, 6]])] == [[0.5], [2.0, 0.5]]
    with pytest.raises(DataError, match=r"rewards\[1\]\): returned an array of shape \(1,\); expected \(2,\)"):
        adv.per_group(lambda group: group[:1])([[1.0], [2.0, 3.0]])


def test_token_weights_count_sequences_and_prompts_that_have_tokens() -> None:
    for labels in ("abb", "abc"):
        assert adv.token_weights([0, 2, 2], "prompt-mean", groups=list(labels)).tolist() == [0.0, 0.25, 0.25]
    for mode in ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean"):
        assert adv.token_weights([0, 0], mode).tolist() == [0.0, 0.0]


@for_each("name", ["grpo", "rloo", "loo_std", "maxrl", "pass_at_k", "discounted_returns", "rebn"])
def test_nothing_loops_over_groups(name: str) -> None:
    """A hundred times more groups of one size need no more calls: numpy computes them all at once."""

    def count_calls(rows: int) -> int:
        counts = []
        sys.setprofile(lambda frame, event, arg: counts.append(frame) if event == "call" else None)
        try:
            adv.registry[name](np.arange(8.0 * rows).reshape(rows, 8))
        finally:
            sys.setprofile(None)
        return len(counts)

    count_calls(3)  # what is only done once
    assert count_calls(4_000) <= count_calls(40) + 10
