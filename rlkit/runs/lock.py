"""One process at a time writes to a run."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import uuid
from pathlib import Path

from rlkit._warn import warn
from rlkit.errors import ConfigError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Lock"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_ours: set[Path] = set()  # the files that this process holds, of those that stand for locks


class Lock:
    """An exclusive lock on a folder, held until ``release`` or the end of the process, however that comes.

    Where there are no locks (some network drives, Windows), a file with the name of the machine and the process stands
    for one, and a warning says so: of a process that was killed on another machine it has to be removed by hand.

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
                who = "this very process, which has to close it first (run.close())"
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
        """Let others in; may be called twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # it is given back whatever close says
                os.close(descriptor)
        if self._file is not None:
            file, self._file = self._file, None
            _ours.discard(file)
            with contextlib.suppress(OSError):
                file.unlink()

    def _stand_in(self, folder: Path, why: str) -> None:
        """Make a file that can be there once only."""
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
            warn(f"{why}: {path} stands for one while the run is open", RuntimeWarning)
            return
        raise ConfigError(f"{path} comes and goes: several processes want to write to the run")


def _make_way(path: Path) -> None:
    """Remove the file of a process that is gone. Raises ConfigError: it is not known to be gone."""
    try:
        holder = path.read_text("utf-8", errors="replace")
    except FileNotFoundError:
        return
    host, pid = [*holder.split(), "", ""][:2]
    if not pid.isdecimal() or host != socket.gethostname() or path in _ours or _alive(int(pid)):
        who = f"process {pid} on {host}" if pid.isdecimal() else "another process"
        text = f"{path.parent} is in use by {who}; a run has one writer. If it is gone, remove {path}"
        raise ConfigError(text)
    aside = path.with_name(f".lock.{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        path.rename(aside)
        if aside.read_text("utf-8", errors="replace") != holder:  # and has its own file there by now
            with contextlib.suppress(FileExistsError):
                os.link(aside, path)
        aside.unlink()


def _alive(pid: int) -> bool:
    """Return whether a process of this machine goes on; True where that cannot be told."""
    if pid == os.getpid():  # it had this one's number before: a container began anew
        return False
    if os.name == "nt":  # where asking would end it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
