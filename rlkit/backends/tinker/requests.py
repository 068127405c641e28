"""Futures of the SDK as rlkit's: a deadline for each, and its errors in rlkit's terms."""

from __future__ import annotations

import concurrent.futures
import weakref
from collections.abc import Callable
from typing import TypeVar

from rlkit.backends.queue import Inner
from rlkit.backends.tinker import clock, faults, guard

__all__ = ["within"]

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
            _fail(outer, faults.translate(call, error, path=path))

    inner.add_done_callback(done)
    if not outer.done():
        watched, source = weakref.ref(outer), weakref.ref(inner)  # the clock keeps nothing alive

        def expire() -> None:
            late, running = watched(), source()
            if late is not None and not late.done():
                _fail(late, faults.late(call, seconds, link=link))
                if running is not None:
                    running.cancel()

        timer = clock.after(seconds, expire)
        outer.add_done_callback(lambda _: timer.cancel())
    return outer


def _copy(call: str, source: Inner[T], outer: Inner[T]) -> None:
    error = source.exception()
    _set(outer, source.result()) if error is None else _fail(outer, faults.translate(call, error))


def _set(outer: Inner[T], value: T) -> None:
    try:
        outer.set_result(value)
    except concurrent.futures.InvalidStateError:
        return  # its deadline was over


def _fail(outer: Inner[T], error: BaseException) -> None:
    try:
        outer.set_exception(error)
    except concurrent.futures.InvalidStateError:
        return
