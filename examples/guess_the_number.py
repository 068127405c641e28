r"""SmolLM2 plays GEM's GuessTheNumber: several turns, discounted returns, ReBN, and a run that resumes.

    python examples/guess_the_number.py --steps 8        # a few minutes on a CPU; run it again to resume
    python examples/guess_the_number.py --model toy      # milliseconds, to see the loop

The model does not write \boxed{} by itself, so its turn begins with one. It first learns to close the box
after a number; "well formed" is the share of turns in which it did.
"""

from __future__ import annotations

import argparse
import re
import time
from typing import Any

import rlkit
from rlkit import credit
from rlkit.advantages import discounted_returns, rebn
from rlkit.chat import Chat
from rlkit.envs import gem
from rlkit.rollouts import Plan, rollout_sync

ENVIRONMENT = "game:GuessTheNumber-v0-easy"
BOX = "\\boxed{"


def returns(rewards: list[Any]) -> list[Any]:
    """Return the discounted return from each turn on, normalised over all turns of the batch (ReBN)."""
    return rebn(discounted_returns(rewards, gamma=0.9))


def train(folder: str, *, model: str, steps: int, episodes: int, rate: float) -> list[tuple[float, float]]:
    """Train; return (mean return, share of well-formed turns) of each finished step."""
    local = {"model": model, "lora": rlkit.Lora(rank=16)}
    curve = []
    config = {"model": model, "episodes": episodes, "rate": rate}
    with rlkit.Run(folder, seed=0, config=config, trackers=("jsonl",)) as run:
        policy = run.connect("toy") if model == "toy" else run.connect("local", **local)
        chat = Chat(policy.tokenizer, prefill=BOX)
        tasks = gem(ENVIRONMENT, name="guess", seed=run.seed)
        params = rlkit.SamplingParams(max_tokens=6)
        plan = Plan(n=1, params=params, chat=chat, max_turns=5, seed=run.seed, min_n=1)
        for step in run.steps(steps):
            started = time.monotonic()
            with policy.sampler().result() as sampler:
                groups = rollout_sync(sampler, tasks.batch(step, episodes), step=step, plan=plan)
            batch = credit.assign(groups, returns, level="turn", weights=None, split="allow")
            fb = policy.forward_backward(batch.data, "importance_sampling")
            policy.optim_step(rlkit.Adam(learning_rate=rate)).result()
            turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
            texts = [policy.tokenizer.decode(turn.tokens) for turn in turns]
            formed = sum(bool(re.match(r"\s*\d+\s*\}", text)) for text in texts) / len(texts)
            mean = groups.metrics["env/guess/reward"]
            curve.append((mean, formed))
            run.log({**groups.metrics, "train/loss": fb.result().metrics["loss:sum"], "env/guess/well_formed": formed})
            run.log_trajectories(groups)
            run.checkpoint(policy)
            print(f"step {step:2}  return {mean:6.3f}  well formed {formed:.2f}  {time.monotonic() - started:5.1f} s")
    return curve


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/guess")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--episodes", type=int, default=32, help="per step")
    parser.add_argument("--rate", type=float, default=2e-4)
    args = parser.parse_args()
    train(args.folder, model=args.model, steps=args.steps, episodes=args.episodes, rate=args.rate)


if __name__ == "__main__":
    main()
