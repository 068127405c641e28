"""``VllmEngine``: servers of vLLM behind the seam between a trainer and what samples for it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import attrs
import numpy as np

from rlkit.backends.engine import LoraAdapter
from rlkit.backends.live import SuccessiveSampler
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.sampling import SeedStream
from rlkit.backends.vllm.client import Json, VllmClient
from rlkit.backends.vllm.live import ContinuingSampler
from rlkit.backends.vllm.loop import EventLoop
from rlkit.backends.vllm.opening import longest, named_model
from rlkit.backends.vllm.probe import TEMPERATURE, Probe, Seen, TrainerLogprobs, different_tokenizer
from rlkit.backends.vllm.process import VllmProcess, free_port
from rlkit.backends.vllm.sampler import VllmSampler
from rlkit.backends.vllm.server import Adapter, Server
from rlkit.backends.vllm.settings import Vllm
from rlkit.backends.vllm.wire import read_samples, read_scores, sample_request, score_request
from rlkit.errors import BackendError, ConfigError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Lora, SamplingParams

__all__ = ["Trained", "VllmEngine"]

T = TypeVar("T")

_KEPT = 2  # versions that stay loaded, whoever samples from them
_TEXTS = ("Hello, world! 12345 + 67.89 = ?\n\tdef f(x):\n        return x\n", "Übergröße, naïve café 你好世界")
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03}


@attrs.frozen(kw_only=True)
class Trained:
    """What the engine has to know about the trainer.

    Attributes:
        model: a folder or a hub id.
        dtype: of the base.
        lora: the adapter's shape.
        modules: last parts of the names of the modules that have it.
        tokenizer, max_length: of the model.
        seeds: of requests that bring none.
        logprobs: the trainer's own.
    """

    model: str
    dtype: str
    lora: Lora
    modules: Sequence[str]
    tokenizer: Tokenizer
    max_length: int
    seeds: SeedStream
    logprobs: TrainerLogprobs


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
        server = min(self.engine.servers, key=lambda server: server.busy)
        return await server.generate({**body, "model": self.engine.base if self.adapter is None else self.adapter.name})


class VllmEngine:
    """``SamplingEngine`` over servers of vLLM; adapters alone travel, by a folder, under names that are used once.

    Args:
        settings: which servers.
        trained: whom it samples for.

    Raises:
        ConfigError: a server does not start, or serves another model, or has another tokenizer.
        BackendError: it does not answer.
    """

    def __init__(self, settings: Vllm, trained: Trained) -> None:
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
            self.servers += _servers(settings, trained, self.base)
            self.max_length, self._scored = self._begin()
            for server in self.servers:
                self._compare(server, self.base, 0, scale=0.0)
        except BaseException:
            self.close()
            raise

    def load_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Write it into a folder, have all servers load it, and compare a few of its logprobs with the trainer's."""
        name = f"rlkit-{self._run}-{self._count}-version-{version}"
        self._count += 1
        folder = self._folder / name
        adapter.save(folder)
        loaded = Adapter(name, folder, version)
        weakref.finalize(loaded, _forget, self._loop, self.servers, name, folder)
        self._do(*(server.load(loaded) for server in self.servers))
        for server in self.servers:
            self._compare(server, name, version)
        self._loaded[version] = self._recent[version] = loaded
        while len(self._recent) > _KEPT:
            self._recent.popitem(last=False)

    def sampler(self, version: int) -> Sampler | None:
        """Return a sampler of that version while servers have it."""
        adapter = self._loaded.get(version)
        return None if adapter is None else self._sampler(adapter, version)

    def live_sampler(
        self, first: Sampler, update: Callable[[SuccessiveSampler], Future[int]]
    ) -> SuccessiveSampler | None:
        """See ``LiveEngine``; None where a server cannot abort requests."""
        try:
            self._do(*(server.client.abort("") for server in self.servers))
        except (BackendError, UnsupportedError):  # it has no such endpoint, or is not there to ask
            return None
        return ContinuingSampler(first, update, loop=self._loop, abort=self._abort, seeds=self._trained.seeds)

    async def _abort(self, request: str) -> None:
        with contextlib.suppress(BackendError):  # of a server that is gone
            await asyncio.gather(*(server.client.abort(request) for server in self.servers))

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
        for server, models in zip(self.servers, self._do(*(server.begin() for server in self.servers)), strict=True):
            model = named_model(models, None, server.client.url)
            if server is self.servers[0]:
                self.base = model.name
            elif model.name != self.base:
                raise ConfigError(f"{server.client.url}: serves {model.name!r}, and another server {self.base!r}")
            lengths.append(longest(model, self._trained.max_length))
            tokens = self._do(*(server.client.tokenize(text) for text in _TEXTS))
            other = different_tokenizer(self._trained.tokenizer, _TEXTS, tokens)
            if other:
                raise ConfigError(f"{server.client.url}: {other}; give it the model that is trained")
        return min(length for length, _ in lengths), min(scored for _, scored in lengths)

    def _compare(self, server: Server, model: str, version: int, scale: float = 1.0) -> None:
        tokens, tokenizer = self._probe.tokens, self._trained.tokenizer
        params = SamplingParams(max_tokens=8, temperature=TEMPERATURE, stop=())
        drawn = sample_request(tokens, params, 1, version, params.max_tokens, tokenizer)
        where = f"{model} at {server.client.url}"
        scored, sampled = self._do(
            server.generate({**score_request(tokens, 0), "model": model}), server.generate({**drawn, "model": model})
        )
        (sample,) = read_samples(sampled, where, tokens, params, 1, version, tokenizer.vocab_size)
        seen = Seen(read_scores(scored, where, tokens, 0)[0], np.concatenate([tokens, sample.tokens]), sample.logprobs)
        self._probe.check(where, seen, version, scale)

    def _do(self, *work: Coroutine[object, object, T]) -> list[T]:
        async def together() -> list[T]:
            return await asyncio.gather(*work)

        return self._loop.submit(together()).result()


def _servers(settings: Vllm, trained: Trained, base: str) -> list[Server]:
    if settings.urls:
        clients = [VllmClient(url, key=settings.key, deadline=settings.deadline) for url in settings.urls]
        return [Server(client, None, start=settings.start, restarts=settings.restarts) for client in clients]
    key, port = secrets.token_hex(16), free_port()
    command = settings.command(trained.model, trained.dtype, trained.lora, trained.modules, trained.max_length, base)
    environment = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": key,
        **settings.environment,
    }
    process = VllmProcess([*command, "--host", "127.0.0.1", "--port", str(port)], environment)
    client = VllmClient(f"http://127.0.0.1:{port}", key=key, deadline=settings.deadline)
    return [Server(client, process, start=settings.start, restarts=settings.restarts)]


def _forget(loop: EventLoop, servers: Sequence[Server], name: str, folder: Path) -> None:
    """Unload an adapter from which nobody samples any more; called by whatever thread collects garbage."""

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
