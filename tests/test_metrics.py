"""Diagnostics: reference values, formulas written out, laws, and what is refused."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import metrics
from rlkit.errors import ConfigError, DataError
from tests.each import for_each
from tests.golden import Case, assert_close, cases, each_case
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
laws = examples(50)
POLICIES = [
    "chi2",
    "clip_fraction",
    "effective_sample_size",
    "kl_k3",
    "kl_v1",
    "kl_v2",
    "perplexity_difference",
    "ratio_statistics",
]


@each_case(cases("metrics"))
def test_reference_values(case: Case) -> None:
    """A metric gives what the independent reference and the peers named in ``source`` give."""
    assert_close(case.find("rlkit.metrics")(**case.inputs, **case.settings), case.expected["value"])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    """Two policies' logprobs of some sequences, one of which may be empty."""
    lengths = draw(st.lists(st.integers(0, 8), min_size=1, max_size=5).filter(sum))
    row = lambda n: st.lists(st.floats(-8, 0), min_size=n, max_size=n)  # noqa: E731
    return [draw(row(n)) for n in lengths], [draw(row(n)) for n in lengths]


@laws
@given(pairs())
def test_formulas(pair: Any) -> None:
    """Every metric of two policies equals its formula as a loop."""
    p, q = pair
    d = [a - b for x, y in zip(p, q, strict=True) for a, b in zip(x, y, strict=True)]
    w = [math.exp(x) for x in d]
    n = len(d)
    call = lambda f, **kw: f(trainer_logprobs=p, sampling_logprobs=q, **kw)  # noqa: E731
    assert call(metrics.kl_v1) == pytest.approx(-math.fsum(d) / n, rel=1e-9, abs=1e-9)
    assert call(metrics.kl_v2) == pytest.approx(math.fsum(x * x for x in d) / n / 2, rel=1e-9, abs=1e-9)
    assert call(metrics.kl_k3) == pytest.approx(math.fsum(math.exp(x) - 1 - x for x in d) / n, rel=1e-9, abs=1e-9)
    assert call(metrics.chi2) == pytest.approx(math.fsum(x * x for x in w) / n - 1, rel=1e-9, abs=1e-9)
    size = math.fsum(w) ** 2 / (n * math.fsum(x * x for x in w))
    assert call(metrics.effective_sample_size) == pytest.approx(size)
    sums = [math.fsum(x) - math.fsum(y) for x, y in zip(p, q, strict=True) if x]
    assert call(metrics.chi2, level="sequence") == pytest.approx(
        np.mean(np.exp(2 * np.array(sums))) - 1, rel=1e-9, abs=1e-9
    )
    means = [s / len(x) for s, x in zip(sums, [x for x in p if x], strict=True)]
    assert call(metrics.perplexity_difference) == pytest.approx(-np.mean(means), rel=1e-9, abs=1e-9)
    clipped = call(metrics.clip_fraction, clip_low_threshold=0.5, clip_high_threshold=2.0)
    assert clipped == {"low": sum(x < 0.5 for x in w) / n, "high": sum(x > 2.0 for x in w) / n}
    found = call(metrics.ratio_statistics)
    spread = np.std(w, ddof=1) if n > 1 else 0.0
    assert found == pytest.approx({"min": min(w), "max": max(w), "mean": np.mean(w), "std": spread}, rel=1e-9, abs=1e-9)
    assert metrics.entropy_estimate(sampling_logprobs=q) == pytest.approx(
        -math.fsum(b for y in q for b in y) / n, abs=1e-12
    )


@laws
@given(pairs())
def test_laws(pair: Any) -> None:
    """k3 and v2 are never negative, v1 changes its sign with the order, the effective size lies in (0, 1]."""
    p, q = pair
    there, back = ({"trainer_logprobs": a, "sampling_logprobs": b} for a, b in ((p, q), (q, p)))
    assert metrics.kl_v1(**there) == pytest.approx(-metrics.kl_v1(**back))
    assert metrics.kl_v2(**there) == pytest.approx(metrics.kl_v2(**back))
    assert metrics.kl_k3(**there) >= 0
    assert 0 < metrics.effective_sample_size(**there) <= 1 + 1e-12
    same = {"trainer_logprobs": p, "sampling_logprobs": p}
    assert [getattr(metrics, name)(**same) for name in ("kl_v1", "kl_v2", "kl_k3", "chi2")] == [0.0] * 4
    assert metrics.effective_sample_size(**same) == pytest.approx(1.0)
    assert metrics.ratio_statistics(**same)["std"] == 0.0


def test_unbiased_by_enumeration() -> None:
    """Over all tokens of a small vocabulary v1 and k3 have the exact KL of the sampler from the trainer as mean."""
    q, p = np.array([0.5, 0.2, 0.2, 0.1]), np.array([0.3, 0.4, 0.2, 0.1])
    exact = float(q @ np.log(q / p))
    for metric in (metrics.kl_v1, metrics.kl_k3):
        each = [metric(trainer_logprobs=[math.log(p[i])], sampling_logprobs=[math.log(q[i])]) for i in range(4)]
        assert float(q @ np.array(each)) == pytest.approx(exact)
    each = [metrics.entropy_estimate(sampling_logprobs=[math.log(x)]) for x in q]
    assert float(q @ np.array(each)) == pytest.approx(float(-q @ np.log(q)))


@for_each("name", POLICIES)
@for_each("gap", [800.0, 1e6])
def test_finite_for_broken_policies(name: str, gap: float) -> None:
    """A token that one policy finds impossible gives large numbers, never infinity or NaN."""
    metric = getattr(metrics, name)
    for p, q in ((-gap, 0.0), (0.0, -gap)):
        found = metric(trainer_logprobs=[[p, -1.0], [p, p]], sampling_logprobs=[[q, -1.0], [q, q]])
        assert np.isfinite(list(found.values()) if isinstance(found, dict) else found).all()


def test_forms() -> None:
    """One sequence, equal and ragged ones, float32: the same numbers as Python floats."""
    p, q = np.array([-0.5, -2.0, -1.0], np.float32), np.array([-1.0, -1.0, -1.5], np.float32)
    one = metrics.kl_v1(trainer_logprobs=p, sampling_logprobs=q)
    assert type(one) is float
    assert one == metrics.kl_v1(trainer_logprobs=[p[:1], p[1:]], sampling_logprobs=[q[:1], q[1:]])
    assert one == metrics.kl_v1(trainer_logprobs=p[None], sampling_logprobs=q[None])
    assert one == metrics.kl_v1(trainer_logprobs=[p, []], sampling_logprobs=[q, []])


@for_each(
    ("p", "q", "message"),
    [
        ([-1.0], [-1.0, -2.0], "sampling_logprobs"),
        ([[-1.0], [-1.0, -2.0]], [[-1.0], [-1.0]], r"sampling_logprobs\[1\]: has length 1"),
        ([[-1.0]], [-1.0], "sampling_logprobs"),
        ([NAN], [-1.0], r"trainer_logprobs\[0\]: is nan"),
        ([[-1.0], [-1.0, -INF]], [[-1.0], [-1.0, -1.0]], r"trainer_logprobs\[1\]\[1\]: is -inf"),
        ([-1.0, -1.0], [-1.0, INF], r"sampling_logprobs\[1\]: is inf"),
        ([-1.0, 0.11], [-1.0, -1.0], r"trainer_logprobs\[1\]: is 0.11; expected a logprob"),
        ([-1.0, -1.0], [-1.0, 3.0], r"sampling_logprobs\[1\]: is 3.0; expected a logprob"),
        ([], [], "trainer_logprobs"),
        ([[], []], [[], []], "trainer_logprobs: holds no tokens"),
        (None, [-1.0], "trainer_logprobs"),
        ([None], [-1.0], r"trainer_logprobs\[0\]"),
        (["a"], [-1.0], r"trainer_logprobs\[0\]"),
        ([True], [-1.0], r"trainer_logprobs\[0\]"),
    ],
)
@for_each("name", POLICIES)
def test_bad_logprobs(name: str, p: Any, q: Any, message: str) -> None:
    """Logprobs have to be finite, of one shape, and some."""
    with pytest.raises(DataError, match=rf"^{message}"):
        getattr(metrics, name)(trainer_logprobs=p, sampling_logprobs=q)


def test_rounding_above_zero_passes() -> None:
    """Logprobs a little above 0 come from rounding, and stop no run."""
    assert metrics.kl_v1(trainer_logprobs=[1e-3], sampling_logprobs=[0.06]) == pytest.approx(0.059)
    with pytest.raises(DataError, match=r"^sampling_logprobs\[0\]: is 0.4; .*probability"):
        metrics.entropy_estimate(sampling_logprobs=[0.4])


def test_bad_settings() -> None:
    """Settings are checked, bounds must not cross."""
    both = {"trainer_logprobs": [-1.0], "sampling_logprobs": [-1.0]}
    with pytest.raises(ConfigError, match="^level"):
        metrics.chi2(**both, level="batch")
    with pytest.raises(ConfigError, match="^clip_low_threshold"):
        metrics.clip_fraction(**both, clip_low_threshold=1.3)
    with pytest.raises(ConfigError, match="^clip_low_threshold"):
        metrics.clip_fraction(**both, clip_low_threshold=-0.2)
    with pytest.raises(ConfigError, match="^clip_high_threshold"):
        metrics.clip_fraction(**both, clip_high_threshold=NAN)
    with pytest.raises(DataError, match="^sampling_logprobs"):
        metrics.entropy_estimate(sampling_logprobs=[[]])
    with pytest.raises(ConfigError, match="^low"):
        metrics.group_informativeness([1.0, 0.0], low=1.0)
    with pytest.raises(DataError, match="^rewards: has no scored"):
        metrics.group_informativeness([NAN])
    with pytest.raises(DataError, match=r"^rewards\[1\]"):
        metrics.group_informativeness([[1.0], []])


def test_group_informativeness_of_unscored() -> None:
    """Unscored rewards and groups do not count; groups that vary between the bounds are neither easy nor hard."""
    found = metrics.group_informativeness([[1, NAN, 1], [NAN, NAN], [0.2, 0.4]])
    assert found == {"zero": 0.5, "too_easy": 0.5, "too_hard": 0.0}
    assert metrics.group_informativeness([0.2, 0.4], low=0.5)["too_hard"] == 1.0


@laws
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets(n: int, data: st.DataObject) -> None:
    """pass@k is the share of subsets of size k that hold a right sample."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    expected = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
    assert metrics.pass_at_k(n, c, k) == pytest.approx(expected)
    np.testing.assert_allclose(metrics.pass_at_k([n, n], [c, n], k), [expected, 1.0])


@for_each(
    ("n", "c", "k", "error", "message"),
    [
        (3, 1, 4, DataError, "n"),
        (3, 4, 1, DataError, "c"),
        (3, -1, 1, DataError, "c"),
        (3, 1, 0, ConfigError, "k"),
        (3.5, 1, 1, DataError, "n"),
        (True, 1, 1, DataError, "n"),
        ([[3], [3, 4]], [1, 1], 1, DataError, "n: has"),
        ([3, 3], [[1], [1, 1]], 1, DataError, "c: has"),
        ([3, 3], [1, 4], 1, DataError, r"c\[1\]"),
        ([3, 2], [1, 1], 3, DataError, r"n\[1\]"),
        ([3, 3], [1], 1, DataError, "c"),
    ],
)
def test_pass_at_k_refuses(n: Any, c: Any, k: Any, error: type[Exception], message: str) -> None:
    """n, c and k have to be integers with 0 <= c <= n and 1 <= k <= n."""
    with pytest.raises(error, match=rf"^{message}"):
        metrics.pass_at_k(n, c, k)


def test_pass_at_k_of_many() -> None:
    """Thousands of samples neither overflow nor lose the small chances."""
    assert metrics.pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)
    assert type(metrics.pass_at_k(10, 1, 2)) is float


def test_defaults_and_public_names() -> None:
    """Defaults are pinned; the two policies go by name only; every public name has an example."""
    found = {
        name: {
            p.name: p.default
            for p in inspect.signature(getattr(metrics, name)).parameters.values()
            if p.default is not p.empty
        }
        for name in metrics.__all__
    }
    assert {name: defaults for name, defaults in found.items() if defaults} == {
        "chi2": {"level": "token"},
        "clip_fraction": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "group_informativeness": {"low": 0.0, "high": 1.0},
    }
    for name in (*POLICIES, "entropy_estimate"):
        parameters = inspect.signature(getattr(metrics, name)).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
    assert all(">>>" in getattr(metrics, name).__doc__ for name in metrics.__all__)


def test_a_ratio_on_a_bound_is_not_clipped() -> None:
    """Ratios of exactly 0.5 and 2 lie within bounds of 0.5 and 2."""
    lp = [math.log(0.25), math.log(0.5), math.log(0.25)]
    q = [math.log(0.5), math.log(0.25), math.log(0.5) + 1e-9]
    found = metrics.clip_fraction(
        trainer_logprobs=lp, sampling_logprobs=q, clip_low_threshold=0.5, clip_high_threshold=2.0
    )
    assert found == {"low": pytest.approx(1 / 3), "high": 0.0}


def test_token_lag():
    """Over tokens, and over sequences that have some; integers of the version now at most."""
    rows = [[4, 4, 5], [5], [], [2, 6]]
    assert metrics.token_lag(versions=rows, current=6) == {"mean": 10 / 6, "max": 4.0, "mixed": 2 / 3}
    assert metrics.token_lag(versions=[6, 6], current=6) == {"mean": 0.0, "max": 0.0, "mixed": 0.0}
    for wrong, where in (
        ([[1], [7]], r"versions\[1\]\[0\]"),
        ([-1], r"versions\[0\]"),
        ([0.5], r"\[0\]"),
        ([[]], "no tok"),
    ):
        with pytest.raises(DataError, match=where):
            metrics.token_lag(versions=wrong, current=6)
    with pytest.raises(ConfigError, match="current"):
        metrics.token_lag(versions=[0], current=-1)
