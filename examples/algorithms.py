"""One task, several algorithms: an estimator, a loss and a token weighting are three choices, and any three compose.

    python examples/algorithms.py --steps 15

The task is to write digits. Every algorithm starts from the same toy policy and seed, so the table compares them.
"""

from __future__ import annotations

import argparse

import numpy as np

import rlkit
from rlkit import losses
from rlkit.advantages import token_weights
from rlkit.filters import zero_variance

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
    """The mean reward of each step."""
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
        advantages = rlkit.advantages.registry[estimator](rewards).ravel()
        keep = zero_variance(rewards).keep  # groups that teach nothing
        flat = [sample for group in samples for sample in group]
        weights = token_weights([sample.tokens.size for sample in flat], mode)
        data = []
        for k in np.flatnonzero(np.repeat(keep, rewards.shape[1])):
            inputs = {"weights": weights[k]}
            if name.endswith("KL"):  # the reference is asked only where it is used
                whole = np.concatenate([flat[k].prompt, flat[k].tokens])
                inputs["reference_logprobs"] = reference.logprobs(whole).result()[flat[k].prompt.size :]
            data.append(flat[k].datum(advantages[k], **inputs))
        if data:
            policy.forward_backward(data, loss, config=config)
            policy.optim_step(rlkit.Adam(learning_rate=0.05))
    return means


def main() -> None:
    """Runs every algorithm and prints its reward, first and last."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    steps = parser.parse_args().steps
    for name in ALGORITHMS:
        means = run(name, steps)
        print(f"{name:16} reward {means[0]:.2f} -> {means[-1]:.2f}")


if __name__ == "__main__":
    main()
