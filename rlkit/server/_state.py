"""The state of a service: sessions, models in training, samplers, custom losses; and how endpoints are declared.

Requests with later answers: ids, order, repeated delivery, results.

A client numbers the requests of one model (``seq_id``). They are executed in that order independent of their arrival,
and a request that arrives twice, because its first answer was lost, is executed once.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Mapping
from typing import TypeAlias

import attrs
import numpy as np

from rlkit._seeds import SeedStream
from rlkit.backends.trainer import Worker
from rlkit.errors import ConfigError, DataError, RlkitError, UnknownNameError, UnsupportedError
from rlkit.server._adapter import BackendModel, BackendModels, BackendSnapshot
from rlkit.server._checkpoints import Checkpoints
from rlkit.server._losses import Loss
from rlkit.server._wire import ApiError, Request, Response
from rlkit.types import Lora

__all__ = ["Applied", "ClientSession", "Futures", "Line", "SamplerSession", "ServerState", "TrainingRun", "endpoint"]

Submit = Callable[[Callable[[], None]], object]  # executes a job: a worker's submit
_KEPT = 512  # results that were read and are kept for a client that did not get them
_LIMIT = 20_000  # requests that are kept in all


@attrs.define(eq=False)
class Entry:
    """A request that was accepted.

    Attributes:
        request_id: the id that the client polls.
        operation: such as "optim_step".
        accepted: the body of the answer to the request itself.
        future: set to the Response, or to the exception, once it was executed.
        waits_for: the seq_id that has to come first, while it has not.
        since: when it was accepted (monotonic).
        key: its identity, the same for a repeated request.
    """

    request_id: str
    operation: str
    accepted: dict[str, object]
    future: concurrent.futures.Future[Response] = attrs.field(factory=concurrent.futures.Future)
    waits_for: int | None = None
    since: float = attrs.field(factory=time.monotonic)
    key: Hashable = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    @property
    def answer(self) -> Response:
        """The answer to the request itself."""
        return Response.json(self.accepted)

    def carry_out(self, job: Callable[[], Response]) -> None:
        """Run ``job`` and keep its result; do nothing if the request was cancelled or given up."""
        with self._lock:
            if self.future.done() or not self.future.set_running_or_notify_cancel():
                return
        try:
            self.future.set_result(job())
        except BaseException as error:  # noqa: BLE001  # the reader of the result gets it
            self.future.set_exception(error)

    def give_up(self, error: Exception) -> None:
        """Fail a request that has not started."""
        with self._lock:
            if not self.future.done() and not self.future.running():
                self.future.set_exception(error)


class Futures:
    """The accepted requests.

    Args:
        dedupe: execute a request that arrives twice only once. False is a server without at-most-once delivery.
        patience: seconds that a request waits for one with a lower seq_id before it fails.
    """

    def __init__(self, *, dedupe: bool = True, patience: float = 30.0) -> None:
        self.dedupe = dedupe
        self.patience = patience
        self._entries: dict[str, Entry] = {}
        self._keys: dict[Hashable, Entry] = {}
        self._read: OrderedDict[str, None] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()

    def known(self, key: Hashable) -> Entry | None:
        """Return the request of that identity if it came before and repeats are recognised."""
        with self._lock:
            return self._keys.get(key) if self.dedupe else None

    def add(self, key: Hashable, operation: str, **accepted: object) -> Entry:
        """Add a request. ``key`` is its identity, ``accepted`` goes into the answer next to ``request_id``."""
        with self._lock:
            request_id = f"{operation}-{next(self._numbers):06d}"
            entry = Entry(request_id, operation, {"request_id": request_id, **accepted}, key=key)
            self._entries[request_id] = entry
            self._keys[key] = entry
            while len(self._entries) > _LIMIT and (oldest := next(iter(self._entries.values()))).future.done():
                self._forget(oldest)
            return entry

    def accept(
        self, key: Hashable, operation: str, run: Submit, job: Callable[[], Response], **accepted: object
    ) -> Response:
        """Add a request that ``run`` executes, and return the answer to it."""
        entry = self.add(key, operation, **accepted)
        run(functools.partial(entry.carry_out, job))
        return entry.answer

    def find(self, request_id: str) -> Entry:
        """Return the request of that id.

        Raises:
            ApiError: 410, it was read long ago; 404, there was no such request.
        """
        with self._lock:
            entry, gone = self._entries.get(request_id), request_id in self._gone
        if entry is None:
            raise ApiError(410 if gone else 404, f"request {request_id!r} is {'no longer kept' if gone else 'unknown'}")
        return entry

    def retrieve(self, request_id: str) -> Response:
        """Return the result of a request.

        Raises:
            ApiError: 408, not yet; otherwise as ``find``.
        """
        entry = self.find(request_id)
        if not entry.future.done() and entry.waits_for is not None and self.left(entry) <= 0:
            message = (
                f"{entry.operation}: the preceding request, with seq_id {entry.waits_for}, never arrived; create a "
                "new client from the last saved state"
            )
            entry.give_up(ApiError(400, message))
        if not entry.future.done():
            raise ApiError(408, "not yet", type="try_again", request_id=request_id, queue_state="active")
        if entry.future.cancelled():
            raise ApiError(410, f"request {request_id!r} was cancelled")
        self._mark_read(request_id)
        error = entry.future.exception()
        return entry.future.result() if error is None else failed(error)

    def left(self, entry: Entry) -> float:
        """Return the seconds until a request that waits for another fails."""
        return entry.since + self.patience - time.monotonic()

    def cancel(self, request_id: str) -> None:
        """Drop a request that has not started."""
        self.find(request_id).future.cancel()

    def _mark_read(self, request_id: str) -> None:
        with self._lock:
            self._read[request_id] = None
            while len(self._read) > _KEPT:
                old, _ = self._read.popitem(last=False)
                if old in self._entries:
                    self._forget(self._entries[old])

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.request_id]
        self._gone[entry.request_id] = None
        if len(self._gone) > _LIMIT:
            self._gone.popitem(last=False)
        if self._keys.get(entry.key) is entry:
            del self._keys[entry.key]


class Line:
    """The requests of one model, executed one after the other in the order of their seq_ids from ``first`` on."""

    def __init__(self, run: Submit, first: int = 1) -> None:
        self._run = run
        self._next = first
        self._held: dict[int, tuple[Entry, Callable[[], Response]] | None] = {}  # None: refused
        self._refused: set[int] = set()
        self._lock = threading.Lock()

    def enter(self, seq_id: int | None, entry: Entry, job: Callable[[], Response]) -> None:
        """Execute ``job`` once its turn has come; without a seq_id, or with an earlier one, at once."""
        with self._lock:
            if seq_id is None or seq_id < self._next:
                self._refused.discard(-1 if seq_id is None else seq_id)
                self._run(functools.partial(entry.carry_out, job))
                return
            self._held[seq_id] = (entry, job)
            entry.waits_for = self._next
            self._go_on()

    def skip(self, seq_id: int | None) -> None:
        """Skip the turn of a request that was refused."""
        with self._lock:
            if seq_id is not None and seq_id >= self._next and seq_id not in self._held:
                self._held[seq_id] = None
                self._refused.add(seq_id)
                self._go_on()

    def had(self, seq_id: int | None) -> bool:
        """Return whether a request of that number was executed, or will be."""
        with self._lock:
            return seq_id is not None and seq_id not in self._refused and (seq_id < self._next or seq_id in self._held)

    def _go_on(self) -> None:
        while self._next in self._held:
            request = self._held.pop(self._next)
            self._next += 1
            if request is not None:
                request[0].waits_for = None
                self._run(functools.partial(request[0].carry_out, request[1]))
        for request in self._held.values():
            if request is not None:
                request[0].waits_for = self._next


def failed(error: BaseException) -> Response:
    """Return the result of a request that failed: the responsible side and the reason."""
    users = isinstance(error, (ConfigError, DataError, UnknownNameError, UnsupportedError)) or (
        isinstance(error, ApiError) and error.status < 500
    )
    message = str(error) if isinstance(error, (RlkitError, ApiError)) else f"{type(error).__name__}: {error}"
    return Response.json({"error": message, "category": "user" if users else "server"})


_APPLIED = 100_000  # operations that are remembered


@attrs.frozen
class Applied:
    """An operation that was actually executed.

    Attributes:
        operation: "forward", "forward_backward", "optim_step", "save_weights", ...
        model_id: of which model, or the sampling session of a "sample".
        seq_id: the client's number of the request.
        time: the time of its execution (monotonic).
    """

    operation: str
    model_id: str
    seq_id: int | None
    time: float = attrs.field(factory=time.monotonic)


@attrs.define(eq=False)
class ClientSession:
    """A client's session."""

    session_id: str
    number: int
    finished: bool = False
    metadata: Mapping[str, object] | None = None
    last_seen: float = attrs.field(factory=time.monotonic)


@attrs.define(eq=False)
class TrainingRun:
    """A model in training, its thread, and the order of its requests."""

    model_id: str
    base_model: str
    lora: Lora
    worker: Worker
    line: Line
    model: BackendModel | None = None
    metadata: Mapping[str, object] | None = None
    last_request: float = attrs.field(factory=time.time)
    unloaded: bool = False

    @property
    def session_id(self) -> str:
        """The session that made it."""
        return self.model_id.partition(":train:")[0]

    def ready(self) -> BackendModel:
        """Return the model. Raises ApiError: 400, making it failed."""
        if self.model is None:
            raise ApiError(400, f"model {self.model_id!r} could not be created; see the answer to its first request")
        return self.model


@attrs.define(eq=False)
class SamplerSession:
    """A frozen policy that a client samples from, loaded at its first use.

    Attributes:
        number: distinguishes its seeds from another sampler's.
        read: loads the policy.
        again: it can be loaded again; False for one that exists only here.
        base: it is the base model, which costs nothing.
        kept: the policy, if it was loaded.
    """

    sampler_id: str
    base_model: str
    model_path: str | None
    number: int
    read: Callable[[], BackendSnapshot]
    again: bool = True
    base: bool = False
    kept: BackendSnapshot | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def forget(self) -> None:
        """Free the policy, unless it is being loaded; it is loaded again when needed."""
        if self._lock.acquire(blocking=False):
            self.kept = None
            self._lock.release()

    @property
    def session_id(self) -> str:
        """The session that made it."""
        return self.sampler_id.partition(":sample:")[0]

    def snapshot(self) -> BackendSnapshot:
        """Return the policy."""
        with self._lock:
            if self.kept is None:
                self.kept = self.read()
            return self.kept


@attrs.define(eq=False)
class ServerState:
    """The whole state of one service."""

    models: BackendModels
    names: tuple[str, ...]
    tokenizer_id: str | None
    config: Mapping[str, object]
    seeds: SeedStream
    max_rank: int
    max_samplers: int
    sampler_bytes: int
    idle: float
    raw_logprobs: bool
    futures: Futures
    checkpoints: Checkpoints
    pool: concurrent.futures.ThreadPoolExecutor
    secret: bytes = attrs.field(factory=lambda: secrets.token_bytes(32), repr=False)  # signs addresses of files
    lock: threading.RLock = attrs.field(factory=threading.RLock)  # of all that follows
    sessions: dict[str, ClientSession] = attrs.field(factory=dict)
    runs: dict[str, TrainingRun] = attrs.field(factory=dict)
    samplers: OrderedDict[str, SamplerSession] = attrs.field(factory=OrderedDict)  # the last used is last
    losses: dict[tuple[str, str], Loss] = attrs.field(factory=dict)
    applied: deque[Applied] = attrs.field(factory=lambda: deque(maxlen=_APPLIED))
    answers: dict[str, Response] = attrs.field(factory=dict)  # by idempotency key

    def find_session(self, session_id: str) -> ClientSession:
        """Return the session of that id, finished or not. Raises ApiError: 404, there is no such session."""
        if session_id not in self.sessions:
            raise ApiError(404, f"session {session_id!r} is unknown")
        return self.sessions[session_id]

    def session(self, session_id: str) -> ClientSession:
        """Return the session of that id. Raises ApiError: 404, there is no such session; 410, it was finished."""
        session = self.find_session(session_id)
        if session.finished:
            raise ApiError(410, f"session {session_id!r} was finished")
        session.last_seen = time.monotonic()
        return session

    def run(self, model_id: str) -> TrainingRun:
        """Return the model in training of that id.

        Raises:
            ApiError: 404, there is no such model; 410, its session was finished, or it was unloaded.
        """
        run = self.runs.get(model_id)
        if run is None:
            raise ApiError(404, f"model {model_id!r} is unknown")
        self.session(run.session_id)
        if run.unloaded:
            raise ApiError(410, f"model {model_id!r} was unloaded")
        run.last_request = time.time()
        return run

    def trim(self) -> None:
        """Free the least recently used policies, until the others fit into ``sampler_bytes``."""
        with self.lock:
            left = self.sampler_bytes
            for i, sampler in enumerate(reversed(list(self.samplers.values()))):
                if sampler.kept is None or sampler.base:
                    continue
                size = getattr(sampler.kept, "nbytes", 0)
                left -= self.sampler_bytes // 4 if size is None else size
                if left < 0 and i:  # the last one is in use
                    self.let_go(sampler)

    def let_go(self, sampler: SamplerSession) -> None:
        """Free a sampler's policy; one that exists only here is lost."""
        sampler.forget()
        if not sampler.again:
            self.samplers.pop(sampler.sampler_id, None)

    def base(self, name: str) -> str:
        """Return ``name`` if this service has that base model. Raises ApiError: 400, it has only others."""
        if name not in self.names:
            raise ApiError(400, f"base_model {name!r} is unknown; this server has: {', '.join(self.names)}")
        return name

    def seed(self, *words: int) -> int:
        """Return a seed of 64 bits, a function of the service's own and of ``words`` alone."""
        sequence = np.random.SeedSequence(self.seeds.entropy, spawn_key=(2, *words))
        return int(sequence.generate_state(1, np.uint64)[0])

    def done(self, operation: str, model_id: str, seq_id: int | None) -> None:
        """Record that an operation was executed."""
        with self.lock:
            self.applied.append(Applied(operation, model_id, seq_id))


Handler: TypeAlias = Callable[..., Response]


@attrs.frozen
class Endpoint:
    """A method, a pattern of paths, and their handler."""

    method: str
    pattern: re.Pattern[str]
    name: str
    handler: Handler


def _part(found: re.Match[str]) -> str:
    return f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})"


ENDPOINTS: list[Endpoint] = []


def endpoint(method: str, path: str, name: str = "") -> Callable[[Handler], Handler]:
    """Declare ``handler(state, request, **parts)``, whose own name is the endpoint's unless another is given.

    ``{part}`` in ``path`` matches any text without a slash, ``{part:path}`` any text.
    """
    pattern = re.compile("/api/v1/" + re.sub(r"\{(\w+)(:path)?\}", _part, path))

    def added(handler: Handler) -> Handler:
        ENDPOINTS.append(Endpoint(method, pattern, name or handler.__name__, handler))
        return handler

    return added


post = functools.partial(endpoint, "POST")


def find_endpoint(request: Request) -> tuple[Endpoint, dict[str, str]]:
    """Return the endpoint that answers, and the parts of the path.

    Raises:
        ApiError: 404, no endpoint has the path; 405, only with another method.
    """
    others = []
    for each in ENDPOINTS:
        match = each.pattern.fullmatch(request.path)
        if match and each.method == request.method:
            return each, match.groupdict()
        others += [each.method] * bool(match)
    if others:
        raise ApiError(405, f"{request.path} takes {' or '.join(others)}, not {request.method}")
    raise ApiError(404, f"{request.method} {request.path} is not an endpoint of this server")
