"""A quarter of W, here and in another checkout: does a change of the local engine cost speed?

    python benchmarks/local_quarter.py OTHER [--dtype float32] [--rounds 3]

OTHER is the folder of the other version, such as a git worktree of the commit before. Both sides train on two groups of
8 completions, and sample them, in turn, after a warm-up; CPU seconds and their ratio go to the screen.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import runner

HERE = Path(__file__).parents[1]
LENGTHS, GROUP = [50, 60], 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", type=Path)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    before, now = (runner.Side("rlkit", options.dtype, root=root) for root in (options.other, HERE))
    before.name, now.name = "before", "now"
    for job in ("train", "sample"):
        for side in (before, now):
            side.do(job, lengths=[16], group=2)
        found = runner.interleaved([before, now], options.rounds, job, lengths=LENGTHS, group=GROUP)
        cpu = {name: run["cpu"] for name, run in found.items()}
        peak = {name: round(run["peak_GB"], 2) for name, run in found.items()}
        print(f"{job:6} {options.dtype}  CPU s {cpu}  now / before {cpu['now'] / cpu['before']:.3f}  peak GB {peak}")
    for side in (before, now):
        side.end()


if __name__ == "__main__":
    main()
