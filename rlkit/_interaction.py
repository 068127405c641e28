"""The messages between a policy and an environment: an action, and the answer to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit.errors import DataError

if TYPE_CHECKING:
    from rlkit.tools.types import Malformed, Parsed

__all__ = ["Action", "Message", "Observation", "StepResult"]

Message: TypeAlias = Mapping[str, Any]
Observation: TypeAlias = str | Sequence[Message] | np.ndarray


class Action(str):
    """A policy's action: a string without special tokens, which also knows the tokens it was sampled as.

    Args:
        text: the decoded text; a prefilled beginning of the reply is part of it.
        tokens: int64 [n], as sampled, the stop token included.
        raw: the text with special tokens; None: the same as ``text``.
        stop_reason: "stop" or "length": whether the policy ended its turn or was cut.
        parsed: reasoning, content and tool calls, where the model's response template or a renderer read them; else
            None.
        unread: why the model's response template could not read the turn, where that is so; else None.

    >>> action = Action("<guess>7</guess>", tokens=[60, 55], stop_reason="length")
    >>> action.removeprefix("<guess>"), action.tokens.size, action.stop_reason
    ('7</guess>', 2, 'length')
    """

    __slots__ = ("parsed", "raw", "stop_reason", "tokens", "unread")

    tokens: np.ndarray
    raw: str
    stop_reason: Literal["stop", "length"]
    parsed: Parsed | None
    unread: Malformed | None

    def __new__(
        cls,
        text: str,
        *,
        tokens: ArrayLike = (),
        raw: str | None = None,
        stop_reason: Literal["stop", "length"] = "stop",
        parsed: Parsed | None = None,
        unread: Malformed | None = None,
    ) -> Self:
        """Return the string, with its attributes checked."""
        self = super().__new__(cls, text)
        self.tokens = _check.token_ids("Action.tokens", tokens)
        self.raw = str(text) if raw is None else raw
        _check.choice("Action.stop_reason", stop_reason, ("stop", "length"))
        self.stop_reason = stop_reason
        self.parsed = parsed
        self.unread = unread
        return self

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls where they were separated; else all of it."""
        return str(self) if self.parsed is None else self.parsed.text_outside

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        fields = {name: getattr(self, name) for name in Action.__slots__}
        return functools.partial(type(self), **fields), (str(self),)


@attrs.frozen
class StepResult:
    """An environment's answer to an action.

    Attributes:
        observation: text (it becomes a user message), chat messages to append, or token ids [T] to append as they
            are; ignored once the episode is over.
        reward: of this step, finite; None: it has none, which is not the same as 0 where an episode's reward is a mean,
            a minimum or the last one. An episode that gets no reward at all has failed.
        terminated: the episode reached its own end.
        truncated: the environment cut it off.
        info: anything to look at later. Numbers are logged as metrics; ``info["answer"]``, text or a number, is the
            right answer, and becomes the trajectory's tag "answer".
        rewards: the rewards of this step one by one, if there are several, such as one per tool call; None among them
            means no reward. ``reward`` is then left out, and becomes their sum.
    """

    observation: Observation = ""
    reward: float | None = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = attrs.field(factory=lambda: MappingProxyType({}))
    rewards: Sequence[float | None] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if isinstance(self.reward, (str, bytes, Mapping)):  # numbers are checked when it is played
            raise DataError("StepResult.reward", f"got {_check.describe(self.reward)}", "a finite number, or None")
