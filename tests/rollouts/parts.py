"""A sampler that answers at once with random tokens, and environments that count their openings and closings."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time

import numpy as np

from rlkit import Future, Sample
from rlkit.backends.toy import ByteTokenizer
from rlkit.envs import StepResult


class RandomSampler:
    """Draws uniformly from SeedSequence([seed, i]), as the protocol says; about one action in eight is empty."""

    tokenizer = ByteTokenizer()

    def __init__(self, version=0, max_length=4096, wait=None):
        self.version = version
        self.max_length = max_length
        self.wait = wait  # None, or a concurrent future that every request waits for
        self.requests = []

    def sample(self, prompt, params, *, n=1, seed=None):
        prompt = np.asarray(prompt)
        self.requests.append((prompt, params, n, seed))
        samples = []
        for i in range(n):
            rng = np.random.default_rng(np.random.SeedSequence([seed, i]))
            length = int(rng.integers(0, params.max_tokens + 1)) if rng.integers(8) else 0
            tokens = rng.integers(0, 259, length)
            logprobs = -rng.exponential(size=length)
            stop = "stop" if length < params.max_tokens else "length"
            samples.append(Sample(prompt, tokens, logprobs, stop, version=self.version, **params.sampling_options))
        if self.wait is None:
            return Future.of(samples)
        answer = concurrent.futures.Future()
        self.wait.add_done_callback(lambda _: answer.set_result(samples))
        return Future.wrap(answer)

    def logprobs(self, tokens, *, temperature=1.0):
        return Future.of(np.zeros(len(tokens), np.float32))

    def close(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()


class Counted:
    """Counts what is open; ``turns`` steps, each worth 1 where the action has an even length."""

    lock = threading.Lock()
    made = closed = 0
    era = 0  # an environment that an earlier test left hanging may close late; it is not counted by the next test
    turns = 3

    def __init__(self):
        with Counted.lock:
            Counted.made += 1
            self.era = Counted.era
        self.steps = 0

    def reset(self, seed):
        return f"Begin {seed}"

    def step(self, action):
        self.steps += 1
        return StepResult(f"You said {len(action)}", float(action.tokens.size % 2 == 0), self.steps >= self.turns)

    def close(self):
        with Counted.lock:
            Counted.closed += self.era == Counted.era


class CountedAsync(Counted):
    """The same, asynchronous."""

    async def reset(self, seed):
        await asyncio.sleep(0)
        return f"Begin {seed}"

    async def step(self, action):
        await asyncio.sleep(0)
        return Counted.step(self, action)

    async def close(self):
        await asyncio.sleep(0)
        Counted.close(self)


def reset_counts():
    with Counted.lock:
        Counted.made = Counted.closed = 0
        Counted.era += 1


def all_closed():
    """Whether every environment that was made is closed; one that was just being made may take a moment."""
    for _ in range(500):
        if Counted.made == Counted.closed:
            break
        time.sleep(0.01)
    return Counted.made == Counted.closed
