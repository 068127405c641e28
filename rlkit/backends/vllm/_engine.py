"""``VllmEngine``: servers of vLLM as the engine that samples for a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from rlkit.backends.protocol import Sampler
from rlkit.backends.samplers import LoraAdapter, SuccessiveSampler, TrainedPolicy
from rlkit.backends.vllm._client import Json, ServerLost, Unreachable, VllmClient
from rlkit.backends.vllm._opening import longest, named_model
from rlkit.backends.vllm._placement import place_server
from rlkit.backends.vllm._probe import TEXTS, Ask, Probe, different_tokenizer
from rlkit.backends.vllm._sampler import ContinuingSampler, EventLoop, VllmSampler
from rlkit.backends.vllm._server import Adapter, Check, Server, VllmProcess, begin, free_port, server_options
from rlkit.errors import BackendError, BackendTimeout, ConfigError, UnsupportedError
from rlkit.futures import Future

if TYPE_CHECKING:
    from rlkit.backends.vllm.settings import Vllm

__all__ = ["VllmEngine", "open_engine"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_KEPT = 2  # versions that stay loaded, whoever samples from them
_VARIABLES = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"}  # that every server needs
_STRENGTHS = (0.03, 0.1, 0.3, 1.0)  # of the trial's adapter relative to the weights, about
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03}


@attrs.frozen(eq=False)
class _Policy:
    """A version, or the base model, on all servers."""

    engine: VllmEngine
    adapter: Adapter | None

    @property
    def name(self) -> str:
        what = "the base model" if self.adapter is None else f"version {self.adapter.version}"
        return f"{what} at {', '.join(server.client.url for server in self.engine.servers)}"

    async def generate(self, body: Json) -> Json:
        asked = {**body, "model": self.engine.base if self.adapter is None else self.adapter.name}
        hung: list[Server] = []
        while True:
            server = self.engine.next_server(hung)
            try:
                return await server.generate(asked)
            except ServerLost:  # asked again: elsewhere, or there when it is back
                _log.warning("%s was lost; its requests are sent again", server.client.url)
            except BackendTimeout:
                hung.append(server)
                if all(server.gone is not None or server in hung for server in self.engine.servers):
                    raise


class VllmEngine:
    """``SamplingEngine`` over servers of vLLM; adapters alone travel, by a folder, under names that are used once.

    Args:
        settings: which servers.
        trained: whom it samples for.

    Raises:
        ConfigError: a server does not start, or serves another model, or has another tokenizer.
        BackendError: it does not answer.
    """

    def __init__(self, settings: Vllm, trained: TrainedPolicy) -> None:
        self._trained = trained
        self._loop = EventLoop("rlkit-vllm")
        self._folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-", dir=settings.folder))
        self._run, self._count = secrets.token_hex(4), 0
        self._recent: OrderedDict[int, Adapter] = OrderedDict()
        self._loaded: weakref.WeakValueDictionary[int, Adapter] = weakref.WeakValueDictionary()
        self.base = "base"
        self.servers: list[Server] = []
        self._end = weakref.finalize(self, _end, self._loop, self.servers, self._folder)
        lora = trained.lora
        tolerance = settings.tolerance or _TOLERANCE.get(trained.dtype, _TOLERANCE["bfloat16"])
        self._probe = Probe(
            trained.logprobs, trained.tokenizer, tolerance, scale=lora.alpha / lora.rank, rank=lora.rank
        )
        try:
            self.servers += _servers(settings, trained, self.base, self._check)
            self.max_length, self._scored = self._begin()
            self._expected = self._probe.expected(0.0)
            for server in self.servers:
                self._compare(server, self.base, 0, scale=0.0)
        except BaseException:
            self.close()
            raise

    def load_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Write it into a folder, have all servers load it, and compare a few of its logprobs with the trainer's."""
        loaded = self._load(adapter, version)
        self._loaded[version] = self._recent[version] = loaded
        while len(self._recent) > _KEPT:
            self._recent.popitem(last=False)

    def try_adapter(self, adapter: LoraAdapter) -> bool:
        """Do the same with one that is forgotten at once; called while the trainer's own is that one, too.

        Returns:
            False: nothing was done, since it changes too little to be told from the base model.
        """
        if self._probe.is_telling:
            self._load(adapter, 0)
            return True
        return False

    def sampler(self, version: int) -> Sampler | None:
        """Return a sampler of that version while servers have it."""
        adapter = self._loaded.get(version)
        return None if adapter is None else self._sampler(adapter, version)

    def live_sampler(
        self, first: Sampler, update: Callable[[SuccessiveSampler], Future[int]]
    ) -> SuccessiveSampler | None:
        """See ``LiveEngine``; None where a server cannot abort requests, as without ``--enable-scale-out``."""
        try:
            self._do(*(server.client.abort("") for server in self.servers))
        except (BackendError, UnsupportedError):  # it has no such endpoint, or is not there to ask
            return None
        return ContinuingSampler(first, update, loop=self._loop, abort=self._abort)

    async def _abort(self, request: str) -> None:
        with contextlib.suppress(BackendError):  # of a server that is gone
            await asyncio.gather(*(server.client.abort(request) for server in self.servers if server.up))

    def base_sampler(self) -> Sampler:
        """Return a sampler of the base model."""
        return self._sampler(None, 0)

    def close(self) -> None:
        """End the servers that it started, and forget the adapters. May be called twice."""
        self._end()

    def _sampler(self, adapter: Adapter | None, version: int) -> VllmSampler:
        return VllmSampler(
            _Policy(self, adapter),
            self._loop,
            tokenizer=self._trained.tokenizer,
            max_length=self.max_length,
            scored=self._scored,
            version=version,
            seeds=self._trained.seeds,
        )

    def _begin(self) -> tuple[int, int]:
        """Start all servers; return the longest sample, and the longest text that they score."""
        lengths = []
        try:
            served = self._loop.submit(begin(self.servers)).result()
        except Unreachable as error:
            raise BackendError(f"connect(sampler): {error}. {_remedy(self._trained)}") from error
        for server, models in zip(self.servers, served, strict=True):
            model = named_model(models, None, server.client.url)
            if server is self.servers[0]:
                self.base = model.name
            elif model.name != self.base:
                raise ConfigError(f"{server.client.url}: serves {model.name!r}, but another server {self.base!r}")
            lengths.append(longest(model, self._trained.max_length))
            tokens = self._do(*(server.client.encode(model, text) for text in TEXTS))
            other = different_tokenizer(self._trained.tokenizer, TEXTS, tokens)
            if other:
                raise ConfigError(f"{server.client.url}: {other}; serve the model that is trained")
        return min(length for length, _ in lengths), min(scored for _, scored in lengths)

    def next_server(self, without: Sequence[Server] = ()) -> Server:
        """Return the server that is asked next: of those that are up the one that has least to do.

        Raises:
            BackendError: all are gone.
        """
        left = [server for server in self.servers if server.gone is None and server not in without]
        if not left:
            raise next(server.gone for server in self.servers if server.gone is not None)
        return min(left, key=lambda server: (not server.up, server.busy))

    def _load(self, adapter: LoraAdapter, version: int) -> Adapter:
        name = f"rlkit-{self._run}-{self._count}-version-{version}"
        self._count += 1
        folder = self._folder / name
        adapter.save(folder)
        loaded = Adapter(name, folder, version, self._probe.expected())
        weakref.finalize(loaded, _forget, self._loop, self.servers, name, folder)
        for server in self._do(self._load_everywhere(loaded))[0]:
            self._compare(server, name, version)
        return loaded

    async def _load_everywhere(self, adapter: Adapter) -> list[Server]:
        """Return the servers that have it now; one that is coming back gets it then, and one at least has it."""
        while True:
            waited = self.next_server()
            if not waited.up:
                with contextlib.suppress(ServerLost):
                    await waited.wait_done()
                continue
            up = [server for server in self.servers if server.up]
            for server in self.servers:
                server.expect(adapter)
            results = await asyncio.gather(*(server.load(adapter) for server in up), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, (ServerLost, BackendTimeout)):
                    raise result
            done = [server for server, result in zip(up, results, strict=True) if result is None]
            if done:
                return done

    async def _check(self, server: Server, adapters: Sequence[Adapter]) -> None:
        for name, expected in [(each.name, each.expected) for each in adapters] or [(self.base, self._expected)]:
            # By the client: what the server is asked for waits until this check is over.
            ask = partial(_ask, server.client.generate, name)
            await self._probe.recheck(ask, f"{name} at {server.client.url}", expected)

    def _compare(self, server: Server, model: str, version: int, scale: float = 1.0) -> None:
        where = f"{model} at {server.client.url}"
        try:
            (seen,) = self._do(self._probe.look(partial(_ask, server.generate, model), where, version))
        except ServerLost:  # it is checked when it comes back
            return
        except BackendTimeout:  # likewise, and others sample meanwhile
            if any(other.up for other in self.servers):
                return
            raise
        self._probe.check(where, seen, version, scale)

    def _do(self, *work: Coroutine[object, object, T]) -> list[T]:
        async def together() -> list[T]:
            return await asyncio.gather(*work)

        return self._loop.submit(together()).result()


def open_engine(settings: Vllm, policy: TrainedPolicy) -> VllmEngine:
    """Return servers that sample the policy, after an adapter that is not a policy has shown that adapters arrive.

    A policy's own adapter begins at zero, and changes little by little: one that never arrived would be seen late.

    Raises:
        ConfigError: vLLM cannot serve such a policy.
        BackendError: a server refuses the trial's adapter, or computes other logprobs with it than the trainer.
    """
    if policy.head:
        all_modules = policy.lora.target_modules is None
        remedy = "give Lora(train_unembed=False)" if all_modules else "leave it out of target_modules"
        raise ConfigError(f"sampler='vllm': vLLM does not support adapters on the output head; {remedy}")
    engine = VllmEngine(settings, policy)
    try:
        for strength in _STRENGTHS:
            with policy.trial(strength) as adapter:
                if engine.try_adapter(adapter):
                    break
    except BaseException:
        engine.close()
        raise
    return engine


def _remedy(trained: TrainedPolicy) -> str:
    """Return the remedy where nothing listens."""
    shape = (trained.dtype, trained.lora, trained.modules, trained.max_length)
    options = server_options(*shape, device=trained.device)
    variables = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
    return (
        f"Start one there: {variables} vllm serve {shlex.join([trained.model, *options])} --port PORT; or let "
        "rlkit start one: sampler='vllm'; to wait for a server that is still starting, use "
        "sampler=Vllm(urls=[...], start=SECONDS)"
    )


async def _ask(generate: Ask, model: str, body: Json) -> Json:
    return await generate({**body, "model": model})


def _servers(settings: Vllm, trained: TrainedPolicy, base: str, check: Check) -> list[Server]:
    make = partial(Server, start=settings.start, restarts=settings.restarts, check=check)
    if settings.urls:
        return [make(VllmClient(url, key=settings.key, deadline=settings.deadline), None) for url in settings.urls]
    key, port = secrets.token_hex(16), free_port()
    placed, variables = place_server(trained.device, settings.memory, settings.devices)
    shape = (trained.model, trained.dtype, trained.lora, trained.modules, trained.max_length)
    command = settings.command(*shape, base, placed, device=trained.device)
    environment = _VARIABLES | {"VLLM_NO_USAGE_STATS": "1", "VLLM_API_KEY": key} | variables
    environment |= settings.environment
    process = VllmProcess([*command, "--host", "127.0.0.1", "--port", str(port)], environment)
    client = VllmClient(f"http://127.0.0.1:{port}", key=key, deadline=settings.deadline)
    return [make(client, process)]


def _forget(loop: EventLoop, servers: Sequence[Server], name: str, folder: Path) -> None:
    """Unload an adapter from which no one samples any more; called by whatever thread collects garbage."""

    async def unload() -> None:
        await asyncio.gather(*(server.unload(name) for server in servers))
        shutil.rmtree(folder, ignore_errors=True)

    loop.soon(lambda: loop.keep(unload()))


def _end(loop: EventLoop, servers: Sequence[Server], folder: Path) -> None:
    async def end() -> None:
        await asyncio.gather(*(server.end() for server in servers), return_exceptions=True)

    loop.at_end.append(end)
    loop.close()
    shutil.rmtree(folder, ignore_errors=True)
