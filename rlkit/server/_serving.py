"""``serve``: any backend as a running server of the Tinker API."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rlkit import _check
from rlkit._runtime import Resource, is_loopback, missing
from rlkit.backends import connect, registry
from rlkit.backends.protocol import TrainerBackend
from rlkit.backends.tokenizers import source_of
from rlkit.errors import ConfigError
from rlkit.server._adapter import BackendModels
from rlkit.server._service import Service
from rlkit.server._wire import ApiError, Response

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest
    from starlette.responses import Response as HttpResponse
    from starlette.types import Receive, Scope, Send

__all__ = ["Server", "serve"]

_BODY_LIMIT = 256 * 2**20
_LARGE = 256 * 2**10  # bodies above it are read in another thread, so that short requests are not held up
_LEFT_OPEN = ("/client/config", "/telemetry")  # the SDK uses separate connections for these, and forgets them
_PATIENCE = 5  # seconds that running requests have when the server closes


class Server(Resource):
    """A service that listens. A context manager; ``close`` finishes accepted requests.

    Attributes:
        service: the service that answers.
        url: its address.
        names: the base models that clients may name.
    """

    def __init__(self, service: Service, host: str, port: int, names: Sequence[str] = ()) -> None:
        self.service = service
        self.names = tuple(names)
        self._closed = False
        from starlette.exceptions import HTTPException

        from rlkit._web import Guard, WebServer

        guard = Guard(
            self._serve,
            admit=self._admit,
            handlers={HTTPException: _refused, ApiError: _refused},
            body_limit=_BODY_LIMIT,
            own_host=not service.has_keys,
        )
        self._listener = WebServer(guard, host, port, name="serve", patience=_PATIENCE)
        self.url = self._listener.url

    def close(self) -> None:
        """Stop listening, finish accepted requests, and free the models. May be called twice."""
        if not self._closed:
            self._closed = True
            self._listener.stop()
            self.service.close()
        self._listener.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as an ASGI application."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import FileResponse
        from starlette.responses import Response as HttpResponse

        try:
            answer = await self._answer(scope, receive)
        except ClientDisconnect:
            return
        except ApiError as error:
            answer = Response.error(error)
        headers = {**answer.headers, **_closing(scope["path"])}
        response = HttpResponse(answer.body, answer.status, headers)
        if answer.file is not None:
            response = FileResponse(answer.file, answer.status, headers)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive) -> Response:
        from starlette.requests import Request as HttpRequest

        request = HttpRequest(scope, receive)
        headers, target, body = dict(request.headers.items()), _target(scope), await request.body()
        if len(body) > _LARGE:
            return await asyncio.to_thread(self.service.handle, request.method, target, headers, body)
        return await self.service.answer(request.method, target, headers, body)

    def _admit(self, request: HttpRequest) -> bool:
        self.service.admit(request.headers, _target(request.scope))
        return True


def _target(scope: Scope) -> str:
    target: str = scope["raw_path"].decode("ascii")
    return f"{target}?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else target


async def _refused(request: HttpRequest, error: Any) -> HttpResponse:
    from starlette.responses import JSONResponse

    status = error.status if isinstance(error, ApiError) else error.status_code
    detail = error.message if isinstance(error, ApiError) else error.detail
    return JSONResponse({"detail": detail}, status, _closing(request.scope["path"]))


def _closing(path: str) -> Mapping[str, str]:
    return {"connection": "close"} if path.endswith(_LEFT_OPEN) else {}


Options: TypeAlias = Mapping[str, Any]
_CLIENTS = {"lora", "init_from", "resume_from"}  # options of a backend that each client gives


def serve(
    backend: str | Callable[..., TrainerBackend] | BackendModels,
    *,
    model: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    names: Sequence[str] | None = None,
    folder: str | Path | None = None,
    tokenizer_id: str | None = None,
    **options: object,
) -> Server:
    """Start a server of the Tinker API; programs reach it with ``TINKER_BASE_URL=<its url>``.

    Args:
        backend: a name for ``rlkit.connect``, a function that makes backends (see ``BackendModels``), or models.
        model: with a name: the model to train.
        host: the address to listen on. Any but loopback needs ``key``, and TLS in front of it.
        port: 0 for a free one.
        key: the API key that clients must send, beginning "tml-"; None lets any in.
        names: base models that clients may name; None: ``model`` and the last part of it, or the backend's name, or
            "model".
        folder: where the list of saved states is kept, and with a name the states; None forgets them with the server.
        tokenizer_id: what clients load the tokenizer by; None: the source of the model's.
        options: as for ``Service``; with a backend's name also those of ``rlkit.connect`` with that name.

    Raises:
        ConfigError: a setting is out of range, or ``host`` is not loopback and there is no key.
        MissingPackageError: a package of the extra ``serve`` is not installed.
        BackendError: the port is taken.

    >>> with serve("toy") as server:
    ...     server.names, server.url.startswith("http://127.0.0.1:")
    (('toy',), True)
    """
    for package in ("uvicorn", "starlette", "tinker"):
        if importlib.util.find_spec(package) is None:
            raise missing("serve", package, "serve")
    _check_address(host, port, key)
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names or ()):
        raise ConfigError("serve(names)", f"got {_check.describe(names)}", "a list of texts")
    of_backend, of_service = _options(backend, options)
    names = tuple(names or _names(backend, model))
    made = _models(backend, model, folder, of_backend)
    service = Service(
        made,
        names=names,
        keys=None if key is None else [key],
        folder=None if folder is None else Path(folder),
        # clients on this machine can read a directory
        tokenizer_id=source_of(made.tokenizer) if tokenizer_id is None else tokenizer_id,
        **of_service,
    )
    try:
        return Server(service, host, port, names)
    except BaseException:
        service.close()
        raise


def _check_address(host: str, port: int, key: str | None) -> None:
    _check.integer("serve(port)", port, low=0, high=65535)
    if key is not None and (not isinstance(key, str) or not key.startswith("tml-") or len(key) < 12):
        raise ConfigError(
            "serve(key): expected a text of at least 12 characters that begins with 'tml-', which clients require"
        )
    _check.require(isinstance(host, str) and host, "serve(host)", host, "a name or an address")
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"serve(host={host!r}) can be reached from other machines; give a key= (rlkit serve: in RLKIT_SERVER_KEY)"
        )


def _names(backend: object, model: str | None) -> tuple[str, ...]:
    """Return the default names of the base model for clients."""
    if model is not None:
        return tuple(dict.fromkeys([Path(model).name or model, model]))
    return (backend,) if isinstance(backend, str) else ("model",)


def _models(
    backend: object, model: str | None, folder: str | Path | None, options: Mapping[str, object]
) -> BackendModels:
    if isinstance(backend, str):
        settings = {"model": model, "folder": folder}
        connecting = {**options, **{name: value for name, value in settings.items() if value is not None}}
        return BackendModels(functools.partial(connect, backend, **connecting))
    if model is not None:
        raise ConfigError("serve(model): requires a backend's name; a function that makes backends sets its model")
    if isinstance(backend, BackendModels):
        return backend
    if isinstance(backend, type) or not callable(backend):
        expected = "a backend's name, or a function that makes one backend for each client: "
        expected += "functools.partial(rlkit.connect, ...)"
        raise ConfigError("serve(backend)", f"got {_check.describe(backend)}", expected)
    return BackendModels(backend)


def _options(backend: object, options: Options) -> tuple[Options, Options]:
    """Split options into (the backend's, the service's); raise ConfigError for others."""
    service = inspect.signature(Service).parameters.keys() - {"models", "names", "keys", "folder", "tokenizer_id"}
    there = set()
    if isinstance(backend, str):
        there = inspect.signature(registry.resolve(backend)).parameters.keys() - _CLIENTS - service
    for name in options.keys() - service - there:
        takes = ", ".join(sorted(service | there))
        raise ConfigError(f"serve: no option {name!r}; besides its arguments it takes: {takes}")
    own, others = ({name: options[name] for name in options if name in known} for known in (there, service))
    return own, others
