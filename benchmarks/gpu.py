"""The speed of the local backend on a GPU for the shapes of models, as ``rlkit doctor --device`` measures it for one.

    python benchmarks/gpu.py [--shapes 0.6B 7B] [--device cuda]

Models of Qwen's shapes with random weights (15 GB for 7B), in the dtype and with the options that are the device's own.
Decoding with CUDA graphs and without, training, and their parts of what memory and products of this device allow,
which is measured too. Wall seconds, medians after a warm-up, go to the screen and to benchmarks/results/gpu-SHAPE.json.
`--shapes tiny --device cpu` tries the script.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import runner

from rlkit._selfcheck import numbers, speed
from rlkit._selfcheck.report import machine
from rlkit.backends.early import device_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=["0.6B", "7B"], choices=numbers.SHAPES)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    device = device_of(options.device)
    parts = {"roofline": speed.roofline(device)}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            found = speed.measured(numbers.build(shape, Path(folder)), device, parts, lambda: True)
        for name, value in found.items():
            print(f"{shape}: {name}: {value}", flush=True)
        runner.write(f"gpu-{shape}", {"machine": machine(device), **parts, "rows": found})


if __name__ == "__main__":
    main()
