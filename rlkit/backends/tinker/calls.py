"""Training calls on a service: sent at once in their order, their results taken in the same order.

One thread sends, so that a call that needs an answer first (a loss evaluated here) holds back those behind it, and
nothing else does. Another takes results in order, so that a call behind a failed one is refused whatever became of
it, and a call's deadline starts when the one before it is done.
"""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any, TypeVar

from rlkit.backends.queue import Call, Inner, Sent
from rlkit.backends.tinker import faults, guard
from rlkit.backends.worker import Worker
from rlkit.errors import RlkitError

__all__ = ["SendAndTake"]

T = TypeVar("T")


class SendAndTake:
    """An executor of jobs that return ``Sent``.

    What a job raises before anything was sent changes nothing. What fails after that is final: the service may have
    carried out the call, and those sent behind it.

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
                sent: Sent[T] = call.job()
                call.carried_out()
            except BaseException as error:  # noqa: BLE001  # the sending thread goes on; the reader gets it
                call.failed(error)
                outer.set_exception(error)
                return
            self._last = outer
            self._taker.submit(lambda: self._take(call, sent, outer))

        self._sender.submit(send)
        return outer

    def wait(self, call: str, inner: Inner[T]) -> T:
        """Return the result of something that the call being sent depends on; from the sending thread alone."""
        if self._last is not None:
            concurrent.futures.wait([self._last])  # it has a deadline of its own
        return self._result(call, inner, self.seconds)

    def close(self) -> None:
        """Send and take what was started, each call within its deadline, and end."""
        self._sender.close()
        self._taker.close()

    def _take(self, call: Call[T], sent: Sent[T], outer: Inner[T]) -> None:
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
            call.failed(translated, final=True)
            outer.set_exception(translated)

    def _result(self, call: str, inner: Inner[T], seconds: float) -> T:
        """Return the result of the SDK's future, or raise its error translated."""
        concurrent.futures.wait([inner], seconds)
        if not inner.done():
            inner.cancel()  # ends the SDK's own retries
            raise faults.late(call, self.seconds, step=call == "optim_step", link=self._link)
        try:
            return inner.result()
        except BaseException as error:
            raise _translated(call, error) from error


def _translated(call: str, error: BaseException) -> RlkitError:
    return faults.translate(call, error, step=call == "optim_step")
