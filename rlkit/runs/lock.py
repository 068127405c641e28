"""One process at a time writes to a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from rlkit.errors import ConfigError

__all__ = ["Lock"]


class Lock:
    """An exclusive lock on a folder, held until ``release`` or the end of the process, however that comes.

    Raises:
        ConfigError: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
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
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Lets others in; may be called twice."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with contextlib.suppress(OSError):  # it is given back whatever close says
                os.close(descriptor)
