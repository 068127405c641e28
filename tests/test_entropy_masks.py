"""Masks that keep tokens for the entropy: values of peers, formulas, laws, what is refused, and a real policy."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.corrections import clip_b, clip_v, top_entropy
from rlkit.errors import ConfigError, DataError
from tests.each import for_each
from tests.properties import examples

NAN, INF = float("nan"), float("inf")
laws = examples(50)
BATCH: dict[str, Any] = {
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
KEPT = [[1.0] * 4, [1.0] * 3]


@pytest.mark.parametrize(
    ("settings", "last"), [({"mu": 0.3}, [1, 0, 0, 1, 1]), ({"mu": 1.0}, [1, 1, 0, 1, 1]), ({}, [1, 1, 1, 1, 1])]
)
def test_clip_b_of_a_peer(settings: dict[str, float], last: list[int]) -> None:
    """Trinity-RFT 0.6.0's clipb keeps the same tokens."""
    assert [row.tolist() for row in clip_b(**BATCH, **settings)] == [*KEPT, last]


@for_each(
    ("settings", "last"),
    [
        ({"mu": 0.05, "max_fraction": 1.0}, [1, 0, 0, 1, 1]),
        ({"mu": 0.05, "max_fraction": 0.1}, [1, 1, 0, 1, 1]),
        ({"mu": 0.05, "max_fraction": 0.0}, [1, 1, 0, 1, 1]),
        ({"mu": 0.3, "max_fraction": 1.0}, [1, 1, 0, 1, 1]),
        ({}, [1, 1, 1, 1, 1]),
    ],
)
def test_clip_v_of_a_peer(settings: dict[str, float], last: list[int]) -> None:
    """Trinity-RFT 0.6.0's clipv keeps the same tokens, of many candidates those that are nearest."""
    assert [row.tolist() for row in clip_v(**BATCH, **SUMS, **settings)] == [*KEPT, last]


ragged = st.lists(st.lists(st.floats(0, 5), max_size=6), min_size=1, max_size=5).filter(any)


@laws
@given(ragged, st.sampled_from([0.05, 0.2, 0.5, 1.0]))
def test_top_entropy(entropy: list[list[float]], fraction: float) -> None:
    """Kept is what reaches the batch's quantile: at least the fraction, and nothing below what was dropped."""
    flat = np.concatenate([np.ravel(row) for row in entropy])
    found = np.concatenate([np.ravel(row) for row in top_entropy(entropy=entropy, fraction=fraction)])
    expected = flat >= np.quantile(flat, 1 - fraction)
    np.testing.assert_array_equal(found, expected)
    assert found.sum() >= np.floor(fraction * flat.size)
    assert flat[found == 0].max(initial=-1) < flat[found == 1].min()


@laws
@given(st.integers(0, 2**32), st.sampled_from([clip_b, clip_v]))
def test_only_bad_tokens_are_dropped(seed: int, mask: Any) -> None:
    """Tokens whose advantage is not negative stay, whatever their score; the result is 0 or 1."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(6, 0.3), 40).clip(1e-9)
    chosen = p[np.arange(40), rng.integers(6, size=40)]
    given = {"entropy": -(p * np.log(p)).sum(1), "logprobs": np.log(chosen), "advantages": rng.normal(0, 1, 40).round()}
    if mask is clip_v:
        given |= {"sum_p2": (p**2).sum(1), "sum_p2_logp": (p**2 * np.log(p)).sum(1), "max_fraction": 0.1}
    found = mask(**given, mu=0.1)
    assert set(found.tolist()) <= {0.0, 1.0}
    assert (found[given["advantages"] >= 0] == 1).all()
    if mask is clip_v:
        assert (found == 0).sum() <= 4
    loose = mask(**given, mu=1e6)
    assert loose.all()


def test_scores_on_the_bound_are_kept() -> None:
    """With mu = 0 a token of probability 1 has D = 0 and stays, and so does one whose S is the mean."""
    pair: dict[str, Any] = {"entropy": [0.0, 2.0], "logprobs": [0.0, -3.0], "advantages": [-1.0, -1.0]}
    sums = {"sum_p2": [1.0, 0.3], "sum_p2_logp": [0.0, -0.4]}  # D of the second: 0.3 * 2 - 0.4 + e^-3 > 0
    assert clip_v(**pair, **sums, mu=0.0, max_fraction=1.0).tolist() == [1.0, 0.0]
    three = {"entropy": [0.0, 1.0, 0.5], "logprobs": [0.0] * 3, "advantages": [-1.0] * 3}  # S is H, its mean 0.5
    assert clip_b(**three, mu=0.0).tolist() == [0.0, 1.0, 1.0]


def test_scores_that_do_not_vary() -> None:
    """A batch of equal scores, one token, and no token at all keep what there is."""
    one = {"entropy": [0.7] * 3, "logprobs": [-0.7] * 3, "advantages": [-1.0] * 3}
    sums = {"sum_p2": [0.5] * 3, "sum_p2_logp": [-0.3] * 3}
    assert clip_b(**one, mu=0.0).tolist() == [1.0] * 3
    assert clip_v(**one, **sums, mu=0.0).tolist() == [1.0] * 3
    rounded = {**one, "entropy": [0.7, 0.7 + 1e-15, 0.7 - 1e-15]}  # scores that only rounding tells apart
    assert clip_b(**rounded, mu=0.0).tolist() == [1.0] * 3
    assert clip_v(**rounded, **sums, mu=0.0, max_fraction=1.0).tolist() == [1.0] * 3
    none: Any = {"entropy": [[], []], "logprobs": [[], []], "advantages": [[], []]}
    assert [row.size for row in clip_b(**none)] == [0, 0]
    assert [row.size for row in clip_v(**none, sum_p2=[[], []], sum_p2_logp=[[], []])] == [0, 0]
    assert [row.size for row in top_entropy(entropy=[[], []])] == [0, 0]


@for_each(
    ("call", "error", "message"),
    [
        (lambda: top_entropy(entropy=[[0.1], [-1.0]]), DataError, r"entropy\[1\]\[0\]: is -1.0"),
        (lambda: top_entropy(entropy=[NAN]), DataError, r"entropy\[0\]: is nan"),
        (lambda: top_entropy(entropy=[0.1], fraction=0.0), ConfigError, "fraction"),
        (lambda: top_entropy(entropy=[0.1], fraction=1.1), ConfigError, "fraction"),
        (lambda: clip_b(entropy=[0.1], logprobs=[0.5], advantages=[1.0]), DataError, r"logprobs\[0\]: is 0.5"),
        (lambda: clip_b(entropy=[0.1], logprobs=[-1.0], advantages=[INF]), DataError, r"advantages\[0\]"),
        (lambda: clip_b(entropy=[0.1], logprobs=[-1.0], advantages=[[1.0]]), DataError, "advantages"),
        (lambda: clip_b(entropy=[0.1], logprobs=[-1.0], advantages=[1.0], mu=-1.0), ConfigError, "mu"),
        (lambda: clip_v(**BATCH, **{**SUMS, "sum_p2": [[2.0] * 4, *SUMS["sum_p2"][1:]]}), DataError, r"sum_p2\[0\]"),
        (
            lambda: clip_v(**BATCH, **{**SUMS, "sum_p2_logp": [[0.5] * 4, *SUMS["sum_p2_logp"][1:]]}),
            DataError,
            r"sum_p2_logp\[0\]",
        ),
        (lambda: clip_v(**BATCH, **SUMS, max_fraction=2.0), ConfigError, "max_fraction"),
    ],
)
def test_refused(call: Any, error: type[Exception], message: str) -> None:
    """Bad input is named."""
    with pytest.raises(error, match=rf"^{message}"):
        call()


def test_rounding_passes() -> None:
    """Entropies and sums that float32 rounds beyond their range by up to 1e-4 are taken, and no more."""
    one: dict[str, Any] = {
        "entropy": [0.0],
        "logprobs": [0.0],
        "advantages": [-1.0],
        "sum_p2": [1.0],
        "sum_p2_logp": [0],
    }
    for name, edge in (("entropy", -1e-4), ("sum_p2", 1 + 1e-4), ("sum_p2_logp", 1e-4)):
        assert clip_v(**{**one, name: [edge]}).tolist() == [1.0]
        with pytest.raises(DataError, match=f"^{name}"):
            clip_v(**{**one, name: [edge + np.sign(edge - 0.5 * (name == "sum_p2")) * 1e-6]})
    with pytest.raises(DataError, match=r"^sum_p2\[0\]: is 0.0"):
        clip_v(**{**one, "sum_p2": [0.0]})


def test_defaults() -> None:
    """Defaults are pinned, and everything goes by name."""
    for function, expected in ((top_entropy, {"fraction": 0.2}), (clip_b, {"mu": 2.5})):
        parameters = inspect.signature(function).parameters.values()
        assert all(p.kind is p.KEYWORD_ONLY for p in parameters)
        assert {p.name: p.default for p in parameters if p.default is not p.empty} == expected
    assert inspect.signature(clip_v).parameters["mu"].default == 8.5
    assert inspect.signature(clip_v).parameters["max_fraction"].default == 1e-4


def test_with_a_policy() -> None:
    """What ``want`` gives is what the masks take, and a dropped token has no gradient."""
    with rlkit.connect("toy", seed=0) as policy:
        with policy.sampler().result() as sampler:
            samples = sampler.sample([65, 66], rlkit.SamplingParams(max_tokens=6), n=4).result()
        data = [sample.datum(a) for sample, a in zip(samples, (1.0, -1.0, 0.5, -0.5), strict=True)]
        output = policy.forward(data, want=("entropy", "sum_p2", "sum_p2_logp")).result()
        select = lambda arrays: [d.select(x) for d, x in zip(data, arrays, strict=True)]  # noqa: E731
        given: dict[str, Any] = {name: select(output.outputs[name]) for name in ("entropy",)}
        mask = top_entropy(**given, fraction=0.25)
        assert 0 < sum(row.sum() for row in mask) < sum(row.size for row in mask)
        given |= {"logprobs": output.selected, "advantages": select([d.inputs["advantages"] for d in data])}
        clip_b(**given, mu=0.1)
        clip_v(**given, **{name: select(output.outputs[name]) for name in ("sum_p2", "sum_p2_logp")}, mu=0.1)
        loss = policy.forward_backward([d.with_inputs(weights=m) for d, m in zip(data, mask, strict=True)], "ppo")
        assert np.isfinite(loss.result().metrics["loss:sum"])
