"""The process in which verifiers plays: started when it is first needed, and again if it was lost."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import attrs

from rlkit.envs import _home
from rlkit.envs._child import Child
from rlkit.errors import AgentError, ConfigError

_CHILD = Path(__file__).with_name("_verifiers_child.py")
_LOCAL = "127.0.0.1,localhost"

Answer = Mapping[str, object]


@attrs.define(eq=False)
class _Life:
    """One process, and who waits for it."""

    child: Child
    waiting: dict[int, concurrent.futures.Future[Answer]] = attrs.field(factory=dict)
    lost: bool = False


class Worker:
    """Episodes of one environment, all in one process.

    Args:
        python: an interpreter that has verifiers.
        first: what the process is told first.
        environment: variables beside those of this process.
        timeout: seconds that it has to start.
    """

    def __init__(
        self, python: str, first: Mapping[str, object], environment: Mapping[str, str], timeout: float
    ) -> None:
        self._python = python
        self._first = first
        self._environment = environment
        self._timeout = timeout
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._life: _Life | None = None
        self.about: Answer = {}

    def start(self) -> None:
        """Start the process, if it does not run.

        Raises:
            ConfigError: it does not start, or the environment cannot be loaded there.
        """
        with self._lock:
            if self._life is None or self._life.lost or not self._life.child.runs:
                self._life = self._started()

    def _started(self) -> _Life:
        variables = {**os.environ, **self._environment}
        variables["PATH"] = os.pathsep.join([str(Path(self._python).parent), variables.get("PATH", "")])  # its uv
        modules = (str(self._first["folder"]), variables.get("PYTHONPATH"))  # what it starts looks there, too
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, modules))
        for name in ("NO_PROXY", "no_proxy"):  # the gateway is on this machine
            variables[name] = ",".join(filter(None, (variables.get(name), _LOCAL)))
        try:
            child = Child([self._python, str(_CHILD)], folder=str(self._first["folder"]), environment=variables)
        except OSError as error:
            raise ConfigError(f"rlkit.envs.verifiers: {self._python!r} cannot be started: {error}") from error
        _write(child, self._first)
        line = child.line(self._timeout)
        told = json.loads(line) if line.startswith("{") else {}
        if "size" not in told:
            said = told.get("failed") or f"it did not start within {self._timeout:g} s{child.said()}"
            child.end()
            raise ConfigError(f"rlkit.envs.verifiers: {self._python}: {said}")
        self.about = told
        life = _Life(child)
        _home.threads.start(lambda: _listen(life))
        return life

    def begin(self, asked: Mapping[str, object]) -> Playing:
        """Begin an episode.

        Raises:
            AgentError: the process was lost.
        """
        self.start()
        life, number = cast("_Life", self._life), next(self._numbers)
        outcome: concurrent.futures.Future[Answer] = concurrent.futures.Future()
        with self._lock:
            life.waiting[number] = outcome
            try:
                _write(life.child, {"id": number, **asked})
            except OSError as error:
                raise _lost(life) from error
            if life.lost and not outcome.done():
                outcome.set_exception(_lost(life))
        return Playing(self, life, number, outcome)

    def cancel(self, life: _Life, number: int) -> None:
        """End an episode that nobody waits for any more."""
        with self._lock, contextlib.suppress(OSError, ValueError):
            _write(life.child, {"cancel": number})


@attrs.frozen(eq=False)
class Playing:
    """An episode under way.

    Attributes:
        outcome: what it came to.
    """

    _worker: Worker
    _life: _Life
    _number: int
    outcome: concurrent.futures.Future[Answer]

    def cancel(self) -> None:
        """End it."""
        if not self.outcome.done():
            self._worker.cancel(self._life, self._number)


def _write(child: Child, message: Mapping[str, object]) -> None:
    stdin = child.process.stdin
    if stdin is not None:
        stdin.write(json.dumps(message) + "\n")
        stdin.flush()


def _listen(life: _Life) -> None:
    """Hand on what the process says until it ends; who still waits then is told so."""
    with contextlib.suppress(OSError, ValueError):
        for line in life.child.process.stdout or ():
            told = json.loads(line)
            outcome = life.waiting.pop(told["id"], None)
            if outcome is not None:
                outcome.set_result(told)
    life.lost = True
    for outcome in list(life.waiting.values()):
        if not outcome.done():
            outcome.set_exception(_lost(life))


def _lost(life: _Life) -> AgentError:
    return AgentError(f"rlkit.envs.verifiers: the process was lost{life.child.said()}")
