"""The draw of a token, against numpy in float64 and transformers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit import SamplingParams
from tests.properties import examples

torch = pytest.importorskip("torch")

from rlkit.backends import _drawing  # noqa: E402
from rlkit.backends._drawing import draw  # noqa: E402

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
@examples(100)
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


TRUNCATIONS = [(-1, 0.9), (-1, 0.2), (-1, 1e-9), (5, 1.0), (40, 0.95), (2000, 1.0), (10**6, 0.99), (300, 0.5), (1, 1.0)]


def rows_of(vocabulary, seed=0):
    """Logits from peaked to flat, so that some keep few tokens and some more than any number of candidates."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.tensor([0.01, 0.5, 2.0, 5.0, 20.0])
    return torch.randn(len(scales), vocabulary, generator=generator) * scales[:, None]


def kept(logits, params):
    """The logprobs of what is kept, -inf elsewhere."""
    size = logits.shape[1]
    padded = torch.nn.functional.pad(logits, (0, -size % _drawing.BLOCK), value=-torch.inf)
    probs = padded.softmax(-1)
    _drawing.cut(probs, padded, params)
    logprobs = (probs.double() / probs.double().sum(-1, keepdim=True)).log()[:, :size]
    return logprobs.masked_fill(logprobs < -80, -torch.inf)


@pytest.mark.parametrize("vocabulary", [7, 1024, 1500, 9000, 20000])
@pytest.mark.parametrize(("top_k", "top_p"), TRUNCATIONS)
def test_truncation_keeps_what_transformers_keeps(vocabulary, top_k, top_p):
    """The same tokens as transformers' warpers, with their logprobs, but for one token where rounding decides."""
    transformers = pytest.importorskip("transformers")
    logits = rows_of(vocabulary)
    expected = logits.double()
    if top_k > 0:
        expected = transformers.TopKLogitsWarper(min(top_k, vocabulary))(None, expected)
    if top_p < 1:
        expected = transformers.TopPLogitsWarper(top_p)(None, expected)
    expected = expected.log_softmax(-1)
    expected = expected.masked_fill(expected < -80, -torch.inf)  # no number in float32, and never drawn
    found = kept(logits, [SamplingParams(top_k=top_k, top_p=top_p)] * len(logits))
    both = found.isfinite() & expected.isfinite()
    odd = (found.isfinite() != expected.isfinite()).sum(-1, keepdim=True)
    assert (odd <= 1).all()
    slack = 1e-5 - 1e-6 * expected + 2 * odd / both.sum(-1, keepdim=True)  # the least probable of so many
    assert ((found - expected).abs() < slack)[both].all()


@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(TRUNCATIONS)), min_size=1, max_size=4),
    coarse=st.sampled_from([8, 1000]),
)
@examples(60)
def test_truncation_is_of_a_row_alone(rows, coarse):
    """A row keeps the same tokens, with the same bits, in any company; all that are as probable as the last one."""
    logits = rows_of(9000)[[which for which, _ in rows]]
    logits = (logits * coarse).round() / coarse  # many of equal probability
    params = [SamplingParams(top_k=k, top_p=p) for _, (k, p) in rows]
    together = kept(logits, params)
    for row in range(len(rows)):
        alone = kept(logits[row : row + 1], params[row : row + 1])[0]
        assert torch.equal(together[row], alone)
        possible = logits[row] - logits[row].logsumexp(-1) >= -80
        stays = alone.isfinite()
        assert torch.equal(stays, possible & (logits[row] >= logits[row][stays].min()))
        if params[row].top_k > 0 and params[row].top_p == 1:
            above = int((logits[row] > logits[row][stays].min()).sum())
            assert above < min(params[row].top_k, int(possible.sum())) <= int(stays.sum())


@pytest.mark.parametrize("sizes", [(1,), (3, 50), (10**6,)])
def test_where_it_is_looked_for_does_not_matter(monkeypatch, sizes):
    """Among a few tokens, among more, or in the sorted row: it is the same set, for rows of any options together."""
    logits = (rows_of(128 * 64) * 4).round() / 4
    options = [{"top_k": 50}, {"top_k": 2000, "top_p": 0.5}, {}, {"top_p": 0.99, "min_p": 0.001}, {"top_p": 1e-9}]
    params = [SamplingParams(**given) for given in options]
    expected = kept(logits, params)
    monkeypatch.setattr(_drawing, "LARGEST", sizes)
    assert torch.equal(kept(logits, params), expected)
    assert expected[2].isfinite().all()
    assert expected[4].isfinite().sum() >= 1


def test_extreme_logits():
    """Rows of equal logits, of one that is possible, with huge gaps, and with tokens that are impossible."""
    logits = torch.zeros(4, 300)
    logits[1, 1:] = -torch.inf
    logits[2] = torch.linspace(-1e30, 1e30, 300)
    logits[3, 100:] = -torch.inf
    for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.999), SamplingParams(top_p=1e-9)):
        tokens, logprobs = draw(logits, [params] * 4, np.full(4, 0.999))
        assert tokens[1:3].tolist() == [0, 299]
        assert tokens[3] < 100
        assert np.isfinite(logprobs).all()
        possible = 300  # all are as probable as the last one that is kept
        assert tokens[0] < possible
        assert logprobs[0] == pytest.approx(-np.log(possible), abs=2e-3)


def test_truncated_and_whole_rows_together():
    """In one draw each row has its own options, and its token is one that it keeps."""
    logits = rows_of(3000)
    params = [
        SamplingParams(top_k=1),
        SamplingParams(),
        SamplingParams(top_p=0.3),
        SamplingParams(temperature=0.0, top_k=2),
    ]
    uniforms = np.array([0.999, 0.5, 0.999, 0.1])
    tokens, logprobs = draw(logits[[2, 2, 3, 3]], params, uniforms)
    alone = [
        draw(logits[[w]], [p], uniforms[b : b + 1]) for b, (w, p) in enumerate(zip((2, 2, 3, 3), params, strict=True))
    ]
    assert tokens.tolist() == [int(t[0]) for t, _ in alone]
    assert logprobs.tobytes() == np.concatenate([lp for _, lp in alone]).tobytes()
    assert (tokens[0], logprobs[0]) == (int(logits[2].argmax()), 0.0)
    assert tokens[3] == int(logits[3].argmax())
