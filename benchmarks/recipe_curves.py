"""Draws the rewards and held-out scores of runs of examples/configs/chain_sum.yaml.

rlkit train examples/configs/chain_sum.yaml name=grpo
rlkit train examples/configs/chain_sum.yaml name=rloo algorithm.algorithm_type=rloo
python benchmarks/recipe_curves.py checkpoints/examples/grpo checkpoints/examples/rloo
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

from rlkit.tracking import read_metrics

OUT = Path(__file__).parents[1] / "docs" / "images" / "chain-sum.png"


def draw(folders: list[Path], out: Path) -> None:
    figure, axes = plt.subplots(1, len(folders), figsize=(5 * len(folders), 4), layout="constrained", sharey=True)
    for axis, folder in zip(np.atleast_1d(axes), folders, strict=True):
        rows = [(row["step"], row["metrics"]) for row in read_metrics(folder)]
        trained = np.array([(step, m["env/chain_sum/reward"]) for step, m in rows if "env/chain_sum/reward" in m])
        held = [
            [step] + [m[f"eval/held_out/{x}"] for x in ("mean", "low", "high")] for step, m in rows if "eval/mean" in m
        ]
        at, mean, low, high = np.array(held).T
        axis.plot(*trained.T, marker="o", markersize=3, label="training questions, sampled")
        axis.errorbar(at, mean, [mean - low, high - mean], fmt="D", capsize=4, label="held out, greedy (95 %)")
        for x, y in zip(at, mean, strict=True):
            axis.annotate(f"{y:.2f}", (x, y), (6, 4), textcoords="offset points")
        axis.set(
            title=f"{folder.name}: sums of two digits",
            xlabel="steps done",
            ylim=(-0.02, 1.02),
            xlim=(-0.4, at[-1] * 1.12),
        )
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower right", frameon=False)
        print(folder.name, trained[:, 1].round(3).tolist(), "held out", mean.round(3).tolist())
    np.atleast_1d(axes)[0].set_ylabel("share of right answers")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    draw(given.folders, given.out)


if __name__ == "__main__":
    main()
