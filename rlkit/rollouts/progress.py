"""A progress bar, where there is somebody to see it; where stderr is no terminal, a line now and then."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any, Self

__all__ = ["Progress"]

_PAUSE = 10.0  # seconds between two lines


class Progress:
    """Counts episodes on stderr with rich, or in lines where it is no terminal; does nothing where it is not wanted.

    Args:
        total: episodes, or None where that is unknown.
        wanted: None: where stderr is a terminal and rich is installed.
    """

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        if wanted is None:
            wanted = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
        self._bar: Any = None
        self._total, self._ended, self._failed = total, 0, 0
        self._began = self._said = time.monotonic()
        terminal = sys.stderr is not None and sys.stderr.isatty()
        self._lines = bool(wanted) and sys.stderr is not None and not terminal
        if wanted and terminal:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("episodes", total=total)

    def episode(self, *, failed: int) -> None:
        """Count one more that has ended."""
        self._ended, self._failed = self._ended + 1, failed
        if self._lines and time.monotonic() - self._said >= _PAUSE:
            self._say()
        if self._bar is not None:
            text = f"episodes ({failed} failed)" if failed else "episodes"
            self._bar.update(self._task, advance=1, description=text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._lines:
            self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
        of = "" if self._total is None else f" of {self._total}"
        failed = f", {self._failed} failed" if self._failed else ""
        print(f"episodes {self._ended}{of}{failed}, {self._said - self._began:.0f} s", file=sys.stderr, flush=True)
