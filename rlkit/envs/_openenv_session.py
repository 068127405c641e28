"""What an OpenEnv server is asked: about itself over HTTP, and in a session over a websocket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, cast

from rlkit import _check
from rlkit.errors import EnvBusy, EnvError, EnvTimeout

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_LARGEST = 100 * 2**20  # bytes of a message, as OpenEnv's own client has it


class EnvUnreachable(EnvError, ConnectionError):
    """A server cannot be reached; the same call may succeed later, as after any ConnectionError."""


def unreached(where: str, error: object) -> EnvError:
    """Return what a connection that failed means."""
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return EnvUnreachable(f"{where}: nobody listens there: {error}")
    return EnvUnreachable(f"{where}: cannot be reached: {error}")


async def about(place: Callable[[], str], where: str) -> dict[str, object]:
    """Return the schema of the server's actions, and the environment's name."""
    return await asyncio.to_thread(_asked, place, where)


def _asked(place: Callable[[], str], where: str) -> dict[str, object]:
    from urllib.error import HTTPError, URLError
    from urllib.request import ProxyHandler, build_opener

    local = build_opener(ProxyHandler({})) if place().startswith("http://127.0.0.1") else build_opener()
    answers: dict[str, Mapping[str, object]] = {}
    for path in ("schema", "metadata"):
        try:
            with local.open(f"{place()}/{path}", timeout=30) as response:
                answers[path] = json.load(response)
        except HTTPError as error:
            if path == "schema":
                raise EnvError(f"{where}: {error}; is it an OpenEnv server?") from error
            answers[path] = {}
        except (URLError, OSError) as error:
            raise unreached(where, getattr(error, "reason", error)) from error
        except ValueError as error:
            raise EnvError(f"{where}: the answer is no JSON; is it an OpenEnv server?") from error
    schema = answers["schema"].get("action") if isinstance(answers["schema"], Mapping) else None
    if not isinstance(schema, Mapping):
        raise EnvError(f"{where}: its schema has no action; is it an OpenEnv server?")
    name = answers["metadata"].get("name") if isinstance(answers["metadata"], Mapping) else None
    return {"action": schema, "name": name if isinstance(name, str) and name else "openenv"}


class Refused(Exception):
    """The server did not take an action."""


class Session:
    """A websocket to the server."""

    def __init__(self, place: Callable[[], str], where: str, timeout: float) -> None:
        self._place = place
        self._where = where
        self._timeout = timeout
        self._socket: ClientConnection | None = None

    async def open(self) -> None:
        from websockets.asyncio.client import connect

        url = await asyncio.to_thread(self._place)
        proxy: Literal[True] | None = None if "//127.0.0.1" in url or "//localhost" in url else True
        try:
            self._socket = await connect(
                f"{url.replace('http', 'ws', 1)}/ws", open_timeout=self._timeout, max_size=_LARGEST, proxy=proxy
            )
        except OSError as error:
            raise unreached(self._where, error) from error
        except Exception as error:
            raise EnvBusy(f"{self._where}: {type(error).__name__}: {error}") from error

    async def ask(self, kind: str, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return the answer's data.

        Raises:
            Refused: the action is not one of the environment's.
        """
        from websockets.exceptions import ConnectionClosed

        if self._socket is None:
            raise EnvError(f"{self._where}: there is no session")
        try:
            async with asyncio.timeout(self._timeout):
                with contextlib.suppress(ConnectionClosed):  # what the server said before is still to be read
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
            raise EnvError(f"{self._where}: got {_check.shown(answer)}; is it an OpenEnv server?")
        if answer.get("type") != "error":
            return told
        code, message = told.get("code"), " ".join(str(told.get("message")).split())[:300]
        if code == "VALIDATION_ERROR":
            errors = cast("list[Mapping[str, object]]", told.get("errors") or [])
            raise Refused(
                "; ".join(
                    f"{'.'.join(map(str, cast('list[object]', e.get('loc') or [])))}: {e.get('msg')}" for e in errors
                )
            )
        raise (EnvBusy if code == "CAPACITY_REACHED" else EnvError)(f"{self._where}: {code}: {message}")

    async def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            await socket.close()
