"""A sampler of random tokens, environments that count their openings and closings, and rollouts of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time

import numpy as np
import pytest

from rlkit import Adam, BackendError, Future, Sample, SamplingParams, envs
from rlkit.advantages import grpo
from rlkit.backends.toy import ByteTokenizer
from rlkit.envs import StepResult, Tasks
from rlkit.rollouts import rollout
from rlkit.trajectory import datums

PARAMS = SamplingParams(max_tokens=6)


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


class Endless(Counted):
    turns = 10**9


TASKS = Tasks(lambda i: Counted(), 6, name="counted")


def scripted(*script):
    """Return an environment that answers with these fields of a StepResult, a step each, and ends with the last."""

    def step(self, action):
        self.steps += 1
        return StepResult(**{"observation": "More.", "terminated": self.steps == len(script)} | script[self.steps - 1])

    return type("Scripted", (Counted,), {"step": step})


def replaced(function, where="step"):
    """Return an environment that calls this function in ``reset``, or in its second step."""

    def reset(self, seed):
        return function()

    def step(self, action):
        return function() if self.steps == 1 else Counted.step(self, action)

    return type("Replaced", (Counted,), {where: reset if where == "reset" else step})


def throw(error):
    def function():
        raise error

    return function


def raising(error, where="step"):
    return replaced(throw(error), where)


def in_turn(*kinds):
    """Return a function that makes an environment of each kind in turn, over and over."""
    endless = itertools.cycle(kinds)
    return lambda: next(endless)()


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


def run(tasks=Counted, sampler=None, **options):
    """Return the groups of a rollout, of two members each unless ``options`` say otherwise."""
    return asyncio.run(rollout(sampler or RandomSampler(), tasks, **{"n": 2, "params": PARAMS} | options))


def describe(groups):
    """Return what decides whether the groups of two rollouts are the same, bit for bit."""
    return [
        (group.number, t.reward, t.seed, t.index, t.ended, t.messages, [_describe_turn(turn) for turn in t.turns])
        for group in groups
        for t in group.trajectories
    ]


def _describe_turn(turn):
    return turn.prompt.tolist(), turn.tokens.tolist(), turn.logprobs.tolist(), turn.reward, dict(turn.metrics)


def is_text(result, task):
    return float(isinstance(result, str))


def play_agent(program, *, reward=is_text, rows=("x",), sampler=None, about=None, **options):
    """Return the groups of a rollout of an agent; ``about`` has more arguments of ``agent``."""
    return run(envs.agent(program, reward, list(rows), **(about or {})), sampler, **options)


def fail_agent(program, **options):
    """Return the message of a rollout of an agent of which no group is left."""
    with pytest.raises(BackendError) as caught:
        play_agent(program, **options)
    return str(caught.value)


def train(policy, groups):
    """Take one optimizer step on these groups, and return them."""
    data = []
    for group in groups:
        for t, a in zip(group.trajectories, grpo(group.rewards, scale="none") + 0.1, strict=True):
            data += datums(t, a)
    policy.forward_backward(data, "importance_sampling")
    policy.optim_step(Adam(learning_rate=0.05))
    return groups
