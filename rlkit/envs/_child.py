"""A process that serves environments for as long as whoever started it, and is ended with its process group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import IO

from rlkit import _orphans

_LOCAL = "127.0.0.1,localhost"
_SAID = 500  # characters of what it wrote to stderr, for messages


class Child:
    """A process with pipes for stdin and stdout; it lasts as long as this object, or the program.

    It is ended with its process group also where the program is killed.

    Args:
        arguments: the command.
        folder: where it runs.
        environment: all its variables; None: this process's.
    """

    def __init__(self, arguments: Sequence[str], *, folder: str, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        _orphans.prepare()
        self.process = subprocess.Popen(  # noqa: S603  # what the user names
            list(arguments),
            cwd=folder,
            env=None if environment is None else dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        _orphans.adopt(self.process.pid)
        self.end = weakref.finalize(self, _end, self.process, self._log)

    @property
    def runs(self) -> bool:
        """Return whether it has not ended."""
        return self.process.poll() is None

    def line(self, timeout: float) -> str:
        """Return the first line of its stdout; "" if it ends or takes too long."""
        stdout = self.process.stdout
        until = time.monotonic() + timeout
        while stdout is not None and (left := until - time.monotonic()) > 0:
            if select.select([stdout], [], [], left)[0]:
                return stdout.readline()
        return ""

    def said(self) -> str:
        """Return the end of what it wrote to stderr, for a message."""
        return "" if self._log.closed else said(self._log, _SAID)


def said(log: IO[str], most: int, *, numbered: bool = False) -> str:
    """Return the last ``most`` characters of a log, for a message; ``numbered``: its first line is our own."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 4 * most, max(0, size - 4 * most)).decode("utf-8", "replace")
    if numbered and size <= 4 * most:
        text = text.partition("\n")[2]
    end = " ".join(text.split())[-most:]
    return f"; its output: {end}" if end else ""


def past_proxies(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a program's variables with which it finds the gateway, which is on this machine, behind a proxy too."""
    kept = {name: ",".join(filter(None, (variables.get(name), _LOCAL))) for name in ("NO_PROXY", "no_proxy")}
    return {**variables, **kept}


def _end(process: subprocess.Popen[str], log: IO[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    _orphans.release(process.pid)
    process.wait()
    for stream in (process.stdin, process.stdout, log):
        if stream is not None:
            with contextlib.suppress(OSError):  # output that is no longer read
                stream.close()
