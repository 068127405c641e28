"""A server of an OpenEnv environment, started on this machine when it is first needed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from pathlib import Path
from typing import IO

from rlkit.errors import EnvError

_CHILD = Path(__file__).with_name("_openenv_child.py")
_SAID = 500  # characters of what a server wrote to stderr, for messages


class LocalServer:
    """An app in a process of its own, which lasts as long as this object, or the program.

    Args:
        app: "module:app".
        python: the interpreter that has the environment's packages; None: this one.
        folder: where the module is looked for first, and where the server runs; None: here.
        timeout: seconds that it has to start.
    """

    def __init__(self, app: str, *, python: str | None, folder: str | None, timeout: float) -> None:
        self._app = app
        self._python = sys.executable if python is None else python
        self._folder = os.getcwd() if folder is None else folder  # noqa: PTH109
        self._timeout = timeout
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._url = ""
        self._log: IO[str] | None = None

    @property
    def where(self) -> str:
        """Its name in messages."""
        return f"rlkit.envs.openenv: server {self._app!r}"

    def url(self) -> str:
        """Return where it listens; start it if it does not run.

        Raises:
            EnvError: it ended, or did not listen in time.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            return self._url

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # lasts as long as the process
        self._process = subprocess.Popen(  # noqa: S603  # what the user names
            [self._python, str(_CHILD), self._folder, self._app],
            cwd=self._folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process, self._log)
        line = _line(self._process, self._timeout)
        if not line.strip().isdigit():
            said = self.said()
            _end(self._process, self._log)
            raise EnvError(f"{self.where}: did not start (it has {self._timeout:g} s){said}")
        self._url = f"http://127.0.0.1:{int(line)}"

    def said(self) -> str:
        """Return the end of what it wrote to stderr."""
        if self._log is None or self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4 * _SAID, max(0, size - 4 * _SAID)).decode("utf-8", "replace")
        said = " ".join(text.split())[-_SAID:]
        return f"; it said: {said}" if said else ""


def _line(process: subprocess.Popen[str], timeout: float) -> str:
    """Return the first line of a process's stdout; "" if it ends or takes too long."""
    assert process.stdout is not None  # noqa: S101
    until = time.monotonic() + timeout
    while (left := until - time.monotonic()) > 0:
        if select.select([process.stdout], [], [], left)[0]:
            return process.stdout.readline()
    return ""


def _end(process: subprocess.Popen[str], log: IO[str]) -> None:
    """End a process with its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            stream.close()
