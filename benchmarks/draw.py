"""Drawing a token with top_p or top_k: all rows at once, beside one sort of the whole vocabulary for each row.

    python benchmarks/draw.py [--rows 32] [--rounds 5] [--threads 1]

Logits are random: "peaked" ones keep some tens of tokens at top_p 0.95, as a tuned model does, "flat" ones thousands.
Milliseconds of CPU per token go to the screen and to benchmarks/results/draw.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import runner
import torch

from rlkit import SamplingParams
from rlkit.backends import sampling

VOCABULARIES = {"SmolLM2": 49152, "Qwen": 151936}
OPTIONS = {"plain": {}, "top_p 0.95": {"top_p": 0.95}, "top_k 50": {"top_k": 50}}
SHAPES = {"peaked": 8.0, "flat": 3.0}


def one_by_one(logprobs: torch.Tensor, top_k: list[int], top_p: list[float]) -> torch.Tensor:
    """What is kept of each row by a sort of its whole vocabulary."""
    out = torch.full_like(logprobs, -torch.inf)
    for row, k, p in zip(range(len(logprobs)), top_k, top_p, strict=True):
        ordered, order = logprobs[row].sort(descending=True, stable=True)
        if k > 0:
            ordered[k:] = -torch.inf
        if p < 1:
            probs = ordered.double().exp()
            ordered[probs.cumsum(0) - probs >= p * probs.sum()] = -torch.inf
        out[row, order] = ordered.log_softmax(0)
    return out


def milliseconds(draw: Callable[[], Any], rounds: int) -> float:
    """CPU time of a call, the best of some."""
    draw()
    found = []
    for _ in range(rounds):
        start = time.process_time()
        draw()
        found.append(time.process_time() - start)
    return 1000 * min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    uniforms = np.random.default_rng(0).random(options.rows)
    at_once, results = sampling._truncated, {}  # noqa: SLF001
    for name, size in VOCABULARIES.items():
        for shape, scale in SHAPES.items():
            logits = torch.randn(options.rows, size, generator=torch.Generator().manual_seed(0)) * scale
            for title, settings in OPTIONS.items():
                params = [SamplingParams(**settings)] * options.rows
                times = {}
                for side, truncated in {"one by one": one_by_one, "at once": at_once}.items():
                    sampling._truncated = truncated  # noqa: SLF001
                    took = milliseconds(partial(sampling.draw, logits, params, uniforms), options.rounds)
                    times[side] = took / options.rows
                results[f"{name}, {shape}, {title}"] = times
                print(f"{name}, {shape}, {title:12}", *(f"{side} {t:.2f} ms" for side, t in times.items()), flush=True)
    sampling._truncated = at_once  # noqa: SLF001
    runner.write(
        "draw", {"rows": options.rows, "threads": options.threads, "ms_per_token": results, "machine": runner.machine()}
    )


if __name__ == "__main__":
    main()
