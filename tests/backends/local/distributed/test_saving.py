"""Saves do not depend on how many processes wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import rlkit
from tests.backends.local.distributed.test_training import rows

peft = pytest.importorskip("peft")

STEP = rlkit.Adam(learning_rate=0.01)


def train(policy, steps):
    for _ in range(steps):
        policy.forward_backward(rows([3, 60, 9, 5, 33]), "cross_entropy")
        policy.optim_step(STEP).result()


def files(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def test_resume_two_one_two(connect):
    """A state goes from two processes to one and back unchanged, and the run goes on as if nothing had been."""
    whole = connect(2)
    train(whole, 2)
    first = whole.save("a").result()
    one = connect(1, seed=None, resume_from=first)
    second = one.save("a").result()
    assert files(first) == files(second)
    two = connect(2, seed=None, resume_from=second)
    assert two.version == 2
    for policy in (whole, two):
        train(policy, 2)
    assert files(whole.save("b").result()) == files(two.save("b").result())
    train(one, 2)
    a, b = (policy.forward(rows([7, 30])).result().logprobs for policy in (one, two))
    assert all(np.abs(x - y).max() < 1e-3 for x, y in zip(a, b, strict=True))


def test_init_from_begins_a_new_optimizer(connect):
    """Weights alone: on two processes as on one."""
    policy = connect(2)
    train(policy, 1)
    path = policy.save("a", optimizer=False).result()
    one, two = connect(1, init_from=path), connect(2, init_from=path)
    for other in (one, two):
        assert other.version == 0
        train(other, 1)
    a, b = (other.forward(rows([7, 30])).result().logprobs for other in (one, two))
    assert all(np.abs(x - y).max() < 1e-4 for x, y in zip(a, b, strict=True))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # what peft asks transformers for
def test_plain_peft_loads_it(connect, tiny):
    """The adapter is peft's own format, and gives the policy's logprobs there."""
    import transformers

    policy = connect(2, lora=rlkit.Lora(rank=4, train_unembed=False))
    train(policy, 2)
    path = policy.save("a").result()
    state = json.loads((Path(path) / "state.json").read_text())
    assert "processes" not in state
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny("llama"))
    model = peft.PeftModel.from_pretrained(base, path).eval()
    datum = rows([30])[0]
    tokens = torch.from_numpy(np.array(datum.tokens))
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, :-1].float() / datum.temperature
    expected = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0].numpy()
    got = policy.forward([datum]).result().selected[0]
    assert np.abs(got - expected[datum.mask[1:]]).max() < 1e-4
