"""One datum of 1k to 8k tokens: peak memory and CPU seconds of its gradient, at once and with layers computed again.

    python benchmarks/long_datums.py [--lengths 1024 2048 4096 8192] [--dtype float32]

SmolLM2-135M, LoRA of rank 32 on all layers but the head, one thread; the last 128 tokens are trained on. Every cell is
a process of its own: the largest resident size while the gradient is computed, less the size before, and its CPU
seconds, after a short datum. "again" is micro_batch_tokens=1024. The table goes to the screen and to
benchmarks/results/long_datums-DTYPE.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import runner
import workload

WAYS = {"at once": 2**20, "again": 1024}
AT_ONCE = 4096  # tokens; more do not fit into the memory of every machine
TRAINED = 128


def measure(length: int, budget: int, dtype: str) -> dict:
    """Megabytes above the loaded model, and CPU seconds, of this process."""
    import torch

    import rlkit

    torch.set_num_threads(1)
    options = {"lora": rlkit.Lora(rank=workload.RANK, train_unembed=False), "seed": 0, "device": "cpu", "dtype": dtype}
    status = Path("/proc/self/status")
    with rlkit.connect("local", model=workload.MODEL, micro_batch_tokens=budget, **options) as policy:
        for size in (TRAINED + 2, length):
            tokens = np.random.default_rng(size).integers(100, 40000, size)
            data = [rlkit.Datum.supervised(tokens[:-TRAINED], tokens[-TRAINED:])]
            Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
            before, began = _kilobytes(status, "VmRSS"), time.process_time()
            policy.forward_backward(data, "cross_entropy").result()
        return {"MB": (_kilobytes(status, "VmHWM") - before) / 1e3, "cpu": time.process_time() - began}


def _kilobytes(status: Path, name: str) -> int:
    line = next(x for x in status.read_text().splitlines() if x.startswith(name))
    return int(line.split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--cell", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(*options.cell, options.dtype)))
        return
    rows = []
    for length in options.lengths:
        row: dict = {"tokens": length}
        for way, budget in WAYS.items() if length <= AT_ONCE else [("again", WAYS["again"])]:
            command = [sys.executable, __file__, "--dtype", options.dtype, "--cell", str(length), str(budget)]
            out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            row[way] = json.loads(out.splitlines()[-1])
        rows.append(row)
        print(row, flush=True)
    runner.write(f"long_datums-{options.dtype}", {"machine": runner.machine(), "rows": rows})


if __name__ == "__main__":
    main()
