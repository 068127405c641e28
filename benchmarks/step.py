"""A GRPO step on workload W: rlkit beside transformers' ``generate`` and a naive peft step, in one run.

    python benchmarks/step.py [--dtype float32] [--rounds 3] [--threads 1]

Each side is a process of its own; they take turns (A B A B ...) after a warm-up, and medians of CPU seconds are
compared. Peak memory is the process's largest resident size so far. The table goes to the screen, the figures to
benchmarks/results/step-DTYPE.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
SIDES = ("rlkit", "naive")
JOBS = ("sample", "train")


class Side:
    """One process, told what to do over a pipe."""

    def __init__(self, name: str, dtype: str, threads: int) -> None:
        self.name = name
        command = [sys.executable, str(HERE / "sides.py"), name, dtype, str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._read()

    def do(self, job: str, groups: int = 8) -> dict:
        self.process.stdin.write(f"{job} {groups}\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the side {self.name} ended with status {self.process.wait()}")
        return json.loads(line)

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    sides = [Side(name, options.dtype, options.threads) for name in SIDES]
    for side in sides:
        for job in JOBS:
            side.do(job, groups=1)  # warm-up
    runs: dict[tuple[str, str], list[dict]] = {(side, job): [] for side in SIDES for job in JOBS}
    for number in range(options.rounds):
        for job in JOBS:
            for side in sides:
                found = side.do(job)
                runs[side.name, job].append(found)
                print(f"round {number + 1}: {side.name} {job} {found['cpu']:.1f} CPU s", file=sys.stderr)
    for side in sides:
        side.end()
    result = {
        "workload": "W: 8 prompts (37-78 tokens) x 8 completions x 64 tokens, SmolLM2-135M-Instruct, LoRA rank 32",
        "dtype": options.dtype,
        "threads": options.threads,
        "rounds": options.rounds,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")}
        | {"python": platform.python_version()},
        "sides": {},
    }
    for side in SIDES:
        cpu = {job: statistics.median(r["cpu"] for r in runs[side, job]) for job in JOBS}
        tokens = {job: runs[side, job][0]["tokens"] for job in JOBS}
        result["sides"][side] = {
            "cpu_s": {**cpu, "step": sum(cpu.values())},
            "tokens_per_cpu_s": {job: tokens[job] / cpu[job] for job in JOBS},
            "peak_GB": max(r["peak_bytes"] for job in JOBS for r in runs[side, job]) / 1e9,
        }
    ours, theirs = (result["sides"][side] for side in SIDES)
    result["ratio"] = {job: theirs["cpu_s"][job] / ours["cpu_s"][job] for job in (*JOBS, "step")}
    result["ratio"]["peak"] = theirs["peak_GB"] / ours["peak_GB"]
    print(f"{'':8}{'sample':>22}{'train':>22}{'step':>12}{'peak':>10}")
    for side in SIDES:
        s = result["sides"][side]
        cells = [f"{s['cpu_s'][job]:7.1f} s {s['tokens_per_cpu_s'][job]:7.1f} tok/s" for job in JOBS]
        print(f"{side:8}{cells[0]:>22}{cells[1]:>22}{s['cpu_s']['step']:10.1f} s{s['peak_GB']:7.1f} GB")
    r = result["ratio"]
    print(f"{'ratio':8}{r['sample']:22.2f}{r['train']:22.2f}{r['step']:12.2f}{r['peak']:10.2f}")
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"step-{options.dtype}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
