"""The order of a trainer's calls, and what happens to them when one fails.

Policies and critics each hold a ``CallQueue``. An executor carries its calls out: ``RunHere`` in one thread of this
process, ``rlkit.backends.tinker.calls.SendAndTake`` on a service.

A call belongs to the generation in which it was made. When a training call fails, the calls of its generation that
stand behind it are refused. The next generation begins when an error of that failure is read, or with ``discard``; its
calls are accepted. After a final failure, where the state of the service is not known, nothing is accepted any more.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import attrs

from rlkit.backends.worker import Worker
from rlkit.errors import BackendError, RankLost, TrainerFailed
from rlkit.futures import Future

__all__ = ["Call", "CallQueue", "Executor", "Failure", "Inner", "Job", "RunHere", "Sent"]

T = TypeVar("T")
Inner: TypeAlias = "concurrent.futures.Future[T]"


@attrs.frozen(eq=False)
class Sent(Generic[T]):
    """What a job has sent to a service: the SDK's futures, and what makes the call's result of theirs."""

    parts: Sequence[Inner[Any]]
    finish: Callable[[list[Any]], T]


Job: TypeAlias = Callable[[], T | Generator[None, None, T] | Sent[T]]
"""The work of a call, run in order: it returns the result, a generator that does (for ``RunHere``), or ``Sent``."""


@attrs.frozen(eq=False)
class Failure:
    """The training call that failed. ``final``: it had been sent, so that the state of the service is not known."""

    call: str
    generation: int
    error: BaseException
    final: bool


class Executor(Protocol):
    """Carries out calls, one after the other in the order of ``start``."""

    def start(self, call: Call[T]) -> Inner[T]:
        """Queue ``call``: ``check`` it, run its job, report ``carried_out`` or ``failed``, then settle the future."""

    def drain(self) -> None:
        """Wait until the jobs of all calls made so far have run."""

    def close(self) -> None:
        """Finish what was started, and end. May be called twice."""


class CallQueue:
    """The calls of one policy or critic.

    Args:
        name: of the backend, for messages.
        executor: carries the calls out.

    Attributes:
        closed: whether ``close`` was called.
        generation: of the calls made now.
        pending: whether a gradient is accumulated, as the calls were made.
        accumulated: and as they were carried out (on a service: sent).
        failure: the latest; the calls of its generation and before are refused.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self._name = name
        self._executor = executor
        self.lock = threading.RLock()
        self.closed = False
        self.generation = 0
        self.pending = False
        self.accumulated = False
        self.failure: Failure | None = None

    def submit(self, name: str, job: Job[T]) -> Future[T]:
        """Queue a call that does not train, such as a forward pass or a snapshot; its failure is its own."""
        return self._start(name, job)

    def forward_backward(self, job: Job[T], *, adds: bool) -> Future[T]:
        """Queue a call that accumulates a gradient; with ``adds=False`` there is none in its data."""
        with self.lock:
            future = self._start("forward_backward", job, trains=True, accumulates=True if adds else None)
            self.pending = self.pending or adds
        return future

    def optim_step(self, job: Job[T]) -> Future[T]:
        """Queue a call that applies and clears the gradient; BackendError where none is accumulated."""
        with self.lock:
            self._check_open()
            if not self.pending:
                why = "call forward_backward first (datums without a masked-in token add none)"
                raise BackendError(f"optim_step: no gradient is accumulated; {why}")
            future = self._start("optim_step", job, trains=True, accumulates=False)
            self.pending = False
        return future

    def save(self, job: Job[T]) -> Future[T]:
        """Queue a call that saves weights and optimizer; BackendError where a gradient would be lost."""
        with self.lock:
            self._check_open()
            if self.pending and not (self.failure is not None and self.failure.final):  # then it is refused for that
                raise BackendError("save: a gradient is accumulated and would be lost; step or discard() first")
            return self._start("save", job)

    def discard(self, clear: Callable[[], None] | None) -> Future[None]:
        """Begin the next generation without a gradient.

        Args:
            clear: drops the accumulated gradient; None where a service holds it, which cannot be told to. Then this
                waits until what was called has been sent.

        Raises:
            BackendError: the service holds a gradient, or its state is not known (``TrainerFailed``).
        """
        self._check_open()
        if clear is None:
            self._executor.drain()
        with self.lock:
            if self.failure is not None and self.failure.final:
                raise _refusal("discard", self.failure)
            if clear is None and self.accumulated:
                what = "connect anew with resume_from= and the path of the last saved state"
                raise BackendError(f"discard: the gradient is on the service, which has no call to drop it; {what}")
            self.generation += 1
            self.pending = False
            return Future.of(None) if clear is None else self._start("discard", clear, accumulates=False)

    def close(self) -> None:
        """Finish the calls made so far and refuse later ones. May be called twice."""
        with self.lock:
            self.closed = True
        self._executor.close()

    def _start(self, name: str, job: Job[T], *, trains: bool = False, accumulates: bool | None = None) -> Future[T]:
        with self.lock:
            self._check_open()
            call: Call[T] = Call(self, name, job, self.generation, trains, accumulates)
            return Future.wrap(self._executor.start(call), on_error=call.read)

    def _check_open(self) -> None:
        if self.closed:
            raise BackendError(f"the {self._name} backend is closed")


@attrs.frozen(eq=False)
class Call(Generic[T]):
    """One call, as an executor sees it.

    Attributes:
        name: for messages.
        trains: whether its failure refuses the calls behind it.
        accumulates: whether a gradient is accumulated once it was carried out; None: as before.
    """

    queue: CallQueue
    name: str
    job: Callable[[], Any]  # a ``Job[T]``: an executor knows which of its kinds it is given
    generation: int
    trains: bool
    accumulates: bool | None

    def check(self, *, sent: bool = False) -> None:
        """Raise TrainerFailed behind a failure (RankLost behind that); once ``sent``, behind a final one alone."""
        failure = self.queue.failure
        if failure is not None and (failure.final or (not sent and self.generation <= failure.generation)):
            raise _refusal(self.name, failure, sent=sent) from failure.error

    def carried_out(self) -> None:
        """Report that its job has run; on a service, that it was sent."""
        if self.accumulates is not None:
            self.queue.accumulated = self.accumulates

    def failed(self, error: BaseException, *, final: bool = False) -> None:
        """Report its error, before the future has it. ``final``: something was sent, so the outcome is not known."""
        queue = self.queue
        if self.trains and not isinstance(error, TrainerFailed):
            with queue.lock:
                if queue.failure is None or not queue.failure.final:
                    queue.failure = Failure(self.name, self.generation, error, final)

    def read(self, error: BaseException) -> None:
        """Begin the next generation where ``error``, which a reader is about to get, is of the failure of this one."""
        queue = self.queue
        with queue.lock:
            failure = queue.failure
            if failure is None or failure.final or not self.generation == failure.generation == queue.generation:
                return
            if error is failure.error or isinstance(error, TrainerFailed | RankLost):
                queue.generation += 1
                queue.pending = queue.accumulated


class RunHere:
    """An executor that runs jobs in the one thread of ``worker``."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.drain, self.close = worker, worker.drain, worker.close

    def start(self, call: Call[T]) -> Inner[T]:
        """Queue ``call``. See ``Executor``."""

        def run() -> Generator[None, None, T]:
            call.check()
            try:
                result = call.job()
                value: T = (yield from result) if isinstance(result, Generator) else result
                call.carried_out()
            except BaseException as error:  # whatever it is, the calls behind this one must not run
                call.failed(error)
                raise
            return value

        return self._worker.submit(run)


def _refusal(call: str, failure: Failure, *, sent: bool = False) -> TrainerFailed | RankLost:
    message = f"{call}: refused, because the {failure.call} before it failed: {failure.error}"
    if sent:
        message += "; it had been sent already and may have been carried out"
    if failure.final and "resume_from=" not in message:
        message += ". The policy takes no more calls: connect anew with resume_from= and the last saved path"
    lost = isinstance(failure.error, RankLost)  # then every call says so, also those that were made before
    error = RankLost(message) if lost else TrainerFailed(message)
    error.__cause__ = failure.error
    return error
