"""Whatever an environment does, the rollout goes on, leaves its episode out, and closes it."""

from __future__ import annotations

import asyncio
import math
import sys
import threading
import time

import numpy as np
import pytest

from rlkit import BackendError, SamplingParams
from rlkit.envs import StepResult, Task
from rlkit.rollouts import rollout
from tests.rollouts.parts import Counted, CountedAsync, RandomSampler, reset_counts

FAULTS = {}
NEVER = threading.Event()


def fault(cls):
    FAULTS[cls.__name__] = cls
    return cls


def in_step(name, base=Counted):
    """Registers an environment whose second step does what the function does."""

    def add(function):
        def step(self, action):
            return function(self) if self.steps == 1 else Counted.step(self, action)

        async def astep(self, action):
            if self.steps == 1:
                return await function(self)
            return Counted.step(self, action)

        FAULTS[name] = type(name, (base,), {"step": astep if base is CountedAsync else step})
        return function

    return add


@fault
class MakeRaises(Counted):
    def __init__(self):
        raise OSError("no sandbox")


@fault
class ResetRaises(Counted):
    def reset(self, seed):
        raise ValueError("bad seed")


@fault
class ResetHangs(Counted):
    def reset(self, seed):
        NEVER.wait()


@fault
class ResetOfTheWrongType(Counted):
    def reset(self, seed):
        return object()


@fault
class NoMethods:
    pass


@fault
class UnknownTokens(Counted):
    def reset(self, seed):
        return np.array([1, 2, 10**9])


@fault
class ToolsOfTheWrongType(Counted):
    tools = "search"


def raising(error):
    def function(self):
        raise error

    return function


for error in (
    RuntimeError("broken"),
    KeyboardInterrupt(),
    asyncio.CancelledError(),
    StopIteration(3),
    GeneratorExit(),
    MemoryError(),
    RecursionError(),
    BaseException("odd"),
):
    in_step(f"Raises{type(error).__name__}")(raising(error))


@in_step("Exits")
def _(self):
    sys.exit(3)


@in_step("ExitsAsync", CountedAsync)
async def _(self):
    sys.exit(3)


@in_step("CancelledAsync", CountedAsync)
async def _(self):
    raise asyncio.CancelledError


@in_step("HangsInAThread")
def _(self):
    NEVER.wait()


@in_step("HangsAsync", CountedAsync)
async def _(self):
    await asyncio.Event().wait()


@in_step("HangsAsyncAgainstCancellation", CountedAsync)
async def _(self):
    for _ in range(3):
        try:
            await asyncio.sleep(1.5)
        except asyncio.CancelledError:
            continue


@in_step("BlocksTheLoop", CountedAsync)
async def _(self):
    time.sleep(2.0)
    return StepResult(reward=float("nan"))


@in_step("Computes")
def _(self):
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        pass
    return


@in_step("FloodOfText")
def _(self):
    return StepResult("x" * 20_000_000)


@in_step("FloodOfMessages")
def _(self):
    return StepResult([{"role": "user", "content": "x" * 1000}] * 5000)


for name, answer in {
    "Nothing": None,
    "Text": "text",
    "ThreeValues": ("", 0.0, True),
    "RewardNaN": StepResult("", math.nan),
    "RewardInfinite": StepResult("", math.inf),
    "TerminatedOfText": StepResult("", 0.0, "yes"),
    "Bytes": StepResult(b"bytes"),
    "MessageWithoutRole": StepResult([{"content": "x"}]),
    "Surrogate": StepResult("\ud800"),
    "InfoOfTheWrongType": StepResult("", info=[1]),
    "FloatTokens": StepResult(np.array([1.5])),
}.items():
    in_step(f"Answers{name}")(lambda self, answer=answer: answer)

LONG = ("ResetHangs", "HangsInAThread", "HangsAsync", "HangsAsyncAgainstCancellation", "BlocksTheLoop", "Computes")
QUICK = {"deadline": 60.0, "call_timeout": 60.0, "close_timeout": 5.0, "params": SamplingParams(max_tokens=6)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stays_with_its_episode(name):
    """The healthy group is whole, the faulty one is not there, its failures are counted, environments are closed."""
    reset_counts()
    tasks = [Task(Counted, "good"), Task(FAULTS[name], "bad")]
    limits = {**QUICK, "call_timeout": 1.0} if name in LONG else QUICK  # on a machine that stands still all are long
    groups = asyncio.run(rollout(RandomSampler(), tasks, n=2, **limits))
    assert [(group.env, len(group.trajectories)) for group in groups] == [("good", 2)]
    assert groups.metrics["env/bad/failed"] == 2
    assert groups.metrics["env/bad/episodes"] == 0
    assert groups.metrics["env/bad/dropped_groups"] == 1
    assert groups.metrics["env/good/failed"] == 0
    assert Counted.made == Counted.closed >= 2


def test_the_faults_are_many():
    assert len(FAULTS) >= 20


class CloseRaises(Counted):
    def close(self):
        super().close()
        raise OSError("already gone")


class CloseHangs(Counted):
    def close(self):
        super().close()
        NEVER.wait()


@pytest.mark.parametrize("env", [CloseRaises, CloseHangs])
def test_a_close_that_fails_is_counted(env, caplog):
    """The episode was over and is kept; the rollout waits for close_timeout and no longer, and says so once."""
    reset_counts()
    groups = asyncio.run(rollout(RandomSampler(), env, n=2, **{**QUICK, "close_timeout": 0.5}))
    assert len(groups[0]) == 2
    assert groups.metrics[f"env/{env.__name__}/close_failed"] == 2
    (said,) = [record.getMessage() for record in caplog.records if record.name == "rlkit.rollouts._episode"]
    assert said.startswith(f"environment '{env.__name__}': could not be closed: ")
    assert ("OSError: already gone" if env is CloseRaises else "not closed within 0.5 s") in said
    assert Counted.made == Counted.closed == 2


class Flaky(Counted):
    """Every second one that is made fails in its first step."""

    def step(self, action):
        if Counted.made % 2:
            raise OSError("gone")
        return super().step(action)


def test_failures_stand_in_the_group():
    """A group that lost some of its episodes is kept while min_n are left."""
    reset_counts()
    groups = asyncio.run(rollout(RandomSampler(), Flaky, n=4, min_n=2, concurrency=1, **QUICK))
    assert len(groups[0].trajectories) == 2
    assert [(f.kind, f.where, f.turns, f.member) for f in groups[0].failures] == [
        ("OSError", "step", 0, 0),
        ("OSError", "step", 0, 2),
    ]
    with pytest.raises(BackendError, match=r"no group is left; 2 episodes failed: 2 OSError in step; .*gone"):
        asyncio.run(rollout(RandomSampler(), Flaky, n=4, min_n=3, concurrency=1, **QUICK))


def test_nothing_left_is_an_error():
    """Its cause is the first exception, and it counts what happened."""
    with pytest.raises(BackendError, match=r"4 episodes failed: 4 ValueError in reset.*bad seed") as caught:
        asyncio.run(rollout(RandomSampler(), [FAULTS["ResetRaises"]] * 2, n=2, **QUICK))
    assert isinstance(caught.value.__cause__, ValueError)
