"""What a service remembers: sessions, models in training, samplers, custom losses; and how endpoints are declared."""

from __future__ import annotations

import concurrent.futures
import functools
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit.backends.sampling import SeedStream
from rlkit.backends.worker import Worker
from rlkit.server.adapter import BackendModel, BackendModels, BackendSnapshot
from rlkit.server.checkpoints import Checkpoints
from rlkit.server.futures import Futures, Line
from rlkit.server.losses import Loss
from rlkit.server.requests import ApiError, Request, Response
from rlkit.types import Lora

__all__ = ["Applied", "ClientSession", "Endpoint", "Endpoints", "SamplerSession", "ServerState", "TrainingRun"]

_APPLIED = 100_000  # operations that are remembered


@attrs.frozen
class Applied:
    """An operation that was really carried out.

    Attributes:
        operation: "forward", "forward_backward", "optim_step", "save_weights", ...
        model_id: of which model, or the sampling session of a "sample".
        seq_id: the client's number of the request.
        time: when it was done (monotonic).
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
    metadata: Mapping[str, Any] | None = None
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
    metadata: Mapping[str, Any] | None = None
    last_request: float = attrs.field(factory=time.time)
    unloaded: bool = False

    def ready(self) -> BackendModel:
        """Return the model. Raises ApiError: 400, making it failed."""
        if self.model is None:
            raise ApiError(400, f"model {self.model_id!r} could not be made; its first request says why")
        return self.model


@attrs.define(eq=False)
class SamplerSession:
    """A frozen policy that a client samples from, read when it is first needed.

    Attributes:
        number: what tells its seeds from another sampler's.
        read: gives the policy.
        again: it can be read again; False for one that exists only here.
        base: it is the base model, which costs nothing.
    """

    sampler_id: str
    base_model: str
    model_path: str | None
    number: int
    read: Callable[[], BackendSnapshot]
    again: bool = True
    base: bool = False
    _snapshot: BackendSnapshot | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def forget(self) -> None:
        """Frees the policy, unless it is being read; it is read again when it is needed."""
        if self._lock.acquire(blocking=False):
            self._snapshot = None
            self._lock.release()

    @property
    def kept(self) -> BackendSnapshot | None:
        """The policy, if it was read."""
        return self._snapshot

    def snapshot(self) -> BackendSnapshot:
        """Return the policy."""
        with self._lock:
            if self._snapshot is None:
                self._snapshot = self.read()
            return self._snapshot


@attrs.define(eq=False)
class ServerState:
    """Everything of one service."""

    models: BackendModels
    names: tuple[str, ...]
    tokenizer_id: str | None
    config: Mapping[str, Any]
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

    def session(self, session_id: str) -> ClientSession:
        """Return the session of that id. Raises ApiError: 404, there is none; 410, it was finished."""
        session = self.sessions.get(session_id)
        if session is None:
            raise ApiError(404, f"session {session_id!r} is unknown")
        if session.finished:
            raise ApiError(410, f"session {session_id!r} was finished")
        session.last_seen = time.monotonic()
        return session

    def run(self, model_id: str) -> TrainingRun:
        """Return the model in training of that id.

        Raises:
            ApiError: 404, there is none; 410, its session was finished, or it was unloaded.
        """
        run = self.runs.get(model_id)
        if run is None:
            raise ApiError(404, f"model {model_id!r} is unknown")
        self.session(model_id.split(":train:", maxsplit=1)[0])
        if run.unloaded:
            raise ApiError(410, f"model {model_id!r} was unloaded")
        run.last_request = time.time()
        return run

    def trim(self) -> None:
        """Lets go of the policies that were sampled from longest ago, until the others fit into ``sampler_bytes``."""
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
        """Frees a sampler's policy; one that exists only here is gone."""
        sampler.forget()
        if not sampler.again:
            self.samplers.pop(sampler.sampler_id, None)

    def base(self, name: str) -> str:
        """``name``, if this service has that base model. Raises ApiError: 400, it has others."""
        if name not in self.names:
            raise ApiError(400, f"base_model {name!r} is unknown; this server has: {', '.join(self.names)}")
        return name

    def seed(self, *words: int) -> int:
        """Return a seed of 64 bits, a function of the service's own and of ``words`` alone."""
        sequence = np.random.SeedSequence(self.seeds.entropy, spawn_key=(2, *words))
        return int(sequence.generate_state(1, np.uint64)[0])

    def done(self, operation: str, model_id: str, seq_id: int | None) -> None:
        """Note that an operation was carried out."""
        with self.lock:
            self.applied.append(Applied(operation, model_id, seq_id))


Handler: TypeAlias = Callable[..., Response]


@attrs.frozen
class Endpoint:
    """A method and a pattern of paths, and what answers them."""

    method: str
    pattern: re.Pattern[str]
    name: str
    handler: Handler


def _part(found: re.Match[str]) -> str:
    return f"(?P<{found[1]}>{'.+' if found[2] else '[^/]+'})"


class Endpoints:
    """The endpoints that a module declares.

    >>> endpoints = Endpoints()
    >>> @endpoints.add("GET", "samplers/{sampler_id}")
    ... def get_sampler(state, request, sampler_id): ...
    >>> endpoints.all[0].name
    'get_sampler'
    """

    def __init__(self) -> None:
        self.all: list[Endpoint] = []

    def add(self, method: str, path: str, name: str = "") -> Callable[[Handler], Handler]:
        """Decorate ``handler(state, request, **parts)``, whose own name is the endpoint's unless there is another.

        ``{part}`` in ``path`` is anything without a slash, ``{part:path}`` anything at all.
        """
        pattern = re.compile("/api/v1/" + re.sub(r"\{(\w+)(:path)?\}", _part, path))

        def added(handler: Handler) -> Handler:
            self.all.append(Endpoint(method, pattern, name or handler.__name__, handler))
            return handler

        return added

    post = functools.partialmethod(add, "POST")

    @staticmethod
    def find(endpoints: list[Endpoint], request: Request) -> tuple[Endpoint, dict[str, str]]:
        """Return the endpoint that answers, and the parts of the path.

        Raises:
            ApiError: 404, none does; 405, with another method.
        """
        others = []
        for endpoint in endpoints:
            match = endpoint.pattern.fullmatch(request.path)
            if match and endpoint.method == request.method:
                return endpoint, match.groupdict()
            others += [endpoint.method] * bool(match)
        if others:
            raise ApiError(405, f"{request.path} takes {' or '.join(others)}, not {request.method}")
        raise ApiError(404, f"{request.method} {request.path} is not an endpoint of this server")
