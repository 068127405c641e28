"""Files that outlast a power failure, as far as the file system can, and are there whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlkit._warn import warn

__all__ = ["append", "owned", "replacing", "synced"]

# What systems answer where there is no such thing as syncing, on network drives and some that are mounted by programs.
_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_warned: set[int] = set()  # devices


def append(path: Path, lines: Iterable[str], *, mode: int = 0o600) -> None:
    """Append lines to a file, each in one write; first end a line that a crash left unfinished.

    Args:
        path: made with ``mode`` if it is not there. Several processes may append to it.
        lines: without their ends.
        mode: who may read and write a new file.

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
                raise OSError("the line was not written to its end")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give an empty file beside ``path`` that only its owner reads; it replaces ``path`` if the block raises nothing.

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

    A file system that cannot do it is no reason to stop: of files it is warned once for each, of folders not at all,
    as databases have it, since most that cannot sync a folder write names at once.

    Raises:
        OSError: it could be synced, and was not.
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
            text = f"the file system of {path} cannot sync: a power failure may cost what was written last"
            warn(text, RuntimeWarning)
    finally:
        os.close(descriptor)


def owned(path: Path) -> None:
    """Let nobody but its owner read a file, where the file system knows owners."""
    try:
        path.chmod(0o600)
    except OSError as error:
        if error.errno not in _UNKNOWN | {errno.EPERM}:
            raise
