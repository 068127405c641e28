"""What the tests of environments share: asynchronous tests, an episode that is played, a turn that calls a tool."""

from __future__ import annotations

import asyncio
import functools
import json

from rlkit.envs import Action
from rlkit.envs.calling import GuardedEnv


def asynchronous(test):
    """Run a test that is a coroutine with ``asyncio.run``."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


async def play(task, *turns, seed=0, timeout=120, **options):
    """The first observation, the results, and the guarded environment, which was closed without an error."""
    env = await GuardedEnv.open(task, timeout=timeout, **options)
    try:
        first = await env.reset(seed, timeout=timeout)
        return first, [await env.step(Action(turn), timeout=timeout) for turn in turns], env
    finally:
        assert await env.close(timeout=timeout) is None


def played(task, *turns, **options):
    return asyncio.run(play(task, *turns, **options))


def tool_call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
