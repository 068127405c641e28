"""An environment that gives the policy Python functions as tools."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import attrs

from rlkit import _check
from rlkit._interaction import Action, Observation, StepResult
from rlkit.errors import ConfigError
from rlkit.tools._functions import schema
from rlkit.tools.formats import Format, formats, parameters, read_calls
from rlkit.tools.types import Malformed, Parsed, ToolCall, error_message, error_text, tool_message

__all__ = ["ToolEnv"]


class ToolEnv:
    """One question, answered with the help of tools.

    A turn with calls is answered by the tools' results, or by the errors of the calls; a turn without calls is the
    answer, and ends the episode.

    Args:
        question: the result of ``reset``: text, messages, or tokens.
        functions: the tools; their schemas come from signatures and docstrings (``rlkit.tools.schema``). They may be
            async. An exception of one is told to the policy.
        reward: the answer's text -> reward; may be async.
        format: the format of the policy's calls, a name in ``rlkit.tools.formats``; for "python" the functions must
            have one called ``python`` that takes ``code``.
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
            what = (
                f"functions are {_check.describe(functions)}" if wrong else f"the reward is {_check.describe(reward)}"
            )
            raise ConfigError("ToolEnv", what, "functions and a reward that can be called")
        self.tools: list[Mapping[str, object]] = [schema(function) for function in functions]
        parameters(self.tools)  # names must be distinct
        self._functions = {function.__name__: function for function in functions}
        self._question, self._reward = question, reward
        self._turns = Turns(format, malformed_reward, max_result, "ToolEnv.")

    def reset(self, seed: int) -> Observation:  # noqa: ARG002
        """Return the question."""
        return self._question

    async def step(self, action: Action) -> StepResult:
        """Make the calls of a turn, or score the answer."""
        return await self._turns.play(action, self.tools, self._call, self._reward)

    async def _call(self, call: ToolCall) -> object:
        try:
            return await awaited(self._functions[call.name], **call.arguments)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the tool's own, and the policy is to see it
            return error_text(error)

    def close(self) -> None:
        """Do nothing: it holds no resources."""


@attrs.frozen
class Turns:
    """How turns are read and answered.

    Attributes:
        format, malformed_reward, max_result: as of ``ToolEnv``.
        where: what comes before their names in messages.

    Raises:
        UnknownNameError, ConfigError: one of them is not valid.
    """

    format: str | Format
    malformed_reward: float
    max_result: int
    where: str = ""

    def __attrs_post_init__(self) -> None:
        formats.resolve(self.format)
        _check.real(f"{self.where}malformed_reward", self.malformed_reward)
        _check.integer(f"{self.where}max_result", self.max_result, low=1)

    async def play(
        self,
        action: Action,
        tools: Sequence[Mapping[str, object]],
        call: Callable[[ToolCall], Awaitable[object]],
        reward: Callable[[str], object],
    ) -> StepResult:
        """Return the answer to a turn with calls, or the reward of one without.

        Args:
            action, tools: as for ``read_calls``.
            call: makes a call; its result is told to the policy.
            reward: the answer's text -> reward.
        """
        parsed = read_calls(action, self.format, tools)
        if not parsed.in_order:
            return StepResult(reward=cast("float | None", await awaited(reward, action.content)), terminated=True)
        return await answer_calls(parsed, call, self.malformed_reward, self.max_result)


async def answer_calls(
    parsed: Parsed,
    call: Callable[[ToolCall], Awaitable[object]],
    malformed_reward: float = 0.0,
    max_result: int | None = None,
) -> StepResult:
    """Return the messages that answer a turn's calls, made one after the other, and its errors; as of ``Turns``."""
    messages = []
    for item in parsed.in_order:
        if isinstance(item, Malformed):
            messages.append(error_message(item))
            continue
        message = tool_message(item, await call(item))
        if max_result is not None and len(message["content"]) > max_result:
            message["content"] = message["content"][:max_result] + " ... (cut)"
        messages.append(message)
    info = {"tool_calls": len(parsed.calls), "malformed_calls": len(parsed.errors)}
    return StepResult(messages, malformed_reward if parsed.errors else 0.0, info=info)


async def awaited(function: Callable[..., object], *args: object, **kwargs: object) -> object:
    """Return the result of a plain or async function; plain ones run in a thread and block no other episode."""
    import asyncio

    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    result = await asyncio.to_thread(_call_plain, function, args, kwargs)
    return await result if inspect.isawaitable(result) else result


def _call_plain(function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, Any]) -> object:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # which a future does not take: it would never be done
        raise RuntimeError(f"raised StopIteration{error.args}") from error
