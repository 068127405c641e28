"""The runs that this process has open, so that a cell of a notebook that opens one again takes it over."""

from __future__ import annotations

import os
import threading
import weakref
from pathlib import Path
from typing import Protocol

from rlkit._warn import warn
from rlkit.errors import ConfigError

__all__ = ["OpenRun", "opened", "take_over"]


class OpenRun(Protocol):
    """A run, as far as it matters whether another may take its place; the attributes are those of ``Run``."""

    folder: Path
    step: int
    saved: int
    looping: int | None
    closed: bool

    def close(self) -> None:
        """End it."""


_open: weakref.WeakValueDictionary[tuple[int, Path], OpenRun] = weakref.WeakValueDictionary()


def opened(run: OpenRun) -> None:
    """Note that ``run`` is open."""
    _open[os.getpid(), run.folder.resolve()] = run


def take_over(folder: Path) -> None:
    """Close the run in ``folder`` that this process has open, if there is one and no other thread is in its loop.

    Raises:
        ConfigError: another thread is.
    """
    run = _open.pop((os.getpid(), folder.resolve()), None)
    if run is None or run.closed:
        return
    if run.looping not in (None, threading.get_ident()):
        _open[os.getpid(), folder.resolve()] = run
        raise ConfigError(f"{folder} is in use by another thread of this process; a run has one writer: run.close()")
    if run.step > run.saved:
        message = (
            f"{folder} was open in this process, at step {run.step}; it is closed, and what came after its last "
            f"checkpoint, of step {run.saved}, is done again"
        )
        warn(message, RuntimeWarning)
    run.close()
