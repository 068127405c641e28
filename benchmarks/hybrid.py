"""A hybrid model with linear attention: rlkit beside ``generate`` and a padded step of peft.

    python benchmarks/hybrid.py [--dtype float32] [--rounds 3] [--threads 1]

A model like Qwen3.5 with random weights (``workload.hybrid``), 4 prompts of 37 to 72 tokens with 8 completions of 64
tokens each, so 32 rows. ``generate`` samples them in one padded batch, merged and as trainers do it, with the adapter
beside; a step is that and a gradient. Each side is a process of its own; they take turns after a warm-up. Figures go to
the screen and to benchmarks/results/hybrid-DTYPE.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import runner
import workload

CASE = {"lengths": [37, 49, 60, 72], "group": 8}


def main() -> None:
    from rlkit.backends.local.hub import model_path

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = str(workload.hybrid(Path(folder), Path(model_path(workload.MODEL))))
        ours, theirs = (runner.Side(name, options.dtype, options.threads, model=model) for name in ("rlkit", "naive"))
        jobs = {
            "sample, rlkit": (ours, "sample", {}),
            "sample, generate merged": (theirs, "sample", {"merged": True}),
            "sample, generate": (theirs, "sample", {}),
            "train, rlkit": (ours, "train", {}),
            "train, peft": (theirs, "train", {}),
        }
        for side, job, more in jobs.values():
            short = {"tokens": 4} if job == "sample" else {}
            side.do(job, lengths=[16], group=2, **short, **more)
        cpu: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(options.rounds):
            for name, (side, job, more) in jobs.items():
                cpu[name].append(side.do(job, **CASE, **more)["cpu"])
        for side in (ours, theirs):
            side.end()
    took = {name: statistics.median(values) for name, values in cpu.items()}
    ratios = {
        "sampling, generate merged": took["sample, generate merged"] / took["sample, rlkit"],
        "training": took["train, peft"] / took["train, rlkit"],
        "step": (took["sample, generate"] + took["train, peft"]) / (took["sample, rlkit"] + took["train, rlkit"]),
    }
    for figures in (took, ratios):
        print("".join(f"  {name} {value:.2f}\n" for name, value in figures.items()))
    runner.write(
        f"hybrid-{options.dtype}",
        {
            **CASE,
            "dtype": options.dtype,
            "threads": options.threads,
            "rounds": options.rounds,
            "machine": runner.machine(),
            "versions": theirs.versions,
            "cpu_s": took,
            "over_rlkit": ratios,
        },
    )


if __name__ == "__main__":
    main()
