"""GRPO that samples the next batch while it trains on this one. Runs on the toy backend in seconds.

    python examples/async_grpo.py [--steps 15] [--lag 1] [--in-flight] [--model smollm2-135m-instruct]

A batch is at most ``--lag`` steps old; with 0 the loop waits. The loss corrects for the age by the ratio of the present
policy to the policy that sampled; sequences whose ratio is too far from 1 are dropped. With ``--in-flight`` running
requests continue under newer weights, and each token's ratio is to the policy that drew it.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

import rlkit
from rlkit import credit
from rlkit.corrections import sequence_mask
from rlkit.envs import Tasks, function
from rlkit.metrics import kl_v1
from rlkit.rollouts import Plan, async_rollouts

QUESTIONS = [f"Give me {number} digits, nothing else." for number in ("two", "three", "four", "five")]


def digits(answer: str) -> float:
    """Return the share of an answer's characters that are digits."""
    return sum(c.isdigit() for c in answer) / max(len(answer), 1)


def train(policy: rlkit.TrainerBackend, *, steps: int, lag: int, rate: float, in_flight: bool = False) -> list[float]:
    """Train, and return the mean reward of each step."""
    tasks: Tasks = function(QUESTIONS, digits, name="digits")
    plan = Plan(n=8, params=rlkit.SamplingParams(max_tokens=6), seed=0)
    means = []
    with async_rollouts(policy, tasks, size=4, steps=steps, max_lag=lag, in_flight=in_flight, plan=plan) as batches:
        for step, groups in enumerate(batches):
            began = time.monotonic()
            data = credit.assign(groups, "grpo", weights="token-mean").data
            pair = {
                "trainer_logprobs": policy.forward(data).result().selected,
                "sampling_logprobs": [d.select(d.inputs["sampling_logprobs"]) for d in data],
            }
            near = sequence_mask(**pair)  # 1 for the tokens of sequences whose ratio lies in [0.5, 2], 0 for the others
            data = [d.with_inputs(weights=d.inputs["weights"] * mask) for d, mask in zip(data, near, strict=True)]
            policy.forward_backward(data, "ppo")
            policy.optim_step(rlkit.Adam(learning_rate=rate)).result()
            means.append(float(np.mean([group.rewards.mean() for group in groups])))
            print(
                f"step {step:2}  reward {means[-1]:.2f}  lag {groups.metrics['sampler/lag']:.1f}"
                f"  kl to it {kl_v1(**pair):6.3f}  near {np.mean([mask.all() for mask in near]):.2f}"
                f"  {time.monotonic() - began:.1f} s"
            )
    return means


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="toy")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--lag", type=int, default=1)
    parser.add_argument("--in-flight", action="store_true", help="continue under newer weights between two tokens")
    args = parser.parse_args()
    toy = args.model == "toy"
    options = {"seed": 0} if toy else {"model": args.model, "lora": rlkit.Lora(rank=16), "seed": 0}
    with rlkit.connect("toy" if toy else "local", **options) as policy:
        train(policy, steps=args.steps, lag=args.lag, rate=0.05 if toy else 1e-4, in_flight=args.in_flight)


if __name__ == "__main__":
    main()
