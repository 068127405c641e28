"""One thread that runs calls in the order they were made, with a turn for background work in between."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, TypeAlias, TypeVar

from rlkit._warn import Line, users_line, warn_at
from rlkit.errors import BackendError

__all__ = ["Background", "Worker", "breathe", "breathing", "check_process"]

T = TypeVar("T")
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
        """Give up what is left."""


class Worker:
    """Runs jobs one after the other in a thread of its own.

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
        weakref.finalize(self, self._state.end).atexit = False

    @property
    def forked(self) -> bool:
        """Whether this process was forked off the one that has the thread."""
        return os.getpid() != self._process

    def submit(self, job: Callable[[], T | Generator[None, None, T]]) -> concurrent.futures.Future[T]:
        """Queue ``job`` behind what was submitted before. Raises BackendError: in a process that was forked off."""
        self.check_process()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        with self._state.changed:
            self._state.jobs.append((job, future))
            self._state.changed.notify()
        return future

    def drain(self) -> None:
        """Wait until the jobs submitted so far have run."""
        concurrent.futures.wait([self.submit(lambda: None)])

    def close(self) -> None:
        """Finish the jobs submitted so far, stop the background, and end the thread; do nothing after a fork."""
        if self.forked:
            return
        self._state.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def check_process(self) -> None:
        """Raise BackendError in a process that was forked off; ask for no lock, which may be held there for ever."""
        check_process(self._name, self._process)


def check_process(name: str, opened: int) -> None:
    """Raise BackendError where the process is not ``opened``, of which the backend ``name`` has its thread.

    >>> check_process("toy", 0)
    Traceback (most recent call last):
    rlkit.errors.BackendError: the toy backend was opened in process 0, and its thread did not come along in the fork...
    """
    if os.getpid() != opened:
        raise BackendError(
            f"the {name} backend was opened in process {opened}, and its thread did not come along in the fork; open "
            "one here, or start processes by the method 'spawn'"
        )


_thread = threading.local()  # "state": whose thread it is; "breathing": the same inside of ``breathing``


@contextlib.contextmanager
def breathing() -> Iterator[None]:
    """Let ``breathe`` have its effect, in a part of a job in whose middle the background may run."""
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
        self._began = 0.0
        self._owed = 0.0

    def begin(self) -> None:
        """Take note that a part of a job begins now."""
        self._began = time.monotonic()

    def share(self) -> None:
        """Give background as long as the job has had since the last time, less by what turns before took longer."""
        now = time.monotonic()
        self._owed += now - self._began
        while self._owed > 0:
            if self.delay() != 0:
                self._owed = 0.0
                break
            began = time.monotonic()
            self.turn()
            self._owed -= time.monotonic() - began
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


_running: weakref.WeakKeyDictionary[_State, threading.Thread] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """Let the parts that are running end at exit, so that no native code runs while the interpreter goes."""
    for state, thread in list(_running.items()):
        state.jobs.clear()
        state.end()
        thread.join(timeout=4.0)


if hasattr(os, "register_at_fork"):  # the threads stay behind, and their locks may be held for ever
    os.register_at_fork(after_in_child=_running.clear)


def _run(state: _State, opened: Line) -> None:
    running: Running | None = None
    _thread.state = state
    warn_at(opened)
    while True:
        job = None
        with state.changed:
            while running is None and not state.jobs and not state.closing:
                delay = state.delay()
                if delay == 0:
                    break
                state.changed.wait(delay)
            if running is None and state.jobs:
                job = state.jobs.popleft()
            elif running is None and state.closing:
                break
        if job is None and running is None:
            state.turn()
            continue
        state.begin()
        if job is not None:
            running = _started(*job)
            job = None
        elif running is not None:
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
