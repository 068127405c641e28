"""Environments of verifiers 0.4, in their own process: its harnesses talk to the policy through a gateway."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from rlkit import _check
from rlkit._process import Child, ChildLost, bypass_proxies
from rlkit.envs.protocol import Credit, Harness, StepResult, Tasks, TaskSettings, check_credit, check_name
from rlkit.errors import AgentError, ConfigError
from rlkit.futures import wait_done

if TYPE_CHECKING:
    from rlkit.gateway import Session

__all__ = ["verifiers"]

_CHILD = Path(__file__).with_name("_verifiers_child.py")


@attrs.define(eq=False, repr=False)
class Worker:
    """Episodes of one environment, all in one process.

    Args:
        python: an interpreter that has verifiers.
        settings: the first message to the process.
        environment: variables besides those of this process.
        timeout: seconds that it has to start.

    Attributes:
        about: what the process says of the environment.
    """

    _python: str
    _settings: Mapping[str, object]
    _environment: Mapping[str, str]
    _timeout: float
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    child: Child | None = attrs.field(default=None, init=False)
    about: Mapping[str, Any] = attrs.field(factory=dict, init=False)

    def start(self) -> Child:
        """Start the process, if it does not run.

        Raises:
            ConfigError: it does not start, or the environment cannot be loaded there.
        """
        with self._lock:
            if self.child is None or self.child.lost:
                self.child = self._start()
            return self.child

    def _start(self) -> Child:
        folder = str(self._settings["folder"])
        variables = {**os.environ, **self._environment}
        variables["PATH"] = os.pathsep.join([str(Path(self._python).parent), variables.get("PATH", "")])  # its uv
        # what it starts looks there, too
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, variables.get("PYTHONPATH"))))
        where = f"rlkit.envs.verifiers: {self._python}"
        try:
            child = Child([self._python, str(_CHILD)], folder=folder, environment=bypass_proxies(variables))
        except OSError as error:
            raise ConfigError(f"{where}: cannot be started: {error}") from error
        try:
            self.about = child.ask(self._settings)[1].result(self._timeout)
        except (ChildLost, TimeoutError) as error:
            why = str(error) or f"the process did not start within {self._timeout:g} s{child.written}"
            child.end()
            raise ConfigError(f"{where}: {why}") from None
        if "failed" in self.about:
            child.end()
            raise ConfigError(f"{where}: {self.about['failed']}")
        return child

    def begin(self, episode: Mapping[str, object]) -> tuple[Child, int, Future[Mapping[str, Any]]]:
        """Begin an episode; return the process, the episode's number there, and what it will come to."""
        child = self.start()
        return child, *child.ask(episode)


_INSTALL = "python -m venv .verifiers && .verifiers/bin/python -m pip install verifiers==0.4.0 uv"


def verifiers(
    taskset: str | Mapping[str, object],
    *,
    harness: str | Mapping[str, object] | None = None,
    config: Mapping[str, object] | None = None,
    python: str | os.PathLike[str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    size: int | None = None,
    credit: Credit = "every",
    timeout: float = 120.0,
    split: str = "train",
    name: str | None = None,
    settings: TaskSettings | None = None,
) -> Tasks:
    """Return tasks of a verifiers environment: its taskset, its harness, its rewards and stop conditions, unchanged.

    verifiers pins packages that rlkit uses in other versions, so it lives in its own environment, and one process
    there plays the episodes. Each is a session of ``rlkit.gateway``: what the harness asks is answered by the policy,
    token for token as it is trained.

    Args:
        taskset: the id of an installed taskset, a module in ``folder``, or the taskset's config with its ``"id"``.
        harness: the id of a harness, or its config with its ``"id"``, for the seat ``agent``; None: the taskset's own,
            or "bash". What "null" and "bash" run is set up by uv.
        config: anything else of the environment's config, such as ``{"agent": {"max_turns": 5}}`` or the ``"id"`` of an
            environment. Agents run as subprocesses unless it names a runtime.
        python: an interpreter that has verifiers; None: this one, if it has it.
        folder: where modules of yours are, and where the process runs; None: here.
        environment: variables for the process, besides those of this one.
        size: how many of the taskset's tasks; None: all.
        credit: which branches are trained, as of ``rlkit.envs.agent``.
        timeout: seconds that the process has to start, > 0.
        split: its name, for metrics and the order of tasks; which tasks there are is up to the taskset's config.
        name: for metrics; None: the environment's id.
        settings: what these tasks want to have different.

    The reward is the sum of the environment's weighted rewards; these and its metrics are in ``info``. Limits of the
    environment's own (``max_turns``, ``max_total_tokens``, ...) truncate. An episode that verifiers does not call ok
    has failed, and so has one with several agents to be trained, or one in which the policy played a seat that is not
    to be trained, and all that are under way when the process is lost, which is started again.

    Raises:
        ConfigError: there is no verifiers, or the environment cannot be loaded; the message says why.
    """
    interpreter = _interpreter(python)
    place = Path.cwd() if folder is None else Path(folder)
    _check.require(place.is_dir(), "folder", str(folder), "a folder that exists")
    _check.optional(_check.integer, "size", size, low=1)
    _check.real("timeout", timeout, above=0.0)
    check_credit(credit)
    first = {"config": _config(taskset, harness, config), "size": size, "folder": str(place.resolve())}
    worker = Worker(interpreter, first, dict(environment or {}), timeout)
    worker.start()
    answers: list[object] = worker.about["answers"]
    label = str(worker.about["name"]) if name is None else check_name("name", name)

    def make(index: int) -> Harness:
        return _Episode(worker, index, answers[index], credit)

    return Tasks(make, worker.about["size"], name=label, split=split, settings=settings)


def _interpreter(python: str | os.PathLike[str] | None) -> str:
    if python is None:
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError(
                f"rlkit.envs.verifiers: verifiers is not installed here. Run {_INSTALL}, and pass "
                "python='.verifiers/bin/python'"
            )
        return sys.executable
    found = shutil.which(os.fspath(python))
    if found is None:
        raise ConfigError("python", f"is {os.fspath(python)!r}", "an interpreter", f"make one with {_INSTALL}")
    return str(Path(found).absolute())  # not resolved: a link says which environment it is of


def _config(
    taskset: str | Mapping[str, object],
    harness: str | Mapping[str, object] | None,
    config: Mapping[str, object] | None,
) -> dict[str, object]:
    """Return the environment's config, as verifiers writes it."""
    for label, value in (("taskset", taskset), ("harness", harness)):
        given = (isinstance(value, str) and value) or (isinstance(value, Mapping) and isinstance(value.get("id"), str))
        if not given and not (label == "harness" and value is None):
            raise ConfigError(label, f"got {_check.describe(value)}", "an id, or a config with its 'id'")
    _check.require(config is None or isinstance(config, Mapping), "config", config, "a mapping")
    made = dict(config or {})
    made["taskset"] = {"id": taskset} if isinstance(taskset, str) else dict(taskset)
    if harness is not None:
        seat = made.get("agent") or {}
        _check.require(isinstance(seat, Mapping), "config['agent']", seat, "a mapping")
        form = {"id": harness} if isinstance(harness, str) else dict(harness)
        made["agent"] = {**cast("Mapping[str, object]", seat), "harness": form}
    return made


@attrs.define(eq=False, repr=False)
class _Episode:
    """One episode of a harness."""

    _worker: Worker
    _index: int
    _answer: object
    credit: Credit
    _playing: tuple[Child, int, Future[Mapping[str, Any]]] | None = attrs.field(default=None, init=False)

    async def play(self, session: Session, seed: int) -> StepResult:  # noqa: ARG002  # the session's draws have it
        episode = {"index": self._index, "url": session.base_url, "model": session.model}
        self._playing = await asyncio.to_thread(self._worker.begin, episode)
        outcome = self._playing[-1]
        await wait_done(outcome)
        try:
            told = outcome.result()
        except ChildLost as error:
            raise AgentError(f"rlkit.envs.verifiers: the process was lost: {error}") from None
        if "failed" in told:
            raise AgentError(f"rlkit.envs.verifiers: {str(told['failed'])[:1000]}")
        stop = str(told["stop"] or "")
        cut = stop.startswith("max_")  # a limit of the environment's own
        info = {**told["metrics"], "stop": stop}
        info |= {} if self._answer is None else {"answer": self._answer}
        return StepResult("", told["reward"], terminated=not cut, truncated=cut, info=info)

    def close(self) -> None:
        """End the episode, if it is under way."""
        if self._playing is not None:
            child, number, outcome = self._playing
            if not outcome.done():  # its result is no longer needed
                child.send({"cancel": number})
