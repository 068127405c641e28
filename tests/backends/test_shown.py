"""What a notebook shows of a policy and a sampler, and what it says of what they are not."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

import rlkit

KINDS = ("toy", "local", "tinker")


@pytest.fixture(params=KINDS)
def policy(request, tiny, tmp_path):
    if request.param == "toy":
        with rlkit.connect("toy", seed=0, folder=tmp_path) as policy:
            yield policy
    elif request.param == "local":
        lora = rlkit.Lora(rank=4)
        with rlkit.connect("local", model=tiny("llama"), lora=lora, seed=0, folder=tmp_path) as policy:
            yield policy
    else:
        pytest.importorskip("tinker")
        from rlkit.testing import FakeTinker

        with FakeTinker(seed=0) as fake:
            client = fake.service_client()
            lora = rlkit.Lora(rank=4)
            with rlkit.connect("tinker", client=client, model="toy", lora=lora, tokenizer=fake.tokenizer) as policy:
                yield policy


def test_what_is_shown(policy):
    """Kind, model, adapter and version; a sampler its own version, and that it is closed."""
    data = [rlkit.Datum.supervised([1, 2], [3])]
    policy.forward_backward(data, "cross_entropy")
    policy.optim_step(rlkit.Adam()).result()
    name = type(policy).__name__
    assert repr(policy).startswith(f"<{name} ")
    assert repr(policy).endswith("version 1>")
    if name != "ToyBackend":
        assert "LoRA r=4" in repr(policy)
    sampler = policy.sampler().result()
    assert "Sampler" in repr(sampler)
    assert "version 1" in repr(sampler)
    if name != "TinkerBackend":
        sampler.close()
        assert repr(sampler).endswith("closed>")


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_no_copies(policy, attempt):
    """A policy and a sampler say why they cannot be pickled or copied, and what to do instead."""
    for thing in (policy, policy.sampler().result()):
        with pytest.raises(TypeError, match="can ?not be pickled"):
            attempt(thing)


@pytest.mark.parametrize("policy", ["toy", "local"], indirect=True)
def test_arguments_of_the_chat_template(policy, request, tiny):
    """What decides on the form of the result is refused by name: the result is always int64 [T]."""
    tokenizer = policy.tokenizer
    messages = [{"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(messages).dtype == np.int64
    for option in ({"return_dict": False}, {"tokenize": True}, {"return_tensors": "pt"}):
        with pytest.raises(rlkit.ConfigError, match=f"apply_chat_template: .*{next(iter(option))}"):
            tokenizer.apply_chat_template(messages, **option)
    for wrong in ("Hi", messages[0], [], ["Hi"], [{"content": "Hi"}], [{"role": "user"}], None, 3):
        with pytest.raises(rlkit.DataError, match=r"apply_chat_template\(messages\)"):
            tokenizer.apply_chat_template(wrong)


def test_reference_logprobs(policy):
    """They are the sampler's own at first, aligned to the sampled tokens, of samples and of datums."""
    sampler, base = policy.sampler().result(), policy.base_sampler().result()
    samples = sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=4), n=3, seed=0).result()
    for given in (samples, [sample.datum() for sample in samples]):
        found = rlkit.reference_logprobs(base, given).result()
        for logprobs, sample in zip(found, samples, strict=True):
            assert logprobs.dtype == np.float32
            np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-5)
            sample.datum(1.0, reference_logprobs=logprobs)
    policy.forward_backward([sample.datum(1.0) for sample in samples], "ppo")
    policy.optim_step(rlkit.Adam(learning_rate=0.1)).result()
    now = rlkit.reference_logprobs(policy.sampler().result(), samples).result()
    still = rlkit.reference_logprobs(base, samples).result()
    assert max(np.abs(a - b).max() for a, b in zip(now, still, strict=True)) > 1e-4
    for wrong in (samples[0], "text", None):
        with pytest.raises(rlkit.DataError, match=r"reference_logprobs\(samples\)"):
            rlkit.reference_logprobs(base, wrong)
    with pytest.raises(rlkit.DataError, match=r"samples\[1\]"):
        rlkit.reference_logprobs(base, [samples[0], 3])
    with pytest.raises(rlkit.ConfigError, match=r"reference_logprobs\(sampler\)"):
        rlkit.reference_logprobs(policy, samples)
