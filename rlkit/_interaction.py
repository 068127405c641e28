"""What a policy and an environment say to each other: an action, and the answer to it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._calls import answered

if TYPE_CHECKING:
    from rlkit.tools.types import Parsed

__all__ = ["Action", "Message", "Observation", "StepResult"]

Message: TypeAlias = Mapping[str, Any]
Observation: TypeAlias = str | Sequence[Message] | np.ndarray


class Action(str):
    """What the policy said: a string, special tokens left out, that also knows the tokens it was sampled as.

    Args:
        text: the decoded text; a prefilled beginning of the reply is part of it.
        tokens: int64 [n], as sampled, the stop token included.
        raw: the text with special tokens; None: the same as ``text``.
        stop_reason: "stop" or "length": whether the policy ended its turn or was cut.
        parsed: reasoning, content and tool calls, where a renderer read them from the tokens; else None.

    >>> action = Action("<guess>7</guess>", tokens=[60, 55], stop_reason="length")
    >>> action.removeprefix("<guess>"), action.tokens.size, action.stop_reason
    ('7</guess>', 2, 'length')
    """

    __slots__ = ("parsed", "raw", "stop_reason", "tokens")

    tokens: np.ndarray
    raw: str
    stop_reason: Literal["stop", "length"]
    parsed: Parsed | None

    def __new__(
        cls,
        text: str,
        *,
        tokens: ArrayLike = (),
        raw: str | None = None,
        stop_reason: Literal["stop", "length"] = "stop",
        parsed: Parsed | None = None,
    ) -> Self:
        """Return the string, with its attributes checked."""
        self = super().__new__(cls, text)
        self.tokens = _check.token_ids("Action.tokens", tokens)
        self.raw = str(text) if raw is None else raw
        _check.choice("Action.stop_reason", stop_reason, ("stop", "length"))
        self.stop_reason = stop_reason
        self.parsed = parsed
        return self

    @property
    def content(self) -> str:
        """The text without reasoning and tool calls where a renderer told them apart; else all of it."""
        return str(self) if self.parsed is None else self.parsed.text_outside

    def __reduce__(self) -> tuple[Callable[[str], Self], tuple[str]]:
        fields = {name: getattr(self, name) for name in Action.__slots__}
        return functools.partial(type(self), **fields), (str(self),)


@answered
@attrs.frozen
class StepResult:
    """What an environment answers to an action.

    Attributes:
        observation: text (it becomes a user message), chat messages to append, or token ids [T] to append as they
            are; of no consequence once the episode is over.
        reward: of this step, finite; None: it has none, which is not the same as 0 where an episode's reward is a mean,
            a minimum or the last one. An episode that gets no reward at all has failed.
        terminated: the episode came to an end of its own.
        truncated: the environment cut it off.
        info: anything worth a look later. Numbers are counted; ``info["answer"]``, text or a number, is what would have
            been right, and becomes the trajectory's tag "answer".
        rewards: of this step one by one, where there are several, such as one per tool call; None among them is no
            reward. ``reward`` is then left out, and becomes their sum.
    """

    observation: Observation = ""
    reward: float | None = 0.0
    terminated: bool = False
    truncated: bool = False
    info: Mapping[str, Any] = attrs.field(factory=lambda: MappingProxyType({}))
    rewards: Sequence[float | None] | None = attrs.field(default=None, kw_only=True)
