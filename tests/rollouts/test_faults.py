"""Whatever an environment does, the rollout continues, leaves its episode out, and closes it."""

from __future__ import annotations

import asyncio
import inspect
import math
import sys
import threading
import time

import numpy as np
import pytest

from rlkit import BackendError
from rlkit.envs import StepResult, Task
from tests.rollouts.parts import Counted, CountedAsync, in_turn, raising, replaced, reset_counts, run, throw

NEVER = threading.Event()


def compute():
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        pass


async def ignore_cancellation():
    for _ in range(3):
        try:
            await asyncio.sleep(1.5)
        except asyncio.CancelledError:
            continue


def replaced_in_coroutine(function):
    """Return an environment whose coroutine calls this function in the second step, and waits for what it returns."""

    async def step(self, action):
        result = function() if self.steps == 1 else Counted.step(self, action)
        return await result if inspect.isawaitable(result) else result

    return type("ReplacedAsync", (CountedAsync,), {"step": step})


ERRORS = (
    RuntimeError("broken"), KeyboardInterrupt(), asyncio.CancelledError(), StopIteration(3), GeneratorExit(),
    MemoryError(), RecursionError(), BaseException("odd"),
)  # fmt: skip
ANSWERS = {
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
}


class Dumb(Exception):
    def __str__(self):
        raise AttributeError("no text")


FAULTS = {
    "RaisesWithoutText": raising(Dumb()),
    "NoMethods": type("NoMethods", (), {}),
    "MakeRaises": throw(OSError("no sandbox")),
    "ResetRaises": raising(ValueError("bad seed"), "reset"),
    "ResetHangs": replaced(NEVER.wait, "reset"),
    "ResetOfTheWrongType": replaced(object, "reset"),
    "UnknownTokens": replaced(lambda: np.array([1, 2, 10**9]), "reset"),
    "ToolsOfTheWrongType": type("ToolsOfTheWrongType", (Counted,), {"tools": "search"}),
    **{f"Raises{type(error).__name__}": raising(error) for error in ERRORS},
    **{f"Answers{name}": replaced(lambda answer=answer: answer) for name, answer in ANSWERS.items()},
    "Exits": replaced(lambda: sys.exit(3)),
    "HangsInAThread": replaced(NEVER.wait),
    "Computes": replaced(compute),
    "FloodOfText": replaced(lambda: StepResult("x" * 20_000_000)),
    "FloodOfMessages": replaced(lambda: StepResult([{"role": "user", "content": "x" * 1000}] * 5000)),
    "ExitsAsync": replaced_in_coroutine(lambda: sys.exit(3)),
    "CancelledAsync": replaced_in_coroutine(throw(asyncio.CancelledError())),
    "HangsAsync": replaced_in_coroutine(lambda: asyncio.Event().wait()),
    "HangsAsyncAgainstCancellation": replaced_in_coroutine(ignore_cancellation),
    "BlocksTheLoop": replaced_in_coroutine(lambda: time.sleep(2.0) or StepResult(reward=math.nan)),
}
FOREVER = ("ResetHangs", "HangsInAThread", "HangsAsync")
LONG = (*FOREVER, "HangsAsyncAgainstCancellation", "BlocksTheLoop", "Computes")
QUICK = {"deadline": 60.0, "call_timeout": 60.0, "close_timeout": 5.0}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_stays_with_its_episode(name):
    """The healthy group is whole, the faulty one is not there, its failures are counted, environments are closed."""
    reset_counts()
    limits = {**QUICK, "call_timeout": 1.0} if name in LONG else QUICK  # on a machine that stands still all are long
    groups = run([Task(Counted, "good"), Task(FAULTS[name], "bad")], **limits)
    assert [(group.env, len(group.trajectories)) for group in groups] == [("good", 2)]
    counts = ("bad/failed", "bad/episodes", "bad/dropped_groups", "good/failed")
    assert [groups.metrics[f"env/{count}"] for count in counts] == [2, 0, 1, 0]
    if name in FOREVER:
        assert groups.metrics["env/bad/timed_out"] == groups.metrics["env/bad/failed/timeout"] == 2
    assert Counted.made == Counted.closed >= 2


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
    groups = run(env, **{**QUICK, "close_timeout": 0.5})
    assert len(groups[0]) == 2
    assert groups.metrics[f"env/{env.__name__}/close_failed"] == 2
    (said,) = [record.getMessage() for record in caplog.records if record.name == "rlkit.rollouts._episode"]
    assert said.startswith(f"environment '{env.__name__}': could not be closed: ")
    assert ("OSError: already gone" if env is CloseRaises else "not closed within 0.5 s") in said
    assert Counted.made == Counted.closed == 2


def test_failures_stand_in_the_group():
    """A group that lost some of its episodes is kept while min_n are left."""
    flaky = in_turn(raising(OSError("gone")), Counted)
    groups = run(flaky, n=4, min_n=2, concurrency=1, **QUICK)
    assert len(groups[0].trajectories) == 2
    failures = [(f.kind, f.where, f.turns, f.member) for f in groups[0].failures]
    assert failures == [("OSError", "step", 1, 0), ("OSError", "step", 1, 2)]
    with pytest.raises(BackendError, match=r"no group is left; 2 episodes failed: 2 OSError in step; .*gone"):
        run(flaky, n=4, min_n=3, concurrency=1, **QUICK)


def test_nothing_left_is_an_error():
    """Its cause is the first exception, and it counts what happened."""
    with pytest.raises(BackendError, match=r"4 episodes failed: 4 ValueError in reset.*bad seed") as caught:
        run([FAULTS["ResetRaises"]] * 2, **QUICK)
    assert isinstance(caught.value.__cause__, ValueError)
