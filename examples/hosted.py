"""GRPO on Tinker: the loop of the README, plus saving and resuming for a run on a service.

    python examples/hosted.py --model Qwen/Qwen3-8B          # hosted; needs TINKER_API_KEY
    python examples/hosted.py --fake                         # the same program, without the service
    TINKER_BASE_URL=http://127.0.0.1:8000 python examples/hosted.py --model NAME     # a server of the API

Each step samples, takes the gradient and submits the step before any result is read. Every few steps the state is
saved; if a step's outcome is unknown, the run must resume from there, and does.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import rlkit
from rlkit.advantages import grpo

PROMPTS = ("Call ", "Dial ", "Count: ")


@contextlib.contextmanager
def service(*, fake: bool) -> Iterator[dict[str, Any]]:
    """Return options of ``connect``: none for the hosted service; with ``fake`` those of a service in this process."""
    if not fake:
        yield {}
        return
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as server:
        yield {"base_url": server.base_url, "api_key": server.api_key, "model": "toy"}


def run(options: dict[str, Any], *, steps: int, save_every: int, learning_rate: float) -> list[float]:
    """Train, and return the mean reward of each step."""
    policy = rlkit.connect("tinker", **options)
    params = rlkit.SamplingParams(max_tokens=8)
    prompts = [policy.tokenizer.encode(text) for text in PROMPTS]
    print(
        "route of the loss:",
        policy.route([rlkit.Datum([1, 2], [0, 1], {"sampling_logprobs": [-1.0], "advantages": 1.0})], "ppo"),
    )
    path, means, saved_at = policy.save("start").result(), [], 0
    while len(means) < steps:
        try:
            means.append(train(policy, prompts, params, learning_rate))
            if len(means) % save_every == 0:
                path, saved_at = policy.save("step").result(), len(means)
        except (rlkit.StepOutcomeUnknown, rlkit.TrainerFailed) as error:
            print(f"{error}\ngoing on from {path}")
            policy.close()
            policy = rlkit.connect("tinker", **{**options, "resume_from": path})
            del means[saved_at:]
            continue
        print(f"step {len(means):3}  reward {means[-1]:.3f}  version {policy.version}")
    policy.close()
    return means


def train(policy: Any, prompts: list[np.ndarray], params: rlkit.SamplingParams, learning_rate: float) -> float:
    """Make one step of GRPO; the reward is the share of digits."""
    sampler = policy.sampler().result()
    data, rewards = [], []
    for group in [sampler.sample(prompt, params, n=8) for prompt in prompts]:
        samples = group.result()
        texts = [policy.tokenizer.decode(s.tokens) for s in samples]
        r = np.array([sum(c.isdigit() for c in text) / 8 for text in texts])
        rewards.append(r.mean())
        data += [s.datum(a) for s, a in zip(samples, grpo(r), strict=True)]
    fb = policy.forward_backward(data, "ppo")
    step = policy.optim_step(rlkit.Adam(learning_rate=learning_rate))  # in flight together
    fb.result(), step.result()
    return float(np.mean(rewards))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=None, help="2e-4, or 0.05 with --fake")
    parser.add_argument("--fake", action="store_true", help="a service in this process")
    args = parser.parse_args()
    rate = args.learning_rate if args.learning_rate is not None else 0.05 if args.fake else 2e-4
    with service(fake=args.fake) as where:
        options = {"model": args.model, "lora": rlkit.Lora(rank=args.rank), "seed": 0, **where}
        run(options, steps=args.steps, save_every=args.save_every, learning_rate=rate)


if __name__ == "__main__":
    main()
