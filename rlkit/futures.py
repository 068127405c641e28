"""``Future``, the result of every backend call. ``.result()`` in a notebook, ``await`` in asynchronous code."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, TypeVar

from rlkit import _check
from rlkit.errors import BackendError, BackendTimeout, RequestCancelled

__all__ = ["Future", "join_all", "wait_done"]

T = TypeVar("T")
U = TypeVar("U")


class Future(Generic[T]):
    """A value that is being computed.

    Cancelling an ``await``, or letting ``result(timeout)`` run out, abandons the waiting but never a training call, so
    that none is lost from the middle of a sequence. Only a sampler's request can stop: when you call ``cancel()``, when
    nothing refers to its future any more, or when you interrupt the last wait with Ctrl-C.

    ``asyncio.gather``, ``wait_for`` and ``ensure_future`` take it as it is. ``asyncio.run`` and
    ``TaskGroup.create_task`` need a coroutine; wrap the future in one: ``async def value(): return await future``.

    >>> Future.of(3).result()
    3
    """

    # Hooks, see ``wrap``. They are attributes of the class, so that ``__del__`` works if ``__init__`` raised.
    _convert: Callable[[Any], T] | None = None
    _on_error: Callable[[BaseException], None] | None = None
    _on_drop: Callable[[], None] | None = None
    _cancel: Callable[[], bool] | None = None

    def __init__(self, inner: concurrent.futures.Future[Any]) -> None:
        self._inner = inner
        self._process = os.getpid()
        self._waiting: list[None] = []  # one for each reader that waits; appending and popping need no lock

    @classmethod
    def of(cls, value: T) -> Future[T]:
        """Return a future that is done already."""
        inner: concurrent.futures.Future[T] = concurrent.futures.Future()
        inner.set_result(value)
        return cls(inner)

    @classmethod
    def wrap(
        cls,
        inner: concurrent.futures.Future[Any],
        *,
        convert: Callable[[Any], T] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
        on_drop: Callable[[], None] | None = None,
        on_cancel: Callable[[], object] | None = None,
    ) -> Future[T]:
        """Return a future over ``inner``, for authors of backends.

        Args:
            inner: the worker sets its result or exception.
            convert: applied to the result, in the thread that reads it, at every reading.
            on_error: told of the exception before it is raised to a reader.
            on_drop: told that the work may stop, because this future was forgotten before it was done, or the last
                waiting in ``result`` was interrupted. It is called by any thread that collects garbage, perhaps in the
                middle of something, so it may set a flag and must not lock.
            on_cancel: told that ``cancel`` has set ``inner`` to ``RequestCancelled``, so that the work may stop, and
                its result is not to be set. None if the work must not be lost.
        """

        def cancel() -> bool:
            try:
                inner.set_exception(RequestCancelled("this request was cancelled; send it again"))
            except concurrent.futures.InvalidStateError:  # it is done
                return False
            if on_cancel is not None:
                on_cancel()
            return True

        future = cls(inner)
        future._convert, future._on_error, future._on_drop = convert, on_error, on_drop
        future._cancel = on_cancel and cancel
        return future

    @classmethod
    def all(cls, futures: Sequence[Future[U]], convert: Callable[[list[U]], T] | None = None) -> Future[Any]:
        """Return a future of the values of several, in their order; the first that failed raises when it is read.

        Cancelling it cancels those of them that can be cancelled.

        Args:
            futures: of any kinds.
            convert: applied to the list, in the thread that reads it, at every reading.

        >>> Future.all([Future.of(1), Future.of(2)]).result()
        [1, 2]
        """

        def read_all(_: object) -> list[U] | T:
            results = [future.result() for future in futures]
            return results if convert is None else convert(results)

        def drop() -> None:
            for future in futures:
                if not future._waiting:  # noqa: SLF001  # another reader may wait for it alone
                    future._drop()  # noqa: SLF001

        def cancel() -> bool:
            cancelled = [future.cancel() for future in futures]  # all of them, not up to the first
            return any(cancelled)

        whole: Future[Any] = Future(join_all([future._inner for future in futures]))
        whole._convert, whole._on_drop, whole._cancel = read_all, drop, cancel
        return whole

    def done(self) -> bool:
        """Return whether ``result()`` would return or raise at once."""
        return self._inner.done()

    def result(self, timeout: float | None = None) -> T:
        """Return the value, waiting up to ``timeout`` seconds for it (None: without limit).

        Raises:
            BackendTimeout: it is not done yet; the work goes on, and ``result`` may be called again.
            BackendError: this process was forked before it was done.
            Exception: whatever the work raised.
        """
        timeout = _check.optional(_check.real, "timeout", timeout, low=0.0, why="seconds")
        self._check_process()
        self._waiting.append(None)
        try:
            concurrent.futures.wait([self._inner], timeout)
        except BaseException as error:
            # Ctrl-C, and not a time limit that the caller set, has ended the last waiting.
            if not isinstance(error, Exception) and len(self._waiting) == 1:
                self._drop()
            raise
        finally:
            self._waiting.pop()
        if not self._inner.done():
            raise BackendTimeout(f"no result within {timeout} s; the call continues, read it again later")
        try:
            value = self._inner.result()
        except BaseException as error:
            if self._on_error is not None:
                self._on_error(error)
            raise
        return value if self._convert is None else self._convert(value)

    def __await__(self) -> Generator[object, None, T]:
        if not self._inner.done():
            self._check_process()
            self._waiting.append(None)
            try:
                yield from wait_done(self._inner).__await__()
            finally:
                self._waiting.pop()
        return self.result()

    def cancel(self) -> bool:
        """Cancel a request of a sampler, which frees its slot at once; reading it raises ``RequestCancelled``.

        Returns:
            Whether it was cancelled. False if it is done, and for every training call, snapshot and save.

        Raises:
            BackendError: this process was forked before it was done.

        >>> Future.of(3).cancel()
        False
        """
        self._check_process()
        return self._cancel is not None and self._cancel()

    def _check_process(self) -> None:
        """Raise BackendError after a fork: the threads that would set the result do not exist in the child."""
        if os.getpid() != self._process and not self._inner.done():
            raise BackendError(
                f"this future was made in process {self._process} and was not done at the fork, which does not copy "
                "its threads; read it in that process, or start processes with the 'spawn' method"
            )

    def _drop(self) -> None:
        if self._on_drop is not None and not self._inner.done():
            self._on_drop()

    def __del__(self) -> None:
        self._drop()

    def __repr__(self) -> str:
        if not self.done():
            return "Future(pending)"
        error = self._inner.exception()
        return f"Future({self._inner.result()!r})" if error is None else f"Future({error!r})"


async def wait_done(inner: concurrent.futures.Future[U], timeout: float | None = None) -> bool:
    """Wait in an event loop until ``inner`` is done, without reading its result; return False after ``timeout`` s."""
    if not inner.done():
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not waiter.done():  # cancelled: the waiting was abandoned
                waiter.set_result(None)

        def wake_from_thread(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, and the waiting ended with it
                loop.call_soon_threadsafe(wake)

        inner.add_done_callback(wake_from_thread)
        await asyncio.wait([waiter], timeout=timeout)
    return inner.done()


def join_all(parts: Sequence[concurrent.futures.Future[Any]]) -> concurrent.futures.Future[None]:
    """Return a future that is done when all of ``parts`` are, whether they failed or not."""
    whole: concurrent.futures.Future[None] = concurrent.futures.Future()
    rest = iter(parts)

    def wait_for_next(_: object = None) -> None:
        for part in rest:
            if not part.done():
                part.add_done_callback(wait_for_next)  # in one part at a time, so that no lock is needed
                return
        whole.set_result(None)

    wait_for_next()
    return whole
