"""The limits of a session, and its usage."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator

import attrs

from rlkit import _check
from rlkit._check import checked
from rlkit.gateway.types import GatewayError

__all__ = ["Limits", "Meter"]

_COUNTED = ("requests", "turns", "tokens", "refused", "cancelled", "errors", "rewritten", "unforced")


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


class Meter:
    """A counter of a session's usage, which refuses requests beyond its limits.

    Attributes:
        ended: the limit that was reached: "max_turns", "max_total_tokens", "deadline", "context"; "" while none was.
        counts: requests, turns, tokens, refused, cancelled, errors, rewritten, unforced.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.ended = ""
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
        self._lock = threading.Lock()
        self._ends = math.inf if limits.seconds is None else time.monotonic() + limits.seconds
        self._drawing = 0  # completions in progress
        self._answering = 0
        self._reserved = 0  # tokens that completions in progress may draw
        self._waiting: list[concurrent.futures.Future[None]] = []
        self._closed = False

    @contextlib.contextmanager
    def request(self, n: int) -> Iterator[None]:
        """Admit a request for ``n`` completions, and note when it ends.

        Raises:
            GatewayError: 429, with ``retry_after`` where a later retry can succeed.
        """
        self._admit(n)
        try:
            yield
        finally:
            with self._lock:
                self._drawing -= n
                self._answering -= 1

    def _admit(self, n: int) -> None:
        limits = self.limits
        with self._lock:
            self.counts["requests"] += 1
            problem, ended, again = "", "", None
            if self._closed:
                problem = "this session has ended"
            elif self.left() == 0.0:
                problem, ended = self.over, "deadline"
            elif limits.turns is not None and self.counts["turns"] + self._drawing + n > limits.turns:
                problem, ended = f"this session may have {limits.turns} completions", "max_turns"
            elif limits.tokens is not None and limits.tokens - self.counts["tokens"] < n:
                problem, ended = self._no_tokens, "max_total_tokens"
            elif limits.at_once is not None and self._answering >= limits.at_once:
                problem, again = f"this session may have {limits.at_once} requests at a time", 1.0
            if not problem:
                self._drawing += n
                self._answering += 1
                return
            self.counts["refused"] += 1
            self.ended = self.ended or ended
        code = "limit_reached" if ended else "session_ended" if again is None else "rate_limit_exceeded"
        raise GatewayError(429, problem, code=code, retry_after=again)

    @property
    def over(self) -> str:
        """The error for clients once the time is over."""
        return f"this session's {self.limits.seconds:g} seconds are over"

    def left(self) -> float:
        """Return the seconds that are left; infinity without a limit."""
        return max(0.0, self._ends - time.monotonic())

    @property
    def _no_tokens(self) -> str:
        return f"this session may have {self.limits.tokens} tokens of completions"

    @contextlib.asynccontextmanager
    async def tokens(self, n: int, most: int) -> AsyncIterator[int]:
        """Hold tokens for ``n`` completions while they are drawn: yield how many each may have, in [1, most].

        Raises:
            GatewayError: 429, too few are left.
        """
        while (share := self._reserve(n, most)) == 0:
            waiter: concurrent.futures.Future[None] = concurrent.futures.Future()
            with self._lock:
                self._waiting.append(waiter)
                if self._reserved == 0:  # given back in between
                    continue
            await asyncio.wrap_future(waiter)
        try:
            yield share
        finally:
            with self._lock:
                self._reserved -= n * share
                waiting, self._waiting = self._waiting, []
            for waiter in waiting:
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # the waiting client is gone
                    waiter.set_result(None)

    def _reserve(self, n: int, most: int) -> int:
        """Return how many tokens each of ``n`` completions may have; 0: wait until others give some back."""
        with self._lock:
            free = most * n
            if self.limits.tokens is not None:
                free = self.limits.tokens - self.counts["tokens"] - self._reserved
            share = min(most, free // n)
            if share < most and self._reserved:
                return 0
            if share < 1:
                self.ended = self.ended or "max_total_tokens"
                raise GatewayError(429, self._no_tokens, code="limit_reached")
            self._reserved += n * share
            return share

    def turn(self, tokens: int) -> None:
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

    def reach(self, ended: str) -> None:
        """Note the limit that was reached; the first one stays."""
        with self._lock:
            self.ended = self.ended or ended

    def close(self) -> None:
        """Refuse everything from now on."""
        with self._lock:
            self._closed = True
