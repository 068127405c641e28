"""Sampling with each of the options, beside sampling without any: CPU seconds of whole completions.

    python benchmarks/options.py [--rows 32 64] [--tokens 24] [--rounds 5] [--threads 1]

The first 10 layers of SmolLM2-135M, which were not trained to be the last ones, so that their distributions are "flat";
at temperature 0.2 they are as "peaked" as a tuned model's. Prompts of 37 to 78 tokens, 8 completions each, decoded
together. All options take turns after a warm-up. Medians go to the screen and to benchmarks/results/options.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import runner
import torch
import workload

import rlkit
from rlkit.backends.protocol import Sampler

LENGTHS = (37, 51, 64, 78)
OPTIONS: Mapping[str, Mapping[str, object]] = {
    "plain": {},
    "top_p 0.95": {"top_p": 0.95},
    "top_k 50": {"top_k": 50},
    "min_p 0.1": {"min_p": 0.1},
    "repetition 1.1": {"repetition_penalty": 1.1},
    "presence, frequency": {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    "stop string": {"stop": ("</answer>",)},
    "all": {
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "stop": ("</answer>",),
    },
}


def seconds(sampler: Sampler, prompts: list[np.ndarray], params: rlkit.SamplingParams) -> float:
    """CPU time of a token of 8 completions of each prompt."""
    start = time.process_time()
    futures = [sampler.sample(prompt, params, n=8, seed=i) for i, prompt in enumerate(prompts)]
    tokens = sum(sample.tokens.size for future in futures for sample in future.result())
    return (time.process_time() - start) / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 64])
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from rlkit.backends.local.model.hub import model_path

    results: dict[str, dict[str, float]] = {}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        model = workload.cut(Path(model_path(workload.MODEL)), Path(folder) / "llama", "llama", 10)
        with rlkit.connect("local", model=str(model), seed=0, device="cpu", prefix_mb=0) as policy:
            sampler = policy.sampler().result()
            for rows in options.rows:
                prompts = [rng.integers(0, 49152, LENGTHS[i % 4]) for i in range(rows // 8)]
                for shape, temperature in {"flat": 1.0, "peaked": 0.2}.items():
                    common = {"max_tokens": options.tokens, "temperature": temperature}
                    sides = {name: rlkit.SamplingParams(**common, **how) for name, how in OPTIONS.items()}
                    took: dict[str, list[float]] = {name: [] for name in sides}
                    for turn in range(options.rounds + 1):
                        for name, params in sides.items():
                            found = seconds(sampler, prompts, params)
                            took[name] += [found] if turn else []
                    for name, values in took.items():
                        ratios = [x / plain for x, plain in zip(values, took["plain"], strict=True)]
                        where = f"{rows} rows, {shape}, {name}"
                        results[where] = {
                            "ms_per_token": 1000 * statistics.median(values),
                            "ratio": statistics.median(ratios),
                        }
                        print(
                            f"{where:40} {results[where]['ms_per_token']:6.2f} ms  {results[where]['ratio']:.2f}",
                            flush=True,
                        )
    runner.write(
        "options",
        {"threads": options.threads, "tokens": options.tokens, "sampling": results, "machine": runner.machine()},
    )


if __name__ == "__main__":
    main()
