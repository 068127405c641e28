"""The gateway: a policy, its chat format, and its sessions."""

from __future__ import annotations

import functools
import hmac
import importlib
import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from rlkit import _check
from rlkit._runtime import Resource, is_loopback, missing
from rlkit.backends.protocol import Sampler
from rlkit.chat import Chat
from rlkit.errors import BackendError, ConfigError, RlkitError
from rlkit.gateway._limits import Limits
from rlkit.gateway._session import SampleFunction, Session, check_settings
from rlkit.gateway._types import GatewayError
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    import httpx

    from rlkit.gateway._app import Server

__all__ = ["Gateway"]

_CHATS = 32  # variants of the chat that are kept


class Gateway(Resource):
    """The API endpoints that agents use, over one policy.

    Args:
        sampler: the policy.
        chat: its chat format; None: ``Chat`` with its tokenizer. Its history is always "append": sampled tokens
            are never rewritten.
        params: how turns are drawn, for sessions without their own; None: as clients ask.
        limits: of sessions without their own.
        model: the name that clients are told.
        host: a loopback address; another one only with ``key``, and with TLS in front of it.
        port: 0 for a free one. The socket is opened when the first URL is asked for.
        open: whether requests without a session are answered; they are not recorded.
        key: the API key that such requests must send; None lets any in.

    Attributes:
        chat: the policy's chat format.
        model: the name that clients are told.

    Raises:
        ConfigError: an argument of the wrong type or out of range.

    >>> import asyncio, rlkit
    >>> from rlkit.gateway import Gateway, Request
    >>> sampler = rlkit.connect("toy", seed=0).sampler().result()
    >>> with Gateway(sampler) as gateway, gateway.session(seed=1) as session:
    ...     reply = asyncio.run(session.answer(Request(messages=[{"role": "user", "content": "1 + 1?"}])))
    ...     len(reply.choices), len(session.turns)
    (1, 1)
    """

    def __init__(
        self,
        sampler: Sampler,
        *,
        chat: Chat | None = None,
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        open: bool = False,  # noqa: A002
        key: str | None = None,
    ) -> None:
        _check.require(hasattr(sampler, "sample"), "Gateway(sampler)", sampler, "a sampler: policy.sampler().result()")
        _check.require(chat is None or isinstance(chat, Chat), "Gateway(chat)", chat, "an rlkit.chat.Chat")
        check_settings("Gateway", params, limits)
        _check.require(isinstance(model, str) and model, "Gateway(model)", model, "a name")
        _check.require(isinstance(host, str) and host, "Gateway(host)", host, "a name or an address")
        _check.require(key is None or (isinstance(key, str) and key), "Gateway(key)", key, "a non-empty string")
        if key is None and not is_loopback(host):
            raise ConfigError(
                "Gateway(host)", f"{host} can be reached from other machines", "a loopback address, or key="
            )
        self._sampler = sampler
        self.chat = (Chat(sampler.tokenizer) if chat is None else chat).with_options(history="append")
        self.model = model
        self.host, self.port = host, _check.integer("Gateway(port)", port, low=0, high=65535)
        self.key = key
        self._params, self._limits = params, limits
        self._variant = functools.lru_cache(_CHATS)(self._make_variant)
        self._sessions: dict[str, Session] = {}  # by id and by key
        self._lock = threading.Lock()
        self._server: Server | None = None
        self._closed = False
        self._open = self._keep(Session(self, sampler, params=params, limits=limits, record=False)) if open else None

    def session(
        self,
        *,
        params: SamplingParams | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        ask: SampleFunction | None = None,
    ) -> Session:
        """Open a session for one episode, with the policy as it is now.

        Args:
            params: how turns are drawn, whatever clients ask; None: the gateway's.
            limits: the limits of the session; None: the gateway's.
            seed: >= 0. The same seed and requests draw the same tokens, in whatever order they arrive.
            ask: samples in place of the sampler: (prompt, params, n, seed) -> samples.

        Raises:
            ConfigError: an argument of the wrong type or out of range.
            BackendError: the gateway is closed.
        """
        params = self._params if params is None else params
        limits = self._limits if limits is None else limits
        return self._keep(Session(self, self._sampler, ask, params=params, limits=limits, seed=seed))

    def _keep(self, session: Session) -> Session:
        with self._lock:
            if self._closed:
                raise BackendError("the gateway is closed")
            self._sessions[session.id] = self._sessions[session.api_key] = session
        return session

    def update(self, sampler: Sampler) -> None:
        """Set another policy for sessions opened from now on; open ones keep theirs."""
        _check.require(hasattr(sampler, "sample"), "update(sampler)", sampler, "a sampler")
        with self._lock:
            self._sampler = sampler
            if self._open is not None:
                self._open.use(sampler)

    def admit(self, session: str | None, key: str | None) -> Session:
        """Return the session that a request names by its URL or by its key, or the open one.

        Args:
            session: the id in the URL, ``/s/<id>/...``; the key does not matter then. None: no id in the URL.
            key: the client's API key; None: nothing.

        Raises:
            GatewayError: 401, there is no such session, or no such key and the gateway is not open.
        """
        name = key if session is None else session
        with self._lock:
            named = None if name is None else self._sessions.get(name)
            if named is not None:
                return named
            if session is None and self._open is not None and self._fits(key):
                return self._open
        what = "there is no such session, or it has ended" if session is not None else "the API key is wrong"
        raise GatewayError(401, what, code="invalid_api_key")

    def _fits(self, key: str | None) -> bool:
        return self.key is None or hmac.compare_digest((key or "").encode(), self.key.encode())

    def forget(self, session: Session) -> None:
        """Forget a session that has ended."""
        with self._lock:
            self._sessions.pop(session.id, None)
            self._sessions.pop(session.api_key, None)

    def chat_with(self, template: Mapping[str, object]) -> Chat:
        """Return the chat with these variables of its template.

        Raises:
            GatewayError: 400, the template does not know them.
        """
        return self._variant(json.dumps(template, sort_keys=True)) if template else self.chat

    def _make_variant(self, template: str) -> Chat:
        variables = json.loads(template)
        thinking = variables.pop("enable_thinking", variables.pop("thinking", None))
        options = {} if thinking is None else {"thinking": thinking}
        try:
            return self.chat.with_options(variables={**self.chat.variables, **variables}, **options)
        except RlkitError as error:
            raise GatewayError(400, str(error), param="chat_template_kwargs") from error

    @property
    def url(self) -> str:
        """The gateway's URL; the first use starts the server.

        Raises:
            MissingPackageError: starlette or uvicorn is not installed.
            BackendError: the port is taken, or the gateway is closed.
        """
        with self._lock:
            if self._closed:
                raise BackendError("the gateway is closed")
            if self._server is None:
                app = _import_app("Gateway.url", "uvicorn")
                self._server = app.Server(self, self.host, self.port)
            return self._server.url

    def client(self, id: str, api_key: str, package: Literal["httpx", "httpx2"]) -> httpx.AsyncClient:  # noqa: A002
        """Return a client that reaches a session without a socket. See ``Session.client``."""
        _check.choice("client(package)", package, ("httpx", "httpx2"))
        app, library = _import_app("Gateway.client", package), importlib.import_module(package)
        transport = library.ASGITransport(app=app.create_app(self))
        headers, url = {"authorization": f"Bearer {api_key}"}, f"http://127.0.0.1/s/{id}/v1"
        client: httpx.AsyncClient = library.AsyncClient(transport=transport, base_url=url, headers=headers)
        return client

    def close(self) -> None:
        """Stop listening and end all sessions. The sampler stays open."""
        with self._lock:
            self._closed = True
            server, self._server = self._server, None
            sessions = set(self._sessions.values())
        for session in sessions:
            session.close()
        if server is not None:
            server.close()


def _import_app(user: str, package: str) -> Any:
    """Return the module of the endpoints. Raises MissingPackageError: it or the package cannot be imported."""
    try:
        importlib.import_module(package)
        return importlib.import_module("rlkit.gateway._app")
    except ImportError as error:
        raise missing(user, f"starlette, pydantic, {package}", "gateway") from error
