"""What a long run leaves behind in memory: steps of fixed length, and what the process has grown by afterwards.

    python benchmarks/growth.py [--backend toy] [--steps 2000] [--warm 300]

A step is what a loop does: a snapshot, samples from it, a datum for each, forward_backward, optim_step, metrics to a
tracker, and every hundredth a checkpoint. After a warm-up, in which caches and the allocator's arenas fill, what counts
is the growth per step of the resident set (slope of a line through samples taken after each twentieth of the steps, so
that neither a single page nor the allocator's moment decides) and of what Python objects hold (tracemalloc, in a second
run, since it slows the first down); file descriptors and threads gained; and beside them the whole of the warm-up's
growth, from the end of the first step.

The figures go to the screen and to benchmarks/results/growth.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

import rlkit
from rlkit.advantages import grpo
from rlkit.runs import Run

PROMPTS, SAMPLES, TOKENS = 2, 4, 16


def step(run: Run, policy: Any, params: rlkit.SamplingParams) -> None:
    prompt = np.arange(5, 13)
    with policy.sampler().result() as sampler:
        asked = [sampler.sample(prompt, params, n=SAMPLES) for _ in range(PROMPTS)]
        groups = [future.result() for future in asked]
    data = []
    for samples in groups:
        rewards = np.array([np.mean(sample.tokens % 2) for sample in samples])
        data += [s.datum(a) for s, a in zip(samples, grpo(rewards), strict=True)]
    loss = policy.forward_backward(data, "ppo")
    update = policy.optim_step(rlkit.Adam(learning_rate=1e-3)).result()
    run.log({"train/loss": loss.result().metrics["loss:sum"], "train/grad_norm": update.get("grad_norm:mean", 0.0)})
    run.checkpoint(policy, every=100)


def resident() -> int:
    """Bytes of the resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def held() -> tuple[int, int]:
    """Open descriptors, and threads."""
    return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()


def measured(options: dict[str, Any], warm: int, steps: int, folder: Path, *, traced: bool) -> dict[str, float]:
    """Bytes per step after the warm-up, and descriptors and threads gained."""
    params = rlkit.SamplingParams(max_tokens=TOKENS, stop=())
    every = max(1, steps // 20)
    at, sizes = [], []
    with Run(folder, seed=0, trackers=("jsonl",)) as run:
        policy = run.connect(**options)
        for number in run.steps(warm + steps):
            step(run, policy, params)
            if number == 0:
                first = resident()
            if number == warm:
                counts, settled = held(), resident()
                if traced:
                    tracemalloc.start()
            if number > warm and number % every == 0:
                gc.collect()
                at.append(number)
                sizes.append(tracemalloc.get_traced_memory()[0] if traced else resident())
        after = held()
    if traced:
        tracemalloc.stop()
    slope = float(np.polyfit(at, sizes, 1)[0])
    gained = {"descriptors": after[0] - counts[0], "threads": after[1] - counts[1]}
    return {"bytes": slope, "warm": settled - first, **gained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("toy", "local"), default="toy", help="local: a small one, made up")
    parser.add_argument("--steps", type=int, help="default: 2000 on the toy, 300 on the local backend")
    parser.add_argument("--warm", type=int, default=300, help="steps before those (default: %(default)s)")
    args = parser.parse_args()
    steps = args.steps or {"toy": 2000, "local": 300}[args.backend]
    with tempfile.TemporaryDirectory() as where:
        options: dict[str, Any] = {"name": args.backend}
        if args.backend == "local":
            sys.path.insert(0, str(Path(__file__).parents[1]))
            from tests.models.build import build

            options |= {"model": str(build("llama", Path(where) / "model")), "lora": rlkit.Lora(rank=4)}
        plain = measured(options, args.warm, steps, Path(where) / "plain", traced=False)
        traced = measured(options, args.warm, steps, Path(where) / "traced", traced=True)
    row = {
        "warm-up": args.warm,
        "bytes in the warm-up": plain["warm"],
        "steps": steps,
        "resident bytes per step": round(plain["bytes"], 1),
        "traced bytes per step": round(traced["bytes"], 1),
        "descriptors gained": plain["descriptors"],
        "threads gained": plain["threads"],
    }
    print(f"{args.backend}:", ", ".join(f"{name} {value}" for name, value in row.items()))
    path = Path(__file__).parent / "results" / "growth.json"
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {args.backend: row}, indent=1) + "\n")


if __name__ == "__main__":
    main()
