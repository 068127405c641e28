"""``Service``: requests of the Tinker API in, answers out, without a socket."""

from __future__ import annotations

import concurrent.futures
import hmac
import json
import logging
import urllib.parse
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from rlkit import _check
from rlkit._runtime import Resource
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import BackendError, RlkitError
from rlkit.futures import wait_done
from rlkit.server import _sessions, _storage  # the last imports all files that declare endpoints
from rlkit.server._adapter import BackendModels
from rlkit.server._checkpoints import Checkpoints
from rlkit.server._state import ENDPOINTS, Applied, Entry, Futures, ServerState, find_endpoint
from rlkit.server._wire import ApiError, Request, Response, read_forward_backward

__all__ = ["Service"]

_log = logging.getLogger(__name__)
_POLL = 20.0  # seconds that the answer to "is it done?" may take; clients give up after 45
_PREFIX = "/api/v1/"


class Service(Resource):
    """The Tinker API over models of any kind.

    ``handle`` never waits: a longer request is accepted, and its result retrieved later. A transport that can wait
    calls ``waits_for`` first. Both may be called from any thread.

    Args:
        models: the models that it serves: ``ExactModels`` or ``BackendModels``.
        names: base models that clients may name; all of them mean the one of ``models``.
        keys: API keys that are accepted; None accepts every client.
        seed: of session ids and of samples without a seed; None for a fresh one.
        folder: where the list of saved states is kept, so that a later service knows them; None: nowhere.
        tokenizer_id: what clients load the tokenizer by.
        config: flags of the answer to ``client/config``.
        max_rank: of an adapter.
        max_samplers: policies that a session keeps to sample from. Beyond it the least recently used one is dropped;
            named ones and the base are reloaded when needed, others are gone.
        sampler_mb: megabytes at most of the policies that all sessions keep to sample from, in the same way; one in
            use is kept at any size.
        idle: seconds without a sign of life after which a session is ended and its models freed.
        dedupe: execute a request that arrives twice only once.
        patience: seconds that a request waits for one with a lower seq_id before it fails.
        raw_logprobs: give samples the logprobs of the untempered distribution instead of the one drawn from.

    >>> from rlkit.server import ExactModels
    >>> with Service(ExactModels(), names=["toy"]) as service:
    ...     answer = service.handle("GET", "/api/v1/healthz", {}, b"")
    >>> answer.status, answer.body
    (200, b'{"status": "ok"}')
    """

    def __init__(
        self,
        models: BackendModels,
        *,
        names: Sequence[str],
        keys: Collection[str] | None = None,
        seed: int | None = None,
        folder: Path | None = None,
        tokenizer_id: str | None = None,
        config: Mapping[str, object] | None = None,
        max_rank: int = 128,
        max_samplers: int = 64,
        sampler_mb: int = 2048,
        idle: float = 1800.0,
        dedupe: bool = True,
        patience: float = 120.0,
        raw_logprobs: bool = False,
    ) -> None:
        self._keys = None if keys is None else [key.encode() for key in keys]
        flags = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "custom_loss_server_side": True}
        self._state = ServerState(
            models=models,
            names=tuple(names),
            tokenizer_id=tokenizer_id,
            config={**flags, **(config or {})},
            seeds=SeedStream(resolve_seed(seed)),
            max_rank=max_rank,
            max_samplers=max_samplers,
            sampler_bytes=_check.integer("Service(sampler_mb)", sampler_mb, low=1) * 10**6,
            idle=idle,
            raw_logprobs=raw_logprobs,
            futures=Futures(dedupe=dedupe, patience=patience),
            checkpoints=Checkpoints(folder, models.delete),
            pool=concurrent.futures.ThreadPoolExecutor(64, "rlkit-serve-sample"),
        )
        self._lock = self._state.lock

    @property
    def applied(self) -> list[Applied]:
        """The executed operations, in order."""
        with self._lock:
            return list(self._state.applied)

    def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Return the answer to a request.

        Args:
            method: "GET", "POST", ...
            path: from "/api/v1/" on, or after a prefix of the base URL, with the query.
            headers: by name, in any case.
            body: as it came.
        """
        lowered = {name.lower(): value for name, value in headers.items()}
        request = None
        try:
            self.admit(lowered, path)
            request = _request(method, path, lowered, body)
            if request.path == _PREFIX + "retrieve_future":
                return self._state.futures.retrieve(request.fields().text("request_id"))
            if request.path == _PREFIX + "cancel_future":
                self._state.futures.cancel(request.fields().text("request_id"))
                return Response.json({})
            endpoint, parts = find_endpoint(request)
            with self._lock:
                return endpoint.handler(self._state, request, **parts)
        except ApiError as error:
            self._skip(request)
            return Response.error(error)
        except RlkitError as error:
            self._skip(request)
            return Response.error(ApiError(400, str(error)))
        except Exception as error:  # noqa: BLE001  # one request may fail, the server goes on
            _log.exception("%s %s failed", method, path.partition("?")[0])
            return Response.error(ApiError(500, f"{type(error).__name__} in the server; its log says more"))

    def _skip(self, request: Request | None) -> None:
        """Skip the turn of a request that was refused, so that later ones do not wait for it."""
        try:
            fields = {} if request is None else request.fields().values
        except ApiError:
            return  # protocol buffers, or nothing that has a number
        run, seq_id = self._state.runs.get(str(fields.get("model_id"))), fields.get("seq_id")
        if run is not None and isinstance(seq_id, int) and not isinstance(seq_id, bool):
            run.line.skip(seq_id)

    def waits_for(self, path: str, body: bytes) -> tuple[concurrent.futures.Future[Response], float] | None:
        """Return the future that the request waits for, and the longest wait in seconds; None: it need not wait."""
        if not path.partition("?")[0].endswith("/retrieve_future"):
            return None
        entry = self._wanted(body)
        if entry is None or entry.future.done():
            return None
        left = self._state.futures.left(entry) if entry.waits_for is not None else _POLL
        return entry.future, min(_POLL, max(left, 0.0))

    def _wanted(self, body: bytes) -> Entry | None:
        """Return the request whose result is asked for; None for a body that ``handle`` refuses."""
        try:
            return self._state.futures.find(json.loads(body)["request_id"])
        except (ValueError, TypeError, KeyError, RecursionError, ApiError):
            return None

    async def answer(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> Response:
        """Do as ``handle``, after waiting for a result in progress."""
        waiting = self.waits_for(path, body)
        if waiting is not None:
            await wait_done(*waiting)
        return self.handle(method, path, headers, body)

    def describe(self, method: str, path: str, body: bytes) -> tuple[str, str | None]:
        """Return a request's endpoint, such as "optim_step", and for "retrieve_future" the operation of the result."""
        request = _request(method, path, {}, body)
        name = request.path.removeprefix(_PREFIX)
        if name == "retrieve_future":
            entry = self._wanted(body)
            return name, None if entry is None else entry.operation
        try:
            return find_endpoint(request)[0].name, None
        except ApiError:
            return name, None

    @property
    def endpoints(self) -> list[str]:
        """The names that ``describe`` gives."""
        return sorted({each.name for each in ENDPOINTS} | {"retrieve_future"})

    def fail(self, endpoint: str, body: bytes) -> dict[str, object] | None:
        """Accept a call of a model in training and make it fail, for tests; None if it is another call."""
        if endpoint == "forward_backward":
            call = read_forward_backward(body)
            model_id, seq_id = call.model_id, call.seq_id
        else:
            fields = json.loads(body)
            model_id, seq_id = fields.get("model_id"), fields.get("seq_id")
        with self._lock:
            run = self._state.runs.get(model_id)
            if run is None or seq_id is None:
                return None
            entry = self._state.futures.add((model_id, seq_id), endpoint, model_id=model_id)
            entry.give_up(BackendError("the operation failed, by a requested fault"))
            run.line.skip(seq_id)
            return entry.accepted

    def backend(self, model_id: str) -> TrainerBackend:
        """Return the backend of a client's model, for tests."""
        return self._state.runs[model_id].ready().backend

    def expire(self) -> None:
        """End all sessions from this side: requests for them get 410 from now on."""
        with self._lock:
            for session in self._state.sessions.values():
                session.finished = True

    def close(self) -> None:
        """Finish accepted requests and free all models. May be called twice."""
        self.expire()  # clients that are still open stop asking
        with self._lock:
            runs = list(self._state.runs.values())
            self._state.runs.clear()
        for run in runs:
            _sessions.ended(run)
        for run in runs:
            run.worker.close()
        self._state.pool.shutdown(wait=True, cancel_futures=True)
        self._state.models.close()

    @property
    def has_keys(self) -> bool:
        """Whether it requires a key."""
        return self._keys is not None

    @property
    def in_use(self) -> bool:
        """Whether a client has a session."""
        with self._lock:
            return any(not session.finished for session in self._state.sessions.values())

    def admit(self, headers: Mapping[str, str], path: str) -> None:
        """Raise ApiError 401 for a request without one of the keys and without a signed path.

        ``headers`` have names in lower case.
        """
        if self._keys is None or _storage.signed(self._state, _request("GET", path, {}, b"")):
            return
        sent = headers.get("x-api-key", "").encode()
        good = [hmac.compare_digest(sent, key) for key in self._keys]  # compare all, in constant time
        if True not in good:
            raise ApiError(401, "the API key is missing or wrong; use the key that this server was started with")


def _request(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Request:
    try:
        parts = urllib.parse.urlsplit(path)
    except ValueError as error:
        raise ApiError(400, f"the path of the request cannot be read: {error}") from error
    start = parts.path.find(_PREFIX)
    plain = urllib.parse.unquote(parts.path[start:] if start >= 0 else parts.path)
    query = dict(urllib.parse.parse_qsl(parts.query))
    return Request(method.upper(), plain, query, headers, body)
