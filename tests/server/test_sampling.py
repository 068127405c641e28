"""Samples and scores: what is asked for is what comes, and it is the model's."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import rlkit
from rlkit.testing import FakeTinker
from tests.each import for_each
from tests.server import oracle
from tests.server.sdk import datum, prompt

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

PROMPT = list(b"hello 12")


@pytest.fixture(scope="module")
def fake():
    with FakeTinker(seed=0) as fake:
        yield fake


@pytest.fixture(scope="module")
def training(fake):
    training = fake.service_client().create_lora_training_client("toy").result()
    for text in (b"hello world, hello 12 worlds", b"12 34 56 78"):
        training.forward_backward([datum(list(text), weights=1.0)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.05)).result()
    return training


@pytest.fixture(scope="module")
def sampler(training):
    return training.save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module")
def weights(fake, training, sampler):
    return fake.service.runs[training.model_id].model.backend._weights.value


def table(weights, tokens):
    """float64 [N, V]: the distribution after each token."""
    return oracle.logprobs(weights, tokens, np.tile(np.arange(259), (len(tokens), 1)))


def ask(sampler, n=1, tokens=PROMPT, **options):
    more = {k: options.pop(k) for k in list(options) if "logprobs" in k or "alt" in k or "info" in k}
    params = types.SamplingParams(**{"max_tokens": 6, "stop": [], **options})
    return sampler.sample(prompt(tokens), n, params, **more).result()


def test_samples_are_the_models(sampler, weights):
    """Their logprobs are those of the distribution after the prompt and what was drawn."""
    answer = ask(sampler, n=3, seed=1)
    assert len(answer.sequences) == 3
    for sequence in answer.sequences:
        assert len(sequence.tokens) == len(sequence.logprobs) == 6
        assert sequence.stop_reason == "length"
        whole = [*PROMPT, *sequence.tokens]
        expected = oracle.logprobs(weights, whole[:-1], np.array(whole[1:]))[len(PROMPT) - 1 :]
        np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-5)
    assert len({tuple(s.tokens) for s in answer.sequences}) == 3
    assert len({s.sequence_id for s in answer.sequences}) == 3


def test_frequencies(sampler, weights):
    """Tokens are drawn as often as their probability says, at another temperature too."""
    for temperature in (1.0, 0.5):
        answer = ask(sampler, n=2000, seed=3, max_tokens=1, temperature=temperature)
        drawn = np.bincount([s.tokens[0] for s in answer.sequences], minlength=259) / 2000
        expected = np.exp(table(weights, PROMPT)[-1] / temperature)
        expected /= expected.sum()
        assert np.abs(drawn - expected).max() < 4 * np.sqrt(expected.max() / 2000)
        found = {s.tokens[0]: s.logprobs[0] for s in answer.sequences}
        for token, logprob in found.items():
            assert logprob == pytest.approx(np.log(expected[token]), abs=1e-4)


def test_seeds(fake, sampler):
    """One seed gives the same samples again; without one every request has its own, the same in every run."""
    assert [s.tokens for s in ask(sampler, 2, seed=5).sequences] == [
        s.tokens for s in ask(sampler, 2, seed=5).sequences
    ]
    free = [tuple(ask(sampler).sequences[0].tokens) for _ in range(4)]
    assert len(set(free)) == 4
    runs = []
    for _ in range(2):
        with FakeTinker(seed=7) as again:
            base = again.service_client().create_sampling_client(base_model="toy").result()
            futures = [base.sample(prompt(PROMPT), 2, types.SamplingParams(max_tokens=5)) for _ in range(3)]
            runs.append([s.tokens for f in futures for s in f.result().sequences])
    assert runs[0] == runs[1]
    with pytest.raises(tinker.APIStatusError, match="seed"):
        ask(sampler, seed=2**64)


def test_stop(sampler):
    """None: the end token; []: nothing; strings and ids in addition; the stop token is part of what is returned."""
    common = {"n": 64, "seed": 2, "max_tokens": 40}
    unstopped = ask(sampler, **common).sequences
    assert {s.stop_reason for s in unstopped} == {"length"}
    assert any(257 in s.tokens for s in unstopped)
    for stop, ends in (
        (None, lambda t: t[-1] == 257),
        ("e", lambda t: t[-1] in (257, 258, ord("e"))),  # <|endoftext|> has one in its name
        (["e", "12"], lambda t: t[-1] in (257, 258, ord("e")) or bytes(t[-2:]) == b"12"),
        ([ord("e"), 49], lambda t: t[-1] in (257, ord("e"), 49)),
    ):
        for got, whole in zip(ask(sampler, stop=stop, **common).sequences, unstopped, strict=True):
            assert got.tokens == whole.tokens[: len(got.tokens)]
            if got.stop_reason == "stop":
                assert ends(got.tokens)
            else:
                assert len(got.tokens) == 40


def test_greedy_and_truncated(sampler, weights):
    greedy = ask(sampler, temperature=0.0, max_tokens=1).sequences[0]
    rows = table(weights, PROMPT)[-1]
    assert greedy.tokens == [rows.argmax()]
    assert greedy.logprobs[0] == pytest.approx(rows.max(), abs=1e-5)
    kept = set(np.argsort(-rows)[:3])
    assert {s.tokens[0] for s in ask(sampler, n=200, seed=1, top_k=3, max_tokens=1).sequences} == kept
    order = np.argsort(-rows)
    nucleus = set(order[: np.searchsorted(np.exp(rows[order]).cumsum(), 0.3) + 1])
    assert {s.tokens[0] for s in ask(sampler, n=200, seed=1, top_p=0.3, max_tokens=1).sequences} <= nucleus


def test_prompt_logprobs(sampler, weights):
    expected = oracle.logprobs(weights, PROMPT[:-1], np.array(PROMPT[1:]))
    found = sampler.compute_logprobs(prompt(PROMPT)).result()
    assert found[0] is None
    np.testing.assert_allclose(found[1:], expected, atol=1e-5)
    assert sampler.compute_logprobs(prompt(PROMPT), prompt_logprobs_last_n=2).result() == [None] * 6 + found[6:]
    assert sampler.compute_logprobs(prompt(PROMPT[:1])).result() == [None]


def test_top_logprobs(sampler, weights):
    """Of the prompt and of what was sampled: the k most likely ids in order, nothing before the prompt's second."""
    answer = ask(sampler, seed=1, include_prompt_logprobs=True, topk_prompt_logprobs=3, topk_sample_logprobs=2)
    rows = table(weights, [*PROMPT, *answer.sequences[0].tokens])
    assert answer.topk_prompt_logprobs[0] is None
    for i, found in enumerate(answer.topk_prompt_logprobs[1:]):
        assert [t for t, _ in found] == list(np.argsort(-rows[i])[:3])
        np.testing.assert_allclose([lp for _, lp in found], np.sort(rows[i])[::-1][:3], atol=1e-5)
    for i, found in enumerate(answer.sequences[0].topk_logprobs):
        assert [t for t, _ in found] == list(np.argsort(-rows[len(PROMPT) - 1 + i])[:2])


def test_target_logprobs(sampler, weights):
    """Of ids that the client names; 0 where it named none."""
    ids = np.full((len(PROMPT) - 1, 12), -1)
    ids[0, 0], ids[3, 2], ids[6, 11] = 0, 101, 258
    target = types.TensorData.from_numpy(ids)
    dense = ask(sampler, max_tokens=1, target_prompt_logprobs=target).target_prompt_logprobs.to_numpy()
    rows, expected = table(weights, PROMPT), np.zeros((7, 12))
    for i, j in ((0, 0), (3, 2), (6, 11)):
        expected[i, j] = rows[i, ids[i, j]]
    np.testing.assert_allclose(dense, expected, atol=1e-5)


def test_snapshots_are_frozen(fake):
    """Later steps change neither an ephemeral sampler nor a named one; a new one has them."""
    service = fake.service_client()
    training = service.create_lora_training_client("toy").result()
    first = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("before").result().path
    before = first.compute_logprobs(prompt(PROMPT)).result()
    training.forward_backward([datum(PROMPT, weights=1.0)], "cross_entropy").result()
    pending = training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(PROMPT)).result()
    training.optim_step(types.AdamParams(learning_rate=0.1)).result()
    named = service.create_sampling_client(model_path=path).result()
    base = service.create_sampling_client(base_model="toy").result()
    for sampler in (first, named, base):
        assert sampler.compute_logprobs(prompt(PROMPT)).result() == before
    assert pending == before
    after = training.save_weights_and_get_sampling_client().result().compute_logprobs(prompt(PROMPT)).result()
    assert np.sum(after[1:]) > np.sum(before[1:]) + 1
    assert named.get_base_model() == "toy"


def test_order_of_a_snapshot(fake):
    """Taken in its place among calls that are all in flight."""
    training = fake.service_client().create_lora_training_client("toy").result()
    step = types.AdamParams(learning_rate=0.1)
    samplers = []
    for _ in range(3):
        samplers.append(training.save_weights_and_get_sampling_client())
        training.forward_backward([datum(PROMPT, weights=1.0)], "cross_entropy")
        training.optim_step(step)
    found = [np.sum(s.result().compute_logprobs(prompt(PROMPT)).result()[1:]) for s in samplers]
    assert found[0] < found[1] < found[2]


def test_full_context():
    """A prompt that fills the context can be scored, and nothing follows it; a longer one is refused."""
    with FakeTinker(models=functools.partial(rlkit.connect, "toy", max_length=8)) as fake:
        sampler = fake.service_client().create_sampling_client(base_model="toy").result()
        assert len(sampler.compute_logprobs(prompt(PROMPT)).result()) == 8
        assert len(ask(sampler, tokens=PROMPT[:5], max_tokens=9).sequences[0].tokens) == 3
        with pytest.raises(tinker.RequestFailedError, match="at most 8"):
            sampler.compute_logprobs(prompt([*PROMPT, 1])).result()


@for_each(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"stop": [""]}, "stop"),
        ({"tokens": []}, "at least one"),
        ({"n": 0}, "num_samples"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 8}, "expected 1 to 7"),
        ({"tokens": [300]}, "300"),
        ({"tokens": [-1]}, "each an id >= 0"),
        ({"topk_prompt_logprobs": -1}, "topk_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not offered"),
    ],
)
def test_bad_requests(sampler, options, message):
    with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError), match=message):
        ask(sampler, **options)
