"""Futures of the SDK as rlkit's: a deadline for each, and its errors in rlkit's terms.

Training calls on a service: sent at once in their order, their results taken in the same order.

One thread sends, so that a call that needs an answer first (a loss evaluated here) holds back those after it, and
nothing else does. Another takes results in order, so that a call after a failed one is refused whatever became of
it, and a call's deadline starts when the one before it is done.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rlkit.backends.tinker import connection, guard
from rlkit.backends.trainer import Call, Inner, PendingResult, Worker
from rlkit.errors import RlkitError

__all__ = ["ServiceExecutor", "after", "within"]


@functools.cache
def _clock(process: int) -> asyncio.AbstractEventLoop:  # noqa: ARG001  # a fork lacks the thread, and gets another clock
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rlkit-tinker-clock", daemon=True).start()
    return loop


def after(seconds: float, function: Callable[[], object]) -> Callable[[], object]:
    """Call ``function`` in ``seconds``, in a thread of its own; it must return at once and not raise.

    Returns:
        What cancels it: a function that may be called at any time, also twice.
    """
    clock = _clock(os.getpid())
    timer: list[asyncio.TimerHandle] = []  # it is made, and cancelled, in the clock's thread, in this order

    def cancel() -> None:
        timer[0].cancel()

    clock.call_soon_threadsafe(lambda: timer.append(clock.call_later(seconds, function)))
    return functools.partial(clock.call_soon_threadsafe, cancel)


T = TypeVar("T")
U = TypeVar("U")


def within(
    seconds: float,
    call: str,
    inner: Inner[U],
    finish: Callable[[U], T],
    then: Callable[[T], Inner[T]] | None = None,
    *,
    path: str | None = None,
    link: guard.Link | None = None,
) -> Inner[T]:
    """Return a future of ``finish(result)`` that is done ``seconds`` from now at the latest.

    Args:
        seconds: the deadline; the SDK's own tries end with it.
        call: for messages.
        inner: the SDK's.
        finish: run in the SDK's thread, so it must be quick.
        then: what it gives is a future, whose result is the result.
        path: the saved state that it is about, for messages.
        link: the connection, which knows of trouble, for messages.
    """
    outer: Inner[T] = concurrent.futures.Future()

    def done(source: Inner[U]) -> None:
        try:
            value = finish(source.result())
            if then is None:
                _set(outer, value)
            else:
                then(value).add_done_callback(lambda last: _copy(call, last, outer))
        except BaseException as error:  # noqa: BLE001  # the reader of the future gets it
            _fail(outer, connection.translate(call, error, path=path))

    inner.add_done_callback(done)
    if not outer.done():
        watched, source = weakref.ref(outer), weakref.ref(inner)  # the clock keeps nothing alive

        def expire() -> None:
            late, running = watched(), source()
            if late is not None and not late.done():
                _fail(late, connection.late(call, seconds, link=link))
                if running is not None:
                    running.cancel()

        cancel = after(seconds, expire)
        outer.add_done_callback(lambda _: cancel())
    return outer


def _copy(call: str, source: Inner[T], outer: Inner[T]) -> None:
    error = source.exception()
    _set(outer, source.result()) if error is None else _fail(outer, connection.translate(call, error))


def _set(outer: Inner[T], value: T) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # its deadline was over
        outer.set_result(value)


def _fail(outer: Inner[T], error: BaseException) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # as above
        outer.set_exception(error)


class ServiceExecutor:
    """An executor of jobs that return ``PendingResult``.

    What a job raises before anything was sent changes nothing. What fails after that is final: the service may have
    carried out the call, and those sent after it.

    Args:
        seconds: how long a call may take from when the one before it is done.
        link: the connection, which knows of trouble, for messages.
    """

    def __init__(self, seconds: float, link: guard.Link | None = None) -> None:
        self.seconds = seconds
        self._link = link
        self._sender = Worker("tinker-send")
        self.drain = self._sender.drain  # until all calls made so far have been sent, or refused
        self._taker = Worker("tinker-take")
        self._last: Inner[Any] | None = None  # the latest call that was sent

    def start(self, call: Call[T]) -> Inner[T]:
        """Queue ``call``. See ``Executor``."""
        outer: Inner[T] = concurrent.futures.Future()

        def send() -> None:
            try:
                call.check()
                sent = cast("PendingResult[T]", call.job())
                call.report_done()
            except BaseException as error:  # noqa: BLE001  # the sending thread goes on; the reader gets it
                call.report_failure(error)  # before the future has it: a reader begins the next generation
                outer.set_exception(error)
                return
            self._last = outer
            self._taker.submit(lambda: self._take(call, sent, outer))

        self._sender.submit(send)
        return outer

    def wait(self, call: str, inner: Inner[T]) -> T:
        """Return the result of something that the call being sent depends on; from the sending thread alone."""
        if self._last is not None:
            concurrent.futures.wait([self._last])  # it has its own deadline
        return self._result(call, inner, self.seconds)

    def close(self) -> None:
        """Send and take what was started, each call within its deadline, and end."""
        self._sender.close()
        self._taker.close()

    def _take(self, call: Call[T], sent: PendingResult[T], outer: Inner[T]) -> None:
        """Set the call's result, in the taking thread."""
        try:
            call.check(sent=True)
            started = time.monotonic()
            results = []
            for part in sent.parts:
                left = self.seconds - (time.monotonic() - started)
                results.append(self._result(call.name, part, max(0.0, left)))
            outer.set_result(sent.finish(results))
        except BaseException as error:  # noqa: BLE001  # the taking thread goes on; the reader gets it
            for part in sent.parts:
                part.cancel()  # one that was refused may not have been sent yet, and is not tried for ever
            translated = _translated(call.name, error)
            call.report_failure(translated, final=True)
            outer.set_exception(translated)

    def _result(self, call: str, inner: Inner[T], seconds: float) -> T:
        """Return the result of the SDK's future, or raise its error translated."""
        concurrent.futures.wait([inner], seconds)
        if not inner.done():
            inner.cancel()  # ends the SDK's own retries
            raise connection.late(call, self.seconds, step=call == "optim_step", link=self._link)
        try:
            return inner.result()
        except BaseException as error:
            raise _translated(call, error) from error


def _translated(call: str, error: BaseException) -> RlkitError:
    return connection.translate(call, error, step=call == "optim_step")
