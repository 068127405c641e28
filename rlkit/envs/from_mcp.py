"""Questions that are answered with the tools of an MCP server: one reached by a URL, or started here."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence

from rlkit import _check, _install
from rlkit._calls import answered
from rlkit.envs._extras import package
from rlkit.envs._mcp_keeper import Keeper, Sessions
from rlkit.envs._mcp_session import Server
from rlkit.envs._prompts import Row, Rows
from rlkit.envs._rows import noted
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, EnvError
from rlkit.tools import ToolCall

__all__ = ["mcp"]

_FORMS = "a URL, a command as a list, a server or transport of the SDK, or a function of a row that gives one"


@answered
def mcp(
    server: object,
    prompts: object,
    reward: Callable[..., object],
    *,
    tools: Sequence[str] | None = None,
    shared: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    headers: Mapping[str, str] | None = None,
    format: str = "hermes",  # noqa: A002
    malformed_reward: float = 0.0,
    max_result: int = 10_000,
    timeout: float = 60.0,
    split: str = "train",
    name: str = "mcp",
    settings: TaskSettings | None = None,
) -> Tasks:
    """Tasks that are answered with the tools of an MCP server.

    The server's tools are rendered into the prompt. A turn with calls is answered by what they give, as messages of the
    role "tool": texts, structured content as JSON where there is no text, and errors, which begin with "error: ". A
    call that cannot be read, or does not fit the tool's schema, is answered by what is wrong with it. A turn without a
    call is the answer, and ends the episode.

    Args:
        server: the URL of a streamable HTTP server; a command as a list, which is started with its stdin and stdout as
            the connection; a server object of this process or a transport, as the SDK's ``Client`` takes them; or a
            function of a row that gives one of these, such as a command with the row's own folder.
        prompts: rows as of ``rlkit.envs.function``: prompts, or mappings with a ``"prompt"`` and other fields; or a
            mapping from splits to rows.
        reward: called with the answer's text, without reasoning, and by keyword with those fields of the row that it
            names; and with ``calls``, the pairs (call, what it gave) of the episode, and ``client``, the SDK's open
            ``mcp.Client``, if it names these. May be ``async``.
        tools: names of those that the policy is offered; None: all.
        shared: all episodes use one session with the server, which lasts from the first of them to the last that is
            played at the same time. For tools that keep no state. False: each episode has a session, and a process, of
            its own.
        env: variables for the command, beside HOME, PATH and the like; no others are passed on.
        cwd: where the command runs.
        headers: for the requests to a URL, such as ``{"Authorization": "Bearer ..."}``.
        format: how the policy writes calls, a name in ``rlkit.tools.formats``.
        malformed_reward: of a turn in which a call was not made.
        max_result: characters of a tool's result that the policy is shown, >= 1.
        timeout: seconds that the server has to start, and for one call, > 0.
        split: which rows to take, where ``prompts`` has several splits.
        name: for metrics.
        settings: what these tasks want to have different.

    While episodes are played, a server that cannot be started or is lost raises ``EnvError``, one that does not answer
    in time ``EnvTimeout``, and a URL out of reach ``EnvBusy``, which rollouts try again: the episode has failed, and is
    no matter of the policy. A command is ended with its whole process group.

    Raises:
        ConfigError: an argument is not what it should be, a command cannot be found, or mcp is not installed.
        DataError: a row has no prompt.
        UnknownNameError: no such split or format.

    >>> from mcp.server import MCPServer
    >>> shop = MCPServer("shop")
    >>> @shop.tool()
    ... def stock(fruit: str) -> int:
    ...     '''Says how many pieces of a fruit there are.'''
    ...     return {"pears": 5}[fruit]
    >>> rows = [{"prompt": "How many pears are there?", "answer": "5"}]
    >>> tasks = mcp(shop, rows, lambda text, answer: float(answer in text))
    >>> tasks.name, len(tasks)
    ('mcp', 1)
    """
    package("mcp", "mcp", _install.command("mcp"))
    from rlkit.tools.formats import formats

    formats.resolve(format)
    rows = Rows("mcp", prompts, reward, split=split, offered={"calls": (), "client": None})
    _check.real("malformed_reward", malformed_reward)
    _check.integer("max_result", max_result, low=1)
    _check.flag("shared", shared)
    if tools is not None:
        listed = isinstance(tools, Sequence) and not isinstance(tools, str)
        _check.require(listed and all(isinstance(tool, str) for tool in tools), "tools", tools, "names of tools")
    options = functools.partial(
        Server,
        environment=None if env is None else dict(env),
        folder=None if cwd is None else os.fspath(cwd),
        headers=None if headers is None else dict(headers),
        timeout=_check.real("timeout", timeout, above=0.0),
    )
    if callable(server):
        _check.require(not shared, "shared", shared, "False, since each row has a server of its own")
    else:
        _check_place(server, None if env is None else env.get("PATH"))
    common = Sessions(options(server)) if shared else None

    def make(index: int) -> _Env:
        row = rows[index]
        place = server(row.every) if callable(server) else server
        return _Env(common or Sessions(options(place)), row, reward, tools, format, malformed_reward, max_result)

    return Tasks(make, len(rows), name=check_name("name", name), split=split, settings=settings)


def _check_place(server: object, path: str | None) -> None:
    """Raise ConfigError for what can be no server."""
    if isinstance(server, (str, os.PathLike)):
        if not str(server).startswith(("http://", "https://")):
            raise ConfigError("server", f"got {_check.shown(server)}", _FORMS)
    elif isinstance(server, Sequence):
        if not server or not all(isinstance(part, (str, os.PathLike)) for part in server):
            raise ConfigError("server", f"got {_check.shown(server)}", "a command as a list of texts")
        if shutil.which(server[0], path=path) is None:
            raise ConfigError("server", f"the command {os.fspath(server[0])!r} cannot be found", "one that can be run")
    elif server is None or isinstance(server, (bytes, int, float, Mapping)):
        raise ConfigError("server", f"got {_check.shown(server)}", _FORMS)


class _Env:
    """One question."""

    def __init__(
        self,
        sessions: Sessions,
        row: Row,
        reward: Callable[..., object],
        offered: Sequence[str] | None,
        form: str,
        malformed_reward: float,
        max_result: int,
    ) -> None:
        self._sessions = sessions
        self._session: Keeper | None = None
        self._row = row
        self._reward = reward
        self._offered = offered
        self._form = form
        self._malformed = malformed_reward
        self._max_result = max_result
        self._calls: list[tuple[ToolCall, str]] = []
        self.tools: list[dict[str, object]] = []

    async def reset(self, seed: int) -> Observation:  # noqa: ARG002  # the row says which question it is
        session = self._session = self._sessions.enter()
        await session.opened()
        self.tools = await session.run(session.connection.tools(self._offered))
        return self._row.prompt

    async def step(self, action: Action) -> StepResult:
        from rlkit.tools.env import play_turn

        result = await play_turn(
            action,
            self._form,
            self.tools,
            call=self._call,
            reward=self._scored,
            malformed_reward=self._malformed,
            max_result=self._max_result,
        )
        return StepResult(result.observation, result.reward, result.terminated, info={**result.info, **self._row.info})

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await self._sessions.leave(session)

    async def _call(self, call: ToolCall) -> str:
        session = self._open()
        text = await session.run(session.connection.call(call))
        self._calls.append((call, text))
        return text

    def _open(self) -> Keeper:
        if self._session is None:
            raise EnvError("rlkit.envs.mcp: the environment is closed, or was not reset")
        return self._session

    async def _scored(self, answer: str) -> object:
        from rlkit.tools.env import awaited

        offered = {"calls": tuple(self._calls), "client": self._open().connection.client}
        fields = {
            key: offered.get(key, value) if key not in self._row.every else value
            for key, value in self._row.fields.items()
        }
        with noted(self._row.note):
            return await awaited(self._reward, answer, **fields)
