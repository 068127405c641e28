"""What an update in flight costs: weights replaced under requests that run, keys and values kept or computed anew.

    python benchmarks/in_flight.py [--rounds 3] [--rows 16] [--threads 1]

SmolLM2-135M in float32. Rows of one prompt of 64 tokens are decoded; the policy is trained by a step and updated when
they have 32, 64 and 96 tokens. Both ways take turns. CPU seconds of an update and of a decoding step go to the screen.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import rlkit

AT = (32, 64, 96)


def timed(call: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """``call``, which notes its CPU seconds."""

    def timing(*args: object, **options: object) -> object:
        began = time.process_time()
        result = call(*args, **options)
        spent.append(time.process_time() - began)
        return result

    return timing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    policy: Any = rlkit.connect("local", model="smollm2-135m-instruct", lora=rlkit.Lora(rank=16), seed=0, device="cpu")
    params = rlkit.SamplingParams(max_tokens=AT[-1] + 16, stop=())
    prompt = np.random.default_rng(0).integers(100, 40_000, 64)
    ways = {"kept": False, "computed anew": True}
    updates: dict[str, list[float]] = {name: [] for name in ways}
    steps: list[float] = []
    with policy:
        scheduler = policy._scheduler  # noqa: SLF001  # what is timed is inside
        update = scheduler.update
        for _ in range(options.rounds):
            for name, recompute in ways.items():
                live = policy.live_sampler(recompute=recompute).result()
                live.sample(prompt[:4], rlkit.SamplingParams(max_tokens=1)).result()
                decoder = scheduler.decoders[-1]
                spent: list[float] = []
                scheduler.update = timed(update, updates[name])
                decoder.step = timed(type(decoder).step.__get__(decoder), spent)
                running = live.sample(prompt, params, n=options.rows)
                for tokens in AT:
                    while len(spent) < tokens:
                        time.sleep(0.01)
                    policy.forward_backward([rlkit.Datum.supervised(prompt[:8], prompt[8:12])], "cross_entropy")
                    policy.optim_step(rlkit.Adam(learning_rate=1e-4))
                    live.update().result()
                running.result()
                live.close()
                steps += spent
    step = float(np.median(steps))
    print(f"{options.rows} rows, {options.threads} thread(s): a step of decoding takes {step:.3f} s")
    for name, seconds in updates.items():
        each = float(np.median(seconds))
        print(f"{name}: an update takes {each:.2f} s, {each / step:.1f} steps")


if __name__ == "__main__":
    main()
