"""A lock, so that only one process at a time writes to a run."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import uuid
import weakref
from pathlib import Path
from typing import Protocol

from rlkit._runtime import warn
from rlkit.errors import ConfigError

__all__ = ["Lock", "OpenRun", "opened", "take_over"]


class OpenRun(Protocol):
    """A run, with the attributes that decide whether another may replace it; the attributes are those of ``Run``."""

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
        raise ConfigError(f"{folder} is in use by another thread of this process, which must close it: run.close()")
    if run.step > run.saved:
        message = (
            f"{folder} was open in this process at step {run.step}; that run is closed, and steps after its last "
            f"checkpoint, step {run.saved}, will be repeated"
        )
        warn(message, RuntimeWarning)
    run.close()


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_ours: set[Path] = set()  # the files that this process holds, of those that replace locks


class Lock:
    """An exclusive lock on a folder, held until ``release`` or the end of the process, however that comes.

    Where there are no locks (some network drives, Windows), a file with the name of the machine and the process
    replaces it, and a warning says so: of a process that was killed on another machine it has to be removed by hand.

    Raises:
        ConfigError: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        self._descriptor: int | None = None
        self._file: Path | None = None
        if fcntl is None:
            self._stand_in(folder, "this system has no file locks")
            return
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            self.release()
            who = f"process {holder}" if holder.isdecimal() else "another process"
            if holder == str(os.getpid()):
                who = "this process, which must close it first (run.close())"
            raise ConfigError(f"{folder} is in use by {who}; a run has one writer") from error
        except OSError as error:
            self.release()
            if error.errno not in _NO_LOCKS:
                raise
            self._stand_in(folder, f"the file system of {folder} has no locks ({error.strerror})")
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # it is released even if close fails
                os.close(descriptor)
        if self._file is not None:
            file, self._file = self._file, None
            _ours.discard(file)
            with contextlib.suppress(OSError):
                file.unlink()

    def _stand_in(self, folder: Path, why: str) -> None:
        """Create a file exclusively, as a substitute for a lock."""
        path = folder.absolute() / "lock.held"
        mine = f"{socket.gethostname()} {os.getpid()} {uuid.uuid4().hex}"
        for _ in range(10):
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            except FileExistsError:
                _make_way(path)
                continue
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(mine)
            self._file = path
            _ours.add(path)
            warn(f"{why}: the file {path} replaces the lock while the run is open", RuntimeWarning)
            return
        raise ConfigError(f"{path} is created and removed again and again: several processes try to write to the run")


def _make_way(path: Path) -> None:
    """Remove the file of a process that is gone. Raises ConfigError: it may still run."""
    try:
        holder = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return
    host, pid = [*holder.split(), "", ""][:2]
    if not pid.isdecimal() or host != socket.gethostname() or path in _ours or _alive(int(pid)):
        who = f"process {pid} on {host}" if pid.isdecimal() else "another process"
        text = f"{path.parent} is in use by {who}; a run has one writer. If that process has ended, remove {path}"
        raise ConfigError(text)
    aside = path.with_name(f".lock.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        path.rename(aside)
        if aside.read_text("utf-8", errors="replace") != holder:  # and has its own file there by now
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _alive(pid: int) -> bool:
    """Return whether a process of this machine is alive; True where that is unknown."""
    if pid == os.getpid():  # it had this one's number before: a container began anew
        return False
    if os.name == "nt":  # where the check would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
