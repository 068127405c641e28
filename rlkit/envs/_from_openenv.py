"""Environments on a server that speaks OpenEnv's protocol: JSON over a websocket, one session per episode."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import attrs

from rlkit import _check, _runtime
from rlkit.envs import _adapters, calling
from rlkit.envs._adapters import drop_titles, package
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, EnvBusy, EnvError, EnvTimeout

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

__all__ = ["openenv"]

_Json: TypeAlias = Mapping[str, object]


_LARGEST = 100 * 2**20  # bytes of a message, as OpenEnv's own client has it


class EnvUnreachable(EnvError, ConnectionError):
    """A server cannot be reached; the same call may succeed later, as after any ConnectionError."""


def unreached(where: str, error: object) -> EnvError:
    """Return what a connection that failed means."""
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return EnvUnreachable(f"{where}: no server listens there: {error}")
    return EnvUnreachable(f"{where}: cannot be reached: {error}")


def about(address: str, where: str) -> tuple[_Json, str]:
    """Return the schema of the server's actions, and the environment's name."""
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, build_opener

    local = build_opener(ProxyHandler({})) if address.startswith("http://127.0.0.1") else build_opener()
    answers: dict[str, _Json] = {}
    for path in ("schema", "metadata"):
        try:
            with local.open(f"{address}/{path}", timeout=30) as response:
                answers[path] = json.load(response)
        except HTTPError as error:
            if path == "schema":
                raise EnvError(f"{where}: {error}; is it an OpenEnv server?") from error
            answers[path] = {}
        except (URLError, OSError) as error:
            raise unreached(where, getattr(error, "reason", error)) from error
        except ValueError as error:
            raise EnvError(f"{where}: the answer is not JSON; is it an OpenEnv server?") from error
    schema = answers["schema"].get("action") if isinstance(answers["schema"], Mapping) else None
    if not isinstance(schema, Mapping):
        raise EnvError(f"{where}: its schema has no action; is it an OpenEnv server?")
    name = answers["metadata"].get("name") if isinstance(answers["metadata"], Mapping) else None
    return schema, name if isinstance(name, str) and name else "openenv"


class Refused(Exception):
    """The server did not take an action."""


@attrs.define(eq=False, repr=False)
class Session:
    """A websocket to the server."""

    _address: str
    _where: str
    _timeout: float
    _socket: ClientConnection | None = attrs.field(default=None, init=False)

    async def open(self) -> None:
        from websockets.asyncio.client import connect

        url = self._address
        proxy: Literal[True] | None = None if "//127.0.0.1" in url or "//localhost" in url else True
        try:
            self._socket = await connect(
                f"{url.replace('http', 'ws', 1)}/ws", open_timeout=self._timeout, max_size=_LARGEST, proxy=proxy
            )
        except OSError as error:
            raise unreached(self._where, error) from error
        except Exception as error:
            raise EnvBusy(f"{self._where}: {type(error).__name__}: {error}") from error

    async def ask(self, kind: str, data: _Json) -> _Json:
        """Return the answer's data.

        Raises:
            Refused: the action is not one of the environment's.
        """
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            raise EnvError(f"{self._where}: no session is open")
        try:
            async with asyncio.timeout(self._timeout):
                with contextlib.suppress(ConnectionClosed):  # earlier messages of the server are still to be read
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise EnvTimeout(f"{self._where}: no answer within {self._timeout:g} s") from error
        except (ConnectionClosed, OSError) as error:
            raise EnvError(f"{self._where}: the session was lost: {error}") from error
        except ValueError as error:
            raise EnvError(f"{self._where}: the answer cannot be read: {error}") from error
        told = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(told, dict):
            raise EnvError(f"{self._where}: got {_check.describe(answer)}; is it an OpenEnv server?")
        if answer.get("type") != "error":
            return told
        code, message = told.get("code"), " ".join(str(told.get("message")).split())[:300]
        if code == "VALIDATION_ERROR":
            errors = cast("list[_Json]", told.get("errors") or [])
            places = [".".join(map(str, cast("list[object]", error.get("loc") or []))) for error in errors]
            raise Refused("; ".join(f"{at}: {error.get('msg')}" for at, error in zip(places, errors, strict=True)))
        raise (EnvBusy if code == "CAPACITY_REACHED" else EnvError)(f"{self._where}: {code}: {message}")

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()


_COMMON = ("metadata", "done", "reward")
_OBJECT = re.compile(r"\{.*\}", re.DOTALL)


def openenv(
    server: str,
    *,
    action: Callable[[Action], object] | None = None,
    text: Callable[[Mapping[str, object]], Observation] | None = None,
    instructions: str | None = None,
    reset: Mapping[str, object] | Callable[[int], Mapping[str, object]] | None = None,
    malformed_reward: float = 0.0,
    timeout: float = 60.0,
    size: int = 1024,
    seed: int = 0,
    split: str = "train",
    name: str | None = None,
    settings: TaskSettings | None = None,
) -> Tasks:
    """Return tasks of an environment that an OpenEnv server holds, each with its own seed; every episode is a session.

    Rewards, and when an episode is over, are the server's. A step for which it gives no reward has none.

    Args:
        server: its address, such as "http://127.0.0.1:8000".
        action: makes the server's message for an action: a mapping, or a pydantic object such as the environment's own
            action class. An exception that it raises as ``ValueError`` is told to the policy, and the server is not
            asked. None: by the server's schema: the text itself where an action is one text, else the JSON object in
            the text.
        text: the policy's observation from the server's; None: its text where it has one, else all of it as JSON.
        instructions: comes before the first observation; None: what an action must look like, where it is JSON.
        reset: arguments of ``reset`` besides the seed, or a function of the task's index that returns them.
        malformed_reward: of a turn that is not a valid action.
        timeout: seconds that the server has for one answer, > 0.
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
        EnvError: the server does not answer as one of OpenEnv; EnvBusy: it cannot be reached.
    """
    package("openenv", "websockets", _runtime.command("openenv"))
    _check.integer("size", size, low=1, high=2**30)
    _check.real("malformed_reward", malformed_reward)
    _check.real("timeout", timeout, above=0.0)
    seeds = _adapters.seeds(split, seed)
    if not isinstance(server, str) or not re.match(r"(https?|wss?)://", server):
        raise ConfigError("server", f"got {_check.describe(server)}", 'an address, such as "http://127.0.0.1:8000"')
    address = server.rstrip("/").replace("ws", "http", 1) if server.startswith("ws") else server.rstrip("/")
    where = f"rlkit.envs.openenv: {address}"
    described: tuple[_Json, str] = calling.wait(asyncio.to_thread, about, address, where, timeout=timeout, where=where)
    schema, own_name = described
    form = _ActionFormat(schema, action, text, instructions)

    def make(index: int) -> _Env:
        extra = reset(index) if callable(reset) else reset
        return _Env(Session(address, where, timeout), form, dict(extra or {}), malformed_reward)

    name = own_name if name is None else name
    return Tasks(make, size, name=check_name("name", name), split=split, seeds=seeds, settings=settings)


class _ActionFormat:
    """Actions and observations, in the policy's words and in the server's."""

    def __init__(
        self,
        schema: _Json,
        action: Callable[[Action], object] | None,
        text: Callable[[_Json], Observation] | None,
        instructions: str | None,
    ) -> None:
        properties = cast("Mapping[str, _Json]", schema.get("properties") or {})
        fields = {name: field for name, field in properties.items() if name not in _COMMON}
        self._given = action
        self._text = text
        texts = [name for name, field in fields.items() if "string" in _types(field)]
        self._only = texts[0] if len(fields) == len(texts) == 1 else None
        slim = {**cast("_Json", drop_titles(schema)), "properties": drop_titles(fields)}
        self._schema = json.dumps({key: slim[key] for key in ("properties", "required", "$defs") if key in slim})
        if instructions is None and action is None and self._only is None:
            instructions = f"Answer with one JSON object that fits this schema:\n{self._schema}"
        self.instructions = instructions or ""

    def action(self, action: Action) -> dict[str, object]:
        """Return the message to the server.

        Raises:
            ValueError: the text is not an action.
        """
        if self._given is not None:
            value = self._given(action)
            value = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
            if not isinstance(value, Mapping):
                raise EnvError("rlkit.envs.openenv: action", f"gave {_check.describe(value)}", "a mapping")
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
            raise ValueError("it contains no JSON object")  # noqa: TRY004  # it is the policy's text that is wrong
        return value

    def refusal(self, problem: str) -> str:
        """Return the message to the policy about a turn that was not an action."""
        by_schema = self._given is None and not self._only
        expected = f"\nExpected: a JSON object that fits {self._schema}" if by_schema else ""
        return f"That was not a valid action: {problem}.{expected}"

    def observation_text(self, observation: _Json) -> Observation:
        """Return the message to the policy."""
        if self._text is not None:
            return self._text(observation)
        said = {key: value for key, value in observation.items() if key not in _COMMON}
        shown = {key: value for key, value in said.items() if value not in (None, "", [], {})}
        texts = [value for value in shown.values() if isinstance(value, str)]
        return texts[0] if len(shown) == len(texts) == 1 else json.dumps(shown, ensure_ascii=False)


def _types(field: _Json) -> list[object]:
    options = cast("list[_Json]", field.get("anyOf") or [field])
    return [option.get("type") for option in options if option.get("enum") is None]


@attrs.define(eq=False, repr=False)
class _Env:
    """One session."""

    _session: Session
    _format: _ActionFormat
    _extra: Mapping[str, object]
    _malformed: float

    async def reset(self, seed: int) -> Observation:
        await self._session.open()
        answer = await self._session.ask("reset", {"seed": seed, **self._extra})
        first = self._format.observation_text(cast("_Json", answer.get("observation") or {}))
        if not self._format.instructions or not isinstance(first, str):
            return first
        return f"{self._format.instructions}\n\n{first}"

    async def step(self, action: Action) -> StepResult:
        try:
            answer = await self._session.ask("step", self._format.action(action))
        except (ValueError, Refused) as error:
            return StepResult(self._format.refusal(str(error)), self._malformed, info={"malformed": 1})
        told = self._format.observation_text(cast("_Json", answer.get("observation") or {}))
        reward = cast("float | None", answer.get("reward"))
        return StepResult(told, reward, terminated=answer.get("done") is True, info={"malformed": 0})

    async def close(self) -> None:
        await self._session.close()
