"""Calls into environments that misbehave: the caller's event loop goes on, nothing hangs, nothing else is touched."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import queue
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
from rlkit.envs.calling import GuardedEnv, call
from tests.each import for_each
from tests.envs.parts import asynchronous, played

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
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)


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
    """An environment of functions, which counts how often it is closed."""

    def __init__(self, act=None, begin="seed {}".format, end=lambda: None):
        self.act, self.begin, self.end = act, begin, end
        self.closed = 0

    def reset(self, seed):
        return self.begin(seed)

    def step(self, action):
        return self.act(action)

    def close(self):
        self.closed += 1
        return self.end()


class StubAsync(Stub):
    async def reset(self, seed):
        return super().reset(seed)

    async def step(self, action):
        answer = super().step(action)
        return await answer if inspect.isawaitable(answer) else answer

    async def close(self):
        return super().close()


def stub(*functions, kind=Stub, **more):
    return Task(lambda: kind(*functions, **more), "stub")


def opened(*functions, **more):
    return GuardedEnv.open(stub(*functions, **more))


def raising(error):
    def act(*_):
        raise error

    return act


def giving(*values, **more):
    return lambda *_: StepResult(*values, **more)


def seeing(*messages):
    return giving([*messages])


def thread_name(*_):
    return threading.current_thread().name


class Broken:
    """Not even its repr works."""

    def __repr__(self):
        raise RuntimeError("no repr")


class Odd(BaseException):
    """Not an Exception."""


doubled = functools.reduce(lambda inner, _: [inner, inner], range(40), "x" * 1000)
circle = {"role": "user", "content": []}
circle["content"].append(circle)

FAULTS = {  # what step does -> (the error it leads to, a part of its message)
    "raises": (raising(KeyError("card")), KeyError, "card"),
    "runs out of stack": (lambda a: recurse(a), RecursionError, "recursion"),
    "runs out of memory": (raising(MemoryError("too large")), MemoryError, "too large"),
    "sys.exit": (lambda _: sys.exit(3), rlkit.EnvError, "SystemExit"),
    "interrupt": (raising(KeyboardInterrupt()), rlkit.EnvError, "KeyboardInterrupt"),
    "cancels itself": (raising(asyncio.CancelledError()), rlkit.EnvError, "CancelledError"),
    "leaves a generator": (raising(GeneratorExit()), rlkit.EnvError, "GeneratorExit"),
    "ends an iteration": (raising(StopIteration(1)), rlkit.EnvError, "StopIteration"),
    "ends an asynchronous iteration": (raising(StopAsyncIteration()), rlkit.EnvError, "StopAsyncIteration"),
    "raises no Exception": (raising(Odd("odd")), rlkit.EnvError, "Odd"),
    "no answer": (lambda _: None, rlkit.EnvError, "expected a StepResult"),
    "four values": (lambda _: ("", 0.0, False, {}), rlkit.EnvError, "expected a StepResult"),
    "an answer without repr": (lambda _: Broken(), rlkit.EnvError, "Broken"),
    "NaN reward": (giving("", float("nan")), rlkit.EnvError, "reward: got nan"),
    "infinite reward": (giving("", np.float32("inf")), rlkit.EnvError, "reward: got inf"),
    "reward beyond floats": (giving("", 10**400), rlkit.EnvError, "reward"),
    "reward in text, of five": (lambda _: ("", "1", True, False, {}), rlkit.EnvError, "reward: got '1'"),
    "several rewards": (giving("", np.ones(2)), rlkit.EnvError, "reward"),
    "terminated in numbers": (giving("", 0.0, 1), rlkit.EnvError, "terminated"),
    "truncated in text": (giving("", 0.0, False, "no"), rlkit.EnvError, "truncated"),
    "info in text": (giving(info="none"), rlkit.EnvError, "info"),
    "no observation": (giving(None), rlkit.EnvError, "observation: got None"),
    "observation in numbers": (giving(np.zeros(3)), rlkit.EnvError, "integers"),
    "negative tokens": (seeing(3, -1), rlkit.EnvError, r"\[1\]: is -1"),
    "half a character": (giving("a\ud800"), rlkit.EnvError, "UTF-8"),
    "message without a role": (seeing({"content": "a"}), rlkit.EnvError, r"\[0\]\['role'\]"),
    "message that is text": (seeing({"role": "user", "content": "b"}, "a"), rlkit.EnvError, r"\[1\]"),
    "message with a number": (seeing({"role": "user", "content": 3}), rlkit.EnvError, "content"),
    "message without content": (seeing({"role": "u", "contnet": "b"}), rlkit.EnvError, "and content"),
    "message with an object": (seeing({"role": "u", "content": [Broken()]}), rlkit.EnvError, "Broken"),
    "message without an end": (seeing(circle), rlkit.EnvError, "too deep"),
    "message with half a character": (seeing({"role": "\ud800"}), rlkit.EnvError, r"\[0\].*UTF-8"),
    "message that doubles": (seeing({"role": "u", "content": doubled}), rlkit.EnvError, "max_chars"),
    "flood of text": (giving("x" * 2_000_000), rlkit.EnvError, "at most max_chars"),
    "flood of messages": (giving([{"role": "user"}] * 2_000_000), rlkit.EnvError, "entries"),
    "flood in a message": (seeing({"role": "u", "content": ["y" * 999] * 9999}), rlkit.EnvError, "chars"),
    "flood of tokens": (giving(np.zeros(2_000_000, int)), rlkit.EnvError, "tokens"),
}


def recurse(action):
    return recurse(action)


@for_each("kind", [Stub, StubAsync])
@for_each("fault", FAULTS)
@asynchronous
async def test_a_fault_is_an_error_of_its_episode_alone(fault, kind):
    """Each fault leads to its error, its environment is closed once, and another environment plays on."""
    act, error, message = FAULTS[fault]
    if kind is StubAsync and fault == "ends an iteration":
        error = RuntimeError  # Python's own answer to it in a coroutine
    env, other = await opened(act, kind=kind), await opened(giving("go on", 1))
    assert await env.reset(4, timeout=LONG) == "seed 4"
    with pytest.raises(BaseException, match=message) as caught:
        await env.step(Action("x"), timeout=LONG)
    assert await env.close() is None
    assert (await other.step(Action("y"))).observation == "go on"
    await other.close()
    assert type(caught.value) is error, caught.value
    if error is rlkit.EnvError:
        caught.match("environment 'stub': step")
    assert env.env.closed == 1


@pytest.mark.parametrize("kind", [Stub, StubAsync])
@pytest.mark.parametrize("how", ["hang", "spin", "hang_async", "deaf"])
@asynchronous
async def test_what_hangs_is_given_up(kind, how, endless):
    """In a thread, or in the environments' loop; the caller's event loop runs all the time."""
    env = await opened(getattr(endless, how), kind=kind)
    await env.reset(0)
    step = asyncio.create_task(env.step(Action("x"), timeout=SHORT))
    turns = 0
    while not step.done():
        await asyncio.sleep(0)
        turns += 1
    with pytest.raises(rlkit.EnvTimeout, match=r"environment 'stub': step: no answer within 0\.15 s"):
        await step
    assert turns > 10
    assert SHORT < env.seconds < LONG
    endless.gate.set()
    assert await env.close(timeout=LONG) is None
    assert env.env.closed == 1


@asynchronous
async def test_a_step_that_blocks_and_another_at_the_same_time(endless, monkeypatch):
    """Both are handed to the loop before it begins the first of them; a new environment gets another loop."""
    monkeypatch.setattr(calling, "_STUCK", 0.1)

    async def pause():
        asyncio.get_running_loop().call_later(0.02, time.sleep, 0.05)
        await asyncio.sleep(0.01)

    old = [await opened(act, kind=StubAsync) for act in (endless.hang, giving())]
    for env in old:
        await env.reset(0)
    await call(lambda: pause())  # the loop has to wait for what follows
    steps = [asyncio.create_task(env.step(Action("x"), timeout=LONG)) for env in old]
    await asyncio.sleep(SHORT)
    new = await opened(giving(), kind=StubAsync)
    assert await new.step(Action("x"), timeout=LONG) == StepResult()
    assert not any(step.done() for step in steps)
    endless.gate.set()
    await asyncio.gather(*steps)
    for env in (*old, new):
        assert await env.close(timeout=LONG) is None


@asynchronous
async def test_a_loop_that_is_busy_is_not_blocked(monkeypatch):
    """Many coroutines that compute keep a call waiting; as long as some begin, no environment goes elsewhere."""
    monkeypatch.setattr(calling, "_STUCK", 1.0)

    async def compute():
        time.sleep(0.02)
        return thread_name()

    busy, loops = [], set()
    for _ in range(30):
        busy += [asyncio.create_task(call(compute, timeout=LONG)) for _ in range(5)]
        await asyncio.sleep(0.02)
        loops.add(calling.EnvLoop.get())
    assert (len({*await asyncio.gather(*busy)}), len(loops)) == (1, 1)


@asynchronous
async def test_a_loop_that_had_nothing_to_do_is_not_blocked(monkeypatch):
    """What is counted is how long a call has waited, not how long ago the last one was."""
    monkeypatch.setattr(calling, "_STUCK", 0.5)
    loop = calling.EnvLoop.get()
    assert await call(lambda: asyncio.sleep(0, "done")) == "done"
    await asyncio.sleep(0.7)
    loop.knock()
    assert calling.EnvLoop.get() is loop
    loop.answer()


@asynchronous
async def test_a_call_after_one_that_hangs(endless):
    """A step that was given up is still in its context; the next call runs all the same, and sees what was set."""
    variable = contextvars.ContextVar("variable")
    seen = []

    def begin(seed):
        variable.set("set by reset")
        return "Say something."

    def act(action):
        return endless.hang() if action == "hang" else StepResult(variable.get())

    env = await opened(act, begin, lambda: seen.append(variable.get()))
    await env.reset(0)
    for _ in range(2):
        assert (await env.step(Action("x"), timeout=LONG)).observation == "set by reset"
        with pytest.raises(rlkit.EnvTimeout):
            await env.step(Action("hang"), timeout=SHORT)
    assert await env.close(timeout=1.0) is None, "the step gets half of the time to end, then it is closed under it"
    assert seen == ["set by reset"]


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


@asynchronous
async def test_nothing_is_left_in_the_loop(endless):
    """Neither of episodes, however they end, nor of calls, given up or not, nor of what is made too late."""

    async def others():
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    async def episode(i):
        env = await opened((endless.hang_async, giving())[i % 2], kind=StubAsync)
        await env.reset(0)
        with contextlib.suppress(rlkit.EnvTimeout):
            await env.step(Action("x"), timeout=(SHORT, LONG)[i % 2])
        await asyncio.gather(*(env.close(timeout=LONG) for _ in range(2 if i % 3 == 0 else 1)))

    async def make():
        await asyncio.sleep(2 * SHORT)
        return StubAsync()

    await asyncio.gather(*(episode(i) for i in range(100)))
    with pytest.raises(rlkit.EnvTimeout):
        await GuardedEnv.open(Task(make, "stub"), timeout=SHORT)
    hanging = await opened(lambda _: endless.gate.wait() and endless.deaf())
    with pytest.raises(rlkit.EnvTimeout):
        await hanging.step(Action("x"), timeout=SHORT)
    await hanging.close(timeout=2 * SHORT)
    endless.gate.set()  # its step gives a coroutine, after the environment was closed
    for fn in (endless.hang_async, lambda: endless.hang_async()):
        with pytest.raises(rlkit.EnvTimeout):
            await call(fn, timeout=0.0)
    for _ in range(1000):
        if not (left := await call(others)):
            break
        await asyncio.sleep(0.01)
    assert not left


@asynchronous
async def test_a_close_waits_for_the_step_that_was_cancelled(endless):
    """Step and close do not run at the same time where that can be helped."""
    begun, order = threading.Event(), []

    def act(_):
        begun.set()
        endless.hang()
        order.append("step")

    env = await opened(act, end=lambda: order.append("close"))
    step = asyncio.create_task(env.step(Action("x")))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    closing = asyncio.create_task(env.close(timeout=LONG))
    await asyncio.sleep(0.02)
    assert order == []
    endless.gate.set()
    assert await closing is None
    assert order == ["step", "close"]


@asynchronous
async def test_a_close_that_is_cancelled_goes_on(endless):
    closed = threading.Event()
    env = await opened(end=lambda: endless.hang() and closed.set())
    closing = asyncio.create_task(env.close())
    await asyncio.sleep(0.02)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    endless.gate.set()
    assert await call(closed.wait, LONG)


@for_each("kind", [Stub, StubAsync])
@asynchronous
async def test_a_close_that_fails_or_hangs_is_told(kind):
    error, endless = OSError("busy"), Endless()
    failing, hanging = await opened(end=raising(error), kind=kind), await opened(end=endless.hang, kind=kind)
    assert [await failing.close(), await failing.close()] == [error, error]
    assert isinstance(await hanging.close(timeout=SHORT), rlkit.EnvTimeout)
    endless.gate.set()


@asynchronous
async def test_closed_once_and_then_refused():
    env = await opened(giving())
    await asyncio.gather(env.close(), env.close())
    await env.close()
    with pytest.raises(rlkit.EnvError, match="closed"):
        await env.step(Action("x"))
    assert env.env.closed == 1


@asynchronous
async def test_what_is_made_too_late_is_closed(endless):
    closed = threading.Event()
    with pytest.raises(rlkit.EnvTimeout, match="make"):
        await GuardedEnv.open(Task(lambda: endless.hang() and Stub(end=closed.set), "stub"), timeout=SHORT)
    assert not closed.is_set()
    endless.gate.set()
    assert await call(closed.wait, LONG)


@for_each("made", [None, "env", object()])
def test_what_is_no_environment(made):
    with pytest.raises(rlkit.EnvError, match="environment 'stub': make: made .* no method 'reset'"):
        asyncio.run(GuardedEnv.open(Task(lambda: made, "stub")))


def reset(answer):
    """The first observation of an environment whose reset gives ``answer``."""
    return played(stub(begin=lambda seed: answer))[0]


def step(answer):
    """The result of a step that gives ``answer``."""
    return played(stub(lambda action: answer), "x")[1][0]


HI = {"role": "user", "content": "hi"}
SEVERAL = (HI, {"role": "user", "content": None}, {"role": "user", "content": [{"type": "text", "text": "b"}]})


@for_each(
    ("answer", "form"),
    [("text", "text"), (("text", {"seed": 1}), "text"), (HI, (HI,)), ([HI], (HI,)), (SEVERAL, SEVERAL)],
)
def test_forms_of_an_observation(answer, form):
    assert reset(answer) == form


@for_each("answer", [[3, 4], (3, 4), np.array([3, 4], np.int32)])
def test_tokens_as_an_observation(answer):
    found = step(StepResult(answer)).observation
    assert (found.dtype, found.tolist()) == (np.int64, [3, 4])


@for_each("answer", ["", [], (), np.array([], np.int64), ("", {"seed": 1})])
def test_an_episode_begins_with_something(answer):
    """A policy cannot answer nothing: an empty first observation is the environment's failure."""
    with pytest.raises(rlkit.EnvError, match="observation: is empty; expected the text for the policy to answer"):
        reset(answer)


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


def test_messages_are_copied():
    """An environment that goes on changing its list does not change what was said; numpy's values become plain."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "before"}], "n": np.int64(3), "a": np.ones(2)}]
    found = step(StepResult(messages)).observation
    messages[0]["content"][0]["text"] = "after"
    messages.append(HI)
    assert found == ({"role": "user", "content": [{"type": "text", "text": "before"}], "n": 3, "a": [1.0, 1.0]},)


def test_tools_of_an_environment():
    env = Stub()
    assert GuardedEnv(env, "stub").tools == ()
    for tools in (None, [], [{"type": "function"}]):
        env.tools = tools
        assert GuardedEnv(env, "stub").tools == tuple(tools or ())
    for wrong in ("search", [1], [{}, 1]):
        env.tools = wrong
        with pytest.raises(rlkit.EnvError, match="tools"):
            _ = GuardedEnv(env, "stub").tools


@asynchronous
async def test_what_is_called_sees_the_callers_context():
    """Context variables (of loggers, tracers) reach environments, plain and asynchronous."""
    variable = contextvars.ContextVar("variable")

    async def read():
        return variable.get()

    variable.set("here")
    assert [await call(fn) for fn in (variable.get, read, lambda: read())] == ["here"] * 3


@asynchronous
async def test_plain_calls_run_in_threads_that_differ(endless):
    """Calls that hang take no place from others; and what belongs to a thread, as sqlite3's connections, is lost."""
    env = await opened(lambda _: StepResult(thread_name()), thread_name)
    first = await env.reset(0)
    others = [asyncio.create_task(call(endless.hang)) for _ in range(64)]  # they take the threads that are idle
    await asyncio.sleep(0)
    assert (await env.step(Action("x"), timeout=LONG)).observation != first
    assert not any(task.done() for task in others)
    endless.gate.set()
    await asyncio.gather(*others)


def test_what_environments_share_outlives_a_rollout():
    """Asynchronous environments find the same event loop from one ``asyncio.run`` to the next."""

    async def loop():
        return asyncio.get_running_loop()

    assert asyncio.run(call(loop)) is asyncio.run(call(loop))


@asynchronous
async def test_callables_of_every_sort():
    class Asynchronous:
        async def __call__(self, x):
            return x + 1

    async def add(x, y):
        return x + y

    future = rlkit.Future.of(5)
    assert await call(Asynchronous(), 1) == 2
    assert await call(functools.partial(add, 1), 2) == 3
    assert await call(lambda: future) == 5
    assert await call(lambda: add(2, 2)) == 4


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
    seen = queue.SimpleQueue()
    used = set()
    for _ in range(20):
        for _ in range(2):
            threads.start(lambda: seen.put(threading.current_thread()))
        used |= {seen.get(timeout=LONG), seen.get(timeout=LONG)}
    assert len(used) < 20
    for thread in used:
        thread.join(LONG)
        assert not thread.is_alive()
    assert threads._idle == []


def test_threads_end_with_their_executor():
    """Those that wait for work at once, a running one when it is done; nothing waits for it."""
    executor = _threads.DaemonExecutor(_threads.Threads("rlkit-ending"))
    go_on, seen = threading.Event(), queue.SimpleQueue()
    executor.submit(lambda: seen.put(threading.current_thread()) or go_on.wait(LONG))
    running = seen.get(timeout=LONG)
    executor.submit(lambda: seen.put(threading.current_thread()))
    idle = seen.get(timeout=LONG)
    executor.shutdown(wait=True)
    idle.join(LONG)
    assert (running.is_alive(), idle.is_alive()) == (True, False)
    go_on.set()
    running.join(LONG)
    assert not running.is_alive()


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
        async def block_async(): hang()
        async def deaf():
            while True:
                try: await asyncio.sleep(1)
                except asyncio.CancelledError: pass
        async def to_thread(): await asyncio.to_thread(hang)
        try: asyncio.run(call({how}, timeout=0.1))
        except rlkit.EnvTimeout: print("given up")
        sys.exit(7)
    """
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (7, "given up\n", "")
