"""An environment that gives the policy Python functions as tools."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from rlkit import _check
from rlkit._interaction import Action, Observation, StepResult
from rlkit.errors import ConfigError
from rlkit.tools.formats import Format, formats, parameters, read_calls
from rlkit.tools.functions import schema
from rlkit.tools.messages import error_message, tool_message
from rlkit.tools.types import Malformed, ToolCall

__all__ = ["ToolEnv"]


class ToolEnv:
    """One question, answered with the help of tools.

    A turn with calls is answered by what the tools give, or by what is wrong with the calls; a turn without is the
    answer, and ends the episode.

    Args:
        question: what ``reset`` gives: text, messages, or tokens.
        functions: the tools; their schemas come from signatures and docstrings (``rlkit.tools.schema``). They may be
            async. What one raises is told to the policy.
        reward: the answer's text -> reward; may be async.
        format: how the policy writes calls, a name in ``rlkit.tools.formats``; for "python" the functions must have
            one called ``python`` that takes ``code``.
        malformed_reward: of a turn in which a call was not made.
        max_result: characters of a tool's result that the policy is shown, >= 1.

    Raises:
        ConfigError: no function, or one whose schema cannot be made.

    >>> import asyncio
    >>> def add(x: int, y: int) -> int:
    ...     '''Adds two numbers.'''
    ...     return x + y
    >>> env = ToolEnv("7 + 8?", [add], lambda answer: float("15" in answer))
    >>> env.reset(seed=0)
    '7 + 8?'
    >>> call = Action('<tool_call>{"name": "add", "arguments": {"x": 7, "y": 8}}</tool_call>')
    >>> asyncio.run(env.step(call)).observation[0]["content"]
    '15'
    >>> asyncio.run(env.step(Action("It is 15."))).reward
    1.0
    """

    def __init__(
        self,
        question: Observation,
        functions: Sequence[Callable[..., object]],
        reward: Callable[[str], object],
        *,
        format: str | Format = "hermes",  # noqa: A002
        malformed_reward: float = 0.0,
        max_result: int = 10_000,
    ) -> None:
        if not isinstance(functions, Sequence) or not functions or not callable(reward):
            wrong = not isinstance(functions, Sequence) or not functions
            what = f"functions are {_check.shown(functions)}" if wrong else f"the reward is {_check.shown(reward)}"
            raise ConfigError("ToolEnv", what, "functions and a reward that can be called")
        self.tools: list[Mapping[str, object]] = [schema(function) for function in functions]
        parameters(self.tools)  # no name twice
        formats.resolve(format)
        self._functions = {function.__name__: function for function in functions}
        self._question, self._reward, self._format = question, reward, format
        self._malformed = _check.real("ToolEnv.malformed_reward", malformed_reward)
        self._max_result = _check.integer("ToolEnv.max_result", max_result, low=1)

    def reset(self, seed: int) -> Observation:  # noqa: ARG002
        """Return the question."""
        return self._question

    async def step(self, action: Action) -> StepResult:
        """Make the calls of a turn, or score the answer."""
        return await play_turn(
            action,
            self._format,
            self.tools,
            call=self._call,
            reward=self._reward,
            malformed_reward=self._malformed,
            max_result=self._max_result,
        )

    async def _call(self, call: ToolCall) -> object:
        try:
            return await awaited(self._functions[call.name], **call.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the tool's own, and the policy is to see it
            return f"{type(error).__name__}: {error}"

    def close(self) -> None:
        """Nothing is held."""


async def play_turn(
    action: Action,
    format: str | Format,  # noqa: A002
    tools: Sequence[Mapping[str, object]],
    *,
    call: Callable[[ToolCall], Awaitable[object]],
    reward: Callable[[str], object],
    malformed_reward: float,
    max_result: int,
) -> StepResult:
    """Return what a turn with calls is told, or the reward of one without.

    Args:
        action, format, tools: as for ``read_calls``.
        call: makes a call; what it gives is told to the policy.
        reward: the answer's text -> reward.
        malformed_reward, max_result: as of ``ToolEnv``.
    """
    parsed = read_calls(action, format, tools)
    if not parsed.in_order:
        return StepResult(reward=cast("float | None", await awaited(reward, action.content)), terminated=True)
    messages = []
    for item in parsed.in_order:
        if isinstance(item, Malformed):
            messages.append(error_message(item))
            continue
        message = tool_message(item, await call(item))
        if len(message["content"]) > max_result:
            message["content"] = message["content"][:max_result] + " ... (cut)"
        messages.append(message)
    info = {"tool_calls": len(parsed.calls), "malformed_calls": len(parsed.errors)}
    return StepResult(messages, malformed_reward if parsed.errors else 0.0, info=info)


async def awaited(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Return what a plain or async function gives; plain ones run in a thread and hold up no other episode."""
    import asyncio

    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(function, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result
