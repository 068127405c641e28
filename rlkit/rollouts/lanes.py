"""How many calls may run in threads at once, so that the event loop gets its share of the interpreter."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["Lanes"]


class Lanes:
    """A limit on calls that compute, which calls that only wait do not count against for long.

    Threads that compute take turns at the interpreter, so the more there are the longer everything else waits, the
    event loop included. A call that takes longer than ``patience`` is taken to be waiting for something, and its lane
    is given to the next.

    Args:
        count: calls at once.
        patience: seconds.
    """

    def __init__(self, count: int, patience: float) -> None:
        self._slots = asyncio.Semaphore(count)
        self._patience = patience

    @contextlib.asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """Wait for a lane."""
        await self._slots.acquire()
        mine = True

        def give_back() -> None:
            nonlocal mine
            if mine:
                mine = False
                self._slots.release()

        timer = asyncio.get_running_loop().call_later(self._patience, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()
