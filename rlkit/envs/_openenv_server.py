"""A server of an OpenEnv environment, started on this machine when it is first needed."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from rlkit.envs._child import Child
from rlkit.errors import EnvError

_CHILD = Path(__file__).with_name("_openenv_child.py")


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
        self._child: Child | None = None
        self._url = ""

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
            if self._child is None or not self._child.runs:
                self._child = self._started()
            return self._url

    def _started(self) -> Child:
        try:
            child = Child([self._python, str(_CHILD), self._folder, self._app], folder=self._folder)
        except OSError as error:
            raise EnvError(f"{self.where}: cannot be started: {error}") from error
        line = child.line(self._timeout)
        if not line.strip().isdigit():
            said = child.said()
            child.end()
            raise EnvError(f"{self.where}: did not start (it has {self._timeout:g} s){said}")
        self._url = f"http://127.0.0.1:{int(line)}"
        return child
