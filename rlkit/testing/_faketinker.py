"""``FakeTinker``: the real Tinker SDK over ``rlkit serve``'s application in this process, with faults on demand.

It replaces four names of the SDK, for clients of its own base URL alone: what makes the HTTP client, what sends
telemetry, which a fake gets none of, and what loads the tokenizers of the two kinds of clients.
tests/testing/test_faketinker.py fails when an SDK has moved them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import pkgutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import checked
from rlkit._interaction import Message
from rlkit.backends.protocol import Tokenizer, TrainerBackend
from rlkit.errors import BackendError, ConfigError, UnsupportedError
from rlkit.server import Service

if TYPE_CHECKING:
    import httpx
    import tinker

    from rlkit.server._app import Accepted

__all__ = ["FakeTinker", "Fault", "SeenRequest"]

_KINDS = ("lost", "slow", "bad_json", "opfail", "paused")
_QUIET = ("session_heartbeat", "telemetry", "dynamic_config", "client_config")


@attrs.frozen
class Fault:
    """One way in which a server fails.

    Args:
        kind: an HTTP status from "400" to "599"; "lost" (the connection breaks), "slow" (the answer comes ``seconds``
            late; beyond the client's patience, which is cut short, it is a timeout), "bad_json" (status 200, half a
            body), "opfail" (of a call of a model in training: it is accepted, and fails when it is carried out),
            "paused" (of "retrieve_future": not yet, the queue is paused; answered after ``seconds``).
        endpoint: which requests, by the last part of the path ("optim_step", "forward_backward", "retrieve_future",
            "asample", ...); "*" for all.
        when: "before" the request had an effect, or "after" it had: the operation is carried out and its answer lost.
        times: how many requests; None for all.
        skip: how many matching requests pass before the first that fails.
        operation: with "retrieve_future", only results of that operation ("optim_step", "forward_backward", ...).
        seconds: of "slow" and "paused".

    >>> Fault("503", "optim_step", when="after", times=3)
    Fault(kind='503', endpoint='optim_step', when='after', times=3, skip=0, operation=None, seconds=1.0)
    """

    kind: str
    endpoint: str = "*"
    when: Literal["before", "after"] = "before"
    times: int | None = checked(1, _check.integer, none=True, low=1)
    skip: int = checked(0, _check.integer, low=0)
    operation: str | None = None
    seconds: float = checked(1.0, _check.real, low=0.0)

    def __attrs_post_init__(self) -> None:
        status = isinstance(self.kind, str) and self.kind.isdecimal() and 400 <= int(self.kind) < 600
        if not status and self.kind not in _KINDS:
            raise ConfigError(
                "Fault.kind", f"is {self.kind!r}", f"a status from '400' to '599', or {', '.join(_KINDS)}"
            )
        _check.choice("Fault.when", self.when, ("before", "after"))
        if self.kind == "opfail" and self.when == "after":
            raise ConfigError("Fault(kind='opfail'): an operation that failed had no effect; expected when='before'")


@attrs.frozen
class AppliedOperation:
    """An operation that was actually carried out.

    Attributes:
        operation: "forward", "forward_backward", "optim_step", "save_weights", "sample", ...
        model_id: of which model, or the sampling session of a "sample".
        seq_id: the client's number of the request; 0 for one that made the model.
        time: when it was carried out (monotonic).
    """

    operation: str
    model_id: str
    seq_id: int | None
    time: float = attrs.field(factory=time.monotonic)


class RecordingService(Service):
    """A service that keeps what it carried out, and whose session ids are functions of its seed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.applied: list[AppliedOperation] = []

    def note(self, accepted: Accepted) -> None:
        self.applied.append(AppliedOperation(accepted.operation, *accepted.key))

    def new_session_id(self) -> str:
        return f"{self.derive_seed(0, len(self.sessions)):016x}"


@attrs.frozen
class SeenRequest:
    """A request that reached the server.

    Attributes:
        endpoint: such as "optim_step" or "retrieve_future".
        operation: of "retrieve_future": the operation of the result.
        time: its arrival (monotonic seconds).
        fault: the fault applied to it, or None.
    """

    endpoint: str
    operation: str | None
    time: float
    fault: Fault | None = None


class FakeTinker:
    """A Tinker service in this process, for tests: its client is the SDK's own, its models are small and exact.

    It is ``rlkit serve`` without a socket, over the toy backend: true losses and gradients, AdamW, sampling, snapshots,
    saved states. Only the HTTP transport of clients made for ``base_url`` is replaced, all other code of the SDK runs
    unchanged.

    Args:
        seed: of session ids and of samples without a seed; None for a fresh one.
        latency: seconds that each request takes longer.
        faults: the faults to apply; more with ``inject``.
        models: a function that makes backends, as ``rlkit.serve`` takes it; None: the toy.
        names: the base models that it has.
        dedupe: whether a request that arrives twice, with the same seq_id, is carried out once. A server without that
            applies a step twice if its first answer was lost.
        patience: seconds that a request waits for one with a lower seq_id before it fails.
        max_samplers: snapshots that are kept; the least recently used one is dropped.
        config: flags of ``client/config``, such as ``{"fwdbwd_max_chunk_len": 4}``.

    Attributes:
        base_url, api_key: what clients are made with.
        service: the service that answers.
        applied: the operations that were actually carried out, in order.

    Raises:
        MissingPackageError: a package of the extra ``serve`` is missing.

    >>> import numpy as np, tinker                                    # doctest: +SKIP
    >>> with FakeTinker(seed=0) as fake:                              # doctest: +SKIP
    ...     training = fake.service_client().create_lora_training_client("toy", rank=8).result()
    ...     step = training.optim_step(tinker.AdamParams(learning_rate=1e-2)).result()
    ...     fake.count("optim_step")
    1
    """

    def __init__(
        self,
        *,
        seed: int | None = 0,
        latency: float = 0.0,
        faults: Iterable[Fault] = (),
        models: Callable[..., TrainerBackend] | None = None,
        names: Sequence[str] = ("toy",),
        dedupe: bool = True,
        patience: float = 30.0,
        max_samplers: int = 64,
        config: Mapping[str, object] | None = None,
    ) -> None:
        self.base_url = f"https://fake-{next(_numbers)}.tinker.invalid"
        self.api_key = "tml-fake-key"
        self.names, self.latency = tuple(names), _check.real("FakeTinker(latency)", latency, low=0.0)
        options = {"dedupe": dedupe, "patience": patience, "max_samplers": max_samplers, "config": config}
        self.service = RecordingService(models, names=names, key=self.api_key, seed=seed, **options)
        self.tokenizer = self.service.models.tokenizer
        self._faults: list[tuple[Fault, list[int]]] = []  # with the number of requests that matched
        self.inject(*faults)
        self._seen: list[SeenRequest] = []
        self._clients: list[tinker.ServiceClient] = []
        self._open = False

    def service_client(self, **options: object) -> tinker.ServiceClient:
        """Return a new ``tinker.ServiceClient``; closed with the fake. ``options`` as for the class itself.

        Raises:
            ConfigError: the fake is not open: use it in a ``with`` block.
        """
        import tinker

        self._check_open()
        client = tinker.ServiceClient(**{"base_url": self.base_url, "api_key": self.api_key, **options})
        self._clients.append(client)
        return client

    def rest_client(self) -> tinker.RestClient:
        """Return a new ``tinker.RestClient``. Raises ConfigError: the fake is not open."""
        import tinker

        self._check_open()
        return tinker.RestClient(base_url=self.base_url, api_key=self.api_key)

    def _check_open(self) -> None:
        if not self._open:
            raise ConfigError("FakeTinker is not open; use it as `with FakeTinker() as fake:`")

    def inject(self, *faults: Fault) -> None:
        """Add faults; of those that match a request the first one applies.

        Raises:
            ConfigError: something else than a fault, or one of an endpoint that the service does not have.
        """
        endpoints = sorted(route.name for route in self.service.routes)
        for fault in faults:
            _check.require(isinstance(fault, Fault), "inject", fault, "a Fault")
            if fault.endpoint not in ("*", *endpoints):
                there = ", ".join(endpoints)
                raise ConfigError(f"Fault.endpoint: the service has no {fault.endpoint!r}; it has: {there}")
        self._faults += [(fault, [0]) for fault in faults]

    def heal(self) -> None:
        """End all faults."""
        self._faults.clear()

    def expire(self) -> None:
        """End all sessions from the server's side; requests for them get 410."""
        for session in list(self.service.sessions.values()):
            session.finished = True

    @property
    def applied(self) -> list[AppliedOperation]:
        """The operations that were actually carried out, in order."""
        return list(self.service.applied)

    def count(self, operation: str, model_id: str | None = None) -> int:
        """Return how often ``operation`` was carried out, such as "optim_step" or "forward_backward"."""
        return sum(x.operation == operation and model_id in (None, x.model_id) for x in self.applied)

    def repeated_operations(self) -> list[AppliedOperation]:
        """Return the operations whose model and seq_id had been carried out before."""
        known: dict[tuple[str, str, int], AppliedOperation] = {}
        numbered = [(x, (x.operation, x.model_id, x.seq_id)) for x in self.applied if x.seq_id is not None]
        return [x for x, key in numbered if known.setdefault(key, x) is not x]

    @property
    def requests(self) -> list[SeenRequest]:
        """The received requests, in order; heartbeats, telemetry and configuration are left out."""
        return list(self._seen)

    def open(self) -> Self:
        """Start it, as ``with`` does. Raises UnsupportedError: the SDK has moved what this replaces."""
        if self._open:
            raise ConfigError("FakeTinker is open already")
        if not _live:
            _patch_sdk()
        _live[self.base_url] = self
        self._open = True
        return self

    def close(self) -> None:
        """Finish its clients' sessions, free the models and restore the SDK's own transport."""
        if not self._open:
            return
        self._open, self.latency = False, 0.0
        self.heal()
        try:
            for client in self._clients:
                client.close("success").result(timeout=10)
        finally:
            self._clients.clear()
            del _live[self.base_url]
            if not _live:
                _restore_sdk()
            self.service.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def respond(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to an ``httpx.Request``: this is the transport."""
        import httpx

        endpoint, operation = self._describe(request)
        fault = self._take_fault(endpoint, operation)
        if endpoint not in _QUIET:
            self._seen.append(SeenRequest(endpoint, operation, time.monotonic(), fault))
        await asyncio.sleep(self.latency)  # also of 0: an SDK that asks again at once would block its own loop
        if fault is not None and fault.when == "before" and (failed := await self._fail(fault, endpoint, request)):
            return failed
        answer = await httpx.ASGITransport(self.service.app).handle_async_request(request)
        if fault is not None and fault.when == "after":
            await answer.aread()
            return await self._fail(fault, endpoint, request) or answer
        return answer

    def _describe(self, request: httpx.Request) -> tuple[str, str | None]:
        """Return the endpoint, and of "retrieve_future" the operation, which is a part of the id of the result."""
        scope = {"type": "http", "method": request.method, "path": request.url.path}
        for route in self.service.routes:
            if route.matches(scope)[0].value == 2:  # in full
                if route.name == "retrieve_future":
                    return route.name, json.loads(request.content)["request_id"].rpartition("-")[0]
                return route.name, None
        return request.url.path.rpartition("/")[2], None

    def _take_fault(self, endpoint: str, operation: str | None) -> Fault | None:
        for fault, matched in list(self._faults):
            if fault.endpoint in ("*", endpoint) and fault.operation in (None, operation):
                matched[0] += 1
                if matched[0] > fault.skip and (fault.times is None or matched[0] <= fault.skip + fault.times):
                    return fault
        return None

    async def _fail(self, fault: Fault, endpoint: str, request: httpx.Request) -> httpx.Response | None:
        """Return what the client gets in place of the answer; None if that only comes late."""
        import httpx

        if fault.kind == "lost":
            raise httpx.ReadError("the connection was lost, by a requested fault", request=request)
        if fault.kind == "bad_json":
            json_type = {"content-type": "application/json"}
            return httpx.Response(200, headers=json_type, content=b'{"request_id": ', request=request)
        if fault.kind == "slow":
            limit = request.extensions.get("timeout", {}).get("read") or fault.seconds
            await asyncio.sleep(min(fault.seconds, limit))
            if fault.seconds > limit:
                raise httpx.ReadTimeout("the answer came too late, by a requested fault", request=request)
            return None
        if fault.kind == "paused":
            await asyncio.sleep(fault.seconds)
            paused = {"queue_state": "paused_capacity", "queue_state_reason": "a requested fault"}
            return httpx.Response(408, json={"type": "try_again", "request_id": "", **paused}, request=request)
        if fault.kind == "opfail":
            return httpx.Response(200, content=self._accept_failing(endpoint, request.content), request=request)
        detail = f"{fault.kind}, by a requested fault"
        return httpx.Response(int(fault.kind), json={"detail": detail}, request=request)

    def _accept_failing(self, endpoint: str, body: bytes) -> bytes:
        """Accept a call of a model in training that fails in its turn; return the answer to it."""
        turn = self.service.find_turn(body)
        if turn is None:
            raise ConfigError(f"Fault(kind='opfail', endpoint={endpoint!r}): only a model's training calls can fail so")

        def job() -> Any:
            raise BackendError("the operation failed, by a requested fault")

        run, seq_id = turn
        start = functools.partial(run.order.add, seq_id)
        answer = self.service.accept((run.model_id, seq_id), endpoint, lambda: job, start, model_id=run.model_id)
        return bytes(answer.body)


class SdkTokenizer:
    """A tokenizer of rlkit with the SDK's interface: lists of ids."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.eos_token_id = inner.eos_ids[0]
        self.vocab_size = inner.vocab_size

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of ``text``; it adds no special tokens."""
        del add_special_tokens
        return [int(x) for x in self.inner.encode(text)]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids."""
        return self.inner.decode(np.asarray(tokens, np.int64), skip_special=skip_special_tokens)

    def apply_chat_template(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **variables: object
    ) -> list[int]:
        """Return the ids of messages in the model's template."""
        variables.pop("tokenize", None)
        ids = self.inner.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, **variables)
        return [int(x) for x in ids]


_numbers = itertools.count(1)
_live: dict[str, FakeTinker] = {}
_originals: dict[tuple[str, str], Any] = {}
_HOLDER = "tinker.lib.internal_client_holder"


def _make_client(**options: Any) -> Any:
    """Return ``AsyncTinker``, with the fake's transport where the base URL is a fake's and no client is given."""
    fake = _live.get(str(options.get("base_url")).rstrip("/"))
    if fake is not None and options.get("http_client") is None:
        import httpx

        transport, url = httpx.MockTransport(fake.respond), fake.base_url
        # Follow redirects as the SDK's own client does.
        options["http_client"] = httpx.AsyncClient(transport=transport, base_url=url, follow_redirects=True)
    return _find_original(_HOLDER, "AsyncTinker")(**options)


def _init_telemetry(provider: Any, session_id: str | None) -> Any:
    return None if _fake_of(provider) else _find_original(_HOLDER, "init_telemetry")(provider, session_id)


def _loads_tokenizer(kind: str) -> Callable[[Any], Any]:
    """Return the replacement of the method that loads the tokenizer, of one kind of clients."""

    def get_tokenizer(client: Any) -> Any:
        fake = _fake_of(client.holder)
        return SdkTokenizer(fake.tokenizer) if fake else _find_original(kind, "get_tokenizer")(client)

    return get_tokenizer


def _fake_of(holder: Any) -> FakeTinker | None:
    """Return the fake that a client's connections lead to."""
    return _live.get(getattr(holder, "_base_url", "").rstrip("/"))


_REPLACED: Mapping[tuple[str, str], Callable[..., Any]] = {
    (_HOLDER, "AsyncTinker"): _make_client,
    (_HOLDER, "init_telemetry"): _init_telemetry,
    **{(kind, "get_tokenizer"): _loads_tokenizer(kind) for kind in ("tinker:TrainingClient", "tinker:SamplingClient")},
}


def _patch_sdk() -> None:
    try:
        found = {(owner, name): getattr(pkgutil.resolve_name(owner), name) for owner, name in _REPLACED}
    except (ImportError, AttributeError) as error:
        message = f"FakeTinker needs tinker 0.38 or a later one with the names it replaces: {error}"
        raise UnsupportedError(message) from error
    _originals.update(found)
    for (owner, name), replacement in _REPLACED.items():
        setattr(pkgutil.resolve_name(owner), name, replacement)


def _restore_sdk() -> None:
    for (owner, name), original in _originals.items():
        setattr(pkgutil.resolve_name(owner), name, original)
    _originals.clear()


def _find_original(owner: str, name: str) -> Any:
    return _originals.get((owner, name)) or getattr(pkgutil.resolve_name(owner), name)
