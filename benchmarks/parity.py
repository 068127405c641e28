"""One recipe, one seed, several ways to train: the curves, side by side.

    python benchmarks/parity.py [--steps 15] [--out docs/images/parity.png]

GRPO with a KL term, minibatches and one step off-policy, on the toy backend and on the service over the same exact
model: the two have to be equal, bit for bit. And GRPO with a KL term on the local backend with a two-layer model, and
on the service over that: there, float32 sums in another order can change a sampled token sooner or later. Both sides of
a pair are rlkit's arithmetic, so this shows the protocol; ``two_implementations.py`` has a server that is not rlkit's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import algorithms_table as table  # beside this file
import matplotlib.pyplot as plt

import rlkit
from rlkit import recipes
from rlkit.testing import FakeTinker
from rlkit.tracking import read_metrics

MORE = ["algorithm.kl_loss_fn_args.kl_coef=0.01", "buffer.train_batch_size=16", "synchronizer.sync_offset=1"]
MORE += ["model.lora_configs=[{lora_rank: 8, lora_alpha: 32}]", "model.tinker.rank=8"]


@contextlib.contextmanager
def over_local(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A service in this process over the local backend."""
    with table.backend("local", folder) as (_, options):
        stream = np.random.SeedSequence(0, spawn_key=(zlib.crc32(b"connect/policy"),))  # of a run with seed 0
        seed = stream.generate_state(1, np.uint32).item()

        def connect(*, lora: rlkit.Lora | None = None, **given: Any) -> Any:
            """The adapter begins as the local run's does, whatever seed the service was given."""
            own = lora and attrs.evolve(lora, seed=None)
            return rlkit.connect("local", **options, lora=own, seed=seed, folder=folder, **given)

        fake = FakeTinker(seed=0, models=connect, names=("m",))
        with fake, mock.patch.dict(os.environ, TINKER_API_KEY=fake.api_key):
            yield "tinker", {"model": "m", "base_url": fake.base_url}


def curve(
    name: str,
    where: tuple[str, dict[str, Any]],
    folder: Path,
    steps: int,
) -> np.ndarray:
    """The mean reward of each step."""
    rate = {"toy": 0.02, "local": 0.01}[name]
    own = [*table.settings("grpo", name, folder, where, steps), *MORE, f"algorithm.optimizer.lr={rate}"]
    own += [] if name == "toy" else ["buffer.train_batch_size=0", "synchronizer.sync_offset=0"]
    (outcome,) = recipes.run(recipes.load(overrides=own))
    return np.array([row["metrics"]["env/write/reward"] for row in read_metrics(outcome.folder)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--out", type=Path, default=table.ROOT / "docs" / "images" / "parity.png")
    given = parser.parse_args()
    found = {}
    for title, name, ways in (
        (
            "exact model",
            "toy",
            {"toy": lambda f: table.backend("toy", f), "service": lambda f: table.backend("fake", f)},
        ),
        ("two-layer model", "local", {"local": lambda f: table.backend("local", f), "service": over_local}),
    ):
        for way, make in ways.items():
            with tempfile.TemporaryDirectory() as folder, make(Path(folder)) as where:
                found[title, way] = curve(name, where, Path(folder), given.steps)
            print(title, way, found[title, way].round(4).tolist(), flush=True)
    draw(found, given.out)


def draw(found: dict[tuple[str, str], np.ndarray], path: Path) -> None:
    titles = list(dict.fromkeys(title for title, _ in found))
    figure, axes = plt.subplots(1, len(titles), figsize=(10, 4), layout="constrained")
    for axis, title in zip(axes, titles, strict=True):
        ways = {way: values for (of, way), values in found.items() if of == title}
        (here, a), (_, b) = ways.items()
        axis.plot(a, color="tab:blue", linewidth=5, alpha=0.35, label=f"{here} backend, in this process")
        axis.plot(b, color="tab:orange", linewidth=1.2, marker=".", label="the service over the same model")
        gap = float(np.abs(a - b).max())
        axis.set(title=f"{title}: largest difference {gap:.2g}", xlabel="step", ylim=(0, 1.05))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(loc="lower right", frameon=False)
    axes[0].set_ylabel("mean reward")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
