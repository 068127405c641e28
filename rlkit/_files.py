"""Files that outlast a power failure, JSON lines that can be rewound, and strict JSON."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from rlkit._runtime import warn
from rlkit.errors import CheckpointError, RlkitError

# Errors of systems that cannot sync, on network drives and some that are mounted by programs.
_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_warned: set[int] = set()  # devices
_PIECE = 1 << 20  # bytes that are copied at a time
_WORDS = ("NaN", "Infinity", "-Infinity")  # numbers that JSON has not, as json.dumps writes them


@contextlib.contextmanager
def as_checkpoint_error(path: object, done: str) -> Iterator[None]:
    """Turn the system's errors into a CheckpointError: ``path`` cannot be ``done``."""
    try:
        yield
    except OSError as error:
        if isinstance(error, RlkitError):  # one of its timeouts is an OSError, too
            raise
        raise CheckpointError(f"{path}: cannot be {done}: {error}") from error


def append(path: Path, lines: Iterable[str], *, mode: int = 0o600) -> None:
    """Append lines to a file, each in one write; first end a line that a crash left unfinished.

    Args:
        path: made with ``mode`` if it does not exist. Several processes may append to it.
        lines: without their ends.
        mode: the permissions of a new file.

    Raises:
        OSError: a line could not be written; earlier ones stay.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), mode)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        end = b"" if _ends_line(path, file.seek(0, os.SEEK_END)) else b"\n"
        for line in lines:
            data = end + line.encode("utf-8", errors="backslashreplace") + b"\n"
            end = b""
            if file.write(data) != len(data):
                raise OSError("the line was written only in part")


def read_line(line: bytes) -> dict[str, object] | None:
    """Return the record of a JSON line; None if it is incomplete or holds something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the whole records of a file of JSON lines; none if it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    with as_checkpoint_error(path, "read"), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from filter(None, map(read_line, file))


def rewind(path: Path, step: int, position: int = 0) -> int:
    """Drop lines beyond ``position`` that are of ``step`` or later, or incomplete; return how many are of such a step.

    Only what lies beyond the position is read. The file is truncated where later lines begin; it is replaced only if
    an earlier step comes after them, such as a line of another process.

    Args:
        path: a file of JSON lines; it may be missing.
        step: the key "step" of a line is compared with it.
        position: bytes that stay. A file that ended elsewhere at that time has lost lines: it is read from its
            beginning, with a warning.

    Raises:
        CheckpointError: it cannot be read or written; it stays as it was.
    """
    with as_checkpoint_error(path, f"rewound to step {step}"):
        size = path.stat().st_size if path.exists() else 0
        if size < position or not _ends_line(path, position):  # the system may leave zeros where lines were
            what = f"shrank from {position} to {size} bytes" if size < position else "has changed"
            warn(f"{path}: {what} since the checkpoint of step {step}: lines may be lost", RuntimeWarning)
            position = 0
        return _drop_lines(path, step, position) if size else 0


def _drop_lines(path: Path, step: int, position: int) -> int:
    parts = [[0, position]]  # what stays of the file: from where to where
    end, dropped, torn = position, 0, 0
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            start, end = end, end + len(line)
            record = read_line(line)
            number = None if record is None else record.get("step")
            late = isinstance(number, int) and number >= step
            dropped += late
            torn += record is None and bool(line.strip())
            if record is None or late:
                continue
            if parts[-1][1] == start:
                parts[-1][1] = end
            else:
                parts.append([start, end])
    if len(parts) > 1:
        with replace_file(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
            for start, end in parts:
                old.seek(start)
                new.writelines(old.read(min(_PIECE, end - at)) for at in range(start, end, _PIECE))
    elif parts[0][1] < end:
        os.truncate(path, parts[0][1])
        sync(path)
    if not _ends_line(path, path.stat().st_size):
        with path.open("ab") as file:
            file.write(b"\n")
    if torn:
        logging.getLogger(__name__).warning("%s: %d lines are incomplete and were skipped", path, torn)
    return dropped


def _ends_line(path: Path, position: int) -> bool:
    """Return whether a line of the file ends at this many bytes."""
    if not position:
        return True
    with path.open("rb") as file:
        file.seek(position - 1)
        return file.read(1) == b"\n"


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield an empty file next to ``path`` that only its owner reads; it replaces ``path`` if the block raises nothing.

    Raises:
        OSError: it could not be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
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


def make_private(path: Path) -> None:
    """Restrict reading a file to its owner, where the file system knows owners."""
    try:
        path.chmod(0o600)
    except OSError as error:
        if error.errno not in _UNKNOWN | {errno.EPERM}:
            raise


def from_json(value: object) -> float | None:
    """Return the number that ``plain`` wrote; None for anything else.

    >>> [from_json(x) for x in (1, "Infinity", "1", None, True)]
    [1.0, inf, None, None, None]
    """
    if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in _WORDS):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def plain(value: object) -> object:
    """Return ``value`` as plain JSON: numbers that are not finite as words, arrays as lists, anything else as text.

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
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else json.dumps(float(value))
    return str(value)
