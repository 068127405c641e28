"""What every dialect makes of a client's request: what to sample, and how to write the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import attrs

from rlkit.gateway.types import Answerer, Reply, Request

__all__ = ["Call", "Event", "Json"]

Json: TypeAlias = dict[str, object]
Event: TypeAlias = tuple[str | None, Json | str]
"""The name of a server-sent event, if it has one, and its data."""


@attrs.frozen(eq=False)
class Call(ABC):
    """One call of an endpoint.

    Attributes:
        answerer: what the client was let in to.
        requests: what is to be sampled; several where a call has several prompts. They are answered at the same time.
        stream: whether the client wants server-sent events.
    """

    answerer: Answerer
    requests: Sequence[Request]
    stream: bool

    @abstractmethod
    def body(self, replies: Sequence[Reply]) -> Json:
        """Return the JSON answer to one reply per request."""

    @abstractmethod
    def events(self, replies: Sequence[Reply]) -> Iterator[Event]:
        """Yield the same as a stream."""

    def failed(self, error: Mapping[str, object]) -> Iterator[Event]:
        """Yield what ends a stream that has begun: ``error`` is the JSON of an error."""
        yield None, dict(error)


def count(replies: Sequence[Reply]) -> tuple[int, int]:
    """Return the number of tokens in the prompts and in the completions."""
    drawn = sum(choice.sample.tokens.size for reply in replies for choice in reply.choices)
    return sum(int(reply.prompt.size) for reply in replies), int(drawn)
