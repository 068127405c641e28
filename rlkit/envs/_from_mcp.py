"""Questions that are answered with the tools of an MCP server: one reached by a URL, or started here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO, cast

import attrs

from rlkit import _check, _orphans, _runtime
from rlkit._process import describe_command, read_tail
from rlkit.envs._adapters import function_schema, package
from rlkit.envs._prompts import Row, Rows, note_errors
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings, check_name
from rlkit.errors import ConfigError, EnvBusy, EnvError, EnvTimeout, RlkitError
from rlkit.tools import ToolCall
from rlkit.tools.env import Turns, awaited

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp_types import CallToolResult, ContentBlock

__all__ = ["mcp"]

_SAID = 300  # characters of what a server wrote to stderr, for messages


@attrs.frozen
class Server:
    """Where a server is, and how it is reached.

    Attributes:
        place: a URL, a command, or what the SDK's ``Client`` takes.
        environment, folder: of a command.
        headers: of requests to a URL.
        timeout: seconds to start, and for one call.
    """

    place: object
    environment: Mapping[str, str] | None = attrs.field(repr=False)
    folder: str | None
    headers: Mapping[str, str] | None = attrs.field(repr=False)
    timeout: float

    @property
    def where(self) -> str:
        """Return its name in messages."""
        if isinstance(self.place, str):
            return f"MCP server {self.place}"
        if isinstance(self.place, Sequence):
            return f"MCP server {describe_command(self.place)!r}"
        return "MCP server"


class Connection:
    """A session with a server, by the SDK: opened, used and closed in one task, which is that of an episode."""

    client: Client

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.AsyncExitStack()
        self._log: TextIO | None = None

    async def open(self) -> None:
        """Start or reach the server, and agree on a version."""
        from mcp import Client

        try:
            async with self._raising(), asyncio.timeout(self._server.timeout):
                place = await self._transport()
                self.client = await self._stack.enter_async_context(Client(place))  # type: ignore[arg-type]
        except EnvError:
            await self._stack.aclose()  # what it has begun must not be lost between two calls
            raise
        if self._log is not None and (group := _group(self._log)) is not None:
            _orphans.adopt(group)

    async def tools(self, names: Sequence[str] | None) -> list[dict[str, object]]:
        """Return the schemas of the server's tools, or of those that are named."""
        listed, cursor = [], None
        async with self._raising(), asyncio.timeout(self._server.timeout):
            while True:
                page = await self.client.list_tools(cursor=cursor)
                listed += page.tools
                cursor = page.next_cursor
                if cursor is None:
                    break
        schemas = {tool.name: function_schema(tool.name, tool.description, tool.input_schema) for tool in listed}
        missing = [name for name in names or () if name not in schemas]
        if missing:
            what = f"has no tool {', '.join(map(repr, missing))}"
            raise EnvError(self._server.where, what, f"among: {', '.join(schemas) or 'none'}")
        return [schemas[name] for name in (schemas if names is None else names)]

    async def call(self, call: ToolCall) -> str:
        """Return what a call gives, for the policy."""
        from mcp import MCPError

        async with self._raising():
            try:
                result = await self.client.call_tool(
                    call.name, dict(call.arguments), read_timeout_seconds=self._server.timeout
                )
            except MCPError as error:
                if error.code in _codes():
                    raise
                return f"error: {error.message}"
        return result_text(result)

    async def close(self) -> None:
        """Leave the session, which ends a server that was started for it."""
        try:
            await self._stack.aclose()
        finally:
            if self._log is not None:
                self._log.close()

    async def _transport(self) -> object:
        place = self._server.place
        if isinstance(place, str) and self._server.headers:
            import httpx2
            from mcp.client.streamable_http import streamable_http_client

            http = httpx2.AsyncClient(headers=dict(self._server.headers), timeout=httpx2.Timeout(30.0, read=300.0))
            return streamable_http_client(place, http_client=await self._stack.enter_async_context(http))
        if isinstance(place, Sequence) and not isinstance(place, str):
            self._log = cast("TextIO", tempfile.TemporaryFile("w+"))  # noqa: SIM115  # closed with the session
            command = [os.fspath(part) for part in place]
            return _started(command, self._server.environment, self._server.folder, self._log)
        return place

    @contextlib.asynccontextmanager
    async def _raising(self) -> AsyncIterator[None]:
        try:
            yield
        except RlkitError:
            raise
        except asyncio.CancelledError as error:
            try:  # the SDK cancels the task that opened a connection, where it is lost; leaving it says why
                await self._stack.aclose()
            except BaseException as cause:  # noqa: BLE001
                raise self.convert_error(cause) from error
            raise
        except Exception as error:
            raise self.convert_error(error) from error

    def convert_error(self, error: BaseException) -> EnvError:
        """Return a fault that is not the policy's as EnvBusy, EnvTimeout or EnvError, with the server's last words."""
        cause = _innermost(error)
        where = self._server.where
        said = "" if self._log is None else read_tail(self._log, _SAID, start=len(f"{_group(self._log)}\n"))
        log = f"; its output: {said}" if said else ""
        if isinstance(cause, TimeoutError) or getattr(cause, "code", None) == _codes()[1]:
            return EnvTimeout(f"{where}: no answer within {self._server.timeout:g} s{log}")
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        network = isinstance(cause, ConnectionError) or type(cause).__module__.startswith(("httpx", "httpcore"))
        kind = EnvBusy if isinstance(self._server.place, str) and network else EnvError
        return kind(f"{where}: {text}{log}")


@contextlib.asynccontextmanager
async def _started(
    command: Sequence[str], environment: Mapping[str, str] | None, folder: str | None, log: TextIO
) -> AsyncIterator[TransportStreams]:
    """Start a server and connect to it; at the end nothing of its process group is left.

    The SDK ends the group of a server that still runs, but not what one that has died left behind. So the group's
    number is written, by the shell that becomes the server, into the file for its stderr.
    """
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client

    parameters = StdioServerParameters(
        command="/bin/sh",
        args=["-c", 'echo $$ >&2; exec "$0" "$@"', *command],
        env=None if environment is None else dict(environment),
        cwd=folder,
    )
    try:
        async with stdio_client(parameters, errlog=log) as streams:
            yield streams
    finally:
        if (group := _group(log)) is not None:
            _orphans.release(group)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def _group(log: TextIO) -> int | None:
    """Return the number of a server's process group; None where it has not said it yet."""
    first = os.pread(log.fileno(), 32, 0).partition(b"\n")[0]
    return int(first) if first.isdigit() else None


def result_text(result: CallToolResult) -> str:
    """Return a tool's result as text: its texts, or else its structured content as JSON; errors are named so."""
    text = "\n".join(_block_text(block) for block in result.content)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return f"error: {text}" if result.is_error else text


def _block_text(block: ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[{block.resource.mime_type or 'data'} at {block.resource.uri}]"
    if block.type == "resource_link":
        return f"[{block.name} at {block.uri}]"
    return f"[{block.type}: {block.mime_type}]"


def _codes() -> tuple[int, int]:
    """Return the codes of a connection that was lost, and of an answer that took too long."""
    from mcp_types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    return CONNECTION_CLOSED, REQUEST_TIMEOUT


def _innermost(error: BaseException) -> BaseException:
    """Return the first exception inside of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


_FORMS = "a URL, a command as a list, a server or transport of the SDK, or a function of a row that returns one"


def mcp(
    server: object,
    prompts: object,
    reward: Callable[..., object],
    *,
    tools: Sequence[str] | None = None,
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
    """Return tasks that are answered with the tools of an MCP server.

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
        env: variables for the command, besides HOME, PATH and the like; no others are passed on.
        cwd: where the command runs.
        headers: for the requests to a URL, such as ``{"Authorization": "Bearer ..."}``.
        format, malformed_reward, max_result: as of ``rlkit.tools.ToolEnv``.
        timeout: seconds that the server has to start, and for one call, > 0.
        split, name, settings: as of ``rlkit.envs.function``.

    While episodes are played, a server that cannot be started or is lost raises ``EnvError``, one that does not answer
    in time ``EnvTimeout``, and a URL out of reach ``EnvBusy``, which rollouts try again: the episode has failed, which
    is not the policy's doing. A command is ended with its whole process group.

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
    package("mcp", "mcp", _runtime.command("mcp"))
    turns = Turns(format, malformed_reward, max_result)
    if tools is not None:
        listed = isinstance(tools, Sequence) and not isinstance(tools, str)
        _check.require(listed and all(isinstance(tool, str) for tool in tools), "tools", tools, "names of tools")
    rows = Rows("mcp", prompts, reward, split=split, offered={"calls": (), "client": None})
    at = functools.partial(
        Server,
        environment=None if env is None else dict(env),
        folder=None if cwd is None else os.fspath(cwd),
        headers=None if headers is None else dict(headers),
        timeout=_check.real("timeout", timeout, above=0.0),
    )
    if not callable(server):
        _check_place(server, None if env is None else env.get("PATH"))

    def make(index: int) -> _Env:
        row = rows[index]
        return _Env(at(server(row.all_fields) if callable(server) else server), row, reward, tools, turns)

    return Tasks(make, len(rows), name=check_name("name", name), split=split, settings=settings)


def _check_place(server: object, path: str | None) -> None:
    """Raise ConfigError for what can be no server."""
    if isinstance(server, (str, os.PathLike)):
        if not str(server).startswith(("http://", "https://")):
            raise ConfigError("server", f"got {_check.describe(server)}", _FORMS)
    elif isinstance(server, Sequence):
        if not server or not all(isinstance(part, (str, os.PathLike)) for part in server):
            raise ConfigError("server", f"got {_check.describe(server)}", "a command as a list of texts")
        if shutil.which(server[0], path=path) is None:
            raise ConfigError("server", f"the command {os.fspath(server[0])!r} cannot be found", "one that can be run")
    elif server is None or isinstance(server, (bytes, int, float, Mapping)):
        raise ConfigError("server", f"got {_check.describe(server)}", _FORMS)


@attrs.define(eq=False, repr=False)
class _Env:
    """One question."""

    _server: Server
    _row: Row
    _reward: Callable[..., object]
    _offered: Sequence[str] | None
    _turns: Turns
    tools: list[dict[str, object]] = attrs.field(factory=list, init=False)
    _connection: Connection | None = attrs.field(default=None, init=False)
    _calls: list[tuple[ToolCall, str]] = attrs.field(factory=list, init=False)

    async def reset(self, seed: int) -> Observation:  # noqa: ARG002  # the row says which question it is
        connection = self._connection = Connection(self._server)
        await connection.open()
        self.tools = await connection.tools(self._offered)
        return self._row.prompt

    async def step(self, action: Action) -> StepResult:
        result = await self._turns.play(action, self.tools, self._call, self._scored)
        return StepResult(result.observation, result.reward, result.terminated, info={**result.info, **self._row.info})

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def _call(self, call: ToolCall) -> str:
        text = await self._open().call(call)
        self._calls.append((call, text))
        return text

    def _open(self) -> Connection:
        if self._connection is None:
            raise EnvError("rlkit.envs.mcp: the environment is closed or was not reset")
        return self._connection

    async def _scored(self, answer: str) -> object:
        offered = {"calls": tuple(self._calls), "client": self._open().client}
        fields = {
            key: offered.get(key, value) if key not in self._row.all_fields else value
            for key, value in self._row.fields.items()
        }
        with note_errors(self._row.note):
            return await awaited(self._reward, answer, **fields)
