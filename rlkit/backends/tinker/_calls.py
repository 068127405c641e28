"""Calls on the SDK's own event loop: training calls in order, and a deadline for every call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlkit.backends.tinker._failures import deadline_error, translate_error
from rlkit.backends.trainer import Call, Inner, PendingResult, check_process
from rlkit.futures import Future

if TYPE_CHECKING:
    from tinker.lib.internal_client_holder import InternalClientHolder

__all__ = ["Calls"]

T = TypeVar("T")


class Calls:
    """An executor of jobs that return ``PendingResult``, and of single requests.

    A job is sent in the thread that calls: the SDK returns at once and keeps the order. Results are taken on its loop,
    in the same order, so that a call after a failed one is refused whatever became of it, and a call's deadline starts
    when the one before it is done. What a job raises before anything was sent changes nothing. What fails after that is
    final: the service may have carried out the call, and those sent after it.

    Args:
        holder: of the SDK's client; it has the loop.
        seconds: how long a call may take.
    """

    def __init__(self, holder: InternalClientHolder, seconds: float) -> None:
        self.seconds = seconds
        self._holder = holder
        self._process = os.getpid()
        self._turn = asyncio.Lock()  # which lets tasks through in the order in which they come
        self._last: Inner[Any] | None = None  # the latest call that was sent

    def start(self, call: Call[T]) -> Inner[T]:
        """Send ``call``. See ``Executor``."""
        check_process("tinker", self._process)  # the SDK's loop runs in that process alone
        outer: Inner[T] = concurrent.futures.Future()
        try:
            call.check()
            sent = cast("PendingResult[T]", call.job())
            call.report_done()
        except Exception as error:  # noqa: BLE001  # the reader gets it
            call.report_failure(error)  # before the future has it: a reader begins the next generation
            outer.set_exception(error)
            return outer
        except BaseException as error:
            call.report_failure(error, final=True)  # Ctrl-C may have come when it was sent
            raise
        self._last = outer
        self._holder.run_coroutine_threadsafe(self._take(call, sent, outer))
        return outer

    async def _take(self, call: Call[T], sent: PendingResult[T], outer: Inner[T]) -> None:
        """Set the call's result."""
        async with self._turn:
            limit = asyncio.timeout(self.seconds)
            try:
                call.check(sent=True)
                async with limit:
                    results = [await asyncio.wrap_future(part) for part in sent.parts]
                value = await asyncio.to_thread(sent.finish, results)  # the loop has heartbeats to send
            except BaseException as error:  # noqa: BLE001  # the reader gets it
                for part in sent.parts:
                    part.cancel()  # one that was refused may not have been sent yet, and is not tried for ever
                failure = self._failure(call.name, error, limit)
                await asyncio.to_thread(call.report_failure, failure, final=True)  # which may wait for a lock
                outer.set_exception(failure)
            else:
                outer.set_result(value)

    def request(
        self, call: str, ask: Callable[[], Coroutine[Any, Any, T]], *, path: str | None = None, cancels: bool = True
    ) -> Future[T]:
        """Return the future of a request that goes its own way, and is done within the deadline.

        Args:
            call: for messages.
            ask: asks the SDK and reads its answer, on the SDK's loop, so it must be quick.
            path: the saved state that it is about, for messages.
            cancels: whether the future can be cancelled, and the request with it.
        """
        check_process("tinker", self._process)
        outer: Inner[T] = concurrent.futures.Future()

        async def run() -> None:
            limit = asyncio.timeout(self.seconds)
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # the future was cancelled
                try:
                    async with limit:
                        value = await ask()
                except BaseException as error:  # noqa: BLE001  # the reader gets it
                    outer.set_exception(self._failure(call, error, limit, path))
                else:
                    outer.set_result(value)

        running = self._holder.run_coroutine_threadsafe(run()).future()
        return Future.wrap(outer, on_cancel=running.cancel if cancels else None)

    def _failure(
        self, call: str, error: BaseException, limit: asyncio.Timeout, path: str | None = None
    ) -> BaseException:
        if limit.expired() and isinstance(error, TimeoutError):
            return deadline_error(call, self.seconds)
        return translate_error(call, error, path=path)

    def drain(self) -> None:
        """Do nothing: all calls made so far have been sent, or refused."""

    def close(self) -> None:
        """Wait for the calls that were sent, each within its deadline; do nothing after a fork."""
        if self._last is not None and os.getpid() == self._process:
            concurrent.futures.wait([self._last])
