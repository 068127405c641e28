"""On a server that divides each sequence by the sum of its weights, every loss still has its own direction."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit import losses

pytest.importorskip("tinker", reason="needs the extra tinker")

GD = rlkit.Adam(learning_rate=1e5, beta1=0.0, beta2=0.0, eps=1e8)  # plain gradient descent, without moments
ADVANTAGES = (1.0, -0.5, 0.3, -1.2)


def mine(logprobs, sampling_logprobs, advantages):
    return -((logprobs - sampling_logprobs).exp() * advantages).sum()


LOSSES = {
    "ppo": "ppo",
    "cispo": "cispo",
    "reinforce": "reinforce",
    "opmd": "opmd",
    "topr": "topr",
    "decoupled_ppo": "decoupled_ppo",
    "sapo": "sapo",
    "dppo_kl": "dppo_kl",
    "ppo as a function": losses.ppo,
    "reinforce as a function": losses.reinforce,
    "a function": mine,
}


@pytest.fixture(scope="module")
def batch(fresh_stock):
    """Four samples of one length at ratio 1, where all these losses have one gradient: that of A lp."""
    with connect(fresh_stock) as policy, policy.sampler().result() as sampler:
        params = rlkit.SamplingParams(max_tokens=8, stop=())
        samples = sampler.sample(policy.tokenizer.encode("hello 12"), params, n=4, seed=0).result()
        data = [s.datum(a) for s, a in zip(samples, ADVANTAGES, strict=True)]
        found = policy.forward(data).result()
        return [
            d.with_inputs(sampling_logprobs=lp, old_logprobs=lp) for d, lp in zip(data, found.selected, strict=True)
        ]


def connect(server):
    return rlkit.connect(
        "tinker",
        model=server.model,
        base_url=server.url,
        lora=rlkit.Lora(rank=4),
        seed=0,
        max_length=128,
        deadline=1200.0,
    )


def change(server, batch, loss):
    """What one step of gradient descent does to the logprobs."""
    with connect(server) as policy:
        given = [d.with_inputs(old_logprobs=d.inputs["sampling_logprobs"]) for d in batch]
        names = set(policy_inputs(loss))
        given = [rlkit.Datum(d.tokens, d.mask, {k: v for k, v in d.inputs.items() if k in names}) for d in given]
        before = policy.forward(given).result().selected
        policy.forward_backward(given, loss).result()
        policy.optim_step(GD).result()
        after = policy.forward(given).result().selected
        return np.concatenate(after) - np.concatenate(before)


def policy_inputs(loss):
    from rlkit.losses.prepare import prepare

    return prepare(loss, {}).inputs


@pytest.fixture(scope="module")
def expected(fresh_stock, batch):
    found = change(fresh_stock, batch, "importance_sampling")
    assert np.abs(found).max() > 1e-6
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_directions(fresh_stock, batch, expected, name):
    """The cosine of the change of the logprobs to importance sampling's is 1."""
    found = change(fresh_stock, batch, LOSSES[name])
    cosine = float(found @ expected / np.linalg.norm(found) / np.linalg.norm(expected))
    print(f"{name}: {cosine:.4f}")
    assert cosine > 0.999
