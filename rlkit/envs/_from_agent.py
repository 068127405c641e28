"""Agents that know nothing of rlkit as environments: functions and programs that talk to an endpoint."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, cast

import attrs

from rlkit import _check
from rlkit._files import plain
from rlkit._process import Program, ProgramResult, bypass_proxies, describe_command
from rlkit.envs._prompts import name_of, note_errors, read_rows
from rlkit.envs.calling import Call, call
from rlkit.envs.protocol import Credit, Harness, Message, StepResult, Tasks, TaskSettings, check_credit
from rlkit.errors import AgentError, ConfigError, DataError
from rlkit.futures import wait_done

if TYPE_CHECKING:
    from rlkit.gateway import Session

__all__ = ["Command", "CommandAgent", "FunctionAgent", "ScoredTask", "agent", "messages_of"]

_LAST = 400  # characters of stderr in a message
_PLACE = re.compile(r"\{(\w+)\}")


@attrs.frozen
class ScoredTask:
    """A task, and the reward of the agent's result.

    Attributes:
        row: the task.
        reward: called with the result and the row.
        wants_messages: whether the reward wants ``messages=`` too.
        note: where an error of the reward was raised.
        credit: which branches are trained.
    """

    row: Mapping[str, object]
    reward: Callable[..., object]
    wants_messages: bool
    note: str
    credit: Credit

    async def result(self, result: object, session: Session) -> StepResult:
        """Return the episode's final step with its reward."""
        more = {"messages": messages_of(session)} if self.wants_messages else {}

        def score() -> object:
            return self.reward(result, self.row, **more)

        with note_errors(self.note):
            value = await call(score, where="reward")
        info = {"answer": self.row["answer"]} if "answer" in self.row else {}
        return StepResult("", cast("float | None", value), terminated=True, info=info)


def messages_of(session: Session) -> Sequence[Message]:
    """Return what was said in the branch that ended last."""
    branches = session.branches
    return max(branches, key=lambda branch: branch.last.number).messages if branches else []


@attrs.frozen(eq=False, repr=False)
class FunctionAgent:
    """An agent that is a function of the task and the session, plain or ``async``."""

    _run: Callable[..., object]
    _scored: ScoredTask

    @property
    def credit(self) -> Credit:
        """Which branches are trained."""
        return self._scored.credit

    async def play(self, session: Session, seed: int) -> StepResult:  # noqa: ARG002  # the session's draws have it
        """Call it, and score what it returns."""
        task = dict(self._scored.row)
        if inspect.iscoroutinefunction(self._run):
            result = await self._run(task, session)
        else:
            result = await call(self._run, task, session, where="agent")
        return await self._scored.result(result, session)

    def close(self) -> None:
        """Do nothing: there is nothing to free."""


@attrs.frozen
class Command:
    """A command that is an agent.

    Attributes:
        arguments: the program and its arguments; ``{field}`` is replaced by that field of the task, if it has one.
        environment: variables besides those of this process and those of the session.
        folder: where it runs; None: here.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str | None = None

    def program(self, row: Mapping[str, object], variables: Mapping[str, str]) -> Program:
        """Return the program of an episode."""

        def fill(place: re.Match[str]) -> str:
            value = row.get(place[1], place[0])
            return value if isinstance(value, str) else json.dumps(plain(value))

        arguments = [_PLACE.sub(fill, text) for text in self.arguments]
        everything = bypass_proxies({**os.environ, **variables, **self.environment})
        task = json.dumps(plain(dict(row)), ensure_ascii=False).encode()
        return Program(arguments, environment=everything, stdin=task, folder=self.folder)


class CommandAgent:
    """An agent that is its own program; its result is what it writes to stdout."""

    def __init__(self, command: Command, scored: ScoredTask) -> None:
        self._command = command
        self._scored = scored
        self._program: Program | None = None
        self._running: Call | None = None
        self.credit = scored.credit

    async def play(self, session: Session, seed: int) -> StepResult:  # noqa: ARG002  # the session's draws have it
        """Run it, and score what it wrote.

        Raises:
            AgentError: it cannot be started, or its exit code is not 0.
        """
        variables = await call(session.environment, where="agent")
        self._program = self._command.program(self._scored.row, variables)
        self._running = Call("agent", self._program.run)
        try:
            ended = cast("ProgramResult", await self._running.result(None))
        except BaseException:
            self._program.kill()
            await wait_done(self._running.outcome)
            raise
        if ended.code:
            said = ended.stderr.strip()[-_LAST:] or "it wrote nothing to stderr"
            how = f"exit code {ended.code}" if ended.code > 0 else f"ended by signal {-ended.code}"
            raise AgentError(f"agent {describe_command(self._command.arguments)!r}: {how}: {said}")
        return await self._scored.result(ended.stdout.strip(), session)

    async def close(self) -> None:
        """End the program, at once if it still runs, and wait until it and what it started are gone."""
        if self._program is not None and self._running is not None:
            self._program.kill(grace=0.0)
            await wait_done(self._running.outcome)


def as_task(where: str, row: object) -> dict[str, object]:
    """Return a row as a task: a mapping as it is, anything else as its prompt.

    Raises:
        DataError: a field's name is not text, or JSON cannot say it.
    """
    task = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    if not task or not all(isinstance(name, str) for name in task):
        raise DataError(where, f"has the fields {list(task)}", "a task: text, messages, or fields by name")
    return task


_FORMS = "rows: tasks as text or as mappings"
_RUN = "a function of (task, session), or a command: a list of texts"


def agent(
    run: Callable[..., object] | Sequence[str],
    reward: Callable[..., object],
    tasks: object,
    *,
    split: str = "train",
    credit: Credit = "every",
    environment: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    name: str = "agent",
    settings: TaskSettings | None = None,
) -> Tasks:
    """Return tasks of an agent that was written for an API: it runs unchanged, and what is sampled for it is trained.

    Each episode has a session of ``rlkit.gateway``: endpoints of OpenAI's and Anthropic's APIs, on this machine, where
    the policy answers. The exact tokens of every answer are recorded. Where the agent rewrites its history, or
    has other agents help it, the episode has several branches; ``datums`` makes a datum of each, with split="allow".

    Args:
        run: what plays an episode: a function of (task, session), ``async`` or not (plain ones run in threads), whose
            ``session.base_url``, ``.api_key`` and ``.model`` go to the agent's client (``session.client()`` is one that
            needs no socket); what it returns is its result. Or a command, ``["python", "agent.py"]``: it finds
            OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and RLKIT_MODEL in its environment
            and the task as JSON on stdin; ``{field}`` in an argument is replaced by that field, if the task has it. Its
            result is what it writes to stdout, without space around it, the last megabyte of it.
        reward: called with the result and the task; ``async`` or not. One that names ``messages`` gets the conversation
            too (the branch that ended last). Gives a finite number; None: it cannot tell, and the episode has failed.
        tasks: rows: anything with a length and an index, or a mapping from splits to such. A row is a mapping, or text
            (then the task is ``{"prompt": text}``). The field "answer", where there is one, is kept for the logs.
        split, name, settings: as of ``rlkit.envs.function``.
        credit: which branches are trained: "every" one, the "last" one, or a function of the session's branches that
            gives a weight >= 0 for each.
        environment: variables for a command, besides those of this process.
        folder: where a command runs; None: here.

    A command has its own process group, which is ended as a whole: when the command ends, at the deadline, when
    the rollout is given up, and when this program ends, also by SIGTERM or SIGKILL. Limits are those of the plan:
    ``max_turns`` (answers), ``max_tokens`` of each, ``max_total_tokens``, the context, and the deadline. An agent that
    meets one is refused further answers, and its episode is truncated; without a result its reward is 0, or what the
    settings say of episodes without an end. An agent that fails otherwise (raises, ends with an exit code, runs out of
    time while nothing is being sampled, never asks for anything) is a counted failure, and not trained.

    Raises:
        DataError: there are no rows.
        ConfigError: an argument is of no such form, or the command is not found.
        UnknownNameError: no such split.

    >>> async def run(task, session):
    ...     async with session.client() as client:
    ...         body = {"model": session.model, "messages": [{"role": "user", "content": task["prompt"]}]}
    ...         answer = (await client.post("chat/completions", json=body)).json()
    ...     return answer["choices"][0]["message"]["content"]
    >>> def reward(result, task):
    ...     return float(str(task["answer"]) in result)
    >>> tasks = agent(run, reward, [{"prompt": "2 + 3 =", "answer": 5}])
    >>> len(tasks), tasks[0].name
    (1, 'agent')
    """
    rows = read_rows(tasks, split, where="tasks", forms=_FORMS, function="rlkit.envs.agent")
    for i in range(len(rows) if isinstance(rows, (list, tuple)) else 1):
        as_task(f"tasks[{i}]", rows[i])
    wants_messages, note = _wants_messages(reward), f"in the reward {name_of(reward)} for"
    check_credit(credit)
    if callable(run):
        _check_unused(environment=environment, folder=folder)
    command = None if callable(run) else _command(run, environment, folder)

    def make(index: int) -> Harness:
        where = f"tasks[{index}]"
        scored = ScoredTask(as_task(where, rows[index]), reward, wants_messages, f"{note} {where}", credit)
        if command is not None:
            return CommandAgent(command, scored)
        return FunctionAgent(cast("Callable[..., object]", run), scored)

    return Tasks(make, len(rows), name=name, split=split, settings=settings)


def _wants_messages(reward: object) -> bool:
    """Return whether a reward names ``messages``.

    Raises:
        ConfigError: it cannot be called with a result and a task.
    """
    if not callable(reward):
        raise ConfigError("reward", f"got {_check.describe(reward)}", "a function of (result, task)")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some built-in functions do not say
        return False
    parameters = signature.parameters.values()
    wanted = any(p.name == "messages" or p.kind is p.VAR_KEYWORD for p in parameters)
    try:
        signature.bind(None, None, **({"messages": ()} if wanted else {}))
    except TypeError as error:
        what = f"{name_of(reward)} takes {signature}"
        raise ConfigError("reward", what, "(result, task)", "and optionally messages, by name") from error
    return wanted


def _check_unused(**options: object) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(option, "is given, but run is a function", "nothing", "only commands take it")


def _is_command(run: object) -> TypeGuard[Sequence[str | Path]]:
    return isinstance(run, (list, tuple)) and bool(run) and all(isinstance(part, (str, Path)) for part in run)


def _command(run: object, environment: Mapping[str, str] | None, folder: str | os.PathLike[str] | None) -> Command:
    """Return the command, checked as far as can be before it runs."""
    if not _is_command(run):
        raise ConfigError("run", f"got {_check.describe(run)}", _RUN)
    arguments = [str(part) for part in run]
    variables = dict(environment or {})
    if not all(isinstance(text, str) for pair in variables.items() for text in pair):
        raise ConfigError("environment", f"got {_check.describe(environment)}", "texts by name")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError("folder", f"is {str(folder)!r}", "a folder that exists")
    if os.sep not in arguments[0] and shutil.which(arguments[0], path=variables.get("PATH")) is None:
        raise ConfigError("run", f"the command {arguments[0]!r} is not on the PATH", "a program")
    return Command(arguments, variables, None if folder is None else str(folder))
