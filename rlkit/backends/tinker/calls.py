"""Training calls in the order in which they were made: sent at once, their results taken in the same order.

One thread sends, so that a call that needs an answer first (a loss evaluated here) holds back those behind it, and
nothing else does. Another takes results in order, so that a call behind a failed one is refused whatever became of
it, and a call's deadline starts when the one before it is done.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import attrs

from rlkit.backends.tinker import faults, guard
from rlkit.backends.worker import Worker
from rlkit.errors import BackendError, RlkitError, TrainerFailed
from rlkit.futures import Future

__all__ = ["Calls", "Sent"]

Inner: TypeAlias = "concurrent.futures.Future[Any]"


@attrs.frozen(eq=False)
class Sent:
    """What a call has sent: the SDK's futures, and what makes the call's result of theirs."""

    parts: Sequence[Inner]
    finish: Callable[[list[Any]], Any]


@attrs.frozen(eq=False)
class _Failure:
    """A training call that failed. ``final``: something was sent, so that the service's state is not known."""

    epoch: int
    call: str
    error: BaseException
    final: bool


class Calls:
    """The queue of one policy.

    Args:
        seconds: how long a call may take from when the one before it is done.
        link: the connection, which knows of trouble, for messages.
    """

    def __init__(self, seconds: float, link: guard.Link | None = None) -> None:
        self.seconds = seconds
        self._link = link
        self._sender = Worker("tinker-send")
        self._taker = Worker("tinker-take")
        self.lock = threading.RLock()
        self._last: Inner | None = None  # the latest call that was sent
        self._failure: _Failure | None = None
        self._closed = False
        self._epoch = 0
        self.pending = False  # a gradient is accumulated, as the calls were made
        self.accumulated = False  # and as they were sent

    def submit(self, call: str, send: Callable[[], Sent], *, trains: bool, step: bool = False) -> Future[Any]:
        """Queues a call.

        Args:
            call: its name, for messages.
            send: run in the sending thread, in order; what it raises before anything was sent changes nothing.
            trains: whether the calls behind it are refused when it fails.
            step: whether it is an optimizer step.
        """
        outer: Inner = concurrent.futures.Future()
        with self.lock:
            self.check_open()
            epoch = self._epoch

        def job() -> None:
            try:
                self._refuse(call, epoch)
                sent = send()
            except BaseException as error:  # noqa: BLE001  # the sending thread goes on; the reader gets it
                self._failed(outer, call, error, epoch, trains=trains and not isinstance(error, TrainerFailed))
                return
            self._last = outer
            self._taker.submit(lambda: self._take(outer, call, sent, epoch, trains=trains, step=step))

        self._sender.submit(job)
        return Future.wrap(outer, on_error=lambda error: self._read(error, epoch))

    def wait(self, call: str, inner: Inner) -> Any:
        """The result of something that the call being sent depends on; from the sending thread alone."""
        if self._last is not None:
            concurrent.futures.wait([self._last])  # it has a deadline of its own
        return self._result(call, inner, self.seconds, step=False)

    def discard(self) -> Future[None]:
        """Has calls accepted again after a failure in which nothing was sent; waits until what was called is sent.

        Raises:
            BackendError: a gradient is on the service, which can not be told to drop it.
        """
        self.check_open()
        concurrent.futures.wait([self._sender.submit(lambda: None)])
        with self.lock:
            if self._failure is not None and self._failure.final:
                raise _refusal("discard", self._failure)
            if self.accumulated:
                raise BackendError(
                    "discard: the gradient is on the service, which has no call to drop it; connect anew with "
                    "resume_from= and the path of the last saved state"
                )
            self._epoch += 1
            self.pending = False
        return Future.of(None)

    @property
    def failed(self) -> bool:
        """Whether all that is called is refused: a call failed that had been sent."""
        failure = self._failure
        return failure is not None and failure.final

    def check_open(self) -> None:
        """Raises BackendError once it is closed."""
        if self._closed:
            raise BackendError("the tinker backend is closed")

    def close(self) -> None:
        """Sends and takes what was submitted, each call within its deadline, and ends."""
        with self.lock:
            self._closed = True
        self._sender.close()
        self._taker.close()

    def _take(self, outer: Inner, call: str, sent: Sent, epoch: int, *, trains: bool, step: bool) -> None:
        """In the taking thread: the call's result, in order."""
        try:
            self._refuse(call, epoch, sent=True)
            started = time.monotonic()
            results = []
            for part in sent.parts:
                left = self.seconds - (time.monotonic() - started)
                results.append(self._result(call, part, max(0.0, left), step=step))
            outer.set_result(sent.finish(results))
        except BaseException as error:  # noqa: BLE001  # the taking thread goes on; the reader gets it
            for part in sent.parts:
                part.cancel()  # one that was refused may not have been sent yet, and is not tried for ever
            found = error if isinstance(error, RlkitError) else faults.translate(call, error, step=step)
            trains = trains and not isinstance(found, TrainerFailed)
            self._failed(outer, call, found, epoch, trains=trains, final=True)

    def _result(self, call: str, inner: Inner, seconds: float, *, step: bool) -> Any:
        """The result of the SDK's future, its error translated."""
        concurrent.futures.wait([inner], seconds)
        if not inner.done():
            inner.cancel()  # ends the SDK's own retries
            raise faults.late(call, self.seconds, step=step, link=self._link)
        try:
            return inner.result()
        except BaseException as error:
            raise faults.translate(call, error, step=step) from error

    def _failed(
        self, outer: Inner, call: str, error: BaseException, epoch: int, *, trains: bool, final: bool = False
    ) -> None:
        if trains:
            with self.lock:
                if self._failure is None or not self._failure.final:
                    self._failure = _Failure(epoch, call, error, final)
        outer.set_exception(error)

    def _refuse(self, call: str, epoch: int, *, sent: bool = False) -> None:
        failure = self._failure
        if failure is not None and (failure.final or epoch <= failure.epoch) and not (sent and not failure.final):
            raise _refusal(call, failure, sent=sent) from failure.error

    def _read(self, error: BaseException, epoch: int) -> None:
        """An error reached its reader: after a failure in which nothing was sent, calls are accepted again."""
        with self.lock:
            failure = self._failure
            if failure is None or failure.final or self._epoch != epoch or failure.epoch != epoch:
                return
            if error is failure.error or isinstance(error, TrainerFailed):
                self._epoch += 1
                self.pending = self.accumulated


def _refusal(call: str, failure: _Failure, *, sent: bool = False) -> TrainerFailed:
    message = f"{call}: refused, because the {failure.call} before it failed: {failure.error}"
    if sent:
        message += "; it had been sent already and may have been carried out"
    if failure.final and "resume_from=" not in message:
        message += ". The policy takes no more calls: connect anew with resume_from= and the last saved path"
    found = TrainerFailed(message)
    found.__cause__ = failure.error
    return found
