"""What an environment opens in one call and leaves in another: scopes, sessions, generators, context variables."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import time

import anyio
import pytest

from rlkit.envs import Action, StepResult, Task, gymnasium
from rlkit.envs.calling import GuardedEnv, call
from rlkit.errors import EnvError, EnvTimeout
from tests.envs.parts import asynchronous

ACTIVE: contextvars.ContextVar[str] = contextvars.ContextVar("active", default="none")


class Held:
    """Enters ``opened()`` in reset and leaves it in close."""

    def __init__(self, opened, answer=lambda held: ACTIVE.get()):
        self.opened, self.answer = opened, answer
        self.stack = contextlib.AsyncExitStack()

    async def reset(self, seed):
        self.held = await self.stack.enter_async_context(self.opened())
        return "Go."

    async def step(self, action):
        answer = self.answer(self.held)
        return StepResult(await answer if inspect.isawaitable(answer) else answer, 1.0, terminated=True)

    async def close(self):
        await self.stack.aclose()


@contextlib.asynccontextmanager
async def scope():
    with anyio.CancelScope() as inner:
        yield inner


@contextlib.asynccontextmanager
async def variable():
    token = ACTIVE.set("held")
    yield
    ACTIVE.reset(token)


class Generator:
    """An asynchronous generator that is gone on with in each call."""

    async def reset(self, seed):
        self.turns = self.talk()
        return await anext(self.turns)

    async def talk(self):
        async with scope(), variable():
            yield "Go."
            while True:
                yield StepResult(ACTIVE.get())

    async def step(self, action):
        return await anext(self.turns)

    async def close(self):
        await self.turns.aclose()


class Plain:
    """Plain methods, which run in threads."""

    def reset(self, seed):
        self.token = ACTIVE.set("held")
        return "Go."

    def step(self, action):
        return StepResult(ACTIVE.get())

    def close(self):
        ACTIVE.reset(self.token)


class Gym(Held):
    """Played through an adapter whose methods are plain and give awaitables."""

    async def reset(self, *, seed=None):
        return await super().reset(seed), {}

    async def step(self, action):
        return "none", 1.0, True, False, {}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Held(scope), "none"),
        (lambda: Held(asyncio.TaskGroup, lambda group: group.create_task(asyncio.sleep(0, "done"))), "done"),
        (lambda: Held(variable), "held"),
        (Generator, "held"),
        (Plain, "held"),
        (gymnasium(lambda: Gym(scope))[0].make, "none"),
    ],
)
@asynchronous
async def test_what_reset_enters_close_leaves(make, said):
    """Several at once, each in a task of its own; every call is awaited from another task here."""

    async def episode():
        env = await asyncio.create_task(GuardedEnv.open(Task(make, "held")))
        await asyncio.create_task(env.reset(0, timeout=30))
        result = await asyncio.create_task(env.step(Action("x"), timeout=30))
        return result.observation, await asyncio.create_task(env.close(timeout=30))

    assert await asyncio.gather(*(episode() for _ in range(5))) == [(said, None)] * 5


@asynchronous
async def test_an_environment_that_is_made_with_something_open():
    """An asynchronous ``make`` is in the same task."""

    async def make():
        env = Held(scope)
        await env.reset(0)
        env.reset = lambda seed: "Go."
        return env

    env = await GuardedEnv.open(Task(make, "held"))
    await env.reset(0)
    assert await env.close(timeout=30) is None


@asynchronous
async def test_a_step_that_is_given_up_leaves_what_is_open_to_close():
    env = await GuardedEnv.open(Task(lambda: Held(scope, lambda held: asyncio.sleep(3600)), "held"))
    await env.reset(0)
    with pytest.raises(EnvTimeout):
        await env.step(Action("x"), timeout=0.05)
    assert await env.close(timeout=30) is None
    assert not env.env.held.cancel_called


@asynchronous
async def test_what_fails_between_two_calls_closes_the_environment():
    """At once, in its own task; the next call says so, and closing tells what it was. Nothing spins meanwhile."""
    died = asyncio.Event()

    async def fail():
        await died.wait()
        raise OSError("the connection is gone")

    @contextlib.asynccontextmanager
    async def session():
        async with anyio.create_task_group() as group:  # it cancels whoever is in it
            group.start_soon(fail)
            yield

    async def die():
        died.set()

    env = await GuardedEnv.open(Task(lambda: Held(session), "held"))
    await env.reset(0)
    await call(die)
    await asyncio.sleep(0.2)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.4
    with pytest.raises(EnvError, match="'held': step: .* failed between two calls"):
        await env.step(Action("x"), timeout=30)
    problem = await env.close(timeout=30)
    assert isinstance(problem, ExceptionGroup)
    assert "the connection is gone" in str(problem.exceptions[0])
