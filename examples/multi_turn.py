"""A game of several turns: guess a digit, hear "higher" or "lower", guess again. Runs on the toy backend in a minute.

    python examples/multi_turn.py [--steps 10] [--keep trajectories.jsonl]

Each turn has separate credit: the discounted return from it on, normalised over the batch (ReBN). The policy first
learns to answer with a digit at all.
"""

from __future__ import annotations

import argparse

import numpy as np

import rlkit
from rlkit import credit
from rlkit.advantages import discounted_returns, rebn
from rlkit.chat import Chat
from rlkit.envs import Action, StepResult, Tasks
from rlkit.evaluation import evaluate_sync
from rlkit.rollouts import Plan, rollout_sync
from rlkit.storage import append


class GuessDigit:
    """Draw a digit from the seed; the policy has five guesses."""

    def reset(self, seed: int) -> str:
        """Return the first observation."""
        self.digit = int(np.random.default_rng(seed).integers(10))
        self.left = 5
        return "I think of a digit. Guess it."

    def step(self, action: Action) -> StepResult:
        """Answer one guess."""
        self.left -= 1
        if len(action) != 1 or action not in "0123456789":
            return StepResult("One digit, please.", -0.1, truncated=self.left == 0, info={"digit": False})
        guess = int(action)
        if guess == self.digit:
            return StepResult("Right!", 1.0, terminated=True, info={"digit": True, "right": True})
        hint = "higher" if self.digit > guess else "lower"
        return StepResult(f"It is {hint}.", 0.0, truncated=self.left == 0, info={"digit": True})

    def close(self) -> None:
        """Free nothing."""


def turn_advantages(rewards: list[np.ndarray]) -> list[np.ndarray]:
    """Return the discounted return from each turn on, normalised over all turns of the batch."""
    return rebn(discounted_returns(rewards, gamma=0.9))


def train(steps: int, *, keep: str | None = None) -> tuple[list[float], rlkit.evaluation.Evaluation]:
    """Train; return the mean return of each step, and a score on held-out games."""
    policy = rlkit.connect("toy", seed=0)
    tasks = Tasks(lambda _: GuessDigit(), 64, name="digit", seeds=lambda index: index)
    held_out = Tasks(lambda _: GuessDigit(), 8, name="digit", split="test", seeds=lambda index: 1000 + index)
    plan = Plan(n=8, params=rlkit.SamplingParams(max_tokens=2), chat=Chat(policy.tokenizer), max_turns=5, seed=0)
    means = []
    for step in range(steps):
        with policy.sampler().result() as sampler:
            groups = rollout_sync(sampler, tasks.batch(step, 4), step=step, plan=plan)
        if keep is not None:
            append(keep, groups)
        batch = credit.assign(groups, turn_advantages, level="turn")  # one number per turn, one datum per game
        policy.forward_backward(batch.data, "ppo")
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        means.append(groups.metrics["env/digit/reward"])
        print(
            f"step {step:2}  return {means[-1]:5.2f}  turns {groups.metrics['env/digit/turns']:.1f}"
            f"  digits {groups.metrics['env/digit/info/digit']:.2f}  right {groups.metrics['env/digit/terminated']:.0f}"
        )
    with policy.sampler().result() as sampler:
        found = evaluate_sync(sampler, held_out, n=4, k=[1, 4], plan=plan)
    return means, found


def main() -> None:
    """Train, and print the score on held-out games."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--keep", help="a file to append the trajectories to")
    arguments = parser.parse_args()
    _, found = train(arguments.steps, keep=arguments.keep)
    result = found.scores["digit"]
    print(f"held out: return {result.mean:.2f} (95 %: {result.low:.2f} to {result.high:.2f})")
    print(f"pass@1 {result.pass_at_k[1]:.2f}, pass@4 {result.pass_at_k[4]:.2f}, {result.failed} failed")


if __name__ == "__main__":
    main()
