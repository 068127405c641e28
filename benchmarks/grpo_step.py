"""A GRPO step, rlkit beside TRL's GRPOTrainer, in one run.

    python -m venv /tmp/trl && /tmp/trl/bin/pip install torch==2.13.0 && /tmp/trl/bin/pip install trl peft
    python benchmarks/grpo_step.py --trl /tmp/trl/bin/python [--case W] [--dtype float32] [--rounds 3] [--threads 1]

Each side is a process of its own; they take turns (A B A B ...) after a warm-up, and medians of CPU seconds are
compared. Peak memory is the process's largest resident size. The figures go to the screen and to
benchmarks/results/grpo-CASE-DTYPE.json.
"""

from __future__ import annotations

import argparse

import runner
import workload


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trl", required=True, help="the Python that has trl")
    parser.add_argument("--case", default="W", choices=workload.CASES)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    ours = runner.Side("rlkit", options.dtype, options.threads)
    theirs = runner.Side("trl", options.dtype, options.threads, options.trl)
    for side in (ours, theirs):
        side.do("step", case="warm-up")
    found = runner.interleaved([ours, theirs], options.rounds, "step", case=options.case)
    for side in (ours, theirs):
        side.end()
        found[side.name]["step"] = found[side.name]["sample"] + found[side.name]["train"]
    a, b = found["rlkit"], found["trl"]
    ratios = {key: b[key] / a[key] for key in ("sample", "train", "step", "peak_GB")}
    for name, row in (*found.items(), ("trl / rlkit", ratios)):
        print(f"{name:12}" + "".join(f"  {key} {row[key]:.2f}" for key in ratios))
    lengths, group, tokens = workload.CASES[options.case]
    runner.write(
        f"grpo-{options.case}-{options.dtype}",
        {
            "prompts": lengths,
            "completions_of_each": group,
            "tokens_of_a_completion": tokens,
            "dtype": options.dtype,
            "threads": options.threads,
            "rounds": options.rounds,
            "machine": runner.machine(),
            "versions": theirs.versions,
            "medians": found,
            "trl_over_rlkit": ratios,
        },
    )


if __name__ == "__main__":
    main()
