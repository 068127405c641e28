"""``FakeTinker``: the real Tinker SDK over a service in this process, with exact models and faults on demand.

The fake replaces the SDK's HTTP transport at three names of private modules, all replaced here.

Clients of other base URLs are not touched. tests/testing/test_faketinker.py fails when an SDK has moved the names.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._interaction import Message
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.server import Applied, BackendModels, ExactModels, Service
from rlkit.testing.faults import Fault, Faults

if TYPE_CHECKING:
    import httpx
    import tinker

__all__ = ["NAMES", "FakeTinker", "SdkTokenizer", "Seen", "add", "remove"]

_HOLDER = "tinker.lib.internal_client_holder"
_SAMPLING = "tinker.lib.public_interfaces.sampling_client"
_TRAINING = "tinker.lib.public_interfaces.training_client"
NAMES = (
    (_HOLDER, "AsyncTinker"),
    (_HOLDER, "init_telemetry"),
    (_SAMPLING, "_load_tokenizer_from_model_info"),
    (_TRAINING, "_load_tokenizer_from_model_info"),
)

Sdk: TypeAlias = Any  # something of the SDK's private modules
_lock = threading.Lock()
_live: dict[str, FakeTinker] = {}
_originals: dict[tuple[str, str], Sdk] = {}


def add(fake: FakeTinker) -> None:
    """Register a fake for clients of its base URL.

    Raises:
        UnsupportedError: the package tinker is missing or of another shape.
    """
    with _lock:
        if not _live:
            _install()
        _live[fake.base_url] = fake


def remove(fake: FakeTinker) -> None:
    """Unregister a fake; restore the SDK when none are left."""
    with _lock:
        _live.pop(fake.base_url, None)
        if not _live:
            for (module, name), original in _originals.items():
                setattr(importlib.import_module(module), name, original)
            _originals.clear()


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


def _install() -> None:
    for module, name in NAMES:
        try:
            _originals[module, name] = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            _originals.clear()
            message = f"FakeTinker needs tinker 0.38 or a later one with {module}.{name}: {error}"
            raise UnsupportedError(message) from error
    replacements = (_client, _telemetry, _tokenizer, _tokenizer)
    for (module, name), replacement in zip(NAMES, replacements, strict=True):
        setattr(importlib.import_module(module), name, replacement)


def _client(**options: Sdk) -> Sdk:
    """Return ``AsyncTinker``, with the fake's transport where the base URL is a fake's."""
    fake = _live.get(str(options.get("base_url")).rstrip("/"))
    if fake is not None:
        httpx = importlib.import_module("httpx")
        transport = httpx.MockTransport(fake.respond)
        options["http_client"] = httpx.AsyncClient(transport=transport, base_url=fake.base_url)
    return _original(_HOLDER, "AsyncTinker")(**options)


def _telemetry(provider: Sdk, session_id: str | None) -> Sdk:
    fake = _live.get(getattr(provider, "_base_url", ""))
    if fake is not None and not fake.telemetry:
        return None
    return _original(_HOLDER, "init_telemetry")(provider, session_id)


def _tokenizer(model_name: str, tokenizer_id: str | None = None) -> Sdk:
    for fake in list(_live.values()):
        if model_name in fake.names:
            return SdkTokenizer(fake.tokenizer)
    return _original(_SAMPLING, "_load_tokenizer_from_model_info")(model_name, tokenizer_id)


def _original(module: str, name: str) -> Sdk:
    return _originals.get((module, name)) or getattr(importlib.import_module(module), name)


_numbers = itertools.count(1)
_QUIET = ("session_heartbeat", "telemetry", "dynamic_config", "client_config")
_SAVES = ("save_weights", "save_weights_for_sampler", "load_weights")
_SUBMITS = ("forward_backward", "optim_step", *_SAVES, "create_model", "asample")


@attrs.frozen
class Seen:
    """A request that reached the server.

    Attributes:
        endpoint: such as "optim_step" or "retrieve_future".
        operation: of "retrieve_future": the operation of the result.
        time: its arrival (monotonic seconds).
        fault: the fault applied to it, or None.
        copy: 0, or which repetition of a request that was delivered more than once.
    """

    endpoint: str
    operation: str | None
    time: float
    fault: Fault | None = None
    copy: int = 0


class FakeTinker:
    """A Tinker service in this process, for tests: its client is the SDK's own, its models are small and exact.

    It uses the toy backend's model: true losses and gradients, AdamW, sampling, snapshots, saved states. Only
    the HTTP transport of clients made for ``base_url`` is replaced, all other code of the SDK runs unchanged.

    Args:
        seed: of session ids and of samples without a seed; None for a fresh one.
        latency: the latency of each request in seconds, or a mapping of endpoints to seconds.
        faults: the faults to apply; more with ``inject``.
        models: the models that the service has; None: ``ExactModels()``.
        names: the base models that it has.
        dedupe: whether a request that arrives twice, with the same seq_id, is executed once. A server without that
            applies a step twice if its first answer was lost.
        deliveries: how often each request is delivered.
        patience: seconds that a request waits for one with a lower seq_id before it fails.
        max_samplers: unnamed snapshots that a session keeps; the least recently used one is dropped.
        config: flags of ``client/config``, such as ``{"fwdbwd_max_chunk_len": 4}``.
        raw_logprobs: give samples the logprobs of the untempered distribution.
        telemetry: let the SDK send telemetry here.

    Raises:
        UnsupportedError: the package tinker is missing, or has moved what this replaces.

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
        latency: float | Mapping[str, float] = 0.0,
        faults: Iterable[Fault] = (),
        models: BackendModels | None = None,
        names: Sequence[str] = ("toy",),
        dedupe: bool = True,
        deliveries: int = 1,
        patience: float = 30.0,
        max_samplers: int = 64,
        config: Mapping[str, object] | None = None,
        raw_logprobs: bool = False,
        telemetry: bool = False,
    ) -> None:
        _check.integer("FakeTinker(deliveries)", deliveries, low=1)
        self.base_url = f"https://fake-{next(_numbers)}.tinker.invalid"
        self.api_key = "tml-fake-key"
        self.names = tuple(names)
        self.latency = latency
        self.telemetry = telemetry
        models = ExactModels() if models is None else models
        self.tokenizer = models.tokenizer
        self.service = Service(
            models,
            names=names,
            keys=[self.api_key],
            seed=seed,
            dedupe=dedupe,
            patience=patience,
            config=config,
            raw_logprobs=raw_logprobs,
            max_samplers=max_samplers,
        )
        self._deliveries = deliveries
        self._faults = Faults()
        self.inject(*faults)
        self._seen: list[Seen] = []
        self._clients: list[tinker.ServiceClient] = []
        self._lock = threading.Lock()
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
        """Return a ``tinker.RestClient``: capabilities, training runs, checkpoints."""
        import tinker

        self._check_open()
        return tinker.RestClient(base_url=self.base_url, api_key=self.api_key)

    def inject(self, *faults: Fault) -> None:
        """Add faults.

        Raises:
            ConfigError: one is not a ``Fault``, or names an endpoint that a service does not have.
        """
        for fault in faults:
            _check.require(isinstance(fault, Fault), "inject", fault, "a Fault")
            if fault.endpoint not in ("*", *self.service.endpoints):
                there = ", ".join(self.service.endpoints)
                raise ConfigError(f"Fault.endpoint: the service has no {fault.endpoint!r}; it has: {there}")
        self._faults.add(*faults)

    def heal(self) -> None:
        """End all faults."""
        self._faults.clear()

    def expire(self) -> None:
        """End all sessions from the server's side; requests for them get 410."""
        self.service.expire()

    @property
    def applied(self) -> list[Applied]:
        """The operations that were actually executed, in order."""
        return self.service.applied

    def count(self, operation: str, model_id: str | None = None) -> int:
        """Return how often ``operation`` was executed, such as "optim_step" or "forward_backward"."""
        return sum(x.operation == operation and model_id in (None, x.model_id) for x in self.applied)

    def doubled(self) -> list[Applied]:
        """Return the repeated executions: operations whose model and seq_id had been executed before."""
        had: set[tuple[str, str, int | None]] = set()
        again = []
        for x in self.applied:
            key = (x.operation, x.model_id, x.seq_id)
            if x.seq_id is not None and key in had:
                again.append(x)
            had.add(key)
        return again

    @property
    def requests(self) -> list[Seen]:
        """The received requests, in order; heartbeats, telemetry and configuration are left out."""
        with self._lock:
            return list(self._seen)

    def rate(self, endpoint: str | None = None) -> float:
        """Return requests per second between the first and the last one, of one endpoint or of all."""
        times = [x.time for x in self.requests if endpoint in (None, x.endpoint) and not x.copy]
        span = times[-1] - times[0] if times else 0.0
        return (len(times) - 1) / span if span > 0 else 0.0

    def open(self) -> Self:
        """Start it, as ``with`` does."""
        if self._open:
            raise ConfigError("FakeTinker is open already")
        add(self)
        self._open = True
        return self

    def close(self) -> None:
        """Finish its clients' sessions, free the models and restore the SDK's own transport."""
        if not self._open:
            return
        self._open = False
        self.heal()
        self.latency = 0.0
        try:
            for client in self._clients:
                client.close("success").result(timeout=10)
        finally:
            self._clients.clear()
            remove(self)
            self.service.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()

    async def respond(self, request: httpx.Request) -> httpx.Response:
        """Return the answer to an ``httpx.Request``: this is the transport."""
        endpoint, operation = self.service.describe(request.method, request.url.raw_path.decode(), request.content)
        fault = self._faults.take(endpoint, operation)
        if endpoint not in _QUIET:
            with self._lock:
                self._seen.append(Seen(endpoint, operation, time.monotonic(), fault))
        latency = self.latency if isinstance(self.latency, float | int) else self.latency.get(endpoint, 0.0)
        if latency:
            await asyncio.sleep(latency)
        if fault is not None and fault.when == "before":
            answer = self._failed(request, endpoint) if fault.kind == "opfail" else await _failure(fault, request)
            if answer is not None:
                return answer
        answer = await self._answered(request, endpoint)
        if fault is not None and fault.when == "after":
            answer = await _failure(fault, request) or answer
        return answer

    async def _answered(self, request: httpx.Request, endpoint: str) -> httpx.Response:
        path, body = request.url.raw_path.decode(), request.content
        answer = await self.service.answer(request.method, path, request.headers, body)
        if endpoint in _SUBMITS:
            for copy in range(1, self._deliveries):
                with self._lock:
                    self._seen.append(Seen(endpoint, None, time.monotonic(), copy=copy))
                await self.service.answer(request.method, path, request.headers, body)
        import httpx

        content = answer.body if answer.file is None else answer.file.read_bytes()
        return httpx.Response(answer.status, headers=dict(answer.headers), content=content, request=request)

    def _failed(self, request: httpx.Request, endpoint: str) -> httpx.Response:
        """Return the answer to a request that is accepted and whose operation fails."""
        import httpx

        accepted = self.service.fail(endpoint, request.content)
        if accepted is None:
            raise ConfigError(f"Fault(kind='opfail', endpoint={endpoint!r}): only a model's training calls can fail so")
        return httpx.Response(200, json=accepted, request=request)

    def _check_open(self) -> None:
        if not self._open:
            raise ConfigError("FakeTinker is not open; use it as `with FakeTinker() as fake:`")


async def _failure(fault: Fault, request: httpx.Request) -> httpx.Response | None:
    """Return the client's replacement for an answer; None if the answer is only late."""
    import httpx

    raised = {
        "lost": (httpx.RemoteProtocolError, "server disconnected, by a requested fault"),
        "reset": (httpx.ReadError, "connection reset by a requested fault"),
        "timeout": (httpx.ReadTimeout, "no answer, by a requested fault"),
    }
    if fault.kind in raised:
        kind, text = raised[fault.kind]
        raise kind(text, request=request)
    bodies = {"empty": b"", "bad_json": b'{"request_id": '}
    if fault.kind in bodies:
        json = {"content-type": "application/json"}
        return httpx.Response(200, headers=json, content=bodies[fault.kind], request=request)
    if fault.kind == "redirect":
        return httpx.Response(307, headers={"location": "https://elsewhere.invalid/"}, request=request)
    if fault.kind == "slow":
        limit = request.extensions.get("timeout", {}).get("read")
        await asyncio.sleep(fault.seconds if limit is None else min(fault.seconds, limit))
        if limit is not None and fault.seconds > limit:
            raise httpx.ReadTimeout("the answer came too late, by a requested fault", request=request)
        return None
    if fault.kind in ("paused_capacity", "paused_rate_limit"):
        await asyncio.sleep(fault.seconds)
        body = {"type": "try_again", "queue_state": fault.kind, "queue_state_reason": "a requested fault"}
        return httpx.Response(408, json={"request_id": "", **body}, request=request)
    return httpx.Response(int(fault.kind), json={"detail": f"{fault.kind}, by a requested fault"}, request=request)
