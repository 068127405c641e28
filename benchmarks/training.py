"""A gradient and an update: rlkit beside a naive peft step, over prompt lengths and group sizes.

    python benchmarks/training.py [--dtype float32] [--rounds 3] [--threads 1]

One group; completions of 64 fixed tokens. The naive step computes the logits of all positions of 8 rows at a time.
Each side is a process of its own; they take turns after a warm-up. CPU seconds go to the screen and to
benchmarks/results/training-DTYPE.json.
"""

from __future__ import annotations

import argparse

import runner

CELLS = ((64, 8), (256, 8), (512, 8), (256, 2), (256, 16))  # tokens of the prompt, completions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    sides = [runner.Side(name, options.dtype, options.threads) for name in ("rlkit", "naive")]
    for side in sides:
        side.do("train", lengths=[32], group=2)
    rows = []
    for prompt, group in CELLS:
        found = runner.interleaved(sides, options.rounds, "train", lengths=[prompt], group=group)
        cpu = {name: run["cpu"] for name, run in found.items()}
        rows.append({"prompt": prompt, "group": group, "cpu_s": cpu, "ratio": cpu["naive"] / cpu["rlkit"]})
        print(f"prompt {prompt:4} group {group:3}  {cpu}  ratio {rows[-1]['ratio']:.2f}", flush=True)
        runner.write(
            f"training-{options.dtype}",
            {
                "dtype": options.dtype,
                "threads": options.threads,
                "rounds": options.rounds,
                "machine": runner.machine(),
                "versions": sides[0].versions,
                "rows": rows,
            },
        )
    for side in sides:
        side.end()


if __name__ == "__main__":
    main()
