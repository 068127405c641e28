"""What an environment opens in one call and leaves in another: scopes, sessions, generators, context variables."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time

import anyio
import pytest

from rlkit.envs import Action, StepResult, Task, gymnasium
from rlkit.envs.calling import Guarded, call
from rlkit.errors import EnvError, EnvTimeout

ACTIVE: contextvars.ContextVar[str] = contextvars.ContextVar("active", default="none")


class Held:
    """Enters ``opened()`` in reset and leaves it in close."""

    async def reset(self, seed):
        self.stack = contextlib.AsyncExitStack()
        self.held = await self.stack.enter_async_context(self.opened())
        return "Go."

    async def step(self, action):
        return StepResult(await self.answer(), reward=1.0, terminated=True)

    async def answer(self):
        return ACTIVE.get()

    async def close(self):
        await self.stack.aclose()


class Scope(Held):
    def opened(self):
        return _scope()


@contextlib.asynccontextmanager
async def _scope():
    with anyio.CancelScope() as scope:
        yield scope


class TaskGroup(Held):
    """As an SDK's session: a task of its own answers what is asked, until the group is left."""

    def opened(self):
        return self.session()

    @contextlib.asynccontextmanager
    async def session(self):
        ask, self.asked = anyio.create_memory_object_stream(8)
        tell, self.told = anyio.create_memory_object_stream(8)

        async def serve():
            async for question in self.asked:
                await tell.send(f"{question}!")

        async with ask, self.asked, self.told, tell, anyio.create_task_group() as group:
            group.start_soon(serve)
            try:
                yield ask
            finally:
                group.cancel_scope.cancel()

    async def answer(self):
        await self.held.send("what")
        return await self.told.receive()


class Nursery(Held):
    """asyncio's own."""

    def opened(self):
        return asyncio.TaskGroup()

    async def answer(self):
        return await self.held.create_task(asyncio.sleep(0, "done"))


class Timeout(Held):
    def opened(self):
        return asyncio.timeout(60)


class Variable(Held):
    """A context variable, reset with its token."""

    def opened(self):
        return _variable()


@contextlib.asynccontextmanager
async def _variable():
    token = ACTIVE.set("held")
    yield
    ACTIVE.reset(token)


class Generator(Held):
    """An asynchronous generator that is gone on with in each call."""

    async def reset(self, seed):
        self.turns = self.talk()
        return await anext(self.turns)

    async def talk(self):
        async with _scope(), _variable():
            yield "Go."
            while True:
                yield ACTIVE.get()

    async def answer(self):
        return await anext(self.turns)

    async def close(self):
        await self.turns.aclose()


class PlainVariable:
    """Plain methods, which run in threads."""

    def reset(self, seed):
        self.token = ACTIVE.set("held")
        return "Go."

    def step(self, action):
        return StepResult(ACTIVE.get(), 1.0, terminated=True)

    def close(self):
        ACTIVE.reset(self.token)


class Gym(Scope):
    """The same behind an adapter whose methods are plain and give awaitables."""

    def __init__(self):
        self.inner = Scope()

    async def reset(self, *, seed=None):
        return await self.inner.reset(seed), {}

    async def step(self, action):
        return "none", 1.0, True, False, {}

    async def close(self):
        await self.inner.close()


SAID = {
    Scope: "none",
    TaskGroup: "what!",
    Nursery: "done",
    Timeout: "none",
    Variable: "held",
    Generator: "held",
    PlainVariable: "held",
    gymnasium(Gym)[0].make: "none",
}


@pytest.mark.parametrize(("make", "said"), SAID.items())
def test_what_reset_enters_close_leaves(make, said):
    """Several at once, each in a task of its own; every call is awaited from another task here."""

    async def apart(coroutine):
        return await asyncio.create_task(coroutine)

    async def episode():
        env = await apart(Guarded.opened(Task(make, "held")))
        await apart(env.reset(0, timeout=30))
        result = await apart(env.step(Action("x"), timeout=30))
        return result.observation, await apart(env.close(timeout=30))

    async def scene():
        return await asyncio.gather(*(episode() for _ in range(5)))

    assert asyncio.run(scene()) == [(said, None)] * 5


def test_an_environment_that_is_made_with_something_open():
    """An asynchronous ``make`` is in the same task."""

    async def make():
        env = Scope()
        await env.reset(0)
        env.reset = lambda seed: "Go."
        return env

    async def scene():
        env = await Guarded.opened(Task(make, "held"))
        await env.reset(0)
        return await env.close(timeout=30)

    assert asyncio.run(scene()) is None


class Slow(Scope):
    async def answer(self):
        await asyncio.sleep(3600)


def test_a_step_that_is_given_up_leaves_what_is_open_to_close():
    async def scene():
        env = await Guarded.opened(Task(Slow, "held"))
        await env.reset(0)
        with pytest.raises(EnvTimeout):
            await env.step(Action("x"), timeout=0.05)
        return await env.close(timeout=30), env.env.held

    problem, scope = asyncio.run(scene())
    assert problem is None
    assert not scope.cancel_called


class Dies(TaskGroup):
    """A task of its own raises between two calls, so that the group cancels whoever is in it."""

    @contextlib.asynccontextmanager
    async def session(self):
        async def fails():
            await died.wait()
            raise OSError("the connection is gone")

        died = self.died = asyncio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(fails)
            yield self


def test_what_fails_between_two_calls_closes_the_environment():
    """At once, in its own task; the next call says so, and closing tells what it was. Nothing spins meanwhile."""

    async def scene():
        env = await Guarded.opened(Task(Dies, "held"))
        await env.reset(0)

        async def die():
            env.env.died.set()

        await call(die)
        await asyncio.sleep(0.2)
        before = time.process_time()
        await asyncio.sleep(0.5)
        spent = time.process_time() - before
        with pytest.raises(EnvError, match="'held': step: .* failed between two calls"):
            await env.step(Action("x"), timeout=30)
        return await env.close(timeout=30), spent

    problem, spent = asyncio.run(scene())
    assert isinstance(problem, ExceptionGroup)
    assert "the connection is gone" in str(problem.exceptions[0])
    assert spent < 0.4


def test_a_hanging_call_keeps_its_context_to_itself():
    """A plain step that hangs does not keep close from running, and from seeing what was set."""
    gate, seen = threading.Event(), []

    class Hangs(PlainVariable):
        def step(self, action):
            gate.wait()

        def close(self):
            seen.append(ACTIVE.get())

    async def scene():
        env = await Guarded.opened(Task(Hangs, "held"))
        await env.reset(0)
        with pytest.raises(EnvTimeout):
            await env.step(Action("x"), timeout=0.05)
        return await env.close(timeout=2)

    try:
        assert asyncio.run(scene()) is None
        assert seen == ["held"]
    finally:
        gate.set()


def test_tasks_of_environments_end_with_them():
    async def tasks():
        return asyncio.all_tasks()

    async def scene():
        before = await call(tasks)
        env = await Guarded.opened(Task(Scope, "held"))
        await env.reset(0)
        during = await call(tasks) - before
        await env.close(timeout=30)
        for _ in range(1000):
            if not during & await call(tasks):
                break
            await asyncio.sleep(0.01)
        return len(during), len(during & await call(tasks))

    assert asyncio.run(scene()) == (2, 0)  # one of them is that of the call itself
