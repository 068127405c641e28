"""Environments behind a server that speaks OpenEnv's protocol: JSON over a websocket, one session per episode."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from typing import cast

from rlkit import _check, _install
from rlkit._calls import answered
from rlkit.envs import _splits, calling
from rlkit.envs._extras import package
from rlkit.envs._openenv_server import LocalServer
from rlkit.envs._openenv_session import Refused, Session, about
from rlkit.envs._schemas import untitled
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, EnvError

__all__ = ["openenv"]

_COMMON = ("metadata", "done", "reward")
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


@answered
def openenv(
    server: str,
    *,
    action: Callable[[Action], object] | None = None,
    text: Callable[[Mapping[str, object]], Observation] | None = None,
    instructions: str | None = None,
    reset: Mapping[str, object] | Callable[[int], Mapping[str, object]] | None = None,
    python: str | os.PathLike[str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    malformed_reward: float = 0.0,
    timeout: float = 60.0,
    size: int = 1024,
    seed: int = 0,
    split: str = "train",
    name: str | None = None,
    settings: TaskSettings | None = None,
) -> Tasks:
    """Tasks of an environment that an OpenEnv server holds, each with its own seed; every episode is a session.

    Rewards, and when an episode is over, are the server's. A step for which it gives no reward has none.

    Args:
        server: the address of a server, such as "http://127.0.0.1:8000"; or "module:app", which is started on this
            machine when it is first needed, on 127.0.0.1 and without a container, and ended with the program.
        action: what the server is sent for an action: a mapping, or a pydantic object such as the environment's own
            action class. An exception that it raises as ``ValueError`` is told to the policy, and the server is not
            asked. None: by the server's schema: the text itself where an action is one text, else the JSON object in
            the text.
        text: the policy's observation from the server's; None: its text where it has one, else all of it as JSON.
        instructions: stands before the first observation; None: what an action must look like, where it is JSON.
        reset: what ``reset`` is given beside the seed, or a function of the task's index that says it.
        python: for "module:app": the interpreter that has openenv-core and the environment; None: this one.
        cwd: where "module:app" is found, and runs.
        malformed_reward: of a turn that was no action.
        timeout: seconds that the server has to start, and for one answer, > 0.
        size: how many tasks, in [1, 2^30].
        seed: >= 0; another seed, other tasks.
        split: "train", "test" or "validation": no seed is in two of them. Whether the environment heeds seeds is its
            own affair.
        name: for metrics; None: the server's name for itself.
        settings: what these tasks want to have different.

    While episodes are played, a server without a free session (its ``max_concurrent_envs``) or out of reach raises
    ``EnvBusy``, which rollouts try again; an environment that raises, ``EnvError``. An action that the server refuses
    is told to the policy.

    Raises:
        ConfigError: an argument is not what it should be, or websockets is not installed.
        EnvError: the server does not start or does not answer as one of OpenEnv; EnvBusy: it cannot be reached.
    """
    package("openenv", "websockets", _install.command("openenv"))
    _check.integer("size", size, low=1, high=2**30)
    _check.real("malformed_reward", malformed_reward)
    _check.real("timeout", timeout, above=0.0)
    seeds = _splits.seeds(split, seed)
    remote = server.startswith(("http://", "https://", "ws://", "wss://")) if isinstance(server, str) else False
    if not remote and not (isinstance(server, str) and re.fullmatch(r"[\w.]+:\w+", server)):
        raise ConfigError("server", f"got {_check.shown(server)}", 'an address, or "module:app"')
    if remote and (python is not None or cwd is not None):
        raise ConfigError("python" if python is not None else "cwd", "is given", "None", "the server runs elsewhere")
    local = None
    if not remote:
        folder = None if cwd is None else os.fspath(cwd)
        local = LocalServer(
            server, python=None if python is None else os.fspath(python), folder=folder, timeout=timeout
        )
    address = server.rstrip("/").replace("ws", "http", 1) if server.startswith("ws") else server.rstrip("/")
    place = functools.partial(_url, local, address)
    where = local.where if local is not None else f"rlkit.envs.openenv: {address}"
    told = calling.wait(about, place, where, timeout=2 * timeout, where=where)
    form = _Form(told["action"], action, text, instructions)

    def make(index: int) -> _Env:
        extra = reset(index) if callable(reset) else reset
        return _Env(Session(place, where, timeout), form, dict(extra or {}), malformed_reward)

    name = str(told["name"]) if name is None else name
    return Tasks(make, size, name=check_name("name", name), split=split, seeds=seeds, settings=settings)


def _url(local: LocalServer | None, address: str) -> str:
    return address if local is None else local.url()


class _Form:
    """Actions and observations, in the policy's words and in the server's."""

    def __init__(
        self,
        schema: object,
        action: Callable[[Action], object] | None,
        text: Callable[[Mapping[str, object]], Observation] | None,
        instructions: str | None,
    ) -> None:
        properties = cast(
            "Mapping[str, Mapping[str, object]]", cast("Mapping[str, object]", schema).get("properties") or {}
        )
        fields = {name: field for name, field in properties.items() if name not in _COMMON}
        self._given = action
        self._text = text
        self._only = (
            next(iter(fields)) if len(fields) == 1 and "string" in _types(next(iter(fields.values()))) else None
        )
        slim = {**cast("dict[str, object]", untitled(schema)), "properties": untitled(fields)}
        self._schema = json.dumps({key: slim[key] for key in ("properties", "required", "$defs") if key in slim})
        if instructions is None and action is None and self._only is None:
            instructions = f"Answer with one JSON object that fits this schema:\n{self._schema}"
        self.instructions = instructions or ""

    def action(self, action: Action) -> dict[str, object]:
        """Return what the server is sent.

        Raises:
            ValueError: the text is no action.
        """
        if self._given is not None:
            value = self._given(action)
            value = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
            if not isinstance(value, Mapping):
                raise EnvError("rlkit.envs.openenv: action", f"gave {_check.shown(value)}", "a mapping")
            return dict(value)
        content = action.content.strip()
        if self._only is not None:
            return {self._only: content}
        match = _OBJECT.search(content)
        try:
            value = json.loads(match[0]) if match else None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"the JSON is not valid: {error}") from error
        if not isinstance(value, dict):
            raise ValueError("there is no JSON object")  # noqa: TRY004  # it is the policy's text that is wrong
        return value

    def refused(self, problem: str) -> str:
        """Return what the policy is told about a turn that was no action."""
        expected = (
            f"\nExpected: a JSON object that fits {self._schema}" if self._given is None and not self._only else ""
        )
        return f"That was no action: {problem}.{expected}"

    def told(self, observation: Mapping[str, object]) -> Observation:
        """Return what the policy is told."""
        if self._text is not None:
            return self._text(observation)
        shown = {
            key: value for key, value in observation.items() if key not in _COMMON and value not in (None, "", [], {})
        }
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(shown) == len(texts) == 1 else json.dumps(shown, ensure_ascii=False)


def _types(field: Mapping[str, object]) -> list[object]:
    options = cast("list[Mapping[str, object]]", field.get("anyOf") or [field])
    return [option.get("type") for option in options if option.get("enum") is None]


class _Env:
    """One session."""

    def __init__(self, session: Session, form: _Form, extra: dict[str, object], malformed_reward: float) -> None:
        self._session = session
        self._form = form
        self._extra = extra
        self._malformed = malformed_reward

    async def reset(self, seed: int) -> Observation:
        await self._session.open()
        answer = await self._session.ask("reset", {"seed": seed, **self._extra})
        first = self._form.told(cast("Mapping[str, object]", answer.get("observation") or {}))
        if not self._form.instructions or not isinstance(first, str):
            return first
        return f"{self._form.instructions}\n\n{first}"

    async def step(self, action: Action) -> StepResult:
        try:
            answer = await self._session.ask("step", self._form.action(action))
        except (ValueError, Refused) as error:
            return StepResult(self._form.refused(str(error)), self._malformed, info={"malformed": 1})
        told = self._form.told(cast("Mapping[str, object]", answer.get("observation") or {}))
        reward = cast("float | None", answer.get("reward"))
        return StepResult(told, reward, terminated=answer.get("done") is True, info={"malformed": 0})

    async def close(self) -> None:
        await self._session.close()
