"""Corrections: reference values, formulas as loops, laws, what is refused; masks that keep tokens for the entropy.

Bad logprobs are in tests/test_metrics.py, ranges of settings in tests/test_types.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import corrections
from rlkit.corrections import clip_b, clip_v, top_entropy
from rlkit.errors import ConfigError, DataError
from tests.each import for_each
from tests.golden import Case, assert_close, cases, each_case
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
RATIOS = sorted(set(corrections.__all__) - {"clip_b", "clip_v", "top_entropy"})  # of two policies' logprobs
LEVELS: dict[str, Callable[[list[float]], float]] = {
    "sequence-sum": math.fsum,
    "sequence-mean": lambda x: math.fsum(x) / len(x),
    "sequence-max": max,
}
laws = examples(50)


def bounds(low: float, high: float) -> dict[str, float]:
    return {"clip_low_threshold": low, "clip_high_threshold": high}


@each_case(cases("corrections"))
def test_reference_values(case: Case) -> None:
    """A correction gives what the independent reference and the peers named in ``source`` give."""
    assert_close(case.find("rlkit.corrections")(**case.inputs, **case.settings), case.expected["value"])


@st.composite
def pairs(draw: st.DrawFn, low: float = -3.0) -> tuple[list[list[float]], list[list[float]]]:
    """Two policies' logprobs of some sequences, some of which may be empty."""
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    row = lambda n: st.lists(st.floats(low, 0), min_size=n, max_size=n)  # noqa: E731
    return [draw(row(n)) for n in lengths], [draw(row(n)) for n in lengths]


def call(name: str, p: Any, q: Any, **settings: Any) -> Any:
    more = {"threshold": 0.1} if name == "divergence_rejection" else {}
    return getattr(corrections, name)(trainer_logprobs=p, sampling_logprobs=q, **{**more, **settings})


def inside(w: float) -> float:
    return float(0.7 <= w <= 1.6)


def clip(w: float) -> float:
    return max(0.6, min(w, 1.3))


ESTIMATORS: dict[str, Callable[[float], float]] = {"k2": lambda d: d * d / 2, "k3": lambda d: math.exp(d) - 1 - d}
LOOPS: dict[str, tuple[dict[str, Any], Callable[[list[float]], list[float]]]] = {
    "token_tis": (bounds(0.6, 1.3), lambda d: [clip(math.exp(x)) for x in d]),
    "sequence_tis": (bounds(0.6, 1.3), lambda d: [clip(math.exp(math.fsum(d)))] * len(d)),
    "icepop": (bounds(0.7, 1.6), lambda d: [math.exp(x) * inside(math.exp(x)) for x in d]),
    "clamp": ({"bound": 0.4}, lambda d: [math.exp(max(-0.4, min(0.4, x))) for x in d]),
    "token_mask": (bounds(0.7, 1.6), lambda d: [inside(math.exp(x)) for x in d]),
    "sequence_mask": (bounds(0.7, 1.6), lambda d: [inside(math.exp(math.fsum(d)))] * len(d)),
    "geometric_sequence_mask": (bounds(0.7, 1.6), lambda d: [inside(math.exp(math.fsum(d) / len(d)))] * len(d)),
    "outlier_veto": (bounds(0.7, 1.6), lambda d: [min(inside(math.exp(x)) for x in d)] * len(d)),
}


@laws
@given(pairs(), st.sampled_from(sorted(LOOPS)))
def test_formulas(pair: Any, name: str) -> None:
    """Every correction equals its formula as a loop over sequences, empty ones included."""
    settings, loop = LOOPS[name]
    d = [[a - b for a, b in zip(x, y, strict=True)] for x, y in zip(*pair, strict=True)]
    assert_close(call(name, *pair, **settings), [loop(row) if row else [] for row in d])


@laws
@given(pairs(), st.sampled_from(["token", *LEVELS]), st.sampled_from(sorted(ESTIMATORS)))
def test_divergence_levels(pair: Any, level: str, estimator: str) -> None:
    """Sequence levels reject whole sequences by the sum, mean or largest divergence of their tokens."""
    expected = []
    for x, y in zip(*pair, strict=True):
        row = [ESTIMATORS[estimator](a - b) for a, b in zip(x, y, strict=True)]
        row = row if level == "token" or not row else [LEVELS[level](row)] * len(row)
        expected.append([float(divergence <= 0.3) for divergence in row])
    assert_close(call("divergence_rejection", *pair, threshold=0.3, level=level, estimator=estimator), expected)


@laws
@given(pairs().filter(lambda pair: any(pair[0])))
def test_batch_normalized_averages_one(pair: Any) -> None:
    """Normalised weights average 1 over the batch and keep their proportions."""
    w = np.exp([a - b for x, y in zip(*pair, strict=True) for a, b in zip(x, y, strict=True)])
    np.testing.assert_allclose(np.concatenate(call("batch_normalized", *pair), axis=None), w / w.mean())


@for_each("name", RATIOS)
def test_corners(name: str) -> None:
    """On policy all are exactly 1; a token that one policy finds impossible gives no infinity; no tokens give none."""
    p = [[-0.1, -2.3], [-1.0]]
    assert [row.tolist() for row in call(name, p, p)] == [[1.0, 1.0], [1.0]]
    assert call(name, p[0], p[0]).shape == (2,)
    assert call(name, np.array([p[0]], np.float32), np.array([p[0]], np.float32)).dtype == np.float64
    for gap in (-1e6, -800.0, 800.0, 1e6):
        x, y = min(gap, 0.0), min(-gap, 0.0)
        assert all(np.isfinite(row).all() for row in call(name, [[x, -1.0], [x, x]], [[y, -1.0], [y, y]])), gap
    assert [row.size for row in call(name, [[], []], [[], []])] == [0, 0]


def test_bounds_belong_to_the_inside() -> None:
    """A ratio on a bound is kept, and asymmetric bounds are not the other way round."""
    p, q = [math.log(0.75), math.log(0.375), math.log(0.5), math.log(0.3)], [math.log(0.5)] * 4
    np.testing.assert_array_equal(call("token_mask", p, q, **bounds(0.75, 1.0)), [0.0, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(call("icepop", p, q, **bounds(0.75, 1.0)), [0.0, 0.75, 1.0, 0.0])
    np.testing.assert_array_equal(call("token_mask", p[:2], q[:2], **bounds(0.9, 2.0)), [1.0, 0.0])
    kept = call("geometric_sequence_mask", [[-1.0], [-3.0]], [[-1.5], [-1.0]], **bounds(0.2, 1.7))
    assert [row.tolist() for row in kept] == [[1.0], [0.0]], "ratios of 1.65 and 0.135"


def test_what_is_on_the_threshold_is_kept() -> None:
    """Two tokens that both diverge, by 2 and 0.5: their sum, mean and largest; also where the threshold is 0."""
    p, q = [[-3.0, -2.0], [-1.0, -1.0]], [[-1.0, -1.0], [-1.0, -1.0]]
    for level, divergence in {"sequence-sum": 2.5, "sequence-mean": 1.25, "sequence-max": 2.0}.items():
        for threshold, kept in ((divergence - 0.01, 0.0), (divergence, 1.0)):
            found = call("divergence_rejection", p, q, level=level, threshold=threshold, estimator="k2")
            np.testing.assert_array_equal(found, [[kept] * 2, [1.0] * 2], f"{level}, {threshold}")
    for level in ("token", *LEVELS):
        for estimator in ESTIMATORS:
            for lp, threshold, kept in ((-3.0, 2.0, 1.0), (-3.0, 1.0, 0.0), (-1.0, 0.0, 1.0)):
                settings = {"level": level, "threshold": threshold, "estimator": estimator}
                found = call("divergence_rejection", [[lp], []], [[-1.0], []], **settings)
                assert [row.tolist() for row in found] == [[kept], []], settings


@for_each(
    ("name", "settings", "message"),
    [
        ("token_tis", {"clip_high_threshold": -1.0}, "clip_high_threshold"),
        ("sequence_tis", {"clip_high_threshold": INF}, "clip_high_threshold"),
        ("icepop", {"clip_low_threshold": 6.0}, "clip_low_threshold"),
        ("token_mask", {"clip_low_threshold": 3.0}, "clip_low_threshold"),
        ("sequence_mask", {"clip_high_threshold": 0.1}, "clip_high_threshold"),
        ("geometric_sequence_mask", {"clip_low_threshold": None}, "clip_low_threshold"),
        ("outlier_veto", {"clip_high_threshold": NAN}, "clip_high_threshold"),
        ("divergence_rejection", {"level": "batch"}, "level"),
        ("divergence_rejection", {"estimator": "k1"}, "estimator"),
    ],
)
def test_bad_settings(name: str, settings: dict[str, Any], message: str) -> None:
    """A setting out of range, and bounds that cross, are ConfigErrors."""
    with pytest.raises(ConfigError, match=rf"^{message}"):
        call(name, [-1.0], [-1.0], **settings)


# Masks that keep tokens for the entropy: values of Trinity-RFT 0.6.0's clipb and clipv.
ENTROPIES: dict[str, Any] = {
    "advantages": [[1.120894923] * 4, [-0.800639231] * 3, [-0.320255692] * 5],
    "entropy": [[1.4778, 1.0019, 1.8712, 1.3353], [1.2743, 1.1772, 1.7338], [1.2754, 1.6333, 1.734, 1.6139, 1.3114]],
    "logprobs": [
        [-0.9801, -1.6938, -1.8247, -1.3333],
        [-0.4534, -0.6595, -1.0989],
        [-0.8929, -1.5666, -2.096, -0.8492, -0.543],
    ],
}
SUMS: dict[str, Any] = {
    "sum_p2": [[0.2678, 0.5024, 0.1708, 0.3161], [0.4323, 0.3899, 0.2122], [0.3423, 0.2225, 0.2096, 0.2553, 0.3828]],
    "sum_p2_logp": [
        [-0.3259, -0.256, -0.2893, -0.3223],
        [-0.2519, -0.3196, -0.3007],
        [-0.3322, -0.3136, -0.2978, -0.2988, -0.2786],
    ],
}


def test_masks_of_entropies_keep_what_a_peer_keeps() -> None:
    """Of many candidates ``clip_v`` drops those with the largest score; rows may be one after the other."""
    flat = {name: np.concatenate(rows) for name, rows in {**ENTROPIES, **SUMS}.items()}
    for mask, settings, last in (
        (clip_b, {"mu": 0.3}, [1, 0, 0, 1, 1]),
        (clip_b, {"mu": 1.0}, [1, 1, 0, 1, 1]),
        (clip_b, {}, [1, 1, 1, 1, 1]),
        (clip_v, {"mu": 0.05, "max_fraction": 1.0}, [1, 0, 0, 1, 1]),
        (clip_v, {"mu": 0.05, "max_fraction": 0.1}, [1, 1, 0, 1, 1]),
        (clip_v, {"mu": 0.05, "max_fraction": 0.0}, [1, 1, 0, 1, 1]),
        (clip_v, {"mu": 0.3, "max_fraction": 1.0}, [1, 1, 0, 1, 1]),
        (clip_v, {}, [1, 1, 1, 1, 1]),
    ):
        names = (*ENTROPIES, *(SUMS if mask is clip_v else ()))
        found = mask(**{name: {**ENTROPIES, **SUMS}[name] for name in names}, **settings)
        assert [row.tolist() for row in found] == [[1.0] * 4, [1.0] * 3, last], (mask, settings)
        assert mask(**{name: flat[name] for name in names}, **settings).tolist() == np.concatenate(found).tolist()


@laws
@given(
    st.lists(st.lists(st.floats(0, 5), max_size=6), min_size=1, max_size=5).filter(any),
    st.sampled_from([0.05, 0.2, 0.5, 1.0]),
)
def test_top_entropy(entropy: list[list[float]], fraction: float) -> None:
    """Kept is what reaches the batch's quantile."""
    flat = np.concatenate([np.ravel(row) for row in entropy])
    found = np.concatenate([np.ravel(row) for row in top_entropy(entropy=entropy, fraction=fraction)])
    np.testing.assert_array_equal(found, flat >= np.quantile(flat, 1 - fraction))


def test_entropies_at_their_corners() -> None:
    """Kept are a score on the bound, scores that vary by rounding alone, advantages of 0; there may be no tokens."""
    pair: dict[str, Any] = {"entropy": [0.0, 2.0], "logprobs": [0.0, -3.0]}
    sums = {"sum_p2": [1.0, 0.3], "sum_p2_logp": [0.0, -0.4]}  # D of the second: 0.3 * 2 - 0.4 + e^-3 > 0
    for advantage, last in ((-1.0, 0.0), (0.0, 1.0)):
        pair["advantages"] = [advantage] * 2
        assert clip_v(**pair, **sums, mu=0.0, max_fraction=1.0).tolist() == [1.0, last], advantage
        three = {"entropy": [0.0, 1.0, 0.5], "logprobs": [0.0] * 3, "advantages": [advantage] * 3}  # S is H, mean 0.5
        assert clip_b(**three, mu=0.0).tolist() == [last, 1.0, 1.0], advantage
    two = {"entropy": [0.5, 1.0], "logprobs": [-0.5, -1.0], "advantages": [-1.0, -1.0]}  # each is 1 deviation away
    assert clip_b(**two, mu=1.0).tolist() == [1.0, 1.0]
    sums = {"sum_p2": [0.5] * 3, "sum_p2_logp": [-0.3] * 3}
    for entropy in ([0.7] * 3, [0.7, 0.7 + 1e-15, 0.7 - 1e-15]):
        one = {"entropy": entropy, "logprobs": [-0.7] * 3, "advantages": [-1.0] * 3}
        assert clip_b(**one, mu=0.0).tolist() == clip_v(**one, **sums, mu=0.0, max_fraction=1.0).tolist() == [1.0] * 3
    none: Any = {name: [[], []] for name in ENTROPIES}
    for found in (clip_b(**none), clip_v(**none, **{name: [[], []] for name in SUMS}), top_entropy(entropy=[[], []])):
        assert [row.size for row in found] == [0, 0]


def test_entropies_that_are_refused() -> None:
    """Bad input is named; what float32 rounds beyond the range by up to 1e-4 is taken, and no more."""
    one: dict[str, Any] = {name: [0.0] for name in (*ENTROPIES, *SUMS)} | {"advantages": [-1.0], "sum_p2": [1.0]}
    for name, edge, beyond in (("entropy", -1e-4, -1e-6), ("sum_p2", 1 + 1e-4, 1e-6), ("sum_p2_logp", 1e-4, 1e-6)):
        assert clip_v(**{**one, name: [edge]}).tolist() == [1.0]
        with pytest.raises(DataError, match=rf"^{name}\[0\]"):
            clip_v(**{**one, name: [edge + beyond]})
    for name, value, message in (
        ("sum_p2", [0.0], r"sum_p2\[0\]: is 0.0"),
        ("logprobs", [0.5], r"logprobs\[0\]: is 0.5"),
        ("advantages", [INF], r"advantages\[0\]"),
        ("advantages", [[1.0]], "advantages"),
        ("entropy", [NAN], r"entropy\[0\]: is nan"),
    ):
        with pytest.raises(DataError, match=rf"^{message}"):
            clip_v(**{**one, name: value})
    with pytest.raises(DataError, match=r"^entropy\[1\]\[0\]: is -1.0"):
        top_entropy(entropy=[[0.1], [-1.0]])


def test_masks_of_a_policys_entropies() -> None:
    """What ``want`` gives is what the masks take, and a dropped token has no gradient."""
    with rlkit.connect("toy", seed=0) as policy:
        with policy.sampler().result() as sampler:
            samples = sampler.sample([65, 66], rlkit.SamplingParams(max_tokens=6), n=4).result()
        data = [sample.datum(a) for sample, a in zip(samples, (1.0, -1.0, 0.5, -0.5), strict=True)]
        output = policy.forward(data, want=("entropy", *SUMS)).result()
        select = lambda arrays: [d.select(x) for d, x in zip(data, arrays, strict=True)]  # noqa: E731
        outputs: dict[str, Any] = {name: select(output.outputs[name]) for name in ("entropy", *SUMS)}
        mask = top_entropy(entropy=outputs["entropy"], fraction=0.25)
        assert 0 < sum(row.sum() for row in mask) < sum(row.size for row in mask)
        outputs |= {"logprobs": output.selected, "advantages": select([d.inputs["advantages"] for d in data])}
        clip_v(**outputs, mu=0.1)
        loss = policy.forward_backward([d.with_inputs(weights=m) for d, m in zip(data, mask, strict=True)], "ppo")
        assert np.isfinite(loss.result().metrics["loss:sum"])
