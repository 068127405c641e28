"""SIGINT and SIGTERM: the first ends the run after its step, a second one, or ``grace`` seconds, ends it at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Stopper"]


class Stopper:
    """Watches for signals between ``watch`` and ``unwatch``; does nothing outside of the main thread.

    Args:
        grace: seconds that the step in progress may still take.

    Attributes:
        signal: the first one that came, or None.
    """

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}
        self._timer: threading.Timer | None = None

    def watch(self) -> None:
        """Take over the two signals."""
        if threading.current_thread() is not threading.main_thread() or self._previous:
            return
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._caught)

    def unwatch(self) -> None:
        """Give them back."""
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
        raise KeyboardInterrupt(f"stopped before step {step}; run again to go on")

    def _caught(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self.signal is not None:
            raise KeyboardInterrupt(f"{signal.Signals(number).name}: the step is abandoned")
        self.signal = number
        # Sent to the main thread, since a signal elsewhere does not wake it where it waits.
        self._timer = threading.Timer(self.grace, signal.pthread_kill, [threading.main_thread().ident, number])
        self._timer.daemon = True
        self._timer.start()
