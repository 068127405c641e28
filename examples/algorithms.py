"""One task, several algorithms: an estimator, a loss and a token weighting, in any combination.

    python examples/algorithms.py --steps 15

The task is to write digits. Every algorithm starts from the same toy policy and seed, so the table compares them.
"""

from __future__ import annotations

import argparse

import numpy as np

import rlkit
from rlkit import credit, losses
from rlkit.filters import zero_variance
from rlkit.trajectory import Group

ALGORITHMS = {  # name: (estimator, loss, settings of the loss, token weighting)
    "GRPO": ("grpo", "ppo", {}, "seq-mean-token-mean"),
    "Dr. GRPO": ("dr_grpo", "ppo", {}, "seq-mean-token-sum"),
    "DAPO": ("grpo", "ppo", {"clip_high_threshold": 1.28}, "token-mean"),
    "RLOO": ("rloo", "importance_sampling", {}, "seq-mean-token-sum"),
    "CISPO": ("grpo", "cispo", {}, "token-mean"),
    "GSPO": ("grpo", "gspo", {}, "seq-mean-token-mean"),
    "SAPO": ("grpo", "sapo", {}, "seq-mean-token-mean"),
    "GRPO + KL": ("grpo", losses.with_kl("ppo", coef=0.02), {}, "token-mean"),
    "GRPO + entropy": ("grpo", losses.with_entropy("ppo", coef=0.002), {}, "token-mean"),
}


def run(name: str, steps: int) -> list[float]:
    """Train, and return the mean reward of each step."""
    estimator, loss, config, mode = ALGORITHMS[name]
    policy = rlkit.connect("toy", seed=0)
    reference = policy.base_sampler().result()
    params = rlkit.SamplingParams(max_tokens=6, stop=())
    prompts = [policy.tokenizer.encode(text) for text in ("Call ", "Dial ", "Count ")]
    means = []
    for _ in range(steps):
        sampler = policy.sampler().result()
        groups = [sampler.sample(prompt, params, n=8) for prompt in prompts]
        samples = [group.result() for group in groups]
        texts = [[policy.tokenizer.decode(s.tokens) for s in group] for group in samples]
        rewards = np.array([[sum(c.isdigit() for c in text) / 6 for text in group] for group in texts])
        means.append(float(rewards.mean()))
        keep = zero_variance(rewards).keep  # the others teach nothing
        kept = [Group.of_samples(samples[i], rewards[i]) for i in np.flatnonzero(keep)]
        if kept:
            asked = reference if name.endswith("KL") else None  # only if the loss uses it
            batch = credit.assign(kept, estimator, weights=mode, reference=asked)
            policy.forward_backward(batch.data, loss, config=config)
            policy.optim_step(rlkit.Adam(learning_rate=0.05))
    return means


def main() -> None:
    """Run every algorithm, and print its first and last reward."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    for name in ALGORITHMS:
        means = run(name, steps)
        print(f"{name:16} reward {means[0]:.2f} -> {means[-1]:.2f}")


if __name__ == "__main__":
    main()
