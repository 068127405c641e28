"""The optimal token baseline: reference values, its formula as a loop, laws, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.advantages import discounted_returns, optimal_token_baseline
from rlkit.errors import DataError
from tests.each import for_each
from tests.properties import examples

laws = examples(50)
REWARDS = [[0.001, 0.299, 0.726], [0.075, 0.577, -0.189, 0.683, -0.067], [1.442, 0.934], [-1.761, 0.735, -0.023, 1.071]]
REWARDS += [[1.888]]
LOGPROBS = [[-0.5459, -0.2653, -1.6024], [-0.6202, -0.5905, -0.0898, -0.7143, -1.4281], [-3.6825, -0.5465]]
LOGPROBS += [[-0.9428, -0.9739, -2.1908, -1.0541], [-1.2951]]
SUM_P2 = [[0.413, 0.6102, 0.3482], [0.353, 0.4201, 0.8397, 0.3338, 0.3035], [0.2504, 0.4342]]
SUM_P2 += [[0.3447, 0.2841, 0.7088, 0.267], [0.2793]]
WEIGHTS = [[1.223, 0.127, 0.384], [1.342, 0.598, 0.748, 2.0, 0.546], [2.0, 0.228], [0.031, 0.27, 0.273, 1.492], [0.035]]


@pytest.mark.parametrize(
    ("importance", "expected"),
    [
        (
            None,
            [
                [-0.944011104, 0.061229488, 0.095716331],
                [-0.891011104, 0.040229488, -0.203283669, 0.616, -0.067],
                [0.405988896, -0.029770512],
                [-1.052345041, 1.783, 1.048, 1.071],
                [0.813654959],
            ],
        ),
        (
            WEIGHTS,
            [
                [-1.14553559, 0.077654069, 0.162153192],
                [-1.09253559, 0.056654069, -0.136846808, 0.616, -0.067],
                [0.20446441, -0.013345931],
                [-1.161492292, 1.783, 1.048, 1.071],
                [0.704507708],
            ],
        ),
    ],
)
def test_reference_values(importance: Any, expected: list[list[float]]) -> None:
    """verl 0.9.1's optimal_token_baseline in float64, epsilon 1e-12, two prompts of three and two samples."""
    options = {"logprobs": LOGPROBS, "sum_p2": SUM_P2, "importance": importance, "groups": ["a", "a", "a", "b", "b"]}
    for found, row in zip(optimal_token_baseline(REWARDS, **options), expected, strict=True):
        np.testing.assert_allclose(found, row, atol=1e-8)


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[list[float]], ...]:
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any))
    row = lambda n, low, high: draw(st.lists(st.floats(low, high), min_size=n, max_size=n))  # noqa: E731
    kinds = [(-2.0, 2.0), (-3.0, -0.01), (0.05, 1.0), (0.0, 2.0)]
    return tuple([row(n, low, high) for n in lengths] for low, high in kinds)


@laws
@given(samples())
def test_formula(drawn: Any) -> None:
    """Each token's advantage is its return minus the energy-weighted mean of those at its place, as a loop."""
    rewards, lps, p2, w = drawn
    found = optimal_token_baseline(rewards, logprobs=lps, sum_p2=p2, importance=w, singleton="zero")
    returns = [[sum(row[t:]) for t in range(len(row))] for row in rewards]
    energy = [
        [sum(x[u] ** 2 * max(1 - 2 * np.exp(a[u]) + b[u], 0.0) for u in range(t + 1)) for t in range(len(a))]
        for a, b, x in zip(lps, p2, w, strict=True)
    ]
    for i, row in enumerate(returns):
        for t, value in enumerate(row):
            there = [j for j in range(len(returns)) if len(returns[j]) > t]
            shares = [energy[j][t] for j in there]
            if sum(shares) < 1e-6:
                continue  # next to no energy: the weights are rounding
            mean = sum(s * returns[j][t] for s, j in zip(shares, there, strict=True)) / sum(shares)
            assert found[i][t] == pytest.approx(value - mean if len(there) > 1 else 0.0, abs=1e-7)


def test_it_is_the_baseline_of_least_variance() -> None:
    """Of all baselines of a one-token answer this one makes the gradient's second moment least."""
    rng = np.random.default_rng(0)
    p = np.array([0.7, 0.2, 0.1])
    worth = np.array([1.0, 0.0, 3.0])
    tokens = rng.choice(3, 4000, p=p)
    found = optimal_token_baseline(
        worth[tokens][:, None], logprobs=np.log(p[tokens])[:, None], sum_p2=np.full((4000, 1), (p**2).sum())
    )
    baseline = float(worth[tokens[0]] - found[0, 0])
    scores = np.eye(3)[tokens] - p

    def moment(b: float) -> float:
        return float((((worth[tokens] - b)[:, None] * scores) ** 2).sum(1).mean())

    assert moment(baseline) < min(moment(baseline - 0.05), moment(baseline + 0.05), moment(worth[tokens].mean()))


def test_equal_returns_give_exactly_zero() -> None:
    """Where all samples of a place have one return, rounding does not make an advantage."""
    r = np.float32(0.1)
    found = optimal_token_baseline([[0.0, r]] * 7, logprobs=LAWS_LP, sum_p2=[[0.31, 0.77]] * 7)
    np.testing.assert_array_equal(found, np.zeros((7, 2)))


LAWS_LP = [[-0.1 * i, -0.3 * i] for i in range(1, 8)]


def test_what_is_left_alone() -> None:
    """The tail of the longest sample, and a group of one: its return, 0, or an error that names the token."""
    rewards, lps, p2 = [[0.0, 0.0, 1.0], [0.5]], [[-1.0] * 3, [-1.0]], [[0.5] * 3, [0.5]]
    found = optimal_token_baseline(rewards, logprobs=lps, sum_p2=p2)
    np.testing.assert_array_equal(found[0][1:], discounted_returns(rewards[0])[1:])
    np.testing.assert_array_equal(
        optimal_token_baseline(rewards, logprobs=lps, sum_p2=p2, singleton="zero")[0][1:], [0.0, 0.0]
    )
    with pytest.raises(DataError, match=r"^rewards\[0\]\[1\]: is the only token"):
        optimal_token_baseline(rewards, logprobs=lps, sum_p2=p2, singleton="error")
    apart = optimal_token_baseline(rewards, logprobs=lps, sum_p2=p2, groups=["a", "b"])
    np.testing.assert_array_equal(apart[1], [0.5])


@for_each(
    ("changed", "message"),
    [
        ({"logprobs": [[-1.0], [1.0]]}, r"logprobs\[1\]\[0\]: is 1.0"),
        ({"logprobs": [[-1.0], [-1.0, -1.0]]}, r"logprobs\[1\]"),
        ({"sum_p2": [[0.0], [0.5]]}, r"sum_p2\[0\]\[0\]: is 0.0"),
        ({"sum_p2": [[0.5], [1.1]]}, r"sum_p2\[1\]\[0\]"),
        ({"sum_p2": [[0.5], [float("nan")]]}, r"sum_p2\[1\]\[0\]: is nan"),
        ({"importance": [[1.0], [-1.0]]}, r"importance\[1\]\[0\]"),
        ({"groups": ["a"]}, "groups"),
    ],
)
def test_refused(changed: dict[str, Any], message: str) -> None:
    """Bad input is named."""
    given = {"logprobs": [[-1.0], [-1.0]], "sum_p2": [[0.5], [0.5]], **changed}
    with pytest.raises(DataError, match=rf"^{message}"):
        optimal_token_baseline([[1.0], [0.0]], **given)
