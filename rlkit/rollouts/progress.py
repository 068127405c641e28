"""A progress bar, where there is somebody to see it."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any, Self

__all__ = ["Progress"]


class Progress:
    """Counts episodes on stderr with rich; does nothing where it is not wanted.

    Args:
        total: episodes, or None where that is unknown.
        wanted: None: where stderr is a terminal and rich is installed.
    """

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        if wanted is None:
            wanted = sys.stderr is not None and sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
        self._bar: Any = None
        if wanted:
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("episodes", total=total)

    def episode(self, *, failed: int) -> None:
        """One more has ended."""
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
