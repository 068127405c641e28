"""``FakeTinker``: the real Tinker SDK over a service in this process, with exact models and faults on demand."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import attrs

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.server import Applied, BackendModels, ExactModels, Service
from rlkit.testing import _seam
from rlkit.testing.faults import Fault, Faults

if TYPE_CHECKING:
    import httpx
    import tinker

__all__ = ["FakeTinker", "Seen"]

_numbers = itertools.count(1)
_QUIET = ("session_heartbeat", "telemetry", "dynamic_config", "client_config")
_SUBMITS = (
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "load_weights",
    "create_model",
    "asample",
)


@attrs.frozen
class Seen:
    """A request that reached the server.

    Attributes:
        endpoint: such as "optim_step" or "retrieve_future".
        operation: of "retrieve_future": what the result is of.
        time: when it came (monotonic seconds).
        fault: what was done to it, or None.
        copy: 0, or which repetition of a request that was delivered more than once.
    """

    endpoint: str
    operation: str | None
    time: float
    fault: Fault | None = None
    copy: int = 0


class FakeTinker:
    """A Tinker service in this process, for tests: its client is the SDK's own, its models are small and exact.

    Behind it stands the toy backend's model: true losses and gradients, AdamW, sampling, snapshots, saved states. Only
    the HTTP transport of clients made for ``base_url`` is replaced, everything else of the SDK runs as it is.

    Args:
        seed: of session ids and of samples without a seed; None for a fresh one.
        latency: seconds that each request is on its way, or a mapping of endpoints to seconds.
        faults: what goes wrong; more with ``inject``.
        models: what stands behind the service; None: ``ExactModels()``.
        names: the base models that it has.
        dedupe: whether a request that arrives twice, with the same seq_id, is carried out once. A server without
            that applies a step twice whose first answer was lost.
        deliveries: how often each request is delivered.
        patience: seconds that a request waits for one with a lower seq_id before it fails.
        max_samplers: unnamed snapshots that a session keeps; the one that was used longest ago goes.
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
            ConfigError: one is no ``Fault``, or is of an endpoint that a service has not.
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
        """End all sessions from the server's side; what belongs to them is answered with 410."""
        self.service.expire()

    @property
    def applied(self) -> list[Applied]:
        """The operations that were really carried out, in order."""
        return self.service.applied

    def count(self, operation: str, model_id: str | None = None) -> int:
        """How often ``operation`` was carried out, such as "optim_step" or "forward_backward"."""
        return sum(x.operation == operation and model_id in (None, x.model_id) for x in self.applied)

    def doubled(self) -> list[Applied]:
        """Return the operations that were carried out although one with the same model and seq_id had been."""
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
        """The requests that came, in order; heartbeats, telemetry and configuration are left out."""
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
        _seam.add(self)
        self._open = True
        return self

    def close(self) -> None:
        """Finishes its clients' sessions, frees the models and takes the SDK's own transport back into use."""
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
            _seam.remove(self)
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
            raise ConfigError(f"Fault(kind='opfail', endpoint={endpoint!r}): it is for calls of a model in training")
        return httpx.Response(200, json=accepted, request=request)

    def _check_open(self) -> None:
        if not self._open:
            raise ConfigError("FakeTinker is not open; use it as `with FakeTinker() as fake:`")


async def _failure(fault: Fault, request: httpx.Request) -> httpx.Response | None:
    """Return what the client gets instead of an answer; None where the answer only comes late."""
    import httpx

    if fault.kind == "lost":
        raise httpx.RemoteProtocolError("server disconnected, by the fault that was asked for", request=request)
    if fault.kind == "empty":
        return httpx.Response(200, headers={"content-type": "application/json"}, content=b"", request=request)
    if fault.kind == "redirect":
        return httpx.Response(307, headers={"location": "https://elsewhere.invalid/"}, request=request)
    if fault.kind == "reset":
        raise httpx.ReadError("connection reset by the fault that was asked for", request=request)
    if fault.kind == "timeout":
        raise httpx.ReadTimeout("no answer, by the fault that was asked for", request=request)
    if fault.kind == "slow":
        limit = request.extensions.get("timeout", {}).get("read")
        await asyncio.sleep(fault.seconds if limit is None else min(fault.seconds, limit))
        if limit is not None and fault.seconds > limit:
            raise httpx.ReadTimeout("the answer came too late, by the fault that was asked for", request=request)
        return None
    if fault.kind in ("paused_capacity", "paused_rate_limit"):
        await asyncio.sleep(fault.seconds)
        body = {"type": "try_again", "queue_state": fault.kind, "queue_state_reason": "the fault that was asked for"}
        return httpx.Response(408, json={"request_id": "", **body}, request=request)
    if fault.kind == "bad_json":
        return httpx.Response(
            200, headers={"content-type": "application/json"}, content=b'{"request_id": ', request=request
        )
    return httpx.Response(
        int(fault.kind), json={"detail": f"{fault.kind}, by the fault that was asked for"}, request=request
    )
