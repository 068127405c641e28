"""What ends an attempt at an episode without its being the policy's doing."""

from __future__ import annotations

import functools
import os
import sysconfig
import traceback
from pathlib import Path

import rlkit

__all__ = ["SHORT", "CannotGoOn", "Deadline", "Fault", "described"]

SHORT = 500  # characters of a message that are kept


class CannotGoOn(Exception):
    """The rollout ends with ``error``, which is no matter of one episode."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Fault(Exception):
    """Something that is not the policy's doing; ends an attempt."""

    def __init__(self, where: str, error: Exception, *, kind: str | None = None) -> None:
        super().__init__(str(error))
        self.where = where
        self.error = error
        self.kind = type(error).__name__ if kind is None else kind


class Deadline(Exception):
    """The episode's time is over."""


def described(error: BaseException) -> str:
    """Return the error's text with its notes, which say whose it is, shortened; and where in the user's code it was."""
    text = "; ".join([str(error), *getattr(error, "__notes__", ())])[:SHORT]
    place = _place(error)
    return f"{text}; {place}" if place else text


def _place(error: BaseException) -> str:
    """Return "at FILE:LINE in FUNCTION" of the innermost frame of the user's; else of a package; else "".

    An error of rlkit's own that was made of another is where that one was.
    """
    cause: BaseException | None = error
    packaged = ""
    for _ in range(8):
        if cause is None:
            break
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            whose = _whose(frame.filename)
            if whose == "user":
                return f"at {_short(frame.filename)}:{frame.lineno} in {frame.name}"
            if whose == "package" and not packaged:
                packaged = f"at {_short(frame.filename)}:{frame.lineno} in {frame.name}"
        cause = cause.__cause__
    return packaged


@functools.lru_cache(maxsize=1024)
def _whose(file: str) -> str:
    """Return whose code a file is: "rlkit", "python", "package" or "user"."""
    if file.startswith(("<frozen", "<attrs")):
        return "python"
    if file.startswith(_folder(rlkit.__file__)):
        return "rlkit"
    if {"site-packages", "dist-packages"} & set(Path(file).parts):
        return "package"
    names = ("stdlib", "platstdlib")
    return "python" if file.startswith(tuple(sysconfig.get_path(name) + os.sep for name in names)) else "user"


def _folder(file: str) -> str:
    return str(Path(file).parent) + os.sep


def _short(file: str) -> str:
    """Return a path as its user knows it: relative to the working directory, or to the home."""
    path = Path(file)
    for folder, before in ((Path.cwd, Path()), (Path.home, Path("~"))):
        try:
            return str(before / path.relative_to(folder()))
        except (ValueError, OSError, RuntimeError):  # not within it, or there is none
            continue
    return file
