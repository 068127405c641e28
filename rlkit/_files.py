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
from rlkit.errors import CheckpointError

# Errors of systems that cannot sync, on network drives and some that are mounted by programs.
_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_warned: set[int] = set()  # devices
_PIECE = 1 << 20  # bytes that are copied at a time


@contextlib.contextmanager
def as_checkpoint_error(path: Path, done: str) -> Iterator[None]:
    """Turn the system's errors into a CheckpointError: ``path`` cannot be ``done``."""
    try:
        yield
    except OSError as error:
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
        return _rewind(path, step, position) if size else 0


def _rewind(path: Path, step: int, position: int) -> int:
    dropped = torn = 0
    end, gap, scattered = position, False, False
    for line, record, late in _read_tail(path, step, position):
        dropped += late
        torn += record is None and bool(line.strip())
        if late or record is None:
            gap = True
        elif gap:
            scattered = True
        else:
            end += len(line)
    if scattered:
        with replace_file(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
            for start in range(0, position, _PIECE):
                new.write(old.read(min(_PIECE, position - start)))
            tail = _read_tail(path, step, position)
            new.writelines(line for line, record, late in tail if record is not None and not late)
    elif gap:
        os.truncate(path, end)
        sync(path)
    if not _ends_line(path, path.stat().st_size):
        with path.open("ab") as file:
            file.write(b"\n")
    if torn:
        logging.getLogger(__name__).warning("%s: %d lines are incomplete and were skipped", path, torn)
    return dropped


def _read_tail(path: Path, step: int, position: int) -> Iterator[tuple[bytes, dict[str, object] | None, bool]]:
    """Yield each line after ``position``, its record, and whether it is of ``step`` or later."""
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            record = read_line(line)
            found = None if record is None else record.get("step")
            yield line, record, isinstance(found, int) and found >= step


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
