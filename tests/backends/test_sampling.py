"""The draw of a token, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkit import SamplingParams
from rlkit.backends.sampling import draw

torch = pytest.importorskip("torch")

UNIFORMS = st.one_of(st.floats(0, 1, exclude_max=True), st.sampled_from([0.0, 1 - 2**-53]))


def reference(logits, params, u):
    """(lowest token, highest token) that rounding in float32 may give for one row, and all logprobs."""
    logits = logits.astype(np.float64) / params.temperature
    logprobs = logits - logits.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    if params.top_k > 0:
        order = np.argsort(-logprobs, kind="stable")
        logprobs[order[params.top_k :]] = -np.inf
        logprobs -= np.log(np.exp(logprobs).sum())
    cumulated = np.cumsum(np.exp(logprobs))
    edges = [np.searchsorted(cumulated, u * cumulated[-1] + slack, side="right") for slack in (-1e-5, 1e-5)]
    return *edges, logprobs


@given(
    vocabulary=st.sampled_from([1, 2, 255, 256, 257, 700]),
    rows=st.lists(
        st.tuples(st.integers(0, 2**31), st.sampled_from([0.1, 2.0, 30.0]), UNIFORMS, st.sampled_from([-1, 1, 3])),
        min_size=1,
        max_size=5,
    ),
    temperature=st.sampled_from([1.0, 0.7]),
)
@settings(max_examples=100, deadline=None)
def test_draw(vocabulary, rows, temperature):
    """The token at which the cumulated probability exceeds u, a possible one at the ends too; alone or in company."""
    logits = np.stack([np.random.default_rng(s).normal(size=vocabulary) * scale for s, scale, _, _ in rows])
    logits = logits.astype(np.float32)
    params = [SamplingParams(temperature=temperature, top_k=k) for *_, k in rows]
    uniforms = np.array([u for _, _, u, _ in rows])
    tokens, chosen = draw(torch.from_numpy(logits), params, uniforms)
    for b, token in enumerate(tokens):
        low, high, logprobs = reference(logits[b], params[b], uniforms[b])
        assert low <= token <= high
        assert np.isfinite(chosen[b])
        assert abs(chosen[b] - logprobs[token]) < 1e-4 + 1e-6 * abs(logprobs[token])
        alone = draw(torch.from_numpy(logits[b : b + 1]), params[b : b + 1], uniforms[b : b + 1])
        assert (alone[0][0], alone[1][0]) == (token, chosen[b])


def test_draw_follows_the_probabilities():
    """Over a fine grid of u each token comes up as often as it is probable; greedy rows take the most probable one."""
    logits = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 2
    grid = (np.arange(20000) + 0.5) / 20000
    tokens, _ = draw(logits.expand(len(grid), -1), [SamplingParams()] * len(grid), grid)
    assert (np.diff(tokens) >= 0).all()
    counts = np.bincount(tokens, minlength=600) / len(grid)
    assert np.abs(counts - torch.softmax(logits.double(), 0).numpy()).max() < 1.5 / len(grid)
    both = [SamplingParams(temperature=0.0), SamplingParams()]
    tokens, _ = draw(logits.expand(2, -1), both, np.array([0.3, 0.3]))
    assert tokens[0] == logits.argmax()
    assert tokens[1] == draw(logits[None], both[1:], np.array([0.3]))[0][0]
