"""The draw of a token against numpy in float64 and transformers; penalties against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import SamplingParams
from tests.each import for_each
from tests.properties import examples

torch = pytest.importorskip("torch")

from rlkit.backends import _drawing  # noqa: E402
from rlkit.backends._drawing import TokenCounts, draw, penalize  # noqa: E402

GRID = np.array([0.0, *(np.arange(60) + 0.5) / 60, 1 - 2**-53])
TRUNCATIONS = [(-1, 0.9), (-1, 0.2), (-1, 1e-9), (5, 1.0), (40, 0.95), (2000, 1.0), (10**6, 0.99), (300, 0.5), (1, 1.0)]


def test_draw_follows_the_probabilities():
    """Over a fine grid of u each token comes up as often as it is probable."""
    logits = torch.randn(600, generator=torch.Generator().manual_seed(0)) * 2
    grid = (np.arange(20000) + 0.5) / 20000
    tokens, _ = draw(logits.expand(len(grid), -1), [SamplingParams()] * len(grid), grid)
    assert (np.diff(tokens) >= 0).all()
    counts = np.bincount(tokens, minlength=600) / len(grid)
    assert np.abs(counts - torch.softmax(logits.double(), 0).numpy()).max() < 1.5 / len(grid)


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


@for_each("vocabulary", [7, 1024, 1500, 9000, 20000])
@for_each(("top_k", "top_p"), TRUNCATIONS)
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


def test_where_it_is_looked_for_does_not_matter(monkeypatch):
    """Among a few tokens, among more, or in the sorted row: it is the same set, for rows of any options together."""
    logits = (rows_of(128 * 64) * 4).round() / 4
    options = [{"top_k": 50}, {"top_k": 2000, "top_p": 0.5}, {}, {"top_p": 0.99, "min_p": 0.001}, {"top_p": 1e-9}]
    params = [SamplingParams(**given) for given in options]
    expected = kept(logits, params)
    assert expected[2].isfinite().all()
    assert expected[4].isfinite().any()
    for sizes in ((1,), (3, 50), (10**6,)):
        monkeypatch.setattr(_drawing, "LARGEST", sizes)
        assert torch.equal(kept(logits, params), expected), sizes


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
        assert tokens[0] < 300  # all are as probable as the last one that is kept
        assert logprobs[0] == pytest.approx(-np.log(300), abs=2e-3)
        tokens, logprobs = draw(logits.flip(-1), [params] * 4, np.zeros(4))  # at 0 the first possible one
        assert tokens[:3].tolist() == [0, 299, 0]
        assert tokens[3] >= 200
        assert np.isfinite(logprobs).all()


def counts_of(params, prompt, completion):
    counts = TokenCounts.of(params, np.array(prompt, np.int64))
    for token in completion if counts is not None else ():
        counts.add(token)
    return counts


def expected_logprobs(logits, params, prompt, completion):
    """Float64 [V], -inf where cut: by transformers, and the two penalties that it lacks by their definition."""
    transformers = pytest.importorskip("transformers")
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    if params.repetition_penalty != 1:
        ids = torch.tensor([[*prompt, *completion]])
        scores = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    times = torch.from_numpy(np.bincount(np.array(completion, np.int64), minlength=logits.size))
    scores = scores - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    if params.temperature:
        for name, off in (("temperature", 1), ("top_k", -1), ("top_p", 1), ("min_p", 0)):
            warper = getattr(transformers, f"{name.title().replace('_', '')}LogitsWarper")
            value = getattr(params, name)
            scores = warper(value)(None, scores) if value != off else scores
    return scores[0].log_softmax(-1).numpy()


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.1, 0.3, 2.0, 8.0, 30.0]),
    vocabulary=st.sampled_from([1, 2, 200, 255, 256, 257, 700]),
    prompt=st.lists(st.integers(0, 199), min_size=1, max_size=30),
    completion=st.lists(st.integers(0, 199), max_size=30),
    params=st.sampled_from([SamplingParams(), SamplingParams(temperature=0.7)])
    | st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
        top_k=st.sampled_from([-1, 1, 7, 150]),
        top_p=st.sampled_from([1.0, 0.9, 0.4]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    ),
    u=st.floats(0, 1, exclude_max=True),
)
@examples(250)
def test_options_are_those_of_transformers(seed, scale, vocabulary, prompt, completion, params, u):
    """All in one: the token at which the cumulated probability exceeds u, with its logprob; alone or in company."""
    logits = (np.random.default_rng(seed).normal(size=vocabulary) * scale).astype(np.float32)
    prompt, completion = ([i % vocabulary for i in ids] for ids in (prompt, completion))
    expected = expected_logprobs(logits, params, prompt, completion)
    counts, uniforms = counts_of(params, prompt, completion), np.append(GRID, u)
    rows, many = torch.from_numpy(logits).expand(len(uniforms), -1), len(uniforms)
    drawn, logprobs = draw(rows, [params] * many, uniforms, [counts] * many)
    alone = draw(rows[:1], [params], uniforms[-1:], [counts])
    assert (alone[0][0], alone[1][0]) == (drawn[-1], logprobs[-1])
    assert np.isfinite(logprobs).all()
    if params.temperature == 0:
        assert (expected[drawn] >= expected.max() - 1e-6).all()
    finite = np.isfinite(expected[drawn])
    right = np.abs(logprobs - expected[drawn]) < 1e-4 + 1e-6 * np.abs(logprobs)
    if not right.all():  # the cut is at a border, where float32 keeps one token more or less than float64
        least = np.exp(expected[np.isfinite(expected)]).min()
        assert (np.abs(logprobs - expected[drawn])[finite] < 2 * least + 1e-4).all()
        assert len(set(drawn[~finite].tolist())) <= 1
    elif params.temperature:
        cumulated = np.cumsum(np.exp(expected))
        low, high = (np.searchsorted(cumulated, uniforms * cumulated[-1] + by, side="right") for by in (-1e-5, 1e-5))
        assert ((low <= drawn) & (drawn <= high)).all()


def test_penalties_worked_by_hand():
    """Divided or multiplied by the sign, then taken off by the count, then once; other rows are as they were."""
    logits = torch.tensor([[2.0, -0.5, 1.0, 0.5], [2.0, -0.5, 1.0, 0.5]])
    params = [SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5), SamplingParams()]
    counts = [counts_of(params[0], [0, 1], [1, 1, 2]), None]
    found = penalize(logits, params, counts)
    assert found[0].tolist() == [1.0, -1.0 - 2 * 0.5 - 0.25, 0.5 - 0.5 - 0.25, 0.5]
    assert found[1].tolist() == logits[1].tolist()
    assert logits[0].tolist() == [2.0, -0.5, 1.0, 0.5]
    assert (counts[0].ids.tolist(), counts[0].counts.tolist()) == ([0, 1, 2], [0.0, 2.0, 1.0])
    assert counts_of(SamplingParams(presence_penalty=2.0), [0, 1], [3, 3]).ids.tolist() == [3]  # of the completion
    assert counts_of(SamplingParams(top_k=3, min_p=0.5), [0, 1], [3]) is None
    with pytest.raises(rlkit.ConfigError, match=r"draw\(counts\)\[1\]"):  # what was there before has to be said
        draw(torch.zeros(2, 9), [SamplingParams(), SamplingParams(presence_penalty=1.0)], np.zeros(2))


def test_a_row_has_its_own_options():
    """To the bit the same alone and among others of other options; greedy rows have their penalties and no cut."""
    logits = torch.randn(8, 3000, generator=torch.Generator().manual_seed(0)) * 3
    params = [
        SamplingParams(top_k=1),
        SamplingParams(),
        SamplingParams(top_p=0.3),
        SamplingParams(temperature=0.0, top_k=2),
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=0.7, presence_penalty=-1.0, min_p=0.05, top_p=0.8),
    ]
    best = logits.argmax(-1).tolist()
    counts = [counts_of(p, range(k, 90), [3, *[best[5]] * 3]) for k, p in enumerate(params)]
    uniforms = np.linspace(0.999, 0.1, len(params))
    tokens, logprobs = draw(logits, params, uniforms, counts)
    for row in range(len(params)):
        alone = draw(logits[[row]], params[row : row + 1], uniforms[row : row + 1], counts[row : row + 1])
        assert (alone[0][0], alone[1][0]) == (tokens[row], logprobs[row])
    assert (tokens[0], logprobs[0]) == (best[0], 0.0)
    assert (tokens[3], logprobs[3]) == (best[3], pytest.approx(float(logits[3].log_softmax(-1).max())))
    assert tokens[5] != best[5]
    assert logprobs[5] == pytest.approx(float(penalize(logits, params, counts)[5].log_softmax(-1).max()))
