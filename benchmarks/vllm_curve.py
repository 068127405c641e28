"""The demo's learning curve, sampled by this process and by vLLM: the same loop, questions and first adapters.

    RLKIT_VLLM_PYTHON=.venv-vllm/bin/python python benchmarks/vllm_curve.py [--seeds 2] [--steps 10]

Both sides run examples/quickstart.py's own functions on SmolLM2-135M-Instruct, without an adapter on the output head,
which vLLM does not serve. They draw other tokens, so curves differ as seeds do. Give the same command again to go on
where it stopped; what there is so far is drawn after each run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import matplotlib as mpl
import numpy as np

mpl.use("Agg")
import matplotlib.pyplot as plt

import rlkit
from rlkit.backends.vllm import Vllm
from rlkit.tracking import read_metrics

ROOT = Path(__file__).parents[1]
SIDES = {"local": ("sampled by rlkit", "tab:blue"), "vllm": ("sampled by vLLM", "tab:orange")}
REWARD, WANTED = "env/sums/reward", ("train/kl_k3", "train/ratio/min", "train/ratio/max")


def quickstart() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("quickstart", ROOT / "examples" / "quickstart.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["quickstart"] = module
    spec.loader.exec_module(module)
    return module


def play(example: ModuleType, side: str, seed: int, given: argparse.Namespace) -> None:
    """One curve, with its scores before and after."""
    args = example.arguments(
        ["--out", str(given.out / f"{side}-{seed}"), "--steps", str(given.steps), "--seed", str(seed)]
    )
    options = {"model": args.model, "lora": rlkit.Lora(rank=args.rank, train_unembed=False), "device": "cpu"}
    if side == "vllm":
        environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        environment["OMP_NUM_THREADS"] = str(given.threads)
        arguments = ["--enforce-eager", "--max-num-seqs", "128", "--max-model-len", "2048"]
        options["sampler"] = Vllm(arguments=arguments, environment=environment)
    with rlkit.Run(args.out, seed=seed, trackers=("jsonl",)) as run:
        if run.step < args.steps:
            example.loop(run, run.connect("local", **options), args)


def results(out: Path) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Side -> seed -> name -> a number for each step."""
    curves: dict[str, dict[str, dict[str, list[float]]]] = {side: {} for side in SIDES}
    for side in SIDES:
        for folder in sorted(out.glob(f"{side}-*")):
            rows = [row["metrics"] for row in read_metrics(folder)]
            steps = [row for row in rows if REWARD in row]
            if steps:
                found = {name: [float(f"{row[name]:.4g}") for row in steps] for name in (REWARD, *WANTED)}
                curves[side][folder.name.rpartition("-")[2]] = found
    return curves


def draw(curves: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    """Each seed thin, the mean of the seeds that got furthest thick."""
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for side, seeds in curves.items():
        label, color = SIDES[side]
        for each in seeds.values():
            axes.plot(each[REWARD], color=color, alpha=0.35, linewidth=1)
        longest = max((len(each[REWARD]) for each in seeds.values()), default=0)
        whole = [each[REWARD] for each in seeds.values() if len(each[REWARD]) == longest]
        if whole:
            axes.plot(np.mean(whole, 0), color=color, linewidth=2.5, marker=".", label=f"{label}: mean of {len(whole)}")
    axes.set(title="The demo, SmolLM2-135M-Instruct: GRPO on sums of two one-digit terms")
    axes.set(xlabel="optimizer steps done", ylabel="share of right answers, training questions", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper left", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("steps", 10), ("seeds", 2), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "vllm-curve")
    parser.add_argument("--image", type=Path, default=ROOT / "docs" / "images" / "vllm-curve.png")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results" / "vllm-curve.json")
    given = parser.parse_args()
    example = quickstart()
    for seed in range(given.seeds):
        for side in SIDES:
            began, used = time.perf_counter(), time.process_time()
            play(example, side, seed, given)
            print(f"{side}, seed {seed}: {time.perf_counter() - began:.0f} s", flush=True)
            print(f"processor time of this process {time.process_time() - used:.0f} s", flush=True)
            curves = results(given.out)
            settings = {"steps": given.steps, "seeds": given.seeds, "threads": given.threads}
            given.results.write_text(json.dumps({"settings": settings, "curves": curves}, indent=1) + "\n", "utf-8")
            draw(curves, given.image)


if __name__ == "__main__":
    main()
