"""A session with an MCP server: the connection, its tools, and the server's process where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO, cast

import attrs

from rlkit import _orphans
from rlkit.envs._program import spelled
from rlkit.envs._schemas import function_schema
from rlkit.errors import EnvBusy, EnvError, EnvTimeout, RlkitError
from rlkit.tools import ToolCall

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp_types import CallToolResult, ContentBlock

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
        """Its name in messages."""
        if isinstance(self.place, str):
            return f"MCP server {self.place}"
        if isinstance(self.place, Sequence):
            return f"MCP server {spelled(self.place)!r}"
        return "MCP server"


class Connection:
    """A session with a server, by the SDK."""

    client: Client

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stack = contextlib.AsyncExitStack()
        self._log: TextIO | None = None

    async def open(self) -> None:
        """Start or reach the server, and agree on a version."""
        from mcp import Client

        with self._raising():
            async with asyncio.timeout(self._server.timeout):
                place = await self._transport()
                self.client = await self._stack.enter_async_context(Client(place))  # type: ignore[arg-type]
                if self._log is not None and (group := _group(self._log)) is not None:
                    _orphans.adopt(group)

    async def tools(self, names: Sequence[str] | None) -> list[dict[str, object]]:
        """Return the schemas of the server's tools, or of those that are named."""
        listed, cursor = [], None
        with self._raising():
            async with asyncio.timeout(self._server.timeout):
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

        with self._raising():
            try:
                result = await self.client.call_tool(
                    call.name, dict(call.arguments), read_timeout_seconds=self._server.timeout
                )
            except MCPError as error:
                if _lost(error) or error.code == _codes()["REQUEST_TIMEOUT"]:
                    raise
                return f"error: {error.message}"
        return told(result)

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

    @contextlib.contextmanager
    def _raising(self) -> Iterator[None]:
        try:
            yield
        except RlkitError:
            raise
        except Exception as error:
            raise self.in_our_terms(error) from error

    def in_our_terms(self, error: BaseException) -> EnvError:
        """Return what is no matter of the policy as EnvBusy, EnvTimeout or EnvError, with the server's last words."""
        cause = _innermost(error)
        where, said = self._server.where, self._said()
        if isinstance(cause, TimeoutError) or getattr(cause, "code", None) == _codes()["REQUEST_TIMEOUT"]:
            return EnvTimeout(f"{where}: no answer within {self._server.timeout:g} s{said}")
        text = " ".join(f"{type(cause).__name__}: {cause}".split())
        network = isinstance(cause, ConnectionError) or type(cause).__module__.startswith(("httpx", "httpcore"))
        kind = EnvBusy if isinstance(self._server.place, str) and network else EnvError
        return kind(f"{where}: {text}{said}")

    def _said(self) -> str:
        """Return the end of what the server wrote to stderr."""
        if self._log is None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), 4 * _SAID, max(0, size - 4 * _SAID)).decode("utf-8", "replace")
        said = (
            " ".join(text.partition("\n")[2].split())[-_SAID:] if size <= 4 * _SAID else " ".join(text.split())[-_SAID:]
        )
        return f"; it said: {said}" if said else ""


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


def told(result: CallToolResult) -> str:
    """Return a tool's result as text: its texts, or else its structured content as JSON; errors are named so."""
    text = "\n".join(_shown(block) for block in result.content)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return f"error: {text}" if result.is_error else text


def _shown(block: ContentBlock) -> str:
    if block.type == "text":
        return block.text
    if block.type == "resource":
        text = getattr(block.resource, "text", None)
        return text if isinstance(text, str) else f"[{block.resource.mime_type or 'data'} at {block.resource.uri}]"
    if block.type == "resource_link":
        return f"[{block.name} at {block.uri}]"
    return f"[{block.type}: {block.mime_type}]"


def _codes() -> Mapping[str, int]:
    import mcp_types

    return {name: getattr(mcp_types, name) for name in ("CONNECTION_CLOSED", "REQUEST_TIMEOUT")}


def _lost(error: BaseException) -> bool:
    return getattr(error, "code", None) == _codes()["CONNECTION_CLOSED"]


def _innermost(error: BaseException) -> BaseException:
    """Return the first exception inside of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
