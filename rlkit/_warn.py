"""Warnings that name the user's own line, from any thread of rlkit."""

from __future__ import annotations

import inspect
import threading
import warnings

import attrs

__all__ = ["Line", "users_line", "warn", "warn_at"]


@attrs.frozen(eq=False)
class Line:
    """A line of a program, and the data that Python needs to warn of each line once.

    Attributes:
        file: which it is in.
        number: of the line, from 1.
        module: its module's name.
        registry: the warnings of that module so far.
    """

    file: str
    number: int
    module: str
    registry: dict[str | tuple[str, type[Warning], int], int]


_thread = threading.local()  # "line": which warnings of this thread name, in a thread of rlkit's own


def users_line() -> Line:
    """Return the line outside of rlkit that called it; after ``warn_at``, the line named there."""
    line: Line | None = getattr(_thread, "line", None)
    if line is not None:
        return line
    frame = last = inspect.currentframe()
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == "rlkit":
        frame, last = frame.f_back, frame
    frame = frame or last
    if frame is None:  # a Python without frames
        return Line("<unknown>", 1, "<unknown>", {})
    place = frame.f_globals
    registry = place.setdefault("__warningregistry__", {})
    return Line(frame.f_code.co_filename, frame.f_lineno, str(place.get("__name__")), registry)


def warn_at(line: Line) -> None:
    """Make warnings of this thread name ``line``, that of the caller who started it."""
    _thread.line = line


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """Warn as ``warnings.warn`` does, at the user's own line."""
    line = users_line()
    if isinstance(message, Warning):
        category = type(message)
    warnings.warn_explicit(message, category, line.file, line.number, line.module, line.registry)
