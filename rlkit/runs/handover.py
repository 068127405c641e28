"""The runs that this process has open, so that a cell of a notebook that opens one again takes it over."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.runs.run import Run

__all__ = ["check_same", "opened", "take_over"]

_open: weakref.WeakValueDictionary[tuple[int, Path], Run] = weakref.WeakValueDictionary()


def opened(run: Run) -> None:
    """Notes that ``run`` is open."""
    _open[os.getpid(), run.folder.resolve()] = run


def take_over(folder: Path) -> None:
    """Closes the run in ``folder`` that this process has open, if there is one and no other thread is in its loop.

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
        warnings.warn(message, RuntimeWarning, stacklevel=4)
    run.close()


def check_same(role: str, made: tuple[str, Mapping[str, Any]], asked: tuple[str, Mapping[str, Any]]) -> None:
    """Raises ConfigError where the policy of that role was ``made`` with another backend or options than are ``asked``.

    So the same call, of a cell of a notebook that runs again, may be given the same policy.
    """
    (backend, before), (name, options) = made, asked
    what = "" if name == backend else f"is of the backend {backend!r}"
    for key in sorted(before.keys() | options.keys()):
        if not what and not (key in before and key in options and _alike(before[key], options[key])):
            what = f"was made with another {key}="
    if what:
        raise ConfigError(
            f"connect: the run's {role!r} {what}; open the run again, rlkit.Run(folder), or give role= for another one"
        )


def _alike(one: Any, two: Any) -> bool:
    try:
        return one is two or bool(one == two)
    except (TypeError, ValueError):  # of arrays and the like
        return False
