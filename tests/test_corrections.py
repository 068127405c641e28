"""Off-policy corrections: reference values, formulas as loops, laws, and what is refused."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import corrections
from rlkit.errors import ConfigError, DataError
from tests.each import for_each
from tests.golden import Case, assert_close, cases, each_case
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
RATIOS = sorted(set(corrections.__all__) - {"clip_b", "clip_v", "top_entropy"})  # of two policies' logprobs
laws = examples(50)
EXTRA: dict[str, dict[str, Any]] = {"divergence_rejection": {"threshold": 0.1}}


@each_case(cases("corrections"))
def test_reference_values(case: Case) -> None:
    """A correction gives what the independent reference and the peers named in ``source`` give."""
    assert_close(case.find("rlkit.corrections")(**case.inputs, **case.settings), case.expected["value"])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    """Two policies' logprobs of some sequences, some of which may be empty."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    row = lambda n: st.lists(st.floats(-3, 0), min_size=n, max_size=n)  # noqa: E731
    return [draw(row(n)) for n in lengths], [draw(row(n)) for n in lengths]


def call(name: str, p: Any, q: Any, **settings: Any) -> Any:
    return getattr(corrections, name)(trainer_logprobs=p, sampling_logprobs=q, **{**EXTRA.get(name, {}), **settings})


def k3(d: float) -> float:
    return math.exp(d) - 1 - d


def inside(w: float) -> float:
    return float(0.7 <= w <= 1.6)


LOOPS: dict[str, tuple[dict[str, Any], Callable[[list[float]], list[float]]]] = {
    "token_tis": (
        {"clip_low_threshold": 0.6, "clip_high_threshold": 1.3},
        lambda d: [max(0.6, min(math.exp(x), 1.3)) for x in d],
    ),
    "sequence_tis": (
        {"clip_low_threshold": 0.6, "clip_high_threshold": 1.3},
        lambda d: [max(0.6, min(math.exp(math.fsum(d)), 1.3))] * len(d),
    ),
    "icepop": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6},
        lambda d: [math.exp(x) * inside(math.exp(x)) for x in d],
    ),
    "clamp": ({"bound": 0.4}, lambda d: [math.exp(max(-0.4, min(0.4, x))) for x in d]),
    "token_mask": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6},
        lambda d: [inside(math.exp(x)) for x in d],
    ),
    "sequence_mask": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6},
        lambda d: [inside(math.exp(math.fsum(d)))] * len(d),
    ),
    "geometric_sequence_mask": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6},
        lambda d: [inside(math.exp(math.fsum(d) / len(d)))] * len(d),
    ),
    "outlier_veto": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6},
        lambda d: [min(inside(math.exp(x)) for x in d)] * len(d),
    ),
    "divergence_rejection": ({"threshold": 0.1}, lambda d: [float(k3(x) <= 0.1) for x in d]),
}
LEVELS: dict[str, Callable[[list[float]], float]] = {
    "sequence-sum": math.fsum,
    "sequence-mean": lambda x: math.fsum(x) / len(x),
    "sequence-max": max,
}


@laws
@given(pairs(), st.sampled_from(sorted(LOOPS)))
def test_formulas(pair: Any, name: str) -> None:
    """Every correction equals its formula as a loop over sequences, empty ones included."""
    p, q = pair
    settings, loop = LOOPS[name]
    d = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(p, q, strict=True)]
    assert_close(call(name, p, q, **settings), [loop(row) if row else [] for row in d])


@laws
@given(pairs(), st.sampled_from(sorted(LEVELS)), st.sampled_from(["k2", "k3"]))
def test_divergence_levels(pair: Any, level: str, estimator: str) -> None:
    """Sequence levels reject whole sequences by the sum, mean or largest divergence of their tokens."""
    p, q = pair
    each = {"k2": lambda x: x * x / 2, "k3": k3}[estimator]
    expected = []
    for x, y in zip(p, q, strict=True):
        divergences = [each(a - b) for a, b in zip(x, y, strict=True)]
        expected.append([float(LEVELS[level](divergences) <= 0.3)] * len(x) if x else [])
    assert_close(call("divergence_rejection", p, q, threshold=0.3, level=level, estimator=estimator), expected)


@laws
@given(pairs())
def test_batch_normalized_averages_one(pair: Any) -> None:
    """Normalised weights average 1 over the batch and keep their proportions."""
    p, q = pair
    found = np.concatenate([np.ravel(row) for row in call("batch_normalized", p, q)])
    if found.size:
        assert found.mean() == pytest.approx(1.0)
        w = np.exp([a - b for x, y in zip(p, q, strict=True) for a, b in zip(x, y, strict=True)])
        np.testing.assert_allclose(found, w / w.mean())


@laws
@given(pairs(), st.sampled_from(RATIOS), st.randoms(use_true_random=False))
def test_sequences_in_any_order(pair: Any, name: str, random: Any) -> None:
    """Shuffling sequences shuffles the result; masks hold 0 and 1 only."""
    p, q = pair
    order = random.sample(range(len(p)), len(p))
    before, after = call(name, p, q), call(name, [p[i] for i in order], [q[i] for i in order])
    for place, i in enumerate(order):
        np.testing.assert_allclose(after[place], before[i], rtol=1e-12)
    if inspect.getmodule(getattr(corrections, name)) and ("mask" in name or name in ("outlier_veto", *EXTRA)):
        assert {x for row in before for x in np.ravel(row).tolist()} <= {0.0, 1.0}


@for_each("name", RATIOS)
def test_on_policy(name: str) -> None:
    """Where trainer and sampler agree, every weight and every mask is exactly 1."""
    p = [[-0.1, -2.3], [-1.0]]
    assert [row.tolist() for row in call(name, p, p)] == [[1.0, 1.0], [1.0]]
    assert call(name, p[0], p[0]).shape == (2,)
    assert call(name, np.array([p[0]], np.float32), np.array([p[0]], np.float32)).dtype == np.float64


@for_each("name", RATIOS)
@for_each("gap", [-1e6, -800.0, 800.0, 1e6])
def test_finite(name: str, gap: float) -> None:
    """A token that one policy finds impossible gives no infinity and no NaN."""
    p, q = min(gap, 0.0), min(-gap, 0.0)
    for row in call(name, [[p, -1.0], [p, p]], [[q, -1.0], [q, q]]):
        assert np.isfinite(row).all()


def test_bounds_belong_to_the_inside() -> None:
    """A ratio on a bound is kept, and asymmetric bounds are not the other way round."""
    p, q = [math.log(0.75), math.log(0.375), math.log(0.5), math.log(0.3)], [math.log(0.5)] * 4
    bounds = {"clip_low_threshold": 0.75, "clip_high_threshold": 1.0}
    np.testing.assert_array_equal(call("token_mask", p, q, **bounds), [0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(call("icepop", p, q, **bounds), [0.0, 0.75, 1.0, 0.0])
    keep = {"clip_low_threshold": 0.9, "clip_high_threshold": 2.0}
    np.testing.assert_array_equal(call("token_mask", p[:2], q[:2], **keep), [1.0, 0.0])


def test_no_tokens_at_all() -> None:
    """A batch without tokens gives a result without tokens."""
    for name in RATIOS:
        assert [row.size for row in call(name, [[], []], [[], []])] == [0, 0]


@for_each("name", RATIOS)
def test_bad_logprobs(name: str) -> None:
    """Logprobs have to be finite and of one shape."""
    for p, q, message in (
        ([-1.0], [-1.0, -2.0], "sampling_logprobs"),
        ([[-1.0], [-1.0, -2.0]], [[-1.0], [-1.0]], r"sampling_logprobs\[1\]"),
        ([[-1.0, NAN]], [[-1.0, -1.0]], r"trainer_logprobs\[0\]\[1\]: is nan"),
        ([-1.0], [-INF], r"sampling_logprobs\[0\]: is -inf"),
        (None, [-1.0], "trainer_logprobs"),
        ([0.11], [-1.0], r"trainer_logprobs\[0\]: is 0.11; expected a logprob"),
        ([[-1.0], [-1.0, -1.0]], [[-1.0], [-1.0, 3.0]], r"sampling_logprobs\[1\]\[1\]: is 3.0; expected a logprob"),
        ([-1.0], ["x"], r"sampling_logprobs\[0\]"),
    ):
        with pytest.raises(DataError, match=rf"^{message}"):
            call(name, p, q)


@for_each(
    ("name", "settings", "message"),
    [
        ("token_tis", {"clip_high_threshold": -1.0}, "clip_high_threshold"),
        ("token_tis", {"clip_low_threshold": 2.5}, "clip_low_threshold"),
        ("sequence_tis", {"clip_high_threshold": INF}, "clip_high_threshold"),
        ("icepop", {"clip_low_threshold": 6.0}, "clip_low_threshold"),
        ("token_mask", {"clip_low_threshold": 3.0}, "clip_low_threshold"),
        ("sequence_mask", {"clip_high_threshold": 0.1}, "clip_high_threshold"),
        ("geometric_sequence_mask", {"clip_low_threshold": None}, "clip_low_threshold"),
        ("outlier_veto", {"clip_high_threshold": NAN}, "clip_high_threshold"),
        ("clamp", {"bound": 0.0}, "bound"),
        ("clamp", {"bound": 1e9}, "bound"),
        ("divergence_rejection", {"threshold": -0.1}, "threshold"),
        ("divergence_rejection", {"level": "batch"}, "level"),
        ("divergence_rejection", {"estimator": "k1"}, "estimator"),
    ],
)
def test_bad_settings(name: str, settings: dict[str, Any], message: str) -> None:
    """A setting out of range, and bounds that cross, are ConfigErrors."""
    with pytest.raises(ConfigError, match=rf"^{message}"):
        call(name, [-1.0], [-1.0], **settings)


def test_defaults_and_public_names() -> None:
    """Defaults are pinned; everything goes by name only; every public name has an example."""
    found = {}
    for name in RATIOS:
        parameters = inspect.signature(getattr(corrections, name)).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
        assert ">>>" in getattr(corrections, name).__doc__
        found[name] = {p.name: p.default for p in parameters if p.default is not p.empty}
    bounds = lambda low, high: {"clip_low_threshold": low, "clip_high_threshold": high}  # noqa: E731
    assert found == {
        "batch_normalized": {},
        "clamp": {"bound": 20.0},
        "divergence_rejection": {"level": "token", "estimator": "k3"},
        "geometric_sequence_mask": bounds(0.999, 1.002),
        "icepop": bounds(0.5, 5.0),
        "outlier_veto": bounds(1e-4, 100.0),
        "sequence_mask": bounds(0.5, 2.0),
        "sequence_tis": bounds(0.0, 2.0),
        "token_mask": bounds(0.5, 2.0),
        "token_tis": bounds(0.0, 2.0),
    }


def test_levels_tell_sums_means_and_the_largest_apart() -> None:
    """Two tokens that both diverge, by 2 and 0.5: their sum, mean and largest are three numbers."""
    p, q = [[-3.0, -2.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]
    kept = {"sequence-sum": 2.5, "sequence-mean": 1.25, "sequence-max": 2.0}
    for level, divergence in kept.items():
        for threshold, keep in ((divergence - 0.01, 0.0), (divergence, 1.0)):
            found = call("divergence_rejection", p, q, threshold=threshold, level=level, estimator="k2")
            np.testing.assert_array_equal(found, [[keep] * 2, [1.0] * 2])


def test_a_divergence_on_the_threshold_is_kept() -> None:
    """At every level: a token whose k2 is the threshold, and one of divergence 0 where the threshold is 0."""
    for level in ("token", "sequence-sum", "sequence-mean", "sequence-max"):
        for p, threshold in ((-3.0, 2.0), (-1.0, 0.0)):  # d = -2 and 0
            found = call("divergence_rejection", [[p]], [[-1.0]], threshold=threshold, level=level, estimator="k2")
            assert found.tolist() == [[1.0]], (level, threshold)
        found = call("divergence_rejection", [[-1.0]], [[-1.0]], threshold=0.0, level=level, estimator="k3")
        assert found.tolist() == [[1.0]], level
