"""SIGINT and SIGTERM: the first one ends the run after its step, a second one ends it at once."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Stopper"]


class Stopper:
    """A watcher of signals between ``watch`` and ``unwatch``; it does nothing outside of the main thread.

    Args:
        grace: seconds that the step in progress may still take after SIGTERM; after SIGINT it may take any time.

    Attributes:
        signal: the first signal, or None.
        error: the exception that abandoned the step, or None.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.signal: int | None = None
        self.error: KeyboardInterrupt | None = None
        self._finishing: Callable[[], str] = str
        self._abandoned: Callable[[], str] = str  # of what is watched; not kept longer, so that a run can be forgotten
        self._previous: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def watch(self, finishing: Callable[[], str], abandoned: Callable[[], str]) -> None:
        """Take over the two signals.

        Args:
            finishing: returns the text on what happens first: "finishing step 2, then saving".
            abandoned: returns the text on what is lost if that step is abandoned.
        """
        if threading.current_thread() is not threading.main_thread() or self._previous:
            return
        self._finishing, self._abandoned = finishing, abandoned
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._caught)

    def unwatch(self) -> None:
        """Restore the previous handlers."""
        self._finishing = self._abandoned = str
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if threading.current_thread() is threading.main_thread():
            for number, previous in self._previous.items():
                signal.signal(number, previous)
            self._previous.clear()

    def stop_if_asked(self, step: int) -> None:
        """Raise SystemExit(143) or KeyboardInterrupt where a signal came; ``step`` is the next one."""
        if self.signal is None:
            return
        self.unwatch()
        if self.signal == signal.SIGTERM:
            raise SystemExit(143)
        raise _in_one_line(KeyboardInterrupt(f"stopped before step {step}; run again to continue"))

    def _caught(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            self.error = KeyboardInterrupt(f"{signal.Signals(number).name}: {self._abandoned()}")
            raise _in_one_line(self.error)
        self.signal = number
        if number == signal.SIGINT:
            _say(f"{self._finishing()}; Ctrl-C again to stop now")
            return
        _say(f"SIGTERM: {self._finishing()}, within {self.grace:g} s")
        # Sent to the main thread, since a signal elsewhere does not wake it where it waits.
        self._timer = threading.Timer(self.grace, signal.pthread_kill, [threading.main_thread().ident, number])
        self._timer.daemon = True
        self._timer.start()


def _say(text: str) -> None:
    """Write a line to the terminal or the notebook; the signal may have come in the middle of another write."""
    line = f"\nrlkit: {text}\n"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it may be closed, or None
        try:
            sys.stderr.write(line)
            sys.stderr.flush()
        except RuntimeError:  # a reentrant call
            os.write(2, line.encode())


_stop: KeyboardInterrupt | None = None  # the newest of these
_usual_hook = sys.excepthook


def _in_one_line(error: KeyboardInterrupt) -> KeyboardInterrupt:
    """Make the interpreter print only its text if it is not caught: the traceback of a step does not help."""
    global _stop, _usual_hook  # noqa: PLW0603  # the interpreter has one hook
    if sys.excepthook is not _hook:
        _usual_hook, sys.excepthook = sys.excepthook, _hook
    _stop = error
    return error


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if error is _stop:
        gc.freeze()  # the process ends now, and looking through all that torch has made would take it seconds
        print(f"rlkit: {error}", file=sys.stderr)
    else:
        _usual_hook(kind, error, trace)
