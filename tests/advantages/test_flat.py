"""Flat batches with labels, and token weights."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit.advantages as adv
from rlkit import _rows
from rlkit.errors import ConfigError, DataError, UnknownNameError
from tests.each import for_each
from tests.properties import examples

pytestmark = pytest.mark.filterwarnings("ignore:rewards. every group has one member")
NAN = float("nan")
laws = examples(50)


@st.composite
def labelled(draw: st.DrawFn) -> tuple[list[float], list[str]]:
    """Rewards with labels."""
    pairs = draw(st.lists(st.tuples(st.floats(-9, 9) | st.just(NAN), st.sampled_from("abcd")), min_size=1, max_size=20))
    return [r for r, _ in pairs], [label for _, label in pairs]


@laws
@given(labelled(), st.sampled_from(["grpo", "rloo", "loo_std", "maxrl"]))
def test_by_group_is_the_estimator(batch: tuple[list[float], list[str]], name: str) -> None:
    """Each label's rewards get what the estimator gives them as a group, at their own places."""
    rewards, labels = batch
    result = adv.by_group(name, rewards, labels)
    for label in set(labels):
        places = [i for i, other in enumerate(labels) if other == label]
        np.testing.assert_array_equal(result[places], adv.registry[name]([rewards[i] for i in places]))


def test_by_group_of_tokens() -> None:
    """Functions of time go by labels too, where a group is a sequence of rewards in order."""
    rewards, labels = [0.0, 0.0, 1.0, 0.0, 2.0], [4, 9, 4, 4, 9]
    returns = adv.by_group("discounted_returns", rewards, labels, gamma=0.5)
    assert returns.tolist() == [0.5, 1.0, 1.0, 0.0, 2.0]
    np.testing.assert_allclose(adv.by_group("rebn", rewards, labels), adv.rebn(rewards))


@laws
@given(
    st.sampled_from(["int8", "int16", "uint8", "int64", "uint64"]),
    st.lists(st.integers(0, 120), min_size=1, max_size=30),
    st.sampled_from([0, -100, 2**62, 2**63]),
    st.sampled_from([1, 1000]),
    st.booleans(),
)
def test_integer_labels(dtype: str, numbers: list[int], shift: int, factor: int, rising: bool) -> None:
    """Arrays of integers are coded without a loop, and as any other labels are: by order of appearance."""
    info = np.iinfo(dtype)
    given_labels = [min(max(n * factor + shift, int(info.min)), int(info.max)) for n in numbers]
    given_labels = sorted(given_labels) if rising else given_labels
    codes = _rows.read_labels("groups", np.array(given_labels, dtype), len(numbers))
    assert codes.tolist() == _rows.read_labels("groups", given_labels, len(numbers)).tolist()


@laws
@given(labelled(), st.randoms(use_true_random=False))
def test_by_group_order_and_names(batch: tuple[list[float], list[str]], random: Any) -> None:
    """Order does not matter, nor what the labels are called."""
    rewards, labels = batch
    result = adv.by_group("grpo", rewards, labels)
    order = random.sample(range(len(rewards)), len(rewards))
    names = {"a": 3, "b": ("x", 1), "c": "a", "d": 2.5}
    again = adv.by_group(adv.grpo, [rewards[i] for i in order], [names[labels[i]] for i in order])
    np.testing.assert_allclose(again, result[order], atol=1e-9)


def test_by_group_settings() -> None:
    """Settings are passed on, lengths are regrouped, arrays of labels are fine, 1 and "1" differ."""
    rewards, labels = [1.0, 5.0, 0.0, 3.0], np.array([7, 8, 7, 8])
    np.testing.assert_array_equal(adv.by_group("grpo", rewards, labels, scale="none"), [0.5, 1, -0.5, -1])
    found = adv.by_group("opo", rewards, labels, lengths=[1, 2, 3, 4])
    np.testing.assert_allclose(found, [0.75, 4 / 3, -0.25, -2 / 3])
    np.testing.assert_array_equal(adv.by_group("rloo", [1.0, 2.0, 4.0], [1, "1", 1]), [-3.0, 0.0, 3.0])
    np.testing.assert_array_equal(adv.by_group("grpo", [1.0, 2.0, 3.0], ["x", "y", "z"]), [0.0, 0.0, 0.0])


def test_by_group_of_your_own() -> None:
    """An estimator of one's own takes a list of groups; what it returns is checked."""
    adv_of = adv.by_group(lambda groups: [g - g.max() for g in groups], [1.0, 2.0, 5.0], ["a", "b", "a"])
    np.testing.assert_array_equal(adv_of, [-4.0, 0.0, 0.0])
    with pytest.raises(DataError, match="expected 2 rows"):
        adv.by_group(lambda groups: groups[:1], [1.0, 2.0, 5.0], ["a", "b", "a"])


@for_each(
    ("rewards", "groups", "message"),
    [
        ([1.0, 2.0], ["a"], "groups: has 1 entries"),
        ([1.0], "a", "groups"),
        ([1.0], None, "groups"),
        ([1.0], 3, "groups"),
        ([1.0], np.array(3), "groups"),
        ([1.0, 2.0], ["a", None], r"groups\[1\]: is None"),
        ([1.0, 2.0], ["a", NAN], r"groups\[1\]: is nan"),
        ([1.0, 2.0], ["a", ["b"]], r"groups\[1\]"),
        ([[1.0, 2.0]], ["a", "a"], "rewards"),
        ([], [], "rewards: is empty"),
        ([1.0, float("inf")], ["a", "a"], r"rewards\[1\]: is inf"),
        ([1.0, None], ["a", "a"], r"rewards\[1\]: is None"),
    ],
)
def test_by_group_refuses(rewards: Any, groups: Any, message: str) -> None:
    """Labels have to be as many as rewards, hashable, and no None or NaN."""
    with pytest.raises(DataError, match=message):
        adv.by_group("grpo", rewards, groups)


def test_per_group() -> None:
    """A function of one group becomes an estimator, with its settings; what it returns is checked."""
    centred = adv.per_group(lambda group, *, by=1.0: (group - group.mean()) * by)
    found = centred([[1.0, 3.0], [2.0], [0.0, 1.0, 5.0]], by=2.0)
    assert [row.tolist() for row in found] == [[-2.0, 2.0], [0.0], [-4.0, -2.0, 6.0]]
    shares = adv.per_group(lambda group, *, lengths: group / lengths)
    assert [row.tolist() for row in shares([[1.0], [2.0, 3.0]], lengths=[[2], [1, 6]])] == [[0.5], [2.0, 0.5]]
    with pytest.raises(DataError, match=r"rewards\[1\]\): returned an array of shape \(1,\); expected \(2,\)"):
        adv.per_group(lambda group: group[:1])([[1.0], [2.0, 3.0]])


def test_by_group_unknown() -> None:
    """An unknown estimator names what there is; something else than a name or a function is a ConfigError."""
    with pytest.raises(UnknownNameError, match="did you mean 'grpo'"):
        adv.by_group("grpoo", [1.0], ["a"])
    with pytest.raises(ConfigError):
        adv.by_group(3, [1.0], ["a"])  # type: ignore[arg-type]


def test_by_group_takes_any_callable() -> None:
    """Settings may be caught by **settings, bound by partial, or positional; rewards may be *groups' first."""
    labels = ["a", "a"]
    caught = adv.by_group(lambda groups, **kw: [g * kw["by"] for g in groups], [1.0, 2.0], labels, by=2.0)
    assert caught.tolist() == [2.0, 4.0]
    bound = adv.by_group(functools.partial(adv.grpo, scale="none"), [1.0, 2.0], labels)
    assert bound.tolist() == [-0.5, 0.5]
    positional = adv.by_group(lambda groups, by: [g * by for g in groups], [1.0, 2.0], labels, by=3.0)
    assert positional.tolist() == [3.0, 6.0]
    assert adv.by_group(lambda *groups: groups[0], [1.0, 2.0], labels).tolist() == [1.0, 2.0]
    assert adv.by_group(list, [1.0, 2.0], labels).tolist() == [1.0, 2.0]  # has no signature to read in some versions


lengths = st.lists(st.integers(0, 50), min_size=1, max_size=12)


@laws
@given(lengths, st.data())
def test_token_weights_are_means(counts: list[int], data: st.DataObject) -> None:
    """A sum weighted by token_weights is the mean that the mode names, written out."""
    n = np.array(counts)
    labels = data.draw(st.lists(st.sampled_from("ab"), min_size=n.size, max_size=n.size))
    sums = np.array([data.draw(st.floats(-5, 5)) if k else 0.0 for k in counts])  # each sequence's sum over its tokens
    some = n > 0
    total = lambda mode, **kw: float(adv.token_weights(n, mode, **kw) @ sums)  # noqa: E731
    assert (adv.token_weights(n)[~some] == 0).all()
    assert total("token-sum") == pytest.approx(sums.sum())
    if not some.any():
        assert (adv.token_weights(n) == 0).all()
        return
    assert total("token-mean") == pytest.approx(sums.sum() / n.sum())
    assert total("seq-mean-token-sum") == pytest.approx(sums.sum() / some.sum())
    assert total("seq-mean-token-mean") == pytest.approx((sums[some] / n[some]).mean())
    assert total("seq-mean-token-sum-norm", constant=0.5) == pytest.approx(sums.sum() / some.sum() / 0.5)
    prompts = [[i for i, label in enumerate(labels) if label == prompt and some[i]] for prompt in "ab"]
    means = [sums[members].sum() / n[members].sum() for members in prompts if members]
    assert total("prompt-mean", groups=labels) == pytest.approx(np.mean(means))


def test_token_weights_of_prompts_without_tokens() -> None:
    """A prompt without a token does not count as a prompt."""
    assert adv.token_weights([0, 2, 2], "prompt-mean", groups=["a", "b", "b"]).tolist() == [0.0, 0.25, 0.25]
    assert adv.token_weights([1, 1, 0], "prompt-mean", groups=["a", "b", "c"]).tolist() == [0.5, 0.5, 0.0]


@laws
@given(st.lists(st.integers(1, 50), min_size=2, max_size=12), st.integers(1, 11))
def test_token_weights_do_not_depend_on_micro_batches(counts: list[int], cut: int) -> None:
    """Weights belong to the batch: parts of it add up to the whole."""
    weights = adv.token_weights(counts)
    whole = weights @ np.array(counts)
    parts = weights[:cut] @ np.array(counts[:cut]) + weights[cut:] @ np.array(counts[cut:])
    assert whole == pytest.approx(1.0)
    assert parts == pytest.approx(whole)


@for_each(
    ("arguments", "settings", "error", "message"),
    [
        ([[1, 2]], {"mode": "mean"}, ConfigError, "mode"),
        ([[1, 2]], {"mode": None}, ConfigError, "mode"),
        ([[1, 2]], {"constant": 5}, ConfigError, "constant"),
        ([[1, 2]], {"groups": ["a", "b"]}, ConfigError, "groups"),
        ([[1, 2]], {"mode": "seq-mean-token-sum-norm"}, ConfigError, "constant: is missing"),
        ([[1, 2]], {"mode": "seq-mean-token-sum-norm", "constant": 0}, ConfigError, "constant"),
        ([[1, 2]], {"mode": "seq-mean-token-sum-norm", "constant": float("inf")}, ConfigError, "constant"),
        ([[1, 2]], {"mode": "prompt-mean"}, ConfigError, "groups: is missing"),
        ([[1, 2]], {"mode": "prompt-mean", "groups": ["a"]}, DataError, "groups"),
        ([[]], {}, DataError, "lengths: is empty"),
        ([None], {}, DataError, "lengths"),
        (["12"], {}, DataError, "lengths"),
        ([[1, -1]], {}, DataError, r"lengths\[1\]"),
        ([[1, 1.5]], {}, DataError, r"lengths\[1\]"),
        ([[1, NAN]], {}, DataError, r"lengths\[1\]"),
        ([[1, True]], {}, DataError, r"lengths\[1\]"),
        ([[[1], [2]]], {}, DataError, "lengths"),
    ],
)
def test_token_weights_refuses(arguments: Any, settings: Any, error: type[Exception], message: str) -> None:
    """Bad lengths and settings are named."""
    with pytest.raises(error, match=rf"^{message}"):
        adv.token_weights(*arguments, **settings)


def test_one_long_row_beside_short_ones() -> None:
    """Memory and time follow the number of tokens, not the longest row times the rows."""
    rows = [np.ones(300_000), *[np.ones(2)] * 2_000]
    result = adv.discounted_returns(rows)
    assert result[0][0] == 300_000
    assert result[-1].tolist() == [2.0, 1.0]


@for_each("name", ["grpo", "rloo", "loo_std", "maxrl", "pass_at_k", "discounted_returns", "rebn"])
def test_nothing_loops_over_groups(name: str) -> None:
    """A hundred times more groups of one size need no more calls: what grows with them happens inside numpy."""

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
