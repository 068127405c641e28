"""SFT and DPO: a gradient and an update of rlkit beside the loops that people write with transformers and peft.

    python benchmarks/finetuning.py [--rounds 2] [--threads 1]

The first 10 layers of SmolLM2-135M. SFT: 9 texts of 20 to 900 tokens, the naive loop takes one at a time and computes
logits of completions alone. DPO: 6 pairs behind prompts of 40 to 150 tokens, the naive loop pads 4 pairs and computes
the reference without the adapter; on both sides the reference counts. Each side is a process of its own; they take
turns after a warm-up. CPU seconds go to the screen and to benchmarks/results/finetuning.json.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import runner
import workload

CASES = {
    "supervised": [[8, 12], [20, 40], [30, 90], [60, 120], [80, 170], [100, 250], [150, 300], [200, 450], [300, 600]],
    "preferences": [[40, 50, 70], [60, 90, 40], [80, 64, 64], [100, 30, 100], [120, 80, 50], [150, 60, 90]],
}
WARM = {"supervised": [[8, 8]], "preferences": [[8, 8, 6]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    from rlkit.backends.local.hub import model_path

    with tempfile.TemporaryDirectory() as folder:
        source = Path(model_path(workload.MODEL))
        path = str(workload.cut(source, Path(folder) / "llama", "llama"))
        sides = [runner.Side(name, "float32", options.threads, model=path) for name in ("rlkit", "naive")]
        found = {}
        for job, texts in CASES.items():
            for side in sides:
                side.do(job, texts=WARM[job])
            found[job] = runner.interleaved(sides, options.rounds, job, texts=texts)
        for side in sides:
            side.end()
    for job, run in found.items():
        print(f"{job:12}  {run}  naive / rlkit {run['naive']['cpu'] / run['rlkit']['cpu']:.2f}")
    runner.write(
        "finetuning",
        {
            "cases": CASES,
            "threads": options.threads,
            "rounds": options.rounds,
            "machine": runner.machine(),
            "versions": sides[0].versions,
            "medians": found,
            "naive_over_rlkit": {job: run["naive"]["cpu"] / run["rlkit"]["cpu"] for job, run in found.items()},
        },
    )


if __name__ == "__main__":
    main()
