"""Calls into environments that misbehave: the caller's event loop goes on, nothing hangs, nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import rlkit
from rlkit import _threads
from rlkit.envs import Action, StepResult, Task, calling
from rlkit.envs.calling import Guarded, call
from tests.each import for_each

SHORT = 0.15  # seconds until what hangs is given up
LONG = 60.0  # seconds that nothing here takes


class Endless:
    """Held calls, let go of when the test ends so that no thread stays behind."""

    def __init__(self):
        self.gate = threading.Event()

    def hang(self, *_):
        self.gate.wait()
        return StepResult()

    def spin(self, *_):
        while not self.gate.is_set():
            pass
        return StepResult()

    async def hang_async(self, *_):
        await asyncio.get_running_loop().create_future()

    async def deaf(self, *_):
        while not self.gate.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    async def block_async(self, *_):
        self.gate.wait()
        return StepResult()


@pytest.fixture
def endless():
    held = Endless()
    yield held
    held.gate.set()


@pytest.fixture(autouse=True)
def _own_home(monkeypatch):
    """Each test has an event loop of its own, so that one that blocks it troubles no other."""
    monkeypatch.setattr(calling.EnvLoop, "_current", None)


class Stub:
    """An environment whose step does ``act``."""

    def __init__(self, act):
        self.act = act
        self.closed = 0

    def reset(self, seed):
        return f"seed {seed}"

    def step(self, action):
        return self.act(action)

    def close(self):
        self.closed += 1


class StubAsync(Stub):
    async def reset(self, seed):
        return f"seed {seed}"

    async def step(self, action):
        answer = self.act(action)
        return await answer if hasattr(answer, "__await__") else answer

    async def close(self):
        self.closed += 1


def raising(error):
    def act(*_):
        raise error

    return act


def giving(value):
    return lambda *_: value


class Broken:
    """Not even its repr works."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Odd(BaseException):
    """Not an Exception."""


deep = functools.reduce(lambda inner, _: [inner], range(100), "x")
doubled = functools.reduce(lambda inner, _: [inner, inner], range(40), "x" * 1000)
circle = {"role": "user", "content": []}
circle["content"].append(circle)

FAULTS = {  # what step does -> (the error it leads to, a part of its message)
    "raises": (raising(KeyError("card")), KeyError, "card"),
    "raises its own": (raising(ConnectionError("reset")), ConnectionError, "reset"),
    "runs out of stack": (lambda a: recurse(a), RecursionError, ""),
    "runs out of memory": (raising(MemoryError()), MemoryError, ""),
    "sys.exit": (lambda _: sys.exit(3), rlkit.EnvError, "SystemExit"),
    "exit": (raising(SystemExit()), rlkit.EnvError, "SystemExit"),
    "interrupt": (raising(KeyboardInterrupt()), rlkit.EnvError, "KeyboardInterrupt"),
    "cancels itself": (raising(asyncio.CancelledError()), rlkit.EnvError, "CancelledError"),
    "leaves a generator": (raising(GeneratorExit()), rlkit.EnvError, "GeneratorExit"),
    "ends an iteration": (raising(StopIteration(1)), rlkit.EnvError, "StopIteration"),
    "ends an asynchronous iteration": (raising(StopAsyncIteration()), rlkit.EnvError, "StopAsyncIteration"),
    "raises no Exception": (raising(Odd("odd")), rlkit.EnvError, "Odd"),
    "no answer": (giving(None), rlkit.EnvError, "expected a StepResult"),
    "text": (giving("you won"), rlkit.EnvError, "expected a StepResult"),
    "four values": (giving(("", 0.0, False, {})), rlkit.EnvError, "expected a StepResult"),
    "an answer without repr": (giving(Broken()), rlkit.EnvError, "Broken"),
    "a generator": (lambda _: (x for x in "ab"), rlkit.EnvError, "expected a StepResult"),
    "NaN reward": (giving(StepResult("", float("nan"))), rlkit.EnvError, "reward: got nan"),
    "infinite reward": (giving(StepResult("", np.float32("inf"))), rlkit.EnvError, "reward: got inf"),
    "reward beyond floats": (giving(StepResult("", 10**400)), rlkit.EnvError, "reward"),
    "reward in text": (lambda _: StepResult("", "1"), rlkit.DataError, "StepResult.reward: got '1'"),
    "reward in text, of five": (giving(("", "1", True, False, {})), rlkit.EnvError, "reward: got '1'"),
    "several rewards": (giving(StepResult("", np.ones(2))), rlkit.EnvError, "reward"),
    "terminated in numbers": (giving(StepResult("", 0.0, 1)), rlkit.EnvError, "terminated"),
    "truncated in text": (giving(StepResult("", 0.0, False, "no")), rlkit.EnvError, "truncated"),
    "info in text": (giving(StepResult(info="none")), rlkit.EnvError, "info"),
    "no observation": (giving(StepResult(None)), rlkit.EnvError, "observation: got None"),
    "observation in bytes": (giving(StepResult(b"ab")), rlkit.EnvError, "observation"),
    "observation in numbers": (giving(StepResult(np.zeros(3))), rlkit.EnvError, "integers"),
    "negative tokens": (giving(StepResult([3, -1])), rlkit.EnvError, r"\[1\]: is -1"),
    "half a character": (giving(StepResult("a\ud800")), rlkit.EnvError, "UTF-8"),
    "message without a role": (giving(StepResult([{"content": "a"}])), rlkit.EnvError, r"\[0\]\['role'\]"),
    "message that is text": (giving(StepResult([{"role": "user", "content": "b"}, "a"])), rlkit.EnvError, r"\[1\]"),
    "message with a number": (giving(StepResult([{"role": "user", "content": 3}])), rlkit.EnvError, "content"),
    "message without content": (giving(StepResult([{"role": "u", "contnet": "b"}])), rlkit.EnvError, "and content"),
    "message with an object": (giving(StepResult([{"role": "u", "content": [Broken()]}])), rlkit.EnvError, "Broken"),
    "message without an end": (giving(StepResult([circle])), rlkit.EnvError, "too deep"),
    "message too deep": (giving(StepResult([{"role": "user", "content": deep}])), rlkit.EnvError, "too deep"),
    "message with half a character": (giving(StepResult([{"role": "\ud800"}])), rlkit.EnvError, r"\[0\].*UTF-8"),
    "message that doubles": (giving(StepResult([{"role": "u", "content": doubled}])), rlkit.EnvError, "max_chars"),
    "flood of text": (giving(StepResult("x" * 2_000_000)), rlkit.EnvError, "at most max_chars"),
    "flood of messages": (giving(StepResult([{"role": "user"}] * 2_000_000)), rlkit.EnvError, "entries"),
    "flood in a message": (giving(StepResult([{"role": "u", "content": ["y" * 999] * 9999}])), rlkit.EnvError, "chars"),
    "flood of tokens": (giving(StepResult(np.zeros(2_000_000, int))), rlkit.EnvError, "tokens"),
}  # fmt: skip


def recurse(action):
    return recurse(action)


async def played(act, kind=Stub, timeout=LONG):
    """(the error of one step, the environment) of an episode that is closed whatever happens."""
    env = await Guarded.opened(Task(functools.partial(kind, act), "stub"), timeout=LONG)
    try:
        assert await env.reset(4, timeout=LONG) == "seed 4"
        with pytest.raises(BaseException) as caught:
            await env.step(Action("x"), timeout=timeout)
    finally:
        assert await env.close() is None
    return caught, env.env


@for_each("kind", [Stub, StubAsync])
@for_each("fault", FAULTS)
def test_a_fault_is_an_error_of_its_episode_alone(fault, kind):
    """Each fault leads to its error, its environment is closed once, and another environment plays on beside it."""
    act, error, message = FAULTS[fault]
    if kind is StubAsync and fault == "ends an iteration":
        error = RuntimeError  # Python's own answer to it in a coroutine

    async def scene():
        other = await Guarded.opened(Task(lambda: Stub(giving(("go on", 1, False, False, {}))), "other"))
        caught, env = await played(act, kind)
        assert (await other.step(Action("y"))).observation == "go on"
        await other.close()
        return caught, env

    caught, env = asyncio.run(scene())
    assert type(caught.value) is error, caught.value
    caught.match(message)
    if error is rlkit.EnvError:
        caught.match("environment 'stub': step")
    assert env.closed == 1


HANGS = {
    "hangs": (Stub, "hang"),
    "computes for ever": (Stub, "spin"),
    "waits for ever": (StubAsync, "hang_async"),
    "waits for ever, called plainly": (Stub, "hang_async"),
    "does not hear that it is cancelled": (StubAsync, "deaf"),
    "blocks in a coroutine": (StubAsync, "block_async"),
}


@pytest.mark.parametrize("fault", HANGS)
def test_what_hangs_is_given_up(fault, endless):
    """A step without an answer is an EnvTimeout; the caller's event loop has been running all the time."""
    kind, how = HANGS[fault]

    async def scene():
        env = await Guarded.opened(Task(lambda: kind(getattr(endless, how)), "stub"))
        await env.reset(0)
        beats = 0

        async def beat():
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        heart = asyncio.create_task(beat())
        with pytest.raises(rlkit.EnvTimeout, match=r"environment 'stub': step: no answer within 0\.15 s"):
            await env.step(Action("x"), timeout=SHORT)
        heart.cancel()
        assert beats > 10
        endless.gate.set()
        assert await env.close(timeout=LONG) is None
        return env.env

    assert asyncio.run(scene()).closed == 1


@pytest.mark.parametrize(("kind", "how"), [(Stub, "hang"), (StubAsync, "block_async")])
def test_the_loop_runs_while_a_step_blocks(kind, how, endless):
    """The step blocks until the caller's loop has turned a hundred times: it would never end if it held the loop."""

    async def scene():
        env = await Guarded.opened(Task(lambda: kind(getattr(endless, how)), "stub"))
        step = asyncio.create_task(env.step(Action("x"), timeout=LONG))
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert not step.done()
        endless.gate.set()
        assert await step == StepResult()
        assert env.seconds > 0.09
        await env.close()

    asyncio.run(scene())


def test_hundreds_hang_at_once(endless):
    """There is always another thread: what hangs takes no place from others."""

    async def scene():
        hanging = [asyncio.create_task(call(endless.hang, timeout=LONG)) for _ in range(200)]
        assert await call(divmod, 7, 2, timeout=LONG) == (3, 1)
        assert not any(task.done() for task in hanging)
        endless.gate.set()
        await asyncio.gather(*hanging)

    asyncio.run(scene())


def test_new_environments_leave_a_loop_that_is_blocked(endless, monkeypatch):
    """A coroutine that blocks keeps others waiting only until the next environment finds that its home is stuck."""
    monkeypatch.setattr(calling, "_STUCK", 0.1)

    async def answer():
        return threading.current_thread()

    async def scene():
        first = await call(answer, timeout=LONG)
        blocked = asyncio.create_task(call(endless.block_async, timeout=LONG))
        await asyncio.sleep(0)  # so that it begins before the next call
        with pytest.raises(rlkit.EnvTimeout):
            await call(answer, timeout=SHORT)
        second = await call(answer, timeout=LONG)
        endless.gate.set()
        await blocked
        return first, second

    first, second = asyncio.run(scene())
    assert first is not second


def test_a_step_that_blocks_and_another_at_the_same_time(endless, monkeypatch):
    """Both are handed to the loop before it begins the first of them."""
    monkeypatch.setattr(calling, "_STUCK", 0.1)

    async def scene():
        tasks = [Task(lambda act=act: StubAsync(act), "stub") for act in (endless.block_async, giving(StepResult()))]
        blocking, other = [await Guarded.opened(task) for task in tasks]
        for env in (blocking, other):
            await env.reset(0)
        await call(lambda: pause())  # the loop has to wait for what follows
        steps = [asyncio.create_task(env.step(Action("x"), timeout=LONG)) for env in (blocking, other)]
        await asyncio.sleep(SHORT)
        new = await Guarded.opened(tasks[1])
        assert await new.step(Action("x"), timeout=LONG) == StepResult()
        assert not any(step.done() for step in steps)
        endless.gate.set()
        await asyncio.gather(*steps)
        for env in (blocking, other, new):
            assert await env.close(timeout=LONG) is None

    async def pause():
        asyncio.get_running_loop().call_later(0.02, time.sleep, 0.05)
        await asyncio.sleep(0.01)

    asyncio.run(scene())


def test_a_loop_that_is_busy_is_not_blocked(monkeypatch):
    """Many coroutines that compute keep a call waiting; as long as some begin, no environment goes elsewhere."""
    monkeypatch.setattr(calling, "_STUCK", 1.0)

    async def compute():
        time.sleep(0.02)
        return threading.current_thread()

    async def scene():
        busy, seen = [], set()
        for _ in range(30):
            busy += [asyncio.create_task(call(compute, timeout=LONG)) for _ in range(5)]
            await asyncio.sleep(0.02)
            seen.add(id(calling.EnvLoop.get()))
        return {*await asyncio.gather(*busy)}, seen

    threads, loops = asyncio.run(scene())
    assert (len(threads), len(loops)) == (1, 1)


def test_a_loop_that_had_nothing_to_do_is_not_blocked(monkeypatch):
    """What is counted is how long a call has waited, not how long ago the last one was."""
    monkeypatch.setattr(calling, "_STUCK", 0.5)

    async def thread():
        return threading.current_thread()

    async def scene():
        first = await call(thread)
        await asyncio.sleep(0.7)
        return {first, *await asyncio.gather(*(call(thread) for _ in range(20)))}

    assert len(asyncio.run(scene())) == 1


def test_a_call_after_one_that_hangs(endless):
    """A plain step that was given up is still in its context; the next one runs all the same, and sees it."""
    variable = contextvars.ContextVar("variable")

    class Hangs(Stub):
        def reset(self, seed):
            variable.set("set by reset")
            return "Say something."

        def step(self, action):
            return endless.hang() if action == "hang" else StepResult(variable.get())

    async def scene():
        env = await Guarded.opened(Task(lambda: Hangs(None), "stub"))
        await env.reset(0)
        with pytest.raises(rlkit.EnvTimeout):
            await env.step(Action("hang"), timeout=SHORT)
        result = await env.step(Action("x"), timeout=LONG)
        endless.gate.set()
        assert await env.close(timeout=LONG) is None
        return result

    assert asyncio.run(scene()).observation == "set by reset"


def test_waiting_outside_of_an_event_loop(endless):
    async def divide(x, y):
        return divmod(x, y)

    for fn in (divmod, divide):
        assert calling.wait(fn, 7, 2, timeout=LONG, where="here") == (3, 1)
        with pytest.raises(ZeroDivisionError):
            calling.wait(fn, 7, 0, timeout=LONG, where="here")
    for fn in (endless.hang, endless.hang_async):
        with pytest.raises(rlkit.EnvTimeout, match=r"here: no answer within 0\.15 s"):
            calling.wait(fn, timeout=SHORT, where="here")


def test_nothing_is_left_in_the_loop(endless):
    """Neither of episodes, however they end, nor of calls, given up or not, nor of what is made too late."""

    async def others():
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    async def episode(i):
        env = await Guarded.opened(Task(lambda: StubAsync((endless.hang_async, giving(StepResult()))[i % 2]), "stub"))
        await env.reset(0)
        with contextlib.suppress(rlkit.EnvTimeout):
            await env.step(Action("x"), timeout=(SHORT, LONG)[i % 2])
        if i % 3:
            await env.close(timeout=LONG)
        else:
            await asyncio.gather(env.close(timeout=LONG), env.close(timeout=LONG))

    async def make():
        await asyncio.sleep(2 * SHORT)
        return StubAsync(None)

    async def scene():
        await asyncio.gather(*(episode(i) for i in range(100)))
        with pytest.raises(rlkit.EnvTimeout):
            await Guarded.opened(Task(make, "stub"), timeout=SHORT)
        hanging = await Guarded.opened(Task(lambda: Stub(lambda _: endless.gate.wait() and endless.deaf()), "stub"))
        with pytest.raises(rlkit.EnvTimeout):
            await hanging.step(Action("x"), timeout=SHORT)
        await hanging.close(timeout=2 * SHORT)
        endless.gate.set()  # its step gives a coroutine, after the environment was closed
        for fn in (endless.hang_async, lambda: endless.hang_async()):
            with pytest.raises(rlkit.EnvTimeout):
                await call(fn, timeout=0.0)
        for _ in range(1000):
            if not (left := await call(others)):
                return
            await asyncio.sleep(0.01)
        assert not left

    asyncio.run(scene())


def test_an_environment_closes_while_its_step_hangs(endless):
    """The step that was given up gets its time to end; then the environment is closed under it."""

    async def scene():
        env = await Guarded.opened(Task(lambda: Stub(endless.hang), "stub"))
        with pytest.raises(rlkit.EnvTimeout):
            await env.step(Action("x"), timeout=SHORT)
        assert await env.close(timeout=2 * SHORT) is None or env.env.closed
        return env.env

    assert asyncio.run(scene()).closed == 1


def test_a_close_waits_for_the_step_that_was_cancelled():
    """Step and close do not run at the same time where that can be helped."""
    order = []
    begun, gate = threading.Event(), threading.Event()

    def act(_):
        begun.set()
        gate.wait()
        order.append("step")

    class Ordered(Stub):
        def close(self):
            order.append("close")

    async def scene():
        env = await Guarded.opened(Task(lambda: Ordered(act), "stub"))
        step = asyncio.create_task(env.step(Action("x")))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        closing = asyncio.create_task(env.close(timeout=LONG))
        await asyncio.sleep(0.02)
        assert order == []
        gate.set()
        assert await closing is None

    asyncio.run(scene())
    assert order == ["step", "close"]


def test_a_close_that_is_cancelled_goes_on(endless):
    closed = threading.Event()

    class Slow(Stub):
        def close(self):
            endless.gate.wait()
            closed.set()

    async def scene():
        env = await Guarded.opened(Task(lambda: Slow(None), "stub"))
        closing = asyncio.create_task(env.close())
        await asyncio.sleep(0.02)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(scene())
    endless.gate.set()
    assert closed.wait(LONG)


@for_each("kind", [Stub, StubAsync])
def test_a_close_that_fails_is_told(kind):
    class Failing(kind):
        def close(self):
            raise OSError("busy")

    async def scene():
        env = await Guarded.opened(Task(lambda: Failing(None), "stub"))
        return await env.close(), await env.close()

    first, second = asyncio.run(scene())
    assert isinstance(first, OSError)
    assert second is first


def test_a_close_that_hangs_is_told(endless):
    class Hanging(Stub):
        def close(self):
            endless.gate.wait()

    async def scene():
        env = await Guarded.opened(Task(lambda: Hanging(None), "stub"))
        return await env.close(timeout=SHORT)

    assert isinstance(asyncio.run(scene()), rlkit.EnvTimeout)


def test_closed_once_and_then_refused():
    async def scene():
        env = await Guarded.opened(Task(lambda: Stub(giving(StepResult())), "stub"))
        await asyncio.gather(env.close(), env.close())
        await env.close()
        with pytest.raises(rlkit.EnvError, match="closed"):
            await env.step(Action("x"))
        return env.env

    assert asyncio.run(scene()).closed == 1


def test_what_is_made_too_late_is_closed():
    gate, closed = threading.Event(), threading.Event()

    class Late(Stub):
        def close(self):
            closed.set()

    def make():
        gate.wait()
        return Late(None)

    async def scene():
        with pytest.raises(rlkit.EnvTimeout, match="make"):
            await Guarded.opened(Task(make, "stub"), timeout=SHORT)

    asyncio.run(scene())
    assert not closed.is_set()
    gate.set()
    assert closed.wait(LONG)


@for_each("made", [None, "env", object()])
def test_what_is_no_environment(made):
    with pytest.raises(rlkit.EnvError, match="environment 'stub': make: made .* no method 'reset'"):
        asyncio.run(Guarded.opened(Task(lambda: made, "stub")))


def test_an_environment_may_be_made_asynchronously():
    async def make():
        return Stub(giving(StepResult("hi", 1)))

    async def scene():
        env = await Guarded.opened(Task(make, "stub"))
        return await env.step(Action("x"))

    assert asyncio.run(scene()) == StepResult("hi", 1.0)


def reset(answer):
    """The first observation of an environment whose reset gives ``answer``."""

    class Answering(Stub):
        def reset(self, seed):
            return answer

    async def scene():
        return await (await Guarded.opened(Task(lambda: Answering(None)))).reset(0)

    return asyncio.run(scene())


def step(answer):
    """The result of a step that gives ``answer``."""

    async def scene():
        return await (await Guarded.opened(Task(lambda: Stub(giving(answer))))).step(Action("x"))

    return asyncio.run(scene())


@for_each(
    ("answer", "form"),
    [
        ("text", "text"),
        (("text", {"seed": 1}), "text"),
        ({"role": "user", "content": "hi"}, ({"role": "user", "content": "hi"},)),
        ([{"role": "user", "content": None}], ({"role": "user", "content": None},)),
        (
            ({"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}),
            ({"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}),
        ),
    ],
)
def test_forms_of_an_observation(answer, form):
    assert reset(answer) == form


@for_each("answer", ["", [], ("", {"seed": 1})])
def test_an_episode_begins_with_something(answer):
    """A policy cannot answer nothing: an empty first observation is the environment's failure."""
    with pytest.raises(rlkit.errors.EnvError, match="observation: is empty"):
        reset(answer)


@for_each("answer", [[3, 4], (3, 4), np.array([3, 4], np.int32)])
def test_tokens_as_an_observation(answer):
    found = step(StepResult(answer)).observation
    assert (found.dtype, found.tolist()) == (np.int64, [3, 4])


@for_each(
    ("reward", "number"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (np.array(2), 2.0), (np.bool_(True), 1.0), (-0.25, -0.25)],
)
def test_forms_of_a_reward(reward, number):
    """And the five values of gymnasium, with nothing to see at the end."""
    found = step((None, reward, np.bool_(True), False, None))
    assert found == StepResult("", number, True, False, {})
    assert (type(found.reward), type(found.terminated)) == (float, bool)


@for_each(
    ("given", "total", "several"),
    [
        (StepResult("", None), 0.0, ()),
        (("", None, False, False, {}), 0.0, ()),
        (StepResult("", rewards=[None, 1, np.float32(0.5)]), 1.5, (1.0, 0.5)),
        (StepResult("", 1.5, rewards=(1.0, 0.5)), 1.5, (1.0, 0.5)),
        (StepResult("", 0.0), 0.0, None),
    ],
)
def test_none_and_several_as_a_reward(given, total, several):
    """None is no reward, several are kept one by one; a reward of 0 is one."""
    found = step(given)
    assert (found.reward, found.rewards) == (total, several)


def test_a_tensor_as_a_reward():
    torch = pytest.importorskip("torch")
    assert step(StepResult("", torch.tensor(0.5))).reward == 0.5


def test_messages_are_copied():
    """An environment that goes on changing its list does not change what was said; numpy's values become plain."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "before"}], "n": np.int64(3), "a": np.ones(2)}]

    async def scene():
        found = await (await Guarded.opened(Task(lambda: Stub(giving(StepResult(messages)))))).step(Action("x"))
        messages[0]["content"][0]["text"] = "after"
        messages.append({"role": "user", "content": "more"})
        return found

    said = {"role": "user", "content": [{"type": "text", "text": "before"}], "n": 3, "a": [1.0, 1.0]}
    assert asyncio.run(scene()).observation == (said,)


@for_each(("tools", "good"), [(None, True), ([{"type": "function"}], True), ("search", False), ([1], False)])
def test_tools_of_an_environment(tools, good):
    env = Stub(None)
    if tools is not None:
        env.tools = tools
    if good:
        assert Guarded(env, "stub").tools == tuple(tools or ())
    else:
        with pytest.raises(rlkit.EnvError, match="tools"):
            _ = Guarded(env, "stub").tools


def test_what_is_called_sees_the_callers_context():
    """Context variables (of loggers, tracers) reach environments, plain and asynchronous."""
    variable = contextvars.ContextVar("variable")

    async def read():
        return variable.get()

    async def scene():
        variable.set("here")
        return await call(variable.get), await call(read), await call(lambda: read())

    assert asyncio.run(scene()) == ("here", "here", "here")


def test_plain_calls_run_in_threads_that_differ():
    """What belongs to the thread that made it, such as a connection of sqlite3, has to be opened for all threads."""

    class Stored:
        def reset(self, seed):
            self.connection = sqlite3.connect(":memory:", check_same_thread=False)
            self.thread = threading.get_ident()
            return "Say something."

        def step(self, action):
            self.connection.execute("create table said (text)")
            self.connection.execute("insert into said values (?)", (action,))
            (count,) = self.connection.execute("select count(*) from said").fetchone()
            return StepResult(
                reward=float(count), terminated=True, info={"moved": threading.get_ident() != self.thread}
            )

        def close(self):
            self.connection.close()

    async def scene():
        env = await Guarded.opened(Task(Stored, "stored"))
        await env.reset(0)
        gate = threading.Event()
        others = [asyncio.create_task(call(gate.wait)) for _ in range(64)]  # they take the threads that are idle
        await asyncio.sleep(0)
        result = await env.step(Action("something"))
        gate.set()
        await asyncio.gather(*others)
        return result, await env.close()

    result, error = asyncio.run(scene())
    assert error is None
    assert result.reward == 1.0
    assert result.info["moved"]


def test_what_environments_share_outlives_a_rollout():
    """Asynchronous environments find the same event loop from one ``asyncio.run`` to the next."""

    async def loop():
        return asyncio.get_running_loop()

    assert asyncio.run(call(loop)) is asyncio.run(call(loop))


def test_callables_of_every_sort():
    class Asynchronous:
        async def __call__(self, x):
            return x + 1

    async def add(x, y):
        return x + y

    async def scene():
        future = rlkit.Future.of(5)
        return [
            await call(Asynchronous(), 1),
            await call(functools.partial(add, 1), 2),
            await call(lambda: future),
            await call(lambda: add(2, 2)),
        ]

    assert asyncio.run(scene()) == [2, 3, 5, 4]


def test_a_timeout_out_of_range():
    with pytest.raises(rlkit.ConfigError, match="timeout"):
        asyncio.run(call(dict, timeout=-1))


def test_threads_inside_of_environments_are_daemons():
    async def inner():
        return await asyncio.to_thread(lambda: threading.current_thread().daemon)

    assert asyncio.run(call(inner))


def test_threads_without_work_end(monkeypatch):
    """And while there is work, they are used again."""
    monkeypatch.setattr(_threads, "_IDLE", 0.2)
    threads = _threads.Threads("rlkit-test")
    seen = []
    for _ in range(20):
        both = [threading.Event(), threading.Event()]
        for done in both:
            threads.start(lambda done=done: (seen.append(threading.current_thread()), done.set()))
        assert all(done.wait(LONG) for done in both)
    assert len(set(seen)) < 20
    for thread in set(seen):
        thread.join(LONG)
        assert not thread.is_alive()
    assert threads._idle == []


def test_threads_end_with_their_executor():
    """Those that wait for work at once, a running one when it is done; nothing waits for it."""
    executor = _threads.DaemonExecutor(_threads.Threads("rlkit-ending"))
    go_on, threads = threading.Event(), []
    for work in (lambda: go_on.wait(LONG), lambda: None):
        begun = threading.Event()

        def noted(work=work, begun=begun):
            threads.append(threading.current_thread())
            begun.set()
            work()

        executor.submit(noted)
        assert begun.wait(LONG)
    executor.shutdown(wait=True)
    threads[1].join(LONG)
    assert [thread.is_alive() for thread in threads] == [True, False]
    go_on.set()
    threads[0].join(LONG)
    assert not threads[0].is_alive()


def test_threads_of_which_there_may_be_few():
    """Work beyond them waits, in order, and what is cancelled meanwhile is never begun."""
    executor = _threads.DaemonExecutor(_threads.Threads("rlkit-test", most=2))
    go_on, began = threading.Event(), []
    running = [executor.submit(go_on.wait, LONG) for _ in range(2)]
    waiting = [executor.submit(began.append, i) for i in range(6)]
    cancelled = [future.cancel() for future in waiting[1::2]]
    assert (began, cancelled) == ([], [True] * 3)
    go_on.set()
    assert all(future.result(LONG) for future in running)
    for future in waiting[::2]:
        future.result(LONG)
    executor.submit(int).result(LONG)
    assert sorted(began) == [0, 2, 4]


@pytest.mark.parametrize("how", ["hang", "hang_async", "block_async", "deaf", "to_thread"])
def test_the_program_ends_although_a_call_hangs(how):
    """With its own exit status and without a word on stderr."""
    source = f"""
        import asyncio, sys, threading
        import rlkit
        from rlkit.envs.calling import call
        def hang(): threading.Event().wait()
        async def hang_async(): await asyncio.get_running_loop().create_future()
        async def block_async(): threading.Event().wait()
        async def deaf():
            while True:
                try: await asyncio.sleep(1)
                except asyncio.CancelledError: pass
        async def to_thread(): await asyncio.to_thread(hang)
        try: asyncio.run(call({how}, timeout=0.1))
        except rlkit.EnvTimeout: print("given up")
        sys.exit(7)
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(source)], capture_output=True, text=True, timeout=LONG
    )
    assert (done.returncode, done.stdout, done.stderr) == (7, "given up\n", "")
