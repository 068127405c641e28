"""Losses by name: values and gradients equal those of float64 formulas of the exact model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rlkit.backends.toy import Features
from tests.each import for_each
from tests.server.sdk import prompt, tinker, types

FEATURES = Features(259)
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
CASES = [
    ("cross_entropy", {}, None),
    ("cross_entropy", {}, 1),  # [N, K] targets and weights
    ("cross_entropy", {}, 3),
    ("cross_entropy", {}, 40),  # of them the SDK sends a few: the others are token 0 with weight 0
    ("importance_sampling", {}, None),
    ("ppo", {}, None),
    ("ppo", {"clip_low_threshold": 0.95, "clip_high_threshold": 1.3}, None),
    ("cispo", {}, None),
    ("cispo", CLIP, None),
    ("dro", {}, None),
    ("dro", {"beta": 0.3}, None),
    ("gspo", {}, None),
    ("gspo", CLIP, None),
]


def score(weights, tokens, targets):
    """The logprobs of targets [N] or [N, K] under the model of these weights, a float64 tensor."""
    table = (torch.tensor(FEATURES.all(tokens)) @ weights).log_softmax(-1)
    return table.gather(-1, torch.tensor(targets.reshape(len(tokens), -1))).reshape(targets.shape)


def formula(name, lp, x, clip_low_threshold=None, clip_high_threshold=None, beta=0.05):
    """The loss of a datum again."""
    if name == "cross_entropy":
        return -(x["weights"] * lp).sum()
    q, a = x["logprobs"], x["advantages"]
    if name == "importance_sampling":
        return -((lp - q).exp() * a).sum()
    if name == "dro":
        return -(lp * a - beta / 2 * (lp - q) ** 2).sum()
    if name == "cispo":
        low, high = clip_low_threshold or 0.0, clip_high_threshold or 4.0
        return -((lp - q).exp().clamp(low, high).detach() * lp * a).sum()
    low, high, ratio = clip_low_threshold or 0.8, clip_high_threshold or 1.2, (lp - q).exp()
    if name == "gspo":
        mask = x.get("sequence_ratio_mask", (a != 0).double())
        mean = (mask * (lp - q)).sum() / mask.sum() if mask.any() else torch.zeros(())
        ratio = (mean.detach() + lp - lp.detach()).exp()
    return -torch.minimum(ratio * a, ratio.clamp(low, high) * a).sum()


def make_batch(weights, name, seed, k=None):
    """Datums with ratios around 1 and prompts of zeros, as (tokens, targets, inputs).

    Their targets are the next tokens, which makes them ordinary datums of the backend, or with another seed any.
    """
    rng, data = np.random.default_rng(seed), []
    for n in (1, 5, 9):
        tokens, shape, on = rng.integers(0, 259, n), (n,) if k is None else (n, k), np.arange(n) >= n // 3
        targets = rng.integers(0, 259, shape)
        if seed == 0:
            targets[:-1] = tokens[1:].reshape(-1, *[1] * (k is not None))
        inputs = {"weights": rng.normal(size=shape)}
        if k == 40:
            sent = rng.random(shape) < 0.05
            targets, inputs = targets * sent, {"weights": inputs["weights"] * sent}
        if name != "cross_entropy":
            q = score(torch.tensor(weights), tokens, targets).numpy() + rng.normal(0, 0.15, shape)
            inputs = {"logprobs": q * on, "advantages": rng.normal(size=shape) * on}
        if name == "gspo" and seed:
            inputs["sequence_ratio_mask"] = np.arange(n) >= n // 4  # of more than what has an advantage
        data.append((tokens, targets, {key: x.astype(np.float32) for key, x in inputs.items()}))
    return data


def to_sdk(name, data):
    """As datums. Where the advantage is 0 a ratio without a bound is not looked at: 0 times infinity is no number."""
    found = []
    for tokens, targets, inputs in data:
        if name in ("importance_sampling", "ppo", "cispo"):
            off = inputs["advantages"] == 0
            inputs = {**inputs, "logprobs": np.where(off, -1000, inputs["logprobs"]).astype(np.float32)}
        arrays = {"target_tokens": targets, **inputs}
        if targets.shape[-1] == 40:  # matrices of torch are sent as sparse ones
            arrays = {key: torch.tensor(x) for key, x in arrays.items()}
        found.append(types.Datum(prompt(tokens), arrays))
    assert (found[-1].loss_fn_inputs["target_tokens"].sparse_crow_indices is not None) == (targets.shape[-1] == 40)
    return found


@pytest.fixture
def state(fake, training):
    """The weights of the model, and its gradient."""
    return fake.service.runs[training.model_id].model.backend._weights


def forget(training):
    """Ends an accumulation without a change of the weights."""
    training.optim_step(types.AdamParams(learning_rate=0.0)).result()


@for_each(("name", "config", "k"), CASES)
def test_value_and_gradient(state, training, name, config, k):
    """Of each call alone, and the logprobs and terms of each datum; forward leaves no gradient."""
    for seed in (0, 1):
        data, weights = make_batch(state.value, name, seed, k), torch.tensor(state.value, requires_grad=True)
        if name == "gspo" and not seed:
            data[0][2]["advantages"][:] = 0  # a sequence without any adds nothing
        scores = [score(weights, tokens, targets) for tokens, targets, _ in data]
        inputs = [{key: torch.tensor(x, dtype=torch.float64) for key, x in row[2].items()} for row in data]
        losses = [formula(name, lp, x, **config) for lp, x in zip(scores, inputs, strict=True)]
        sum(losses).backward()
        value = sum(losses).item()
        forward = training.forward(to_sdk(name, data), name, config).result()
        assert not state.gradient.any()
        result = training.forward_backward(to_sdk(name, data), name, config).result()
        assert forward.metrics == result.metrics == {"loss:sum": pytest.approx(value, rel=2e-5)}
        for lp, loss, found in zip(scores, losses, result.loss_fn_outputs, strict=True):
            np.testing.assert_allclose(found["logprobs"].to_numpy(), lp.detach(), atol=1e-5)
            assert found["elementwise_loss"].to_numpy().sum() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6)
        gradient = weights.grad.numpy()
        np.testing.assert_allclose(state.gradient, gradient, rtol=0, atol=1e-4 * np.abs(gradient).max())
        forget(training)


BAD = {
    "no loss of that name": ("nothing", {}, {}, "unknown"),
    "stable_reinforce": ("stable_reinforce", {}, {}, "stability"),
    "a loss sent as a graph": ("custom", {"loss_id": "x"}, {}, "unknown"),
    "unknown setting": ("ppo", {"epsilon": 0.2}, {}, "no such setting"),
    "text setting": ("ppo", {"clip_low_threshold": "a"}, {}, "finite number"),
    "missing input": ("ppo", {}, {"advantages": None}, "lacks 'advantages'"),
    "missing targets": ("ppo", {}, {"target_tokens": None}, "lacks 'target_tokens'"),
    "unknown input": ("ppo", {}, {"mask": np.ones(3, np.float32)}, "does not read"),
    "wrong length": ("ppo", {}, {"advantages": np.ones(2, np.float32)}, "shape (2,)"),
    "wrong dtype": ("ppo", {}, {"advantages": np.ones(3, np.int64)}, "dtype int64"),
    "matrix": ("ppo", {}, {"target_tokens": np.ones((3, 2), np.int64)}, "one row per token"),
    "not a number": ("ppo", {}, {"advantages": np.array([0, np.nan, 0], np.float32)}, "[1] is nan"),
    "infinite": ("ppo", {}, {"logprobs": np.array([0, 0, -np.inf], np.float32)}, "[2] is -inf"),
    "not a logprob": ("ppo", {}, {"logprobs": np.array([-1, 0.5, 0], np.float32)}, "has an entry of 0.5"),
    "not finite": ("importance_sampling", {}, {"logprobs": np.full(3, -1000, np.float32)}, "at data[1]"),
    "negative id": ("ppo", {}, {"target_tokens": np.array([1, -1, 2])}, "[-1, 2]"),
    "id too large": ("ppo", {}, {"target_tokens": np.array([1, 1, 259])}, "[1, 259]"),
}


@for_each("case", BAD)
def test_bad_calls_are_refused(state, training, case):
    """By name and index, changing nothing, and the client goes on."""
    name, config, changes, message = BAD[case]
    one = np.ones(3, np.float32)
    inputs = {"target_tokens": np.array([2, 3, 1]), "logprobs": -6 * one, "advantages": one}
    fine, bad = (
        types.Datum(prompt([1, 2, 3]), {key: x for key, x in (inputs | more).items() if x is not None})
        for more in ({}, changes)
    )
    for call in (training.forward, training.forward_backward):
        with pytest.raises((tinker.APIStatusError, tinker.RequestFailedError)) as caught:
            call([fine, bad], name, config).result()
        assert message in str(caught.value)
    assert not state.gradient.any()
    training.forward_backward([fine], "ppo").result()
    forget(training)
