"""``Child``: a rank that this process starts, and that ends with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping

from rlkit import _orphans

__all__ = ["LOOPBACK", "Child"]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_MODULE = "rlkit.backends.local.serve"
_LOG = 2000  # characters of what it wrote that an error shows


class Child:
    """A process that serves.

    Args:
        rank: its number.
        settings: what it reads first, see ``rlkit.backends.local.serve``.
        threads: of torch; None leaves them.
    """

    def __init__(self, rank: int, settings: Mapping[str, object], threads: int | None) -> None:
        self.rank = rank
        paths = [path or str(os.getcwd()) for path in sys.path]  # noqa: PTH109  # "" in a notebook
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if settings.get("host") in (None, "127.0.0.1"):
            environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the process
        self._process = subprocess.Popen(  # noqa: S603  # this interpreter, a module of this package
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is the user's process's
        )
        self.pid = self._process.pid
        _orphans.adopt(self.pid)
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        with contextlib.suppress(OSError), self._process.stdin as stdin:  # it is gone already: ``status`` says so
            stdin.write(json.dumps({**settings, "rank": rank, "threads": threads}).encode())

    @property
    def status(self) -> int | None:
        """What it ended with; None while it runs."""
        known = self._process.returncode
        if known is None and self._process.poll() is not None:
            _orphans.release(self.pid)
        return self._process.returncode

    def describe(self, wait: float = 0.0) -> str:
        """Say how it ended, if it does in ``wait`` seconds, and the last that it wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        status = self.status
        if status is None:
            how = "is there still"
        elif status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        text = self._written
        return f"process {self.pid} {how}" + (f"; it wrote: {text}" if text else "")

    @property
    def _written(self) -> str:
        """The last that it wrote, as long as it has not ended by ``end``."""
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG))
        return self._log.read().decode("utf-8", "replace").strip()

    def end(self, patience: float) -> None:
        """Wait until it has ended, ``patience`` seconds at most, and kill it then. May be called twice."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        _orphans.release(self.pid)
        self._log.close()
