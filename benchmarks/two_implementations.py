"""One recipe on a real model, trained by two implementations that share no code below the Tinker API: the curves.

    make .venv-server/ready
    python benchmarks/two_implementations.py --server .venv-server/bin/python [--steps 10] [--seeds 3]

SmolLM2-135M-Instruct, all of it, is given "What is 7 plus 5? It is" and learns to go on with the sum at once, by GRPO:
on the local backend (torch) and on SkyRL's server of the Tinker API (JAX), both on the CPU, with the same questions in
the same order. The local run of a seed begins with the adapter that the server drew for it, whose A is less than half
as large as peft's. The two draw other tokens, so curves differ as seeds do; the server trains no head, so neither side
does. Give the same command again to go on where it stopped: each run keeps its
checkpoints in ``--out``, and what there is so far is drawn after each of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

import rlkit
from rlkit.advantages import grpo
from rlkit.backends.local import checkpoint
from rlkit.envs import function
from rlkit.rollouts import rollout_sync
from rlkit.tracking import read_metrics, train_metrics
from rlkit.trajectory import datums

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
RESULTS = ROOT / "benchmarks" / "results" / "two-implementations.json"
SIDES = {"server": "SkyRL's Tinker server (JAX)", "local": "rlkit's local backend (torch)"}
COLORS = {"local": "tab:blue", "server": "tab:orange"}
NUMBER = re.compile(r"-?\d+")
TOKENS = 4  # of an answer


def rows(tokenizer: Any) -> list[dict[str, Any]]:
    """Every sum of two terms from 1 to 9, as tokens without a chat; no answer is one of its terms."""
    terms = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    return [{"prompt": tokenizer.encode(f"What is {a} plus {b}? It is"), "answer": str(a + b)} for a, b in terms]


def right(text: str, answer: str) -> float:
    """1 where the first number in the text is the answer."""
    return float(NUMBER.findall(text)[:1] == [answer])


def train(run: rlkit.Run, policy: Any, given: argparse.Namespace, every: int) -> Iterator[None]:
    """GRPO, one optimizer step for each batch; yields after each step."""
    tasks = function(rows(policy.tokenizer), right, name="sums")
    params, adam = rlkit.SamplingParams(max_tokens=TOKENS), rlkit.Adam(learning_rate=given.learning_rate)
    for number in run.steps(given.steps):
        began = time.perf_counter()
        with policy.sampler().result() as sampler:
            options = {"n": given.samples, "params": params, "seed": run.seed, "attempts": 1, "progress": False}
            groups = rollout_sync(sampler, run.batch(tasks, given.prompts), step=number, **options)
        data = []
        for group in groups:
            for t, a in zip(group.trajectories, grpo(group.rewards), strict=True):
                data += datums(t, a, weights=1 / (given.prompts * given.samples * TOKENS))
        loss = policy.forward_backward(data, "ppo")
        update = policy.optim_step(adam)
        metrics = train_metrics(data, loss.result(), update.result())
        run.log({**groups.metrics, **metrics, "time/step": time.perf_counter() - began})
        run.checkpoint(policy, every=every)
        yield


def cell(side: str, seed: int, server: Any, model: str, given: argparse.Namespace) -> Iterator[None]:
    """One curve."""
    lora = rlkit.Lora(rank=given.rank, train_unembed=False)
    start = given.out / f"start-{seed}"
    with rlkit.Run(given.out / f"{side}-{seed}", seed=seed, trackers=("jsonl",)) as run:
        if run.step >= given.steps:
            return
        if side == "local":
            policy = run.connect("local", model="smollm2-135m-instruct", lora=lora, device="cpu")
            if run.step == 0:
                checkpoint.read_adapter(start, policy._trainer.parameters)  # noqa: SLF001  # as tests/realserver does
        else:
            policy = run.connect("tinker", model=model, lora=lora, base_url=server.url, max_length=128, deadline=3600.0)
            if run.step == 0:
                path = policy.training_client.save_weights_for_sampler("start").result(timeout=3600).path
                server.adapter(path, start)
        with policy:
            yield from train(run, policy, given, every=3)


def found(out: Path, steps: int) -> dict[str, dict[str, list[float]]]:
    """Side -> seed -> the mean reward of each step."""
    curves: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    for side in SIDES:
        for folder in sorted(out.glob(f"{side}-*")):
            values = [row["metrics"]["env/sums/reward"] for row in read_metrics(folder)]
            if values:
                curves[side][folder.name.rpartition("-")[2]] = [round(float(x), 5) for x in values[:steps]]
    return curves


def draw(curves: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Each seed thin, the mean over the seeds that got that far thick."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for side, seeds in curves.items():
        for values in seeds.values():
            axes.plot(values, color=COLORS[side], alpha=0.35, linewidth=1)
        longest = max(map(len, seeds.values()), default=0)
        whole = [values for values in seeds.values() if len(values) == longest]
        if whole:
            label = f"{SIDES[side]}: each seed, and their mean"
            axes.plot(np.mean(whole, 0), color=COLORS[side], linewidth=2.5, marker=".", label=label)
    axes.set(title="SmolLM2-135M-Instruct, GRPO on one-digit sums, the same first adapters")
    axes.set(xlabel="optimizer steps done", ylabel="share of right answers", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", required=True, help="the Python of the server's environment")
    for name, default in (("steps", 10), ("seeds", 3), ("prompts", 8), ("samples", 8), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, default=list(SIDES), help="which of the two (default: both)"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "two-implementations")
    parser.add_argument("--image", type=Path, default=ROOT / "docs" / "images" / "two-implementations.png")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with rlkit.connect("local", model="smollm2-135m-instruct", lora=rlkit.Lora(rank=1)) as local:
        model = local.base.path  # converted once into the cache

    def play(side: str, seed: int, server: Any) -> None:
        for _ in cell(side, seed, server, model, given):
            curves = found(given.out, given.steps)
            print(side, seed, curves[side][str(seed)][-1], flush=True)
            settings = {k: v for k, v in vars(given).items() if isinstance(v, (int, float))}
            given.results.write_text(json.dumps({"settings": settings, "reward": curves}, indent=1) + "\n", "utf-8")
            draw(curves, given.image)

    from tests.realserver.server import RealServer

    small = {"max_lora_adapters": 2, "max_lora_rank": given.rank}
    small |= {"train_micro_batch_size": 16, "sample_max_num_sequences": 16}
    with contextlib.ExitStack() as stack:
        server = None
        if "server" in given.sides:
            stack.enter_context(mock.patch.dict(os.environ, TINKER_API_KEY="tml-any-key-is-let-in"))
            server = RealServer(given.server, model, given.out / "server", **small)
            stack.enter_context(server)
        for seed in range(given.seeds):
            for side in given.sides:
                play(side, seed, server)


if __name__ == "__main__":
    main()
