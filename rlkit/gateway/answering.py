"""Requests on their way: answered, cancelled when their client leaves, and ended when the gateway closes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable

from starlette.types import Receive

from rlkit.gateway import streaming
from rlkit.gateway.dialects.call import Call
from rlkit.gateway.types import GatewayError, Reply

__all__ = ["Running", "unless_gone"]


class Running:
    """The requests that are being answered, in whatever event loops."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._answers: set[asyncio.Task[list[Reply]]] = set()

    def begin(self, call: Call) -> asyncio.Task[list[Reply]]:
        """Start to answer a call. Raises GatewayError once all has ended."""
        with self._lock:
            if self.ended:
                raise GatewayError(503, "the gateway was closed", code="closed")
            answer = asyncio.get_running_loop().create_task(_replies(call))
            self._answers.add(answer)
        answer.add_done_callback(self._done)
        return answer

    def end(self) -> None:
        """Cancel all of them. For any thread."""
        with self._lock:
            self.ended = True
            answers = list(self._answers)
        for answer in answers:
            with contextlib.suppress(RuntimeError):  # its loop was closed
                answer.get_loop().call_soon_threadsafe(answer.cancel)

    def _done(self, answer: asyncio.Task[list[Reply]]) -> None:
        with self._lock:
            self._answers.discard(answer)


async def unless_gone(exchange: Awaitable[None], receive: Receive) -> None:
    """Run an exchange; when the client closes the connection, cancel it."""
    running = asyncio.ensure_future(exchange)
    left = asyncio.ensure_future(streaming.gone(receive))
    try:
        await asyncio.wait({running, left}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
    finally:
        for task in (running, left):
            task.cancel()
        await asyncio.gather(running, left, return_exceptions=True)


async def _replies(call: Call) -> list[Reply]:
    """Answer all requests of a call; when one fails, the others are cancelled."""
    running = [asyncio.ensure_future(call.answerer.answer(request)) for request in call.requests]
    try:
        return await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
