"""Samples and scores; bits.json has what they are, and the conformance suite that they are the model's."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import rlkit
from rlkit.testing import FakeTinker
from tests.server.sdk import datum, prompt, tinker, types

PROMPT = list(b"hello 12")


def make_base(fake):
    return fake.service_client().create_sampling_client(base_model="toy").result()


def ask(sampler, n=1, tokens=PROMPT, **options):
    more = {k: options.pop(k) for k in list(options) if "logprobs" in k or "alt" in k}
    params = types.SamplingParams(**{"max_tokens": 6, "stop": [], **options})
    return sampler.sample(prompt(tokens), n, params, **more).result()


def score(sampler):
    return sampler.compute_logprobs(prompt(PROMPT)).result()


def test_seeds():
    """One seed gives the same samples again; without one every request has its own, the same in every run."""
    runs, ids = [], []
    for _ in range(2):
        with FakeTinker(seed=7) as fake:
            sampler = make_base(fake)
            answers = [ask(sampler, 2, seed=seed) for seed in (5, 5, None, None, None)]
            runs.append([[tuple(s.tokens) for s in x.sequences] for x in answers])
            ids.append({s.sequence_id for x in answers for s in x.sequences})
    assert runs[0] == runs[1]
    assert len(ids[0]) == 10
    assert ids[0] == ids[1]  # they begin with the session's
    assert runs[0][0] == runs[0][1]
    assert len({tokens for answer in runs[0][1:] for tokens in answer}) == 8


def test_snapshots_are_frozen(fake):
    """Each is taken in its place among calls in flight; later steps change neither it nor a named one."""
    service = fake.service_client()
    training = service.create_lora_training_client("toy").result()
    path = training.save_weights_for_sampler("before").result().path
    pending = [training.save_weights_and_get_sampling_client()]
    for _ in range(2):
        training.forward_backward([datum(PROMPT, weights=1.0)], "cross_entropy")
        pending.append(training.save_weights_and_get_sampling_client())
        training.optim_step(types.AdamParams(learning_rate=0.1))
        pending.append(training.save_weights_and_get_sampling_client())
    before, unstepped, once, waiting, twice = (score(x.result()) for x in pending)
    assert (unstepped, waiting) == (before, once)
    assert np.sum(before[1:]) + 1 < np.sum(once[1:]) < np.sum(twice[1:])
    named = service.create_sampling_client(model_path=path).result()
    for sampler in (named, make_base(fake), pending[0].result()):
        assert score(sampler) == before
    assert named.get_base_model() == "toy"


def test_samplers_are_bounded():
    """Those that were used longest ago are dropped, whoever made them; saved ones are loaded again, the base stays."""
    with FakeTinker(max_samplers=3) as fake:
        clients = [fake.service_client() for _ in range(2)]
        training = clients[0].create_lora_training_client("toy").result()
        base = clients[0].create_sampling_client(base_model="toy").result()
        path = training.save_weights_for_sampler("a").result().path
        named = clients[1].create_sampling_client(model_path=path).result()
        reference = training.save_weights_and_get_sampling_client().result()
        expected = score(named)
        score(base)
        others = []
        for _ in range(5):
            others.append(training.save_weights_and_get_sampling_client().result())
            score(reference)
        assert len(fake.service.samplers) == 5  # three, and two that can be loaded again
        assert sum(s.snapshot is not None for s in fake.service.samplers.values()) == 4  # of them the base
        assert score(named) == expected
        for sampler in (base, reference, others[-1]):
            score(sampler)
        with pytest.raises(tinker.NotFoundError, match="was dropped.* save it under a name"):
            score(others[0])


def test_full_context():
    """A prompt that fills the context can be scored, and nothing follows it; a longer one is refused."""
    with FakeTinker(models=functools.partial(rlkit.connect, "toy", max_length=8)) as fake:
        sampler = make_base(fake)
        assert len(score(sampler)) == 8
        assert len(ask(sampler, tokens=PROMPT[:5], max_tokens=9).sequences[0].tokens) == 3
        with pytest.raises(tinker.RequestFailedError, match="at most 8"):
            sampler.compute_logprobs(prompt([*PROMPT, 1])).result()
        with pytest.raises(tinker.RequestFailedError, match="300"):
            ask(sampler, tokens=[300])
        assert sampler.compute_logprobs(prompt(PROMPT[:1])).result() == [None]
