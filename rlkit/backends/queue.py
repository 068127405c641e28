"""The order of a trainer's calls, and what happens to them when one fails.

Policies and critics each hold a ``CallQueue``. An executor carries its calls out: ``RunHere`` in one thread of this
process, ``rlkit.backends.tinker._requests.SendAndTake`` on a service.

A call belongs to the generation in which it was made. When a training call fails, the later calls of its generation
are refused. The next generation begins when an error of that failure is read, or with ``discard``; its
calls are accepted. After a final failure, where the state of the service is not known, nothing is accepted any more.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

import attrs

from rlkit._warn import Line, users_line, warn_at
from rlkit.errors import BackendError, RankLost, TrainerFailed
from rlkit.futures import Future

__all__ = [
    "Background",
    "Call",
    "CallQueue",
    "Executor",
    "Failure",
    "Inner",
    "Job",
    "RunHere",
    "Sent",
    "Worker",
    "breathe",
    "breathing",
    "check_process",
]

T = TypeVar("T")
Inner: TypeAlias = "concurrent.futures.Future[T]"


@attrs.frozen(eq=False)
class Sent(Generic[T]):
    """What a job has sent to a service: the SDK's futures, and what makes the call's result of theirs."""

    parts: Sequence[Inner[Any]]  # of several types, so ``finish`` knows better than a type checker what it is given
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

    def submit(self, name: str, job: Job[T], *, trains: bool = False, accumulates: bool | None = None) -> Future[T]:
        """Queue a call; the failure of one that does not train, such as a forward pass or a snapshot, is its own.

        Args:
            name, job, trains, accumulates: see ``Call``.
        """
        with self.lock:
            self._check_open()
            call: Call[T] = Call(self, name, job, self.generation, trains, accumulates)
            # Under the lock, so that the executor has the calls in the order of their generations.
            return Future.wrap(self._executor.start(call), on_error=call.read)

    def forward_backward(self, job: Job[T], *, adds: bool) -> Future[T]:
        """Queue a call that accumulates a gradient; with ``adds=False`` there is none in its data."""
        with self.lock:
            # Without a token nothing is added, and what earlier calls have added stays.
            future = self.submit("forward_backward", job, trains=True, accumulates=True if adds else None)
            self.pending = self.pending or adds
        return future

    def optim_step(self, job: Job[T]) -> Future[T]:
        """Queue a call that applies and clears the gradient; BackendError where none is accumulated."""
        with self.lock:
            self._check_open()  # first: a closed queue says so, whatever it has accumulated
            if not self.pending:
                why = "call forward_backward first (datums with no masked-in token add no gradient)"
                raise BackendError(f"optim_step: no gradient is accumulated; {why}")
            future = self.submit("optim_step", job, trains=True, accumulates=False)
            self.pending = False
        return future

    def save(self, job: Job[T]) -> Future[T]:
        """Queue a call that saves weights and optimizer; BackendError where a gradient would be lost."""
        with self.lock:
            self._check_open()
            if self.pending and not (self.failure is not None and self.failure.final):  # then it is refused for that
                raise BackendError("save: the accumulated gradient would be lost; call optim_step or discard() first")
            return self.submit("save", job)

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
            self._executor.drain()  # without the lock, which jobs take when they report a failure
        with self.lock:
            if self.failure is not None and self.failure.final:
                raise _refusal("discard", self.failure)
            if clear is None and self.accumulated:
                what = "connect anew with resume_from= and the path of the last saved state"
                raise BackendError(f"discard: the service holds the gradient and has no call to drop it; {what}")
            self.generation += 1
            self.pending = False
            return Future.of(None) if clear is None else self.submit("discard", clear, accumulates=False)

    def close(self) -> None:
        """Finish the calls made so far and refuse later ones. May be called twice."""
        with self.lock:
            self.closed = True
        self._executor.close()

    def _check_open(self) -> None:
        if self.closed:
            raise BackendError(f"the {self._name} backend is closed")


@attrs.frozen(eq=False)
class Call(Generic[T]):
    """One call, as an executor sees it.

    Attributes:
        name: for messages.
        trains: whether its failure refuses the calls after it.
        accumulates: whether a gradient is accumulated once it was carried out; None: as before.
    """

    queue: CallQueue
    name: str
    job: Job[T]
    generation: int
    trains: bool
    accumulates: bool | None

    def check(self, *, sent: bool = False) -> None:
        """Raise TrainerFailed after a failure (RankLost after that); once ``sent``, after a final one alone."""
        # It needs no lock: a failure is replaced as a whole. A call that was sent came before any failure that is not
        # final, or is of a later generation: those after such a failure are refused when they are to be sent.
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
        if self.trains and not isinstance(error, TrainerFailed):  # that is a refusal: the failure is an earlier one
            with queue.lock:
                if queue.failure is None or not queue.failure.final:
                    queue.failure = Failure(self.name, self.generation, error, final)

    def read(self, error: BaseException) -> None:
        """Begin the next generation where ``error``, which a reader is about to get, is of the failure of this one."""
        queue = self.queue
        with queue.lock:
            failure = queue.failure
            # One generation begins for one failure: of its readers the first begins it, and those of older ones none.
            if failure is None or failure.final or not self.generation == failure.generation == queue.generation:
                return
            if error is failure.error or isinstance(error, TrainerFailed | RankLost):
                queue.generation += 1
                queue.pending = queue.accumulated  # what was made after the failure was refused, and adds nothing


class RunHere:
    """An executor that runs jobs in the one thread of ``worker``."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.drain, self.close = worker, worker.drain, worker.close

    def start(self, call: Call[T]) -> Inner[T]:
        """Queue ``call``. See ``Executor``."""

        def run() -> Generator[None, None, T]:
            call.check()  # when its turn has come: an earlier call may fail until then
            try:
                result = cast("T | Generator[None, None, T]", call.job())  # ``Sent`` is for services
                value: T = (yield from result) if isinstance(result, Generator) else result
                call.carried_out()
            except BaseException as error:  # whatever it is, the calls after this one must not run
                call.failed(error)
                raise
            return value

        return self._worker.submit(run)


def _refusal(call: str, failure: Failure, *, sent: bool = False) -> TrainerFailed | RankLost:
    message = f"{call}: refused, because the earlier {failure.call} failed: {failure.error}"
    if sent:
        message += "; the call was already sent and may have been carried out"
    if failure.final and "resume_from=" not in message:
        message += ". The policy takes no more calls: connect anew with resume_from= and the last saved path"
    lost = isinstance(failure.error, RankLost)  # then every call says so, also those that were made before
    error = RankLost(message) if lost else TrainerFailed(message)
    error.__cause__ = failure.error
    return error


Parts: TypeAlias = Generator[None, None, object]
Result: TypeAlias = "concurrent.futures.Future[Any]"
Queued: TypeAlias = tuple[Callable[[], object], Result]
Running: TypeAlias = tuple[Parts, Result]


class Background(Protocol):
    """Work that may run between the parts of a call, such as decoding."""

    def delay(self) -> float | None:
        """Return the seconds until the next ``turn``; 0 for now, None for nothing to do."""

    def turn(self) -> None:
        """Do one part of the work."""

    def stop(self) -> None:
        """Drop the remaining jobs."""


class Worker:
    """Run jobs one after the other in its own thread.

    A job is a function, or a function that returns a generator, which the worker drives to its end. At every ``yield``,
    and where a part calls ``breathe``, ``background`` gets as much time as the job has had, if it has so much to do.
    The thread ends with ``close``, or when the worker is forgotten.
    """

    def __init__(self, name: str, background: Background | None = None) -> None:
        self._state = _State(background)
        self.wake = self._state.wake  # has the thread ask ``background.delay()`` again
        thread = threading.Thread(target=_run, args=(self._state, users_line()), name=f"rlkit-{name}", daemon=True)
        thread.start()
        self._thread = thread
        self._name, self._process = name, os.getpid()
        _running[self._state] = thread
        # A finalizer of ``self._state``, since one that held ``self`` would keep the worker alive; at exit ``_end_all``
        # does more.
        weakref.finalize(self, self._state.end).atexit = False

    @property
    def forked(self) -> bool:
        """Return whether this process was forked off the one that has the thread."""
        return os.getpid() != self._process

    def submit(self, job: Callable[[], T | Generator[None, None, T]]) -> concurrent.futures.Future[T]:
        """Queue ``job`` after what was submitted before. Raises BackendError: in a process that was forked off."""
        self.check_process()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._state.changed:
            self._state.jobs.append((job, future))
            self._state.changed.notify()
        return future

    def drain(self) -> None:
        """Wait until the jobs submitted so far have run."""
        concurrent.futures.wait([self.submit(lambda: None)])

    def give_up(self) -> None:
        """End the jobs submitted so far with a BackendError, the running one after its present part."""
        with self._state.changed:
            given_up = list(self._state.jobs)
            self._state.jobs.clear()
            self._state.given_up = True
            self._state.changed.notify()
        for _, future in given_up:  # without the lock, which the futures' callbacks may want
            future.set_exception(BackendError(_GIVEN_UP))

    def close(self) -> None:
        """Finish the jobs submitted so far, stop the background, and end the thread; do nothing after a fork."""
        if self.forked:
            return
        self._state.end()
        # A job may close its own worker, and a thread cannot wait for itself.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_process(self) -> None:
        """Raise BackendError in a process that was forked off; ask for no lock, which may be held there for ever."""
        check_process(self._name, self._process)


def check_process(name: str, opened: int) -> None:
    """Raise BackendError where the process is not ``opened``, of which the backend ``name`` has its thread.

    >>> check_process("toy", 0)
    Traceback (most recent call last):
    rlkit.errors.BackendError: the toy backend was opened in process 0, and a fork does not copy its thread...
    """
    if os.getpid() != opened:
        raise BackendError(
            f"the {name} backend was opened in process {opened}, and a fork does not copy its thread; open a backend "
            "in this process, or start processes with the 'spawn' method"
        )


_thread = threading.local()  # "state": whose thread it is; "breathing": the same inside of ``breathing``


@contextlib.contextmanager
def breathing() -> Iterator[None]:
    """Enable ``breathe`` in a part of a job that the background may interrupt."""
    _thread.breathing = getattr(_thread, "state", None)
    try:
        yield
    finally:
        _thread.breathing = None


def breathe() -> None:
    """Give the background its share of the time, in the middle of a part; does nothing outside of ``breathing``."""
    state = getattr(_thread, "breathing", None)
    if state is not None:
        _thread.breathing = None  # the background does not breathe
        try:
            state.share()
        finally:
            _thread.breathing = state


class _State:
    """What the thread and the worker share; the thread must not hold the worker itself."""

    def __init__(self, background: Background | None) -> None:
        self.background = background
        self.changed = threading.Condition()
        self.jobs: deque[Queued] = deque()
        self.closing = False
        self.ended = False  # closing, and no job is left
        self.given_up = False  # whether the running job is to end
        self._began = 0.0
        self._owed = 0.0

    def next_job(self) -> Queued | None:
        """Wait for a job and take it; return None after a turn of the background, and at the end."""
        with self.changed:
            while not self.jobs and not self.closing and (delay := self.delay()) != 0:
                self.changed.wait(delay)
            self.given_up = False
            if self.jobs:
                return self.jobs.popleft()
            self.ended = self.closing  # under the lock: a job submitted before ``end`` is in the queue by now
        if not self.ended:
            self.turn()  # without the lock, so that jobs can be submitted meanwhile
        return None

    def begin(self) -> None:
        """Take note that a part of a job begins now."""
        self._began = time.monotonic()

    def share(self) -> None:
        """Give background as long as the job has had since the last time, less by what turns before took longer."""
        now = time.monotonic()
        self._owed += now - self._began
        while self._owed > 0:
            if self.delay() != 0:
                self._owed = 0.0  # time that was not wanted is not saved up
                break
            began = time.monotonic()
            self.turn()
            self._owed -= time.monotonic() - began  # below 0 where a turn took longer: the job gets that back
        self.begin()

    def turn(self) -> None:
        """Do one part of the background's work, if there is any."""
        if self.background is not None and self.background.delay() == 0:
            self.background.turn()

    def delay(self) -> float | None:
        return None if self.background is None else self.background.delay()

    def wake(self) -> None:
        with self.changed:
            self.changed.notify()

    def end(self) -> None:
        with self.changed:
            self.closing = True
            self.changed.notify()


_GIVEN_UP = "cancelled, because the run was stopped"
_running: weakref.WeakKeyDictionary[_State, threading.Thread] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """Wait at exit for the running parts to end, so that no native code runs while the interpreter goes."""
    left = list(_running.items())
    for state, _ in left:
        state.jobs.clear()
        state.given_up = True
        state.end()
    deadline = time.monotonic() + 2.5
    for _, thread in left:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


if hasattr(os, "register_at_fork"):  # the threads are gone, and their locks may be held for ever
    os.register_at_fork(after_in_child=_running.clear)


def _run(state: _State, opened: Line) -> None:
    _thread.state = state
    warn_at(opened)
    while not state.ended:
        job = state.next_job()
        if job is None:
            continue
        state.begin()
        running = _started(*job)
        del job  # what it refers to is not kept while its parts run, nor until there is another job
        state.share()
        while running is not None:
            state.begin()
            if state.given_up:
                _end(*running)
                running = None
            else:
                running = _continued(*running)
            state.share()
    if state.background is not None:
        state.background.stop()


def _started(job: Callable[[], object], future: Result) -> Running | None:
    try:
        result = job()
    except BaseException as error:  # noqa: BLE001  # the thread goes on; the reader of the future gets it
        future.set_exception(error)
        return None
    if isinstance(result, Generator):
        return _continued(result, future)
    future.set_result(result)
    return None


def _end(parts: Parts, future: Result) -> None:
    """End a job between two of its parts, as if the next one had failed."""
    try:
        parts.throw(BackendError(_GIVEN_UP))
    except BaseException as error:  # noqa: BLE001  # as above
        future.set_exception(error)
    else:
        parts.close()
        future.set_exception(BackendError(_GIVEN_UP))


def _continued(parts: Parts, future: Result) -> Running | None:
    try:
        next(parts)
    except StopIteration as end:
        future.set_result(end.value)
    except BaseException as error:  # noqa: BLE001  # as above
        future.set_exception(error)
    else:
        return parts, future
    return None
