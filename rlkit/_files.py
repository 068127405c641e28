"""Files that outlast a power failure, and strict JSON."""

from __future__ import annotations

import contextlib
import errno
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from rlkit._runtime import warn

__all__ = ["append", "from_json", "owned", "plain", "replacing", "synced", "to_json"]

# Errors of systems that cannot sync, on network drives and some that are mounted by programs.
_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_warned: set[int] = set()  # devices


def append(path: Path, lines: Iterable[str], *, mode: int = 0o600) -> None:
    """Append lines to a file, each in one write; first end a line that a crash left unfinished.

    Args:
        path: made with ``mode`` if it is not there. Several processes may append to it.
        lines: without their ends.
        mode: the permissions of a new file.

    Raises:
        OSError: a line could not be written; earlier ones stay.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), mode)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        end = b"\n" if file.read(1) not in (b"\n", b"") else b""
        for line in lines:
            data = end + line.encode("utf-8", errors="backslashreplace") + b"\n"
            end = b""
            if file.write(data) != len(data):
                raise OSError("the line was written only in part")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file next to ``path`` that only its owner reads; it replaces ``path`` if the block raises nothing.

    Raises:
        OSError: it could not be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
        yield temporary
        synced(temporary)
        temporary.replace(path)
        synced(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def synced(path: Path) -> None:
    """Sync a file or a folder.

    A file system that cannot sync is not an error: for files it warns once for each, for folders never, as databases
    do, since most that cannot sync a folder write names at once.

    Raises:
        OSError: syncing is supported, and failed.
    """
    folder = path.is_dir()
    if folder and os.name == "nt":  # which opens no folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        device = os.fstat(descriptor).st_dev
        if not folder and device not in _warned:
            _warned.add(device)
            text = f"the file system of {path} cannot sync: a power failure may lose the last writes"
            warn(text, RuntimeWarning)
    finally:
        os.close(descriptor)


def owned(path: Path) -> None:
    """Restrict reading a file to its owner, where the file system knows owners."""
    try:
        path.chmod(0o600)
    except OSError as error:
        if error.errno not in _UNKNOWN | {errno.EPERM}:
            raise


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: float) -> float | str:
    """Return the number as JSON has it: non-finite numbers become "NaN", "Infinity" or "-Infinity".

    >>> [to_json(x) for x in (0.5, float("nan"), float("-inf"))]
    [0.5, 'NaN', '-Infinity']
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_json(value: object) -> float | None:
    """Return the number that ``to_json`` wrote; None for anything else.

    >>> [from_json(x) for x in (1, "Infinity", "1", None, True)]
    [1.0, inf, None, None, None]
    """
    if isinstance(value, str):
        return _WORDS.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def plain(value: object) -> object:
    """Return ``value`` as plain JSON: numbers as ``to_json``, arrays as lists, anything else as text.

    >>> import numpy as np
    >>> plain({"rate": np.float32(0.5), "clip": float("inf"), 3: np.array([True, False]), "kind": complex})
    {'rate': 0.5, 'clip': 'Infinity', '3': [True, False], 'kind': "<class 'complex'>"}
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        item = value.tolist()
        return str(value) if isinstance(item, np.generic) else plain(item)  # of what Python has no number for
    if isinstance(value, int):
        return int(value)
    return to_json(float(value)) if isinstance(value, float) else str(value)
