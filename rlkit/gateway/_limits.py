"""The limits of a session, and its usage."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import attrs

from rlkit import _check
from rlkit._check import checked
from rlkit.gateway._types import GatewayError

__all__ = ["Limits", "Usage"]

_COUNTED = ("requests", "turns", "tokens", "refused", "cancelled", "errors", "rewritten", "unforced")
_PAUSE = 0.02  # seconds until a request looks again whether others have given tokens back


@attrs.frozen
class Limits:
    """The limits of a session; None: no limit.

    Attributes:
        turns: completions, >= 1.
        tokens: of the policy's own, >= 1. Completions that are drawn at the same time share what is left; a request
            that does not fit next to others waits for them.
        seconds: since the session was opened, > 0.
        at_once: concurrent requests, >= 1.

    Raises:
        ConfigError: a value is out of range.

    >>> Limits(turns=8, seconds=60.0).tokens is None
    True
    """

    turns: int | None = checked(None, _check.integer, none=True, low=1)
    tokens: int | None = checked(None, _check.integer, none=True, low=1)
    seconds: float | None = checked(None, _check.real, none=True, above=0.0)
    at_once: int | None = checked(None, _check.integer, none=True, low=1)


class Usage:
    """What a session has used; it refuses requests beyond the limits.

    Attributes:
        ended: the limit that was reached: "max_turns", "max_total_tokens", "deadline", "context"; "" while none was.
        counts: requests, turns, tokens, refused, cancelled, errors, rewritten, unforced.
        closed: whether all requests are refused.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ended = ""
        self.closed = False
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._lock = threading.Lock()
        self._ends = math.inf if limits.seconds is None else time.monotonic() + limits.seconds
        self._drawing = 0  # completions in progress
        self._answering = 0
        self._reserved = 0  # tokens that completions in progress may draw

    @contextlib.contextmanager
    def request(self, n: int) -> Iterator[None]:
        """Admit a request for ``n`` completions, and note when it ends.

        Raises:
            GatewayError: 429, with ``retry_after`` where a later retry can succeed.
        """
        with self._lock:
            self.counts["requests"] += 1
            self._admit(n)
            self._drawing += n
            self._answering += 1
        try:
            yield
        finally:
            with self._lock:
                self._drawing -= n
                self._answering -= 1

    def _admit(self, n: int) -> None:
        limits = self.limits
        if self.closed:
            raise GatewayError(429, "this session has ended", code="session_ended")
        if self.seconds_left() == 0.0:
            raise self.late()
        if limits.turns is not None and self.counts["turns"] + self._drawing + n > limits.turns:
            raise self._over("max_turns", f"this session may have {limits.turns} completions")
        if limits.tokens is not None and limits.tokens - self.counts["tokens"] < n:
            raise self._spent()
        if limits.at_once is not None and self._answering >= limits.at_once:
            what = f"this session may have {limits.at_once} requests at a time"
            raise GatewayError(429, what, code="rate_limit_exceeded", retry_after=1.0)

    def late(self) -> GatewayError:
        """Return the error for clients once the time is over."""
        return self._over("deadline", f"this session's {self.limits.seconds:g} seconds are over")

    def _spent(self) -> GatewayError:
        return self._over("max_total_tokens", f"this session may have {self.limits.tokens} tokens of completions")

    def _over(self, ended: str, what: str) -> GatewayError:
        self.ended = self.ended or ended
        return GatewayError(429, what, code="limit_reached")

    def seconds_left(self) -> float:
        """Return the seconds that are left; infinity without a limit."""
        return max(0.0, self._ends - time.monotonic())

    @contextlib.asynccontextmanager
    async def tokens(self, n: int, most: int) -> AsyncIterator[int]:
        """Hold tokens for ``n`` completions while they are drawn: yield how many each may have, in [1, most].

        Raises:
            GatewayError: 429, too few are left.
        """
        while (share := self._reserve(n, most)) == 0:
            await asyncio.sleep(_PAUSE)
        try:
            yield share
        finally:
            with self._lock:
                self._reserved -= n * share

    def _reserve(self, n: int, most: int) -> int:
        """Return how many tokens each of ``n`` completions may have; 0: wait until others give some back."""
        with self._lock:
            share = most
            if self.limits.tokens is not None:
                share = min(most, (self.limits.tokens - self.counts["tokens"] - self._reserved) // n)
            if share < most and self._reserved:
                return 0
            if share < 1:
                raise self._spent()
            self._reserved += n * share
            return share

    def count_turn(self, tokens: int) -> None:
        """Count a completion."""
        with self._lock:
            self.counts["turns"] += 1
            self.counts["tokens"] += tokens
            if self.ended == "context":  # the agent has found a way to continue
                self.ended = ""

    def count(self, name: str) -> None:
        """Add one to another counter."""
        with self._lock:
            self.counts[name] += 1

    def note_limit(self, ended: str) -> None:
        """Note the limit that was reached; the first one stays."""
        with self._lock:
            self.ended = self.ended or ended
