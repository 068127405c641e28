"""Drawing a token with each of the sampling options, beside a draw without any: milliseconds of CPU, and kernels.

    python benchmarks/draw.py [--rows 32 64] [--rounds 5] [--threads 1]

Penalties look at a prompt and a completion of 500 tokens each.

Logits are random: "peaked" ones keep some tens of tokens at top_p 0.95, as a tuned model does, "flat" ones thousands.
Milliseconds of CPU per token go to the screen and to benchmarks/results/draw.json, with the number of kernels that a
step launches for all rows together.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import runner
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit import SamplingParams
from rlkit.backends._drawing import TokenCounts, draw

VOCABULARIES = {"SmolLM2": 49152, "Qwen": 151936}
OPTIONS: Mapping[str, Mapping[str, float]] = {
    "plain": {},
    "temperature 0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "top_k 20, top_p 0.8": {"top_k": 20, "top_p": 0.8},
    "min_p 0.1": {"min_p": 0.1},
    "repetition 1.1": {"repetition_penalty": 1.1},
    "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "all": {"top_k": 50, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1, "presence_penalty": 0.5},
}
SHAPES = {"peaked": 8.0, "flat": 3.0}
VIEWS = ("view", "expand", "slice", "select", "unsqueeze", "squeeze", "_unsafe_view", "alias", "t", "split", "detach")


class Kernels(TorchDispatchMode):
    """Counts operations that launch something on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*args, **kwargs or {})


def milliseconds(sides: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """CPU time of each call, the best of some, in turn."""
    best = dict.fromkeys(sides, np.inf)
    for _ in range(rounds + 1):
        for name, call in sides.items():
            start = time.process_time()
            call()
            best[name] = min(best[name], 1000 * (time.process_time() - start))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    prompt, completion = (np.random.default_rng(seed).integers(0, 49152, 500) for seed in (1, 2))
    for rows in options.rows:
        uniforms = np.random.default_rng(0).random(rows)
        for name, size in VOCABULARIES.items():
            for shape, scale in SHAPES.items():
                logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(0)) * scale
                sides = {}
                for title, settings in OPTIONS.items():
                    params = SamplingParams(**settings)  # type: ignore[arg-type]
                    counts = [TokenCounts.of(params, prompt) for _ in range(rows)]
                    for each in counts:
                        for token in completion.tolist() if each is not None else ():
                            each.add(token)
                    sides[title] = partial(draw, logits, [params] * rows, uniforms, counts)
                for title, took in milliseconds(sides, options.rounds).items():
                    with Kernels() as kernels:
                        sides[title]()
                    where = f"{name}, {rows} rows, {shape}, {title}"
                    results[where] = {"ms_per_token": took / rows, "kernels": kernels.count}
                    print(f"{where:50} {took / rows:6.3f} ms {kernels.count:5} kernels", flush=True)
    runner.write("draw", {"threads": options.threads, "draws": results, "machine": runner.machine()})


if __name__ == "__main__":
    main()
