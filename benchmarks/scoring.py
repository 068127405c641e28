"""Logprobs of a group's texts beside the trainer's forward; two samplers in turn; a request beside training.

    python benchmarks/scoring.py [--dtype float32] [--rounds 3] [--threads 1]

A group is 8 texts of 264 tokens that share 200. Everything is one process, whose parts take turns after a warm-up. CPU
seconds, which what is computed for another call counts into, go to the screen and to
benchmarks/results/scoring-DTYPE.json.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import runner
import torch
import workload

SHARED, REST, GROUP = 200, 64, 8
TURN, SHORT = 20, 8  # tokens of a call of samplers in turn, and beside training


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import rlkit

    lora = rlkit.Lora(rank=workload.RANK, train_unembed=False)
    policy = rlkit.connect("local", model=workload.MODEL, lora=lora, seed=0, dtype=options.dtype, device="cpu")
    sampler, base = policy.sampler().result(), policy.base_sampler().result()
    rng = np.random.default_rng(0)
    shared = rng.integers(100, 40000, SHARED)
    texts = [np.concatenate([shared, rng.integers(100, 40000, REST)]) for _ in range(GROUP)]
    scored = [rlkit.Datum(text, np.arange(text.size) > 0) for text in texts]
    completions = [rlkit.Datum(text, np.arange(text.size) >= SHARED) for text in texts]
    data = [rlkit.Datum.supervised(text[:60], text[SHARED:]) for text in texts for _ in range(2)]
    turn, short = (rlkit.SamplingParams(max_tokens=n, stop=()) for n in (TURN, SHORT))

    def sample(of: rlkit.Sampler, params: rlkit.SamplingParams) -> object:
        return of.sample(rng.integers(100, 40000, 20), params).result()

    def in_turn() -> None:
        for of in (sampler, base) * 2:
            sample(of, turn)

    def beside() -> list[float]:
        gradient, took = policy.forward_backward(data, "cross_entropy"), []
        while not gradient.done():
            took.append(seconds(lambda: sample(sampler, short)))
        policy.discard().result()
        return took[:-1]

    parts: dict[str, Callable[[], object]] = {
        "a group: sampler.logprobs": lambda: [f.result() for f in [sampler.logprobs(text) for text in texts]],
        "a group: reference_logprobs of completions": lambda: rlkit.reference_logprobs(sampler, completions).result(),
        "a group: policy.forward, all tokens": lambda: policy.forward(scored).result(),
        "a group: policy.forward, completions": lambda: policy.forward(completions).result(),
        "a group: sampler.logprobs, one after the other": lambda: [sampler.logprobs(text).result() for text in texts],
        f"4 calls of {TURN} tokens: one sampler": lambda: [sample(sampler, turn) for _ in range(4)],
        f"4 calls of {TURN} tokens: policy and base in turn": in_turn,
        f"{SHORT} tokens: alone": lambda: sample(sampler, short),
    }
    for part in parts.values():
        part()
    took: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(options.rounds):
        for name, part in parts.items():
            took[name].append(seconds(part))
            print(f"{name:50} {took[name][-1]:.2f} CPU s", flush=True)
    took[f"{SHORT} tokens: beside training"] = beside()
    medians = {name: statistics.median(several) for name, several in took.items()}
    print("medians", *(f"{name:50} {median:.2f} CPU s" for name, median in medians.items()), sep="\n")
    policy.close()
    result = {"dtype": options.dtype, "threads": options.threads, "rounds": options.rounds, "cpu_s": medians}
    runner.write(f"scoring-{options.dtype}", {**result, "machine": runner.machine()})


def seconds(part: Callable[[], object]) -> float:
    began = time.process_time()
    part()
    return time.process_time() - began


if __name__ == "__main__":
    main()
