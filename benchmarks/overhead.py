"""What rlkit adds to a call of the Tinker SDK: the same calls on the plain SDK and through rlkit, over FakeTinker.

    python benchmarks/overhead.py [--rounds 150]

The two sides take turns in one process after a warm-up; medians of milliseconds of processor time per call, which other
programs on the machine disturb less than wall time. The service is in the process and answers at once, so that what is
measured is the clients' own work and the service's, which is the same on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types

import rlkit
from rlkit.testing import FakeTinker

PROMPT, TOKENS, GROUP = 16, 32, 8


class Plain:
    """What a script for the plain SDK writes."""

    def __init__(self, fake: Any) -> None:
        self.client = fake.service_client().create_lora_training_client("toy", rank=8).result()
        self.sampler = self.client.save_weights_and_get_sampling_client().result()
        rng = np.random.default_rng(0)
        self.data = []
        for _ in range(GROUP):
            tokens = rng.integers(97, 123, PROMPT + TOKENS)
            arrays = {"logprobs": -rng.random(TOKENS), "advantages": rng.normal(size=TOKENS)}
            inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
            for name, array in arrays.items():
                inputs[name] = np.concatenate([np.zeros(PROMPT - 1), array]).astype(np.float32)
            self.data.append(types.Datum(types.ModelInput.from_ints(tokens[:-1].tolist()), inputs))
        self.ids = tokens[:PROMPT].tolist()

    def forward_backward(self) -> None:
        self.client.forward_backward(self.data, "ppo", {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}).result()

    def step(self) -> None:
        self.client.optim_step(types.AdamParams(learning_rate=1e-4)).result()

    def sample(self) -> None:
        params = types.SamplingParams(max_tokens=8, stop=[], seed=1)
        self.sampler.sample(types.ModelInput.from_ints(self.ids), GROUP, params).result()

    def logprobs(self) -> None:
        self.sampler.compute_logprobs(types.ModelInput.from_ints(self.ids)).result()


class Rlkit:
    """The same through rlkit."""

    def __init__(self, fake: Any) -> None:
        self.policy: Any = rlkit.connect("tinker", model="toy", base_url=fake.base_url, api_key=fake.api_key, seed=0)
        self.sampler = self.policy.sampler().result()
        rng = np.random.default_rng(0)
        self.data = []
        for _ in range(GROUP):
            tokens = rng.integers(97, 123, PROMPT + TOKENS)
            mask = np.arange(tokens.size) >= PROMPT
            inputs = {"sampling_logprobs": -rng.random(TOKENS), "advantages": rng.normal(size=TOKENS)}
            self.data.append(rlkit.Datum(tokens, mask, inputs))
        self.ids = tokens[:PROMPT]

    def forward_backward(self) -> None:
        self.policy.forward_backward(self.data, "ppo").result()

    def step(self) -> None:
        self.policy.optim_step(rlkit.Adam(learning_rate=1e-4)).result()

    def sample(self) -> None:
        self.sampler.sample(self.ids, rlkit.SamplingParams(max_tokens=8, stop=()), n=GROUP, seed=1).result()

    def logprobs(self) -> None:
        self.sampler.logprobs(self.ids).result()


def timed(call: Callable[[], None]) -> float:
    started = time.process_time()  # of all threads
    call()
    return 1000 * (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=150)
    rounds = parser.parse_args().rounds
    with FakeTinker(seed=0) as fake:
        sides = (Plain(fake), Rlkit(fake))
        times: dict[str, tuple[list[float], list[float]]] = {}
        for k in range(rounds + 3):
            for name in ("forward_backward", "step", "sample", "logprobs"):
                for side, row in zip(sides, times.setdefault(name, ([], [])), strict=True):
                    took = timed(getattr(side, name))
                    if k >= 3:
                        row.append(took)
        sides[1].policy.close()
    results = {}
    print(f"{'call':20}{'SDK ms':>10}{'rlkit ms':>10}{'added ms':>10}{'ratio':>8}")
    for name, (plain, ours) in times.items():
        a, b = statistics.median(plain), statistics.median(ours)
        results[name] = {"sdk_ms": round(a, 2), "rlkit_ms": round(b, 2), "ratio": round(b / a, 2)}
        print(f"{name:20}{a:10.2f}{b:10.2f}{b - a:10.2f}{b / a:8.2f}")
    path = Path(__file__).parent / "results" / "overhead.json"
    path.write_text(json.dumps({"rounds": rounds, "datums": GROUP, "calls": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
