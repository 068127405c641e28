"""Agents as harnesses: functions that are called, and commands that are run."""

from __future__ import annotations

import inspect
import json
import os
import re
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import attrs

from rlkit._json import plain
from rlkit.envs import _home
from rlkit.envs._program import Ended, Program, spelled
from rlkit.envs._rows import noted
from rlkit.envs._running import Running
from rlkit.envs.calling import call
from rlkit.envs.protocol import Credit, Message, StepResult
from rlkit.errors import AgentError, ConfigError, DataError
from rlkit.futures import settled

if TYPE_CHECKING:
    from rlkit.gateway import Session

__all__ = ["Command", "CommandAgent", "FunctionAgent", "Scored", "messages_of"]

_LAST = 400  # characters of stderr in a message
_PLACE = re.compile(r"\{\{(?P<escaped>\w+)\}\}|(?P<shell>\$?)\{(?P<field>\w+)\}")
_LOCAL = "127.0.0.1,localhost"


@attrs.frozen
class Scored:
    """A task, and what the agent's result is worth.

    Attributes:
        row: the task.
        reward: called with the result and the row.
        told: whether the reward wants ``messages=`` too.
        note: where an error of the reward was raised.
        credit: which branches are trained.
    """

    row: Mapping[str, object]
    reward: Callable[..., object]
    told: bool
    note: str
    credit: Credit

    async def result(self, result: object, session: Session) -> StepResult:
        """Return what the episode was worth."""
        more = {"messages": messages_of(session)} if self.told else {}

        def score() -> object:
            return self.reward(result, self.row, **more)

        with noted(self.note):
            value = await call(score, where="reward")
        info = {"answer": self.row["answer"]} if "answer" in self.row else {}
        return StepResult("", cast("float | None", value), terminated=True, info=info)


def messages_of(session: Session) -> Sequence[Message]:
    """Return what was said in the branch that ended last."""
    branches = session.branches
    return max(branches, key=lambda branch: branch.last.number).messages if branches else []


class FunctionAgent:
    """An agent that is a function of the task and the session, plain or ``async``."""

    def __init__(self, run: Callable[..., object], scored: Scored) -> None:
        self._run = run
        self._scored = scored
        self.credit = scored.credit

    async def play(self, session: Session, seed: int) -> StepResult:  # noqa: ARG002  # the session's draws have it
        """Call it, and score what it returns."""
        task = dict(self._scored.row)
        if inspect.iscoroutinefunction(self._run):
            result = await self._run(task, session)
        else:
            result = await call(self._run, task, session, where="agent")
        return await self._scored.result(result, session)

    def close(self) -> None:
        """Nothing to free."""


@attrs.frozen
class Command:
    """A command that is an agent.

    Attributes:
        arguments: the program and its arguments; ``{field}`` stands for a field of the task.
        environment: variables beside those of this process and those of the session.
        folder: where it runs; None: here.
        engine: the program that runs containers.
        image: the container's image; None: there is no container.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str | None = None
    engine: str = ""
    image: str | None = None

    def check(self, where: str, row: Mapping[str, object]) -> None:
        """Raise ConfigError where an argument has a place for a field that the row lacks."""
        for text in self.arguments:
            for place in _PLACE.finditer(text):
                if place["field"] and not place["shell"] and place["field"] not in row:
                    known, name = ", ".join(row), place["field"]
                    what = f"{text!r} names {{{name}}}, which is no field of {where}"
                    raise ConfigError("run", what, f"among: {known}", f"{{{{{name}}}}} is the text {{{name}}}")

    def filled(self, row: Mapping[str, object]) -> list[str]:
        """Return the arguments with the row's fields in their places; ``{{field}}`` and a shell's ``${name}`` stay."""

        def put(place: re.Match[str]) -> str:
            if place["escaped"]:
                return f"{{{place['escaped']}}}"
            value = row.get(place["field"], place[0])
            shell = place["shell"] if place["field"] in row else ""
            return shell + (value if isinstance(value, str) else json.dumps(plain(value)))

        self.check("the task", row)
        return [_PLACE.sub(put, text) for text in self.arguments]

    def program(self, row: Mapping[str, object], variables: Mapping[str, str]) -> tuple[Program, list[str]]:
        """Return the program of an episode, and the command that ends its container, [] where it has none."""
        arguments, ending = self.filled(row), []
        own = {**variables, **self.environment}
        if self.image is not None:
            name = f"rlkit-{secrets.token_hex(8)}"
            place = [] if self.folder is None else ["--workdir", self.folder]
            named = [part for variable in own for part in ("--env", variable)]  # values stay off the command line
            options = ["--rm", "--interactive", "--init", "--network", "host", "--name", name, *place, *named]
            arguments = [self.engine, "run", *options, self.image, *arguments]
            ending = [self.engine, "rm", "--force", name]
        everything = {**os.environ, **own}
        for variable in ("NO_PROXY", "no_proxy"):  # the gateway is on this machine
            everything[variable] = ",".join(filter(None, (everything.get(variable), _LOCAL)))
        folder = self.folder if self.image is None else None
        text = json.dumps(plain(dict(row)), ensure_ascii=False)
        program = Program(arguments, environment=everything, stdin=text.encode(), folder=folder, ending=ending)
        return program, ending


class CommandAgent:
    """An agent that is a program of its own; its result is what it writes to stdout."""

    def __init__(self, command: Command, scored: Scored) -> None:
        self._command = command
        self._scored = scored
        self._program: Program | None = None
        self._running: Running | None = None
        self.credit = scored.credit

    async def play(self, session: Session, seed: int) -> StepResult:  # noqa: ARG002  # the session's draws have it
        """Run it, and score what it wrote.

        Raises:
            AgentError: it cannot be started, or its exit code is not 0.
        """
        variables = await call(session.environment, where="agent")
        self._program, ending = self._command.program(self._scored.row, variables)
        self._running = Running("agent", _run, (self._program, ending), _home.current())
        try:
            ended = cast("Ended", await self._running.result(None))
        except BaseException:
            self._program.kill()
            await settled(self._running.outcome)
            raise
        if ended.code:
            said = ended.stderr.strip()[-_LAST:] or "it wrote nothing to stderr"
            how = f"exit code {ended.code}" if ended.code > 0 else f"ended by signal {-ended.code}"
            raise AgentError(f"agent {spelled(self._command.arguments)!r}: {how}: {said}")
        return await self._scored.result(ended.stdout.strip(), session)

    async def close(self) -> None:
        """End the program, at once if it still runs, and wait until it and what it started are gone."""
        if self._program is not None and self._running is not None:
            self._program.kill(grace=0.0)
            await settled(self._running.outcome)


def _run(program: Program, ending: Sequence[str]) -> Ended:
    try:
        return program.run()
    finally:
        if ending:  # a container outlives the client that started it
            subprocess.run(ending, capture_output=True, check=False, timeout=30)  # noqa: S603


def engine() -> str:
    """Return the program that runs containers.

    Raises:
        ConfigError: there is none, or none that answers.
    """
    problem = ""
    for name in ("podman", "docker"):
        if (path := shutil.which(name)) is not None:
            told = subprocess.run(  # noqa: S603
                [path, "version"], capture_output=True, text=True, errors="replace", check=False, timeout=60
            )
            if told.returncode == 0:
                return path
            said = " ".join(told.stderr.split())[-_LAST:]
            problem = problem or f"is given, and {name} cannot run containers here: {said}"
    if problem:
        raise ConfigError("image", problem, "a daemon that runs, or no image")
    raise ConfigError("image", "is given, and neither podman nor docker is on the PATH", "one of them, or no image")


def as_task(where: str, row: object) -> dict[str, object]:
    """Return a row as a task: a mapping as it is, anything else as its prompt.

    Raises:
        DataError: a field's name is no text, or JSON cannot say it.
    """
    task = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    if not task or not all(isinstance(name, str) for name in task):
        raise DataError(where, f"has the fields {list(task)}", "a task: text, messages, or fields by name")
    return task
