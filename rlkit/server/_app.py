"""The endpoints of the Tinker API: sessions, and the results of requests; ``Service`` holds what there is.

A client numbers the requests of one model (``seq_id``). They are carried out in that order, however they arrive, and a
request that arrives twice, because its first answer was lost, is carried out once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import secrets
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tinker import types

from rlkit import _check
from rlkit._runtime import Resource
from rlkit._seeds import resolve_seed
from rlkit._web import Guard, Handlers, find_key, is_key
from rlkit.backends.protocol import TrainerBackend
from rlkit.backends.tokenizers import source_of
from rlkit.errors import ConfigError, DataError, RlkitError, UnknownNameError, UnsupportedError
from rlkit.futures import wait_done
from rlkit.server import _sampling, _saved, _training
from rlkit.server._models import Models, toy_models
from rlkit.server._wire import answer, read, read_turn

__all__ = ["Accepted", "ClientSession", "Endpoint", "Job", "Key", "Service"]

_log = logging.getLogger(__name__)
_POLL = 20.0  # seconds that the answer to "is it done?" may take; clients give up after 45
_GRACE = 30.0  # seconds for signs of life that wait to be read, as when the process was stopped for a while
_KEPT = 512  # results that were read and are kept for a client that did not get them
_LIMIT = 20_000  # requests that are kept in all
_BODY_LIMIT = 256 * 2**20
_CLOSING = {"connection": "close"}  # for requests that the SDK sends on separate connections, which it forgets
_DEDUPLICATES = {"x-rlkit-deduplicates": "1"}  # tells rlkit's own client that a call sent twice is carried out once

Endpoint: TypeAlias = "Callable[[Service, Request], Awaitable[Response]]"
Job: TypeAlias = Callable[[], Response]
Key: TypeAlias = tuple[str, int | None]  # of a request: the model or sampling session, and the client's number of it


@attrs.define(eq=False)
class ClientSession:
    """A client's session."""

    session_id: str
    number: int
    finished: bool = False
    last_seen: float = attrs.field(factory=time.monotonic)


@attrs.define(eq=False)
class Accepted:
    """A request that was accepted.

    Attributes:
        key: the same for a repeated request.
        request_id: the id that the client polls.
        operation: such as "optim_step".
        more: what the answer to the request itself has besides that id.
        job: computes the response.
        done: called with it once it was carried out.
        future: set to the response, or to the exception, once it was carried out.
        waits_for: the seq_id that has to come first, while it has not.
        since: when it was accepted (monotonic).
    """

    key: Key
    request_id: str
    operation: str
    more: Mapping[str, object]
    job: Job
    done: Callable[[Accepted], None]
    future: concurrent.futures.Future[Response] = attrs.field(factory=concurrent.futures.Future)
    waits_for: int | None = None
    since: float = attrs.field(factory=time.monotonic)

    def carry_out(self) -> None:
        """Do the job, unless the request was cancelled."""
        if self.future.set_running_or_notify_cancel():
            try:
                result = self.job()
                self.done(self)
                self.future.set_result(result)
            except BaseException as error:  # noqa: BLE001  # the reader of the result gets it
                self.future.set_exception(error)


class Results:
    """The accepted requests and their results, by the ids that clients poll."""

    def __init__(self) -> None:
        self._all: dict[str, Accepted] = {}
        self._keys: dict[Key, str] = {}
        self._read: dict[str, None] = {}
        self._last = 0
        self._salt = secrets.token_hex(4)  # a client of an earlier server may still ask for its results

    def add(self, key: Key, operation: str, *more: Any) -> Accepted:
        """Add a request. When there are very many, the oldest ones are forgotten."""
        self._last += 1
        accepted = Accepted(key, f"{operation}-{self._salt}.{self._last:06d}", operation, *more)
        self._all[accepted.request_id], self._keys[key] = accepted, accepted.request_id
        while len(self._all) > _LIMIT and (oldest := next(iter(self._all.values()))).future.done():
            self._forget(oldest)
        return accepted

    def find_repeat(self, key: Key) -> Accepted | None:
        """Return the request that came before under this key, if it has a number and is still kept."""
        return None if key[1] is None else self._all.get(self._keys.get(key, ""))

    def find(self, request_id: str) -> Accepted:
        """Return the request of that id. Raises HTTPException: 410, it was read long ago; 404, there was none."""
        if request_id in self._all:
            return self._all[request_id]
        stem, _, number = request_id.rpartition(".")
        gone = stem.endswith(f"-{self._salt}") and number.isdecimal() and 0 < int(number[:9]) <= self._last
        status, what = (410, "no longer kept") if gone else (404, "unknown")
        raise HTTPException(status, f"request {request_id!r} is {what}")

    def mark_read(self, accepted: Accepted) -> None:
        """Record that a client got the result: it is kept until many others were read."""
        self._read[accepted.request_id] = None
        while len(self._read) > _KEPT:
            self._forget(self._all[next(iter(self._read))])

    def _forget(self, accepted: Accepted) -> None:
        del self._all[accepted.request_id]
        self._read.pop(accepted.request_id, None)
        self._keys.pop(accepted.key, None)


class Service(Resource):
    """The Tinker API over models of any kind; ``app`` is the ASGI application.

    Args:
        models: a function that makes a backend for each client, as ``serve`` takes it, or ``Models``; None: the toy.
        names: base models that clients may name; all of them mean the one of ``models``.
        key: the API key that clients must send; None accepts every client of this machine.
        seed: of samples without a seed; None for a fresh one.
        folder: where the list of saved states is kept, so that a later service knows them; None: nowhere.
        tokenizer_id: what clients load the tokenizer by; None: the source of the model's.
        config: flags of the answer to ``client/config``.
        max_rank: of an adapter.
        max_samplers: policies that are kept to sample from, of all sessions. Beyond it the least recently used one is
            dropped; named ones are reloaded when needed, others are gone. The base is always kept.
        idle: seconds without a sign of life, >= 60, after which a session is ended and its models freed; the SDK gives
            one every ten seconds.
        dedupe: carry out a request that arrives twice only once.
        patience: seconds that a request waits for one with a lower seq_id before it fails.

    Raises:
        ConfigError: ``max_rank``, ``max_samplers``, ``idle`` or ``patience`` is no number in its range.
        CheckpointError: another server uses the folder, it cannot be written, or its list of states is damaged.
    """

    def __init__(
        self,
        models: Models | Callable[..., TrainerBackend] | None = None,
        *,
        names: Sequence[str],
        key: str | None = None,
        seed: int | None = None,
        folder: Path | None = None,
        tokenizer_id: str | None = None,
        config: Mapping[str, object] | None = None,
        max_rank: int = 128,
        max_samplers: int = 64,
        idle: float = 1800.0,
        dedupe: bool = True,
        patience: float = 120.0,
    ) -> None:
        self.max_rank = _check.integer("max_rank", max_rank, low=1)
        self.max_samplers = _check.integer("max_samplers", max_samplers, low=1)
        self.idle = _check.real("idle", idle, low=60.0)
        self.dedupe, self.patience, self._key = dedupe, _check.real("patience", patience, low=0.0), key
        made = toy_models() if models is None else models if isinstance(models, Models) else Models(models)
        self.models, self.names = made, tuple(names)
        # Clients on this machine can read a directory.
        self.tokenizer_id = source_of(made.tokenizer) if tokenizer_id is None else tokenizer_id
        flags = {"pjwt_auth_enabled": False, "use_pyqwest_transport": False, "custom_loss_server_side": False}
        self.config = {**flags, **(config or {})}
        self.sessions: dict[str, ClientSession] = {}
        self.runs: dict[str, _training.TrainingRun] = {}
        self.samplers: dict[str, _sampling.SamplerSession] = {}  # the last used is last
        self.saved = _saved.SavedStates(folder, made.delete)
        self.results = Results()
        self.pool = concurrent.futures.ThreadPoolExecutor(64, "rlkit-serve-sample")
        self._seed = resolve_seed(seed)
        tables = (_ENDPOINTS, _training.ENDPOINTS, _sampling.ENDPOINTS, _saved.ENDPOINTS)
        self.routes = [self._route(*endpoint) for table in tables for endpoint in table.items()]
        routed = Starlette(routes=self.routes, exception_handlers={HTTPException: self._refuse})
        routed.router.redirect_slashes = False
        handlers: Handlers = {HTTPException: _describe}
        self.app = Guard(routed, admit=self._admit, handlers=handlers, body_limit=_BODY_LIMIT, own_host=key is None)

    def _admit(self, request: Request) -> bool:
        if self._key is not None and not is_key(find_key(request.headers), self._key):
            raise HTTPException(401, "the API key is missing or wrong; use the key that this server was started with")
        return True

    def _route(self, name: str, function: Endpoint) -> Route:
        method, _, path = name.partition(" ")

        async def respond(request: Request) -> Response:
            try:
                return await function(self, request)
            except Exception as error:  # noqa: BLE001  # one request may fail, the server goes on
                return await self._refuse(request, error)

        return Route(f"/api/v1/{path}", respond, methods=[method], name=function.__name__)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """Return the answer to a request that failed. It has had its turn: later ones do not wait for it."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=400)  # nobody reads it
        response = await _describe(request, error)
        if response.status_code != 413:
            turn = self.find_turn(await request.body())
            if turn is not None:
                turn[0].order.skip(turn[1])
        return response

    def find_turn(self, body: bytes) -> tuple[_training.TrainingRun, int] | None:
        """Return the model in training that a request is for, and its seq_id, whatever it asks for."""
        turn = read_turn(body)
        return (self.runs[turn[0]], turn[1]) if turn is not None and turn[0] in self.runs else None

    def accept(
        self,
        key: Key,
        operation: str,
        prepare: Callable[[], Job],
        start: Callable[[Accepted], object],
        **more: object,
    ) -> Response:
        """Accept a request, and answer with the id of its result; one that comes again gets the first one's.

        Args:
            key: the model or sampling session, and the client's number of the request; None: it has none.
            operation: its name.
            prepare: checks the request and returns its job.
            start: has the job carried out, in its turn.
            more: what the answer has besides the id.
        """
        accepted = self.results.find_repeat(key) if self.dedupe else None
        if accepted is None:
            accepted = self.results.add(key, operation, more, prepare(), self.note)
            start(accepted)
        elif accepted.operation != operation:
            raise DataError(f"{operation}: seq_id {key[1]} already belongs to a {accepted.operation}")
        return JSONResponse({"request_id": accepted.request_id, **accepted.more})

    def note(self, accepted: Accepted) -> None:
        """Take note of a request that was carried out; called in its thread."""

    def new_session_id(self) -> str:
        """Return an id that no client has: one of an earlier server may still be asking."""
        return secrets.token_hex(8)

    def find_session(self, session_id: str) -> ClientSession:
        """Return the session of that id. Raises HTTPException: 404, it is unknown; 410, it was finished."""
        session = self.sessions.get(session_id)
        if session is None or session.finished:
            status, what = (404, "is unknown") if session is None else (410, "was finished")
            raise HTTPException(status, f"session {session_id!r} {what}")
        session.last_seen = time.monotonic()
        return session

    def finish_session(self, session: ClientSession) -> None:
        """End a session and free its models and samplers. Saved states stay."""
        session.finished = True
        for run in list(self.runs.values()):
            if run.session_id == session.session_id:
                run.close()
        for sampler in list(self.samplers.values()):
            if sampler.session_id == session.session_id:
                del self.samplers[sampler.sampler_id]

    def check_name(self, name: str) -> str:
        """Return ``name`` if it is a base model of this service. Raises UnknownNameError."""
        if name not in self.names:
            raise UnknownNameError(f"base_model {name!r} is unknown; this server has: {', '.join(self.names)}")
        return name

    def derive_seed(self, *words: int) -> int:
        """Return a seed of 64 bits, a function of the service's own and of ``words`` alone."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(2, *words))
        return int(sequence.generate_state(1, np.uint64)[0])

    def close(self) -> None:
        """Finish accepted requests and free all models. May be called twice."""
        for session in self.sessions.values():
            session.finished = True  # clients that are still open stop asking
        runs = list(self.runs.values())
        for run in runs:
            run.close()
        for run in runs:
            run.worker.close()
        self.pool.shutdown(wait=True, cancel_futures=True)
        self.models.close()
        self.saved.close()


async def _describe(request: Request, error: Any) -> Response:
    """Return a refusal: a status, and a sentence that says what is wrong."""
    path, closing = request.url.path, _CLOSING if request.url.path.endswith(("/client/config", "/telemetry")) else {}
    if isinstance(error, HTTPException):
        status, detail, headers = error.status_code, error.detail, error.headers or {}
        if detail == "Not Found":
            detail = f"{request.method} {path} is not an endpoint of this server"
        if detail == "Method Not Allowed":
            allowed = " or ".join(sorted({*headers["Allow"].split(", ")} - {"HEAD"}))
            detail = f"{path} takes {allowed}, not {request.method}"
        return JSONResponse({"detail": detail}, status, {**headers, **closing})
    if isinstance(error, RlkitError):
        return JSONResponse({"detail": str(error)}, 400, closing)
    _log.error("%s %s failed", request.method, path, exc_info=error)
    return JSONResponse({"detail": f"{type(error).__name__} in the server; its log says more"}, 500, closing)


async def client_config(service: Service, request: Request) -> Response:
    """Return flags for the client; for rlkit's, whether a call sent twice is carried out once."""
    return JSONResponse(service.config, headers={**_CLOSING, **(_DEDUPLICATES if service.dedupe else {})})


async def dynamic_config(service: Service, request: Request) -> Response:
    """Return flags that may change: abandoned samples are cancelled."""
    return JSONResponse({"sample_cancel_enabled": True})


async def health(service: Service, request: Request) -> Response:
    """Report that the server answers."""
    return JSONResponse({"status": "ok"})


async def telemetry(service: Service, request: Request) -> Response:
    """Accept telemetry and discard it."""
    return JSONResponse({"status": "accepted"}, headers=_CLOSING)


async def capabilities(service: Service, request: Request) -> Response:
    """Return the base models."""
    each = {"max_context_length": service.models.max_length, "trainable": True, "sampleable": True}
    models = [types.SupportedModel(model_name=name, **each) for name in service.names]
    return answer(types.GetServerCapabilitiesResponse(supported_models=models))


async def create_session(service: Service, request: Request) -> Response:
    """Begin a session, which ends when its client has disappeared."""
    await read(request, types.CreateSessionRequest)
    session = ClientSession(service.new_session_id(), len(service.sessions))
    service.sessions[session.session_id] = session
    _end_when_silent(weakref.ref(service), session, again=False)
    return answer(types.CreateSessionResponse(session_id=session.session_id))


def _end_when_silent(found: weakref.ref[Service], session: ClientSession, *, again: bool) -> None:
    """End a session that is found to be silent twice in a row."""
    service = found()
    if service is not None and not session.finished:
        left = session.last_seen + service.idle - time.monotonic()
        if left <= 0 and again:
            service.finish_session(session)
        else:
            check = functools.partial(_end_when_silent, found, session, again=left <= 0)
            asyncio.get_running_loop().call_later(max(left, _GRACE), check)


async def session_heartbeat(service: Service, request: Request) -> Response:
    """Record that the client is alive."""
    service.find_session((await read(request, types.SessionHeartbeatRequest)).session_id)
    return answer(types.SessionHeartbeatResponse())


async def finish_session(service: Service, request: Request) -> Response:
    """End a session, be it for the second time."""
    session_id = request.path_params["session_id"]
    if session_id not in service.sessions:
        raise HTTPException(404, f"session {session_id!r} is unknown")
    service.finish_session(service.sessions[session_id])
    return JSONResponse({"session_id": session_id})


async def retrieve_future(service: Service, request: Request) -> Response:
    """Return the result of a request, after waiting for it."""
    accepted = service.results.find((await read(request, types.FutureRetrieveRequest)).request_id)
    if (session := service.sessions.get(accepted.key[0].partition(":")[0])) is not None:
        session.last_seen = time.monotonic()
    left = accepted.since + service.patience - time.monotonic()
    await wait_done(accepted.future, _POLL if accepted.waits_for is None else min(_POLL, max(left, 0.0)))
    if accepted.waits_for is not None and time.monotonic() - accepted.since >= service.patience:
        missing = f"the preceding request, with seq_id {accepted.waits_for}, never arrived"
        accepted.future.cancel()  # it is not carried out later
        problem = f"{accepted.operation}: {missing}; create a new client from the last saved state"
        return answer(types.RequestFailedResponse(error=problem, category="user"))
    if not accepted.future.done():
        waiting = {"type": "try_again", "request_id": accepted.request_id, "queue_state": "active"}
        return JSONResponse(waiting, 408)
    if accepted.future.cancelled():
        raise HTTPException(410, f"request {accepted.request_id!r} was cancelled")
    service.results.mark_read(accepted)
    error = accepted.future.exception()
    if error is None:
        return accepted.future.result()
    users = isinstance(error, (ConfigError, DataError, UnknownNameError, UnsupportedError))
    problem = str(error) if isinstance(error, RlkitError) else f"{type(error).__name__}: {error}"
    return answer(types.RequestFailedResponse(error=problem, category="user" if users else "server"))


async def cancel_future(service: Service, request: Request) -> Response:
    """Drop a request that has not started."""
    service.results.find((await read(request, types.FutureRetrieveRequest)).request_id).future.cancel()
    return JSONResponse({})


_ENDPOINTS = {
    "POST client/config": client_config,
    "POST client/dynamic_config": dynamic_config,
    "GET healthz": health,
    "POST telemetry": telemetry,
    "GET get_server_capabilities": capabilities,
    "POST create_session": create_session,
    "POST session_heartbeat": session_heartbeat,
    "POST sessions/{session_id}/finish": finish_session,
    "POST retrieve_future": retrieve_future,
    "POST cancel_future": cancel_future,
}
