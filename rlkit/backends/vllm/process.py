"""A server of vLLM in a process group of its own."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from rlkit.backends.vllm.keeper import GRACE
from rlkit.errors import BackendError

__all__ = ["VllmProcess", "free_port"]

_LINES, _LINE = 400, 2000  # of its log that are kept, and characters of each
_PORTS = range(20_000, 32_000)
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")  # of this environment, not of the server's


class VllmProcess:
    """Starts a server, and ends it with all that it started: on ``stop``, and when this process dies.

    Args:
        command: of the server.
        environment: variables beside this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = list(command)
        self._environment = {k: v for k, v in os.environ.items() if k not in _OURS} | dict(environment)
        self._log: deque[str] = deque(maxlen=_LINES)
        self._keeper: subprocess.Popen[bytes] | None = None
        self.pid: int | None = None

    def start(self) -> None:
        """Start it."""
        self._log.clear()
        self.pid = None
        self._keeper = subprocess.Popen(  # noqa: S603  # the interpreter that the user names, without a shell
            [sys.executable, "-I", str(Path(__file__).with_name("keeper.py")), *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is this process's
        )
        assert self._keeper.stdout is not None  # noqa: S101  # it is a pipe
        threading.Thread(target=self._copy, args=(self._keeper.stdout,), daemon=True).start()

    @property
    def status(self) -> int | None:
        """What it ended with; None while it runs."""
        return None if self._keeper is None else self._keeper.poll()

    @property
    def log(self) -> str:
        """The end of what it said."""
        return "\n".join(self._log)

    def stop(self) -> None:
        """End it. May be called twice."""
        keeper = self._keeper
        if keeper is None:
            return
        assert keeper.stdin is not None  # noqa: S101  # it is a pipe
        with contextlib.suppress(OSError):
            keeper.stdin.close()
        try:
            keeper.wait(GRACE + 5)
        except subprocess.TimeoutExpired:
            for pid in (self.pid, keeper.pid):
                with contextlib.suppress(OSError, TypeError):
                    os.killpg(pid, signal.SIGKILL)  # type: ignore[arg-type]
            keeper.wait()

    def _copy(self, source: IO[bytes]) -> None:
        with source, contextlib.suppress(OSError, ValueError):
            for line in iter(lambda: source.readline(_LINE), b""):
                text = line.decode("utf-8", "replace").rstrip()
                if self.pid is None and text.startswith("rlkit: process "):
                    self.pid = int(text.rpartition(" ")[2])
                elif text:
                    self._log.append(text)


def free_port() -> int:
    """Return a port of this machine that nobody listens on.

    It is below those that systems give to connections: a server that is started takes it only when it has loaded much.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise BackendError("sampler='vllm': no port of this machine is free")
