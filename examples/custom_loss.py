"""A loss of your own, by name, composed, and on every backend. Runs on the toy backend, and on Tinker without a key.

    python examples/custom_loss.py

The loss is called once per datum with only the tokens that the policy sampled ([n] each), and returns a sum. Its
parameters name the inputs that a datum must carry; those with a default are optional. Keyword-only ones are settings.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import rlkit
from rlkit import losses
from rlkit.advantages import grpo

PROMPTS = ["My number is ", "Call ", "Room ", "It is "]


@losses.register("smooth")
@losses.loss(elementwise=True)  # a sum over tokens, so it may be called once for many datums
def smooth(logprobs: Any, sampling_logprobs: Any, advantages: Any, weights: Any = 1.0, *, width: float = 0.2) -> Any:
    """Policy gradient that fades as the policy moves away from the sampling policy, in both directions.

    At the sampling policy its gradient is that of importance sampling. ``weights`` multiplies each term; ``detach``
    and comparisons of tensors are fine, branches on values are not, because backends may trace a loss.
    """
    moved = width * ((logprobs - sampling_logprobs) / width).tanh()
    outside = (logprobs.detach() - sampling_logprobs).abs() > width
    return -(weights * advantages * moved).sum(), {"outside:sum": outside.float().sum()}


def digits(policy: Any, sample: rlkit.Sample) -> float:
    """Return the share of an answer's characters that are digits."""
    text = policy.tokenizer.decode(sample.tokens)
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def train(policy: Any, loss: Any, *, steps: int = 15, config: dict[str, Any] | None = None) -> list[float]:
    """Return the mean reward of each step; two passes over each batch, so that the ratio is not always 1."""
    params = rlkit.SamplingParams(max_tokens=6)
    means = []
    for _ in range(steps):
        with policy.sampler().result() as sampler:
            groups = [sampler.sample(policy.tokenizer.encode(p), params, n=8) for p in PROMPTS]
            groups = [group.result() for group in groups]
        rewards = np.array([[digits(policy, sample) for sample in group] for group in groups])
        data = [
            sample.datum(a, reference_logprobs=sample.logprobs)
            for group, row in zip(groups, rewards, strict=True)
            for sample, a in zip(group, grpo(row), strict=True)
        ]
        for _ in range(2):
            found = policy.forward_backward(data, loss, config=config)
            policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        means.append(float(rewards.mean()))
    metrics = found.result().metrics
    outside = metrics["outside:sum"] / metrics["tokens:sum"]
    print(f"  reward {means[0]:.2f} -> {means[-1]:.2f}, tokens beyond the width at the end {outside:.2f}")
    return means


def mistakes(policy: Any) -> None:
    """Show mistakes: each raises at the call, names its field, and changes nothing."""
    datum = rlkit.Datum.supervised([1, 2], [3])
    for data, config in (([datum], None), ([datum], {"widht": 0.1})):
        try:
            policy.forward_backward(data, "smooth", config=config)
        except rlkit.RlkitError as error:
            print(" ", error)


def main() -> None:
    """Train with the loss in several ways."""
    with rlkit.connect("toy", seed=0) as policy:
        print("by name, with a setting")
        train(policy, "smooth", config={"width": 0.1})
        mistakes(policy)
    with rlkit.connect("toy", seed=0) as policy:
        print("with a divergence from where each batch began")
        train(policy, losses.with_kl("smooth", coef=0.05, estimator="k3"), config={"width": 0.1})
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as fake:
        options = {"model": "toy", "base_url": fake.base_url, "api_key": fake.api_key, "seed": 0}
        with rlkit.connect("tinker", **options) as policy:
            sample = policy.sampler().result().sample([1, 2], rlkit.SamplingParams(max_tokens=2)).result()[0]
            print("on Tinker:", policy.route([sample.datum(1.0)], "smooth"))
            train(policy, "smooth", steps=8)


if __name__ == "__main__":
    main()
