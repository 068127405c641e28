"""Agents that know nothing of rlkit as environments: functions and programs that talk to an endpoint."""

from __future__ import annotations

import inspect
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rlkit import _check
from rlkit._calls import answered
from rlkit.envs._agents import Command, CommandAgent, FunctionAgent, Scored, as_task, engine
from rlkit.envs._rows import named, rows_of
from rlkit.envs.protocol import Credit, Harness, Tasks, TaskSettings
from rlkit.errors import ConfigError

__all__ = ["agent"]

_FORMS = "rows: tasks as text or as mappings"
_RUN = "a function of (task, session), or a command: a list of texts"


@answered
def agent(
    run: Callable[..., object] | Sequence[str],
    reward: Callable[..., object],
    tasks: object,
    *,
    split: str = "train",
    credit: Credit = "every",
    environment: Mapping[str, str] | None = None,
    folder: str | os.PathLike[str] | None = None,
    image: str | None = None,
    name: str = "agent",
    settings: TaskSettings | None = None,
) -> Tasks:
    """Tasks of an agent that was written for an API: it runs unchanged, and what is sampled for it is trained.

    Each episode has a session of ``rlkit.gateway``: endpoints of OpenAI's and Anthropic's APIs, on this machine, behind
    which the policy answers. The exact tokens of every answer are recorded. Where the agent rewrites its history, or
    has other agents help it, the episode has several branches; ``datums`` makes a datum of each, with split="allow".

    Args:
        run: what plays an episode: a function of (task, session), ``async`` or not (plain ones run in threads), whose
            ``session.base_url``, ``.api_key`` and ``.model`` go to the agent's client (``session.client()`` is one that
            needs no socket); what it returns is its result. Or a command, ``["python", "agent.py"]``: it finds
            OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY and RLKIT_MODEL in its environment
            and the task as JSON on stdin; ``{field}`` in an argument is replaced by that field of the task
            (``{{field}}`` is that text in braces). Its result is what it writes to stdout, without space around it, the
            last megabyte of it.
        reward: called with the result and the task; ``async`` or not. One that names ``messages`` gets the conversation
            too (the branch that ended last). Gives a finite number; None: it cannot tell, and the episode has failed.
        tasks: rows: anything with a length and an index, or a mapping from splits to such. A row is a mapping, or text
            (then the task is ``{"prompt": text}``). The field "answer", where there is one, is kept for the logs.
        split: which rows to take, where there are several splits.
        credit: which branches are trained: "every" one, the "last" one, or a function of the session's branches that
            gives a weight >= 0 for each.
        environment: variables for a command, beside those of this process.
        folder: where a command runs; None: here. In a container, a folder there.
        image: of a container in which a command runs, with the host's network; needs podman or docker.
        name: for metrics.
        settings: what these tasks want to have different.

    A command has a process group of its own, which is ended as a whole: when the command ends, at the deadline, when
    the rollout is given up, and when this program ends, also by SIGTERM or SIGKILL. Limits are those of the plan:
    ``max_turns`` (answers), ``max_tokens`` of each, ``max_total_tokens``, the context, and the deadline. An agent that
    meets one is refused further answers, and its episode is truncated; without a result its reward is 0, or what the
    settings say of episodes without an end. An agent that fails otherwise (raises, ends with an exit code, runs out of
    time while nothing is being sampled, never asks for anything) is a counted failure, and not trained.

    Raises:
        DataError: there are no rows.
        ConfigError: an argument is of no such form, the command is not found, or there is nothing to run containers.
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
    rows = rows_of(tasks, split, where="tasks", forms=_FORMS, function="rlkit.envs.agent")
    first = [as_task(f"tasks[{i}]", rows[i]) for i in range(len(rows) if isinstance(rows, (list, tuple)) else 1)]
    told = _wants_messages(reward)
    if credit not in ("every", "last") and not callable(credit):
        raise ConfigError("credit", f"got {_check.shown(credit)}", "'every', 'last', or a function of branches")
    command = None if callable(run) else _command(run, environment, folder, image)
    if command is None:
        for option, value in (("environment", environment), ("folder", folder), ("image", image)):
            if value is not None:
                raise ConfigError(option, "is given, and run is a function", "nothing", "it is for commands")
    else:
        for i, task in enumerate(first):
            command.check(f"tasks[{i}]", task)

    def make(index: int) -> Harness:
        where = f"tasks[{index}]"
        note = f"in the reward {named(reward)} for {where}"
        scored = Scored(as_task(where, rows[index]), reward, told, note, credit)
        if command is not None:
            return CommandAgent(command, scored)
        return FunctionAgent(run, scored)  # type: ignore[arg-type]

    return Tasks(make, len(rows), name=name, split=split, settings=settings)


def _wants_messages(reward: object) -> bool:
    """Return whether a reward names ``messages``.

    Raises:
        ConfigError: it cannot be called with a result and a task.
    """
    if not callable(reward):
        raise ConfigError("reward", f"got {_check.shown(reward)}", "a function of (result, task)")
    try:
        signature = inspect.signature(reward)
    except ValueError:  # some built-in functions do not say
        return False
    parameters = signature.parameters.values()
    told = any(p.name == "messages" or p.kind is p.VAR_KEYWORD for p in parameters)
    try:
        signature.bind(None, None, **({"messages": ()} if told else {}))
    except TypeError as error:
        what = f"{named(reward)} takes {signature}"
        raise ConfigError("reward", what, "(result, task)", "and messages by name, if it wants them") from error
    return told


def _command(
    run: object, environment: Mapping[str, str] | None, folder: str | os.PathLike[str] | None, image: str | None
) -> Command:
    """Return the command, checked as far as can be before it runs."""
    if not isinstance(run, (list, tuple)) or not run or not all(isinstance(part, (str, Path)) for part in run):
        raise ConfigError("run", f"got {_check.shown(run)}", _RUN)
    arguments = [str(part) for part in run]
    variables = dict(environment or {})
    if not all(isinstance(text, str) for pair in variables.items() for text in pair):
        raise ConfigError("environment", f"got {_check.shown(environment)}", "texts by name")
    if image is not None:
        _check.require(isinstance(image, str) and image, "image", image, "an image's name")
        return Command(arguments, variables, None if folder is None else str(folder), engine(), image)
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError("folder", f"is {str(folder)!r}", "a folder that exists")
    if os.sep not in arguments[0] and shutil.which(arguments[0], path=variables.get("PATH")) is None:
        raise ConfigError("run", f"the command {arguments[0]!r} is not on the PATH", "a program")
    return Command(arguments, variables, None if folder is None else str(folder))
