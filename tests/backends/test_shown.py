"""What every backend has beside the conformance suite: no copies, chat templates, reference logprobs."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest

import rlkit


@pytest.fixture(params=["toy", "local", "tinker"])
def policy(request, tiny, tmp_path):
    options = {"seed": 0, "folder": tmp_path, "lora": rlkit.Lora(rank=4)}
    with contextlib.ExitStack() as opened:
        if request.param == "local":
            options["model"] = tiny("llama")
        if request.param == "tinker":
            pytest.importorskip("tinker")
            from rlkit.testing import FakeTinker

            fake = opened.enter_context(FakeTinker(seed=0))
            options |= {"client": fake.service_client(), "model": "toy", "tokenizer": fake.tokenizer}
        yield opened.enter_context(rlkit.connect(request.param, **options))


def test_what_is_scored_and_cannot_be_copied(policy):
    """Reference logprobs are the sampler's own at first, and stay when the policy is trained."""
    base, sampler = policy.base_sampler().result(), policy.sampler().result()
    samples = sampler.sample([1, 2], rlkit.SamplingParams(max_tokens=4), n=3, seed=0).result()
    for given in (samples, [sample.datum() for sample in samples]):
        for logprobs, sample in zip(rlkit.reference_logprobs(base, given).result(), samples, strict=True):
            assert logprobs.dtype == np.float32
            np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-5)
            sample.datum(1.0, reference_logprobs=logprobs)
    policy.forward_backward([sample.datum(1.0) for sample in samples], "ppo")
    policy.optim_step(rlkit.Adam(learning_rate=0.1)).result()
    sampler = policy.sampler().result()
    now, still = (np.concatenate(rlkit.reference_logprobs(x, samples).result()) for x in (sampler, base))
    assert np.abs(now - still).max() > 1e-4
    for thing in (policy, sampler):
        for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="can ?not be pickled"):
                attempt(thing)


@pytest.mark.parametrize("policy", ["toy", "local"], indirect=True)
def test_arguments_of_the_chat_template(policy):
    """What decides on the form of the result is refused by name: the result is always int64 [T]."""
    template, messages = policy.tokenizer.apply_chat_template, [{"role": "user", "content": "Hi"}]
    assert template(messages).dtype == np.int64
    for option in ({"return_dict": False}, {"tokenize": True}, {"return_tensors": "pt"}):
        with pytest.raises(rlkit.ConfigError, match=f"apply_chat_template: .*{next(iter(option))}"):
            template(messages, **option)
    for wrong in ("Hi", messages[0], [], ["Hi"], [{"content": "Hi"}], [{"role": "user"}], None, 3):
        with pytest.raises(rlkit.DataError, match=r"apply_chat_template\(messages\)"):
            template(wrong)
