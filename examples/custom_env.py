"""Environments of your own: one turn as a function, several turns as a class, both in one mixture. Seconds on the toy.

    python examples/custom_env.py [--steps 8]

Three methods make an environment: ``reset``, ``step``, ``close``. Each may be ``async``; plain ones run in threads, so
they may block. A failure is counted and ends its episode, never the run.
"""

from __future__ import annotations

import argparse

import numpy as np

import rlkit
from rlkit import credit
from rlkit.chat import Chat
from rlkit.envs import Action, Mixture, StepResult, Tasks, TaskSettings, function, mixture
from rlkit.evaluation import evaluate_sync
from rlkit.rollouts import Plan, rollout_sync

WAYS = {"<-": "l", "->": "r"}  # a sign, and the right answer
PLAIN = "{% for message in messages %}{{ message.content }} {% endfor %}"  # the toy sees only the last words


class Maze:
    """Three doors; a sign at each shows the way. A wrong turn ends the episode."""

    def reset(self, seed: int) -> str:
        """Begin a game. All randomness comes from the seed, so the episodes of a group are the same game."""
        self.signs = np.random.default_rng(seed).choice(list(WAYS), size=3).tolist()
        return f"A door. The sign says {self.signs[0]}"

    def step(self, action: Action) -> StepResult:
        """Answer ``action``, the policy's text: a str that also has its tokens and its stop reason."""
        right = action.startswith(WAYS[self.signs.pop(0)])
        if not right or not self.signs:
            return StepResult(reward=float(right), terminated=True, info={"out": right and not self.signs})
        return StepResult(f"Good. The sign says {self.signs[0]}", reward=1.0)

    def close(self) -> None:
        """Free the resources of ``__init__`` and ``reset``; called once, whatever happened."""


class Slow(Maze):
    """The same game, as if over a network."""

    async def reset(self, seed: int) -> str:  # type: ignore[override]
        """Begin a game; while one waits, others play."""
        return Maze.reset(self, seed)


def tasks(split: str) -> Mixture:
    """Make mazes and single questions of a split."""
    first = 0 if split == "train" else 10_000
    mazes = Tasks(lambda _: Slow(), 64, name="maze", split=split, seeds=lambda index: first + index)
    rows = [{"prompt": f"Which way? {sign}", "letter": letter} for sign, letter in WAYS.items()]
    questions = function(rows, lambda text, letter: float(text.startswith(letter)), name="question")
    return mixture(
        {"maze": mazes, "question": questions}, weights={"maze": 3}, settings={"question": TaskSettings(n=4)}
    )


def train(steps: int) -> tuple[list[float], rlkit.evaluation.Evaluation]:
    """Train; return the mean return of each step in the maze, and a score on held-out mazes."""
    means = []
    with rlkit.connect("toy", seed=0) as policy:
        chat = Chat(policy.tokenizer, template=PLAIN)
        plan = Plan(n=8, params=rlkit.SamplingParams(max_tokens=1), chat=chat, max_turns=3, seed=0)
        for step in range(steps):
            with policy.sampler().result() as sampler:
                groups = rollout_sync(sampler, tasks("train").batch(step, 8), step=step, plan=plan)
            policy.forward_backward(credit.assign(groups, "grpo").data, "ppo")
            policy.optim_step(rlkit.Adam(learning_rate=0.1)).result()
            means.append(groups.metrics["env/maze/reward"])
            print(f"step {step:2}  maze {means[-1]:.2f} of 3, out {groups.metrics['env/maze/info/out']:.2f}")
        with policy.sampler().result() as sampler:
            return means, evaluate_sync(sampler, tasks("test"), n=1, plan=plan)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    _, found = train(parser.parse_args().steps)
    for name, score in found.scores.items():
        print(f"held out, {name}: {score.mean:.2f} (95 %: {score.low:.2f} to {score.high:.2f})")


if __name__ == "__main__":
    main()
