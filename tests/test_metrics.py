"""Diagnostics: reference values, formulas written out, laws, and what is refused."""

from __future__ import annotations

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
from tests.test_corrections import RATIOS, pairs
from tests.test_corrections import call as correct

NAN, INF = float("nan"), float("inf")
laws = examples(50)
POLICIES = sorted(set(metrics.__all__) - {"entropy_estimate", "group_informativeness", "pass_at_k", "token_lag"})


def call(name: str, p: Any, q: Any, **settings: Any) -> Any:
    return getattr(metrics, name)(trainer_logprobs=p, sampling_logprobs=q, **settings)


def test_logprobs_go_by_name() -> None:
    for name in (*POLICIES, "entropy_estimate"):
        with pytest.raises(TypeError, match="positional"):
            getattr(metrics, name)([-1.0], [-1.0])


@each_case(cases("metrics"))
def test_reference_values(case: Case) -> None:
    """A metric gives what the independent reference and the peers named in ``source`` give."""
    assert_close(case.find("rlkit.metrics")(**case.inputs, **case.settings), case.expected["value"])


@laws
@given(pairs(low=-8.0).filter(lambda pair: any(pair[0])))
def test_formulas(pair: Any) -> None:
    """Every metric of two policies equals its formula as a loop."""
    p, q = pair
    d = [a - b for x, y in zip(p, q, strict=True) for a, b in zip(x, y, strict=True)]
    w, n = [math.exp(x) for x in d], len(d)
    sums = [math.fsum(x) - math.fsum(y) for x, y in zip(p, q, strict=True) if x]
    means = [s / len(x) for s, x in zip(sums, filter(None, p), strict=True)]
    near = lambda value: pytest.approx(value, rel=1e-9, abs=1e-9)  # noqa: E731
    assert call("kl_v1", p, q) == near(-math.fsum(d) / n)
    assert call("kl_v2", p, q) == near(math.fsum(x * x for x in d) / n / 2)
    assert call("kl_k3", p, q) == near(math.fsum(math.exp(x) - 1 - x for x in d) / n)
    assert call("chi2", p, q) == near(math.fsum(x * x for x in w) / n - 1)
    assert call("chi2", p, q, level="sequence") == near(np.mean(np.exp(2 * np.array(sums))) - 1)
    size = math.fsum(w) ** 2 / (n * math.fsum(x * x for x in w))
    assert call("effective_sample_size", p, q) == pytest.approx(size)
    assert call("perplexity_difference", p, q) == near(-np.mean(means))
    clipped = call("clip_fraction", p, q, clip_low_threshold=0.5, clip_high_threshold=2.0)
    assert clipped == {"low": sum(x < 0.5 for x in w) / n, "high": sum(x > 2.0 for x in w) / n}
    spread = np.std(w, ddof=1) if n > 1 else 0.0
    assert call("ratio_statistics", p, q) == near({"min": min(w), "max": max(w), "mean": np.mean(w), "std": spread})
    entropy = -math.fsum(b for y in q for b in y) / n
    assert metrics.entropy_estimate(sampling_logprobs=q) == pytest.approx(entropy, abs=1e-12)


def test_ratios_at_their_corners() -> None:
    """One ratio has no spread, two the unbiased one; a common factor does not matter; on a bound none is clipped."""
    assert [call(name, [-1.0, -2.0], [-1.0, -2.0]) for name in ("kl_v1", "kl_v2", "kl_k3", "chi2")] == [0.0] * 4
    assert type(call("kl_v1", np.float32([-1.0]), np.float32([-1.0]))) is float
    assert call("ratio_statistics", [-1.0], [-2.0])["std"] == 0.0
    assert call("ratio_statistics", [-1.0] * 3, [-1.1] * 3)["std"] == 0.0
    two = call("ratio_statistics", [math.log(0.5)] * 2, [0.0, math.log(0.25)])
    assert two["std"] == pytest.approx(1.5 / np.sqrt(2))
    far = call("effective_sample_size", [-1.0, -2.0], [-802.0, -802.0])
    assert call("effective_sample_size", [-1.0, -2.0], [-2.0, -2.0]) == pytest.approx(far)
    p, q = [math.log(x) for x in (0.25, 0.5, 0.25)], [math.log(x) for x in (0.5, 0.25, 0.5)]  # 0.5, 2, less than 0.5
    q[2] += 1e-9
    found = call("clip_fraction", p, q, clip_low_threshold=0.5, clip_high_threshold=2.0)
    assert found == {"low": pytest.approx(1 / 3), "high": 0.0}


@for_each("name", POLICIES)
def test_finite_for_broken_policies(name: str) -> None:
    """A token that one policy finds impossible gives large numbers, never infinity or NaN."""
    for p, q in ((-800.0, 0.0), (0.0, -800.0), (-1e6, 0.0), (0.0, -1e6)):
        found = call(name, [[p, -1.0], [p, p]], [[q, -1.0], [q, q]])
        assert np.isfinite(list(found.values()) if isinstance(found, dict) else found).all(), (p, q)


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
        ([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.0, 3.0]], r"sampling_logprobs\[1\]\[1\]: is 3.0; expected a logprob"),
        ([], [], "trainer_logprobs"),
        ([[], []], [[], []], "trainer_logprobs: holds no tokens"),
        (None, [-1.0], "trainer_logprobs"),
        ([True], [-1.0], r"trainer_logprobs\[0\]"),
    ],
)
def test_bad_logprobs(p: Any, q: Any, message: str) -> None:
    """Logprobs have to be finite and of one shape, for metrics and corrections alike; metrics need some."""
    for name in POLICIES if p in ([], [[], []]) else (*POLICIES, *RATIOS):
        with pytest.raises(DataError, match=rf"^{message}"):
            (call if name in POLICIES else correct)(name, p, q)


def test_rounding_above_zero_passes() -> None:
    """Logprobs a little above 0 come from rounding, and stop no run."""
    assert call("kl_v1", [1e-3], [0.06]) == pytest.approx(0.059)
    with pytest.raises(DataError, match=r"^sampling_logprobs\[0\]: is 0.4; .*probability"):
        metrics.entropy_estimate(sampling_logprobs=[0.4])


@for_each(
    ("make", "error", "message"),
    [
        (lambda: call("chi2", [-1.0], [-1.0], level="batch"), ConfigError, "level"),
        (lambda: call("clip_fraction", [-1.0], [-1.0], clip_high_threshold=NAN), ConfigError, "clip_high_threshold"),
        (lambda: metrics.entropy_estimate(sampling_logprobs=[[]]), DataError, "sampling_logprobs"),
        (lambda: metrics.group_informativeness([NAN]), DataError, "rewards: has no scored"),
        (lambda: metrics.group_informativeness([[1.0], []]), DataError, r"rewards\[1\]"),
        (lambda: metrics.token_lag(versions=[[1], [7]], current=6), DataError, r"versions\[1\]\[0\]"),
        (lambda: metrics.token_lag(versions=[-1], current=6), DataError, r"versions\[0\]"),
        (lambda: metrics.token_lag(versions=[0.5], current=6), DataError, r"versions\[0\]"),
        (lambda: metrics.token_lag(versions=[[]], current=6), DataError, "versions: holds no tok"),
        (lambda: metrics.pass_at_k([[3], [3, 4]], [1, 1], 1), DataError, "n: has"),
        (lambda: metrics.pass_at_k([3, 3], [[1], [1, 1]], 1), DataError, "c: has"),
        (lambda: metrics.pass_at_k([3, 3], [1, 4], 1), DataError, r"c\[1\]"),
        (lambda: metrics.pass_at_k([3, 2], [1, 1], 3), DataError, r"n\[1\]"),
        (lambda: metrics.pass_at_k(4, [1, 2], 2), DataError, "[nc]: "),
    ],
)
def test_refused(make: Any, error: type[Exception], message: str) -> None:
    """Settings are checked, bounds must not cross, versions are of now at most, 0 <= c <= n and k <= n."""
    with pytest.raises(error, match=rf"^{message}"):
        make()


def test_group_informativeness() -> None:
    """Unscored rewards and groups do not count; groups that vary between the bounds are neither easy nor hard."""
    found = metrics.group_informativeness([[1, NAN, 1], [NAN, NAN], [0.2, 0.4]])
    assert found == {"zero": 0.5, "too_easy": 0.5, "too_hard": 0.0}
    assert metrics.group_informativeness([[1.0], [0.0, 1.0]]) == {"zero": 0.5, "too_easy": 0.5, "too_hard": 0.0}
    assert metrics.group_informativeness([0.2, 0.4], low=0.5)["too_hard"] == 1.0


@laws
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_subsets(n: int, data: st.DataObject) -> None:
    """pass@k is the share of subsets of size k that hold a right sample; thousands of samples do not overflow."""
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    subsets = list(itertools.combinations(range(n), k))
    expected = sum(any(i < c for i in subset) for subset in subsets) / len(subsets)
    found = metrics.pass_at_k(n, c, k)
    assert (type(found), found) == (float, pytest.approx(expected))
    np.testing.assert_allclose(metrics.pass_at_k([n, n], [c, n], k), [expected, 1.0])
    assert metrics.pass_at_k(100_000, 1, 10) == pytest.approx(1e-4)


def test_token_lag() -> None:
    """Over tokens, and over sequences that have some."""
    rows = [[4, 4, 5], [5], [], [2, 6]]
    assert metrics.token_lag(versions=rows, current=6) == {"mean": 10 / 6, "max": 4.0, "mixed": 2 / 3}
    assert metrics.token_lag(versions=[6, 6], current=6) == {"mean": 0.0, "max": 0.0, "mixed": 0.0}
