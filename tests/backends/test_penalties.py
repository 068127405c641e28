"""Sampling options together, against transformers' processors and warpers; penalties against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit import SamplingParams
from tests.properties import examples

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from rlkit.backends._drawing import TokenCounts, draw, penalize  # noqa: E402

GRID = np.append((np.arange(60) + 0.5) / 60, [0.0, 1 - 2**-53])


def counts_of(params, prompt, completion):
    counts = TokenCounts.of(params, np.array(prompt, np.int64))
    for token in completion if counts is not None else ():
        counts.add(token)
    return counts


def expected_logprobs(logits, params, prompt, completion):
    """Float64 [V], -inf where cut: by transformers, and the two penalties that it lacks by their definition."""
    scores = torch.from_numpy(logits.astype(np.float64))[None]
    if params.repetition_penalty != 1:
        ids = torch.tensor([[*prompt, *completion]])
        scores = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    times = torch.from_numpy(np.bincount(np.array(completion, np.int64), minlength=logits.size))
    scores = scores - params.frequency_penalty * times - params.presence_penalty * (times > 0)
    warpers = []
    if params.temperature not in (0, 1):
        warpers.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0 and params.temperature:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1 and params.temperature:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p > 0 and params.temperature:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    for warper in warpers:
        scores = warper(None, scores)
    return scores[0].log_softmax(-1).numpy()


tokens = st.lists(st.integers(0, 199), max_size=30)


@given(
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.3, 2.0, 8.0]),
    prompt=st.lists(st.integers(0, 199), min_size=1, max_size=30),
    completion=tokens,
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.6, 1.0, 1.5]),
        top_k=st.sampled_from([-1, 1, 7, 150]),
        top_p=st.sampled_from([1.0, 0.9, 0.4]),
        min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
        repetition_penalty=st.sampled_from([1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 1.5, -1.0]),
        frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    ),
)
@examples(150)
def test_options_are_those_of_transformers(seed, scale, prompt, completion, params):
    """All in one: a draw gives tokens that they keep, with their logprobs, and each of them about as often."""
    logits = (np.random.default_rng(seed).normal(size=200) * scale).astype(np.float32)
    expected = expected_logprobs(logits, params, prompt, completion)
    counts = counts_of(params, prompt, completion)
    rows = torch.from_numpy(logits).expand(len(GRID), -1)
    drawn, logprobs = draw(rows, [params] * len(GRID), GRID, [counts] * len(GRID))
    if params.temperature == 0:
        assert (expected[drawn] >= expected.max() - 1e-6).all()
    right = np.abs(logprobs - expected[drawn]) < 1e-4
    if not right.all():  # the cut is at a border, where float32 keeps one token more or less than float64
        kept = np.isfinite(expected)
        least = np.exp(expected[kept]).min()
        assert (np.abs(logprobs - expected[drawn])[np.isfinite(expected[drawn])] < 2 * least + 1e-4).all()
        assert len(set(drawn[~np.isfinite(expected[drawn])].tolist())) <= 1
    if params.temperature and right.all():
        frequency = np.bincount(drawn[:60], minlength=200) / 60
        assert np.abs(frequency - np.exp(expected)).max() < 2 / 60


@given(prompt=tokens, completion=tokens)
def test_counts(prompt, completion):
    """Each token of the two once, with how often the completion has it; the prompt matters to one penalty alone."""
    counts = counts_of(SamplingParams(repetition_penalty=2.0), prompt, completion)
    times = np.bincount(completion, minlength=200) if completion else np.zeros(200)
    assert sorted(counts.ids.tolist()) == sorted({*prompt, *completion})
    assert counts.counts.tolist() == times[counts.ids].tolist()
    counts = counts_of(SamplingParams(presence_penalty=2.0), prompt, completion)
    assert sorted(counts.ids.tolist()) == sorted(set(completion))
    assert counts_of(SamplingParams(top_k=3, min_p=0.5), prompt, completion) is None


def test_penalties_worked_by_hand():
    """Divided or multiplied by the sign, then a count of taken off, then once; other rows are as they were."""
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5], [2.0, -2.0, 1.0, 0.5]])
    params = [SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5), SamplingParams()]
    counts = [counts_of(params[0], [0, 1], [1, 1, 2]), None]
    found = penalize(logits, params, counts)
    assert found[0].tolist() == [1.0, -4.0 - 2 * 0.5 - 0.25, 0.5 - 0.5 - 0.25, 0.5]
    assert found[1].tolist() == logits[1].tolist()
    assert logits[0].tolist() == [2.0, -2.0, 1.0, 0.5]


def test_a_row_has_its_own_penalties():
    """To the bit the same alone and among others, also of other penalties; greedy rows have theirs."""
    logits = torch.randn(5, 500, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(min_p=0.3),
        SamplingParams(temperature=0.7, presence_penalty=-1.0, min_p=0.05, top_p=0.8),
    ]
    best = int(logits[2].argmax())
    counts = [counts_of(p, range(k, 90), [3, best, best, best]) for k, p in enumerate(params)]
    uniforms = np.linspace(0.1, 0.9, 5)
    together = draw(logits, params, uniforms, counts)
    for row in range(5):
        alone = draw(logits[[row]], params[row : row + 1], uniforms[row : row + 1], counts[row : row + 1])
        assert (alone[0][0], alone[1][0]) == (together[0][row], together[1][row])
    assert together[0][2] != best
    assert together[1][2] == pytest.approx(float(penalize(logits, params, counts)[2].log_softmax(-1).max()))


def test_a_penalty_without_counts_is_no_silent_one():
    """Who draws for a sampler of its own has to say what was there before."""
    with pytest.raises(rlkit.ConfigError, match=r"draw\(counts\)\[1\]"):
        draw(torch.zeros(2, 9), [SamplingParams(), SamplingParams(presence_penalty=1.0)], np.zeros(2))
