"""Training from one YAML file, with an environment and an algorithm of your own.

    python examples/config_driven.py                                             # seconds, on the toy backend
    python examples/config_driven.py examples/configs/digits.yaml algorithm.algorithm_type=rloo name=rloo
    python examples/config_driven.py examples/configs/digits.yaml algorithm.algorithm_type=first_wins name=first
    python examples/config_driven.py examples/configs/stages.yaml            # imitation, reinforcement, distillation
    rlkit train examples/configs/chain_sum.yaml                                  # needs no code of yours

Run it again to resume. ``rlkit train --keys`` lists the settings, docs/recipes.md explains them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import rlkit
from rlkit import recipes
from rlkit.envs import Tasks, function
from rlkit.tracking import read_metrics

PROMPTS = {"train": ["Call ", "Dial ", "Count ", "Pick "], "test": ["Ring ", "Number "]}


@recipes.rewards.register("digits")
def digits(action: str, answer: str = "") -> float:  # noqa: ARG001  # there is no right answer
    """Return the share of digits in the text."""
    return sum(c.isdigit() for c in action) / max(len(action), 1)


@recipes.environments.register("digits")
def write_digits(taskset: recipes.Taskset) -> Tasks:
    """Make a custom environment from its section of the file."""
    return function(PROMPTS[taskset.split], digits, name=taskset.name, **taskset.workflow_args)


def first_wins(rewards: list[np.ndarray]) -> list[np.ndarray]:
    """Compare the first of the best in each group with the mean of the others: a custom estimator."""
    return [np.where(np.arange(r.size) == r.argmax(), r.max() - r.mean(), 0.0) for r in rewards]


row = recipes.Recipe("an example", data="rollouts", advantage=first_wins, loss="cispo")
recipes.algorithms.register("first_wins", row)


def main(arguments: list[str]) -> list[recipes.Outcome]:
    """Run the file with its overrides, and print the curve of each stage."""
    if arguments in (["help"], ["--help"], ["-h"]):
        print(__doc__)
        return []
    config, *overrides = arguments or [str(Path(__file__).parent / "configs" / "digits.yaml")]
    if config.endswith("stages.yaml") and not Path("demonstrations.jsonl").exists():
        rows = [{"prompt": p, "response": f"{i}2345{i}"} for i, p in enumerate(PROMPTS["train"] * 2)]
        Path("demonstrations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    outcomes = recipes.run(recipes.load(config, overrides))
    for outcome in outcomes:
        rows = [row["metrics"] for row in read_metrics(outcome.folder)]
        for name in ("env/digits/reward", "train/loss", "train/kl_teacher", "eval/held_out/mean"):
            curve = [row[name] for row in rows if name in row]
            if curve:
                print(f"{outcome.stage:10} {name:20} {curve[0]:.2f} -> {curve[-1]:.2f}")
    return outcomes


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except rlkit.RlkitError as error:
        sys.exit(f"config_driven: {error}")
