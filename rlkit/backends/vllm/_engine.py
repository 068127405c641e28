"""``VllmEngine``: servers of vLLM as the engine that samples for a trainer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import shlex
import shutil
import signal
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from rlkit._process import Program, ProgramResult
from rlkit.backends.protocol import Sampler
from rlkit.backends.samplers import LoraAdapter, TrainedPolicy
from rlkit.backends.vllm._client import (
    Json,
    ModelMissing,
    ServerLost,
    VllmClient,
    read_samples,
    read_scores,
    sample_request,
    score_request,
    submit,
)
from rlkit.backends.vllm._sampler import PROBE, PROBE_LENGTH, VllmSampler, check_logprobs_mode, distance
from rlkit.backends.vllm.settings import VARIABLES, prepare_server, server_options
from rlkit.errors import BackendError, BackendTimeout, ConfigError, RlkitError
from rlkit.futures import wait_done
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    from rlkit.backends.vllm.settings import Vllm

__all__ = ["VllmEngine", "open_engine"]

_log = logging.getLogger(__name__)

_KEPT = 2  # versions that stay loaded, whoever samples from them
_STRENGTHS = (0.03, 0.1, 0.3, 1.0)  # of the trial's adapter relative to the weights, about
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.03}
_DRAWN = SamplingParams(max_tokens=8, temperature=0.7, stop=())  # of the probe's sample
_START, _LISTENS = 900.0, 10.0  # seconds until a server answers that is started here, or that runs
_LOOK = 5.0  # seconds in which a server that was lost says that it works
_AVOIDED = 30.0  # seconds without requests, after a server was lost, while there is another
_ENDS = 10.0  # seconds in which it is noticed that the program of a lost server has ended
_GRACE = 10.0  # seconds between asking a server to end and ending it


@attrs.define(eq=False)
class Server:
    """One server.

    Attributes:
        client: asks it.
        ended: of one that rlkit started, how it ended.
        base: its name of the base model.
        busy: requests that it has.
        lost: when it was lost, by ``time.monotonic``; None: it answers, as far as is known.
        breaks: of its client, when it was compared last.
        lock: held while it gets what a server that came back lacks.
    """

    client: VllmClient
    ended: concurrent.futures.Future[ProgramResult] | None = None
    base: str = ""
    busy: int = 0
    lost: float | None = None
    breaks: int = 0
    lock: asyncio.Lock = attrs.field(factory=asyncio.Lock)

    @property
    def avoided(self) -> bool:
        """Return whether others are asked first."""
        return self.lost is not None and time.monotonic() - self.lost < _AVOIDED

    @property
    def doubted(self) -> bool:
        """Return whether there may be another process since it was compared."""
        return self.lost is not None or self.breaks != self.client.breaks

    async def explain(self, error: BackendError) -> BackendError:
        """Return the error, with how the program ended if rlkit started it."""
        if self.ended is not None and await wait_done(self.ended, _ENDS):
            return ServerLost(f"{error}; {_describe_end(self.ended)[0]}")
        return error

    def lose(self, error: BackendError) -> None:
        """Take note that it does not answer."""
        if self.lost is None:
            _log.warning("%s; its requests are sent to other servers, where there are some", error)
        self.lost = time.monotonic()

    async def wait_until_ready(self, within: float) -> None:
        """Wait until it answers, and says that it works.

        Raises:
            ConfigError: the program ended.
            ServerLost: it does not listen, or is not ready, in time.
            BackendTimeout: it listens, and is silent.
        """
        end = time.monotonic() + within
        while True:
            try:
                return await self.client.check_health(min(5.0, within))
            except (ServerLost, BackendTimeout) as error:
                if self.ended is not None and self.ended.done():
                    how, unable = _describe_end(self.ended)
                    remedy = "omit sampler=, so that this process samples" if unable else "see Vllm's arguments="
                    raise ConfigError(f"sampler='vllm': {how}; {remedy}") from error
                if time.monotonic() > end:
                    raise type(error)(f"{error}; waited {within:g} s") from error
            await asyncio.sleep(0.2)


@attrs.define(eq=False, weakref_slot=True)
class ServedPolicy:
    """A version of the policy, or the base model, on all servers, which have it as long as somebody holds this.

    Attributes:
        engine: whose servers.
        expected: float32 [T], the trainer's logprobs of the probe's text, for a server that came back.
        model: what requests call it; never used twice, since servers keep what they computed by it. None: the base.
        folder: where its files are: a server that came back reads them again.
        version: optimizer steps that the policy had taken.
    """

    engine: VllmEngine
    expected: np.ndarray
    model: str | None = None
    folder: Path | None = None
    version: int = 0

    @property
    def name(self) -> str:
        """See ``Served``."""
        what = "the base model" if self.model is None else f"version {self.version}"
        return f"{what} at {', '.join(server.client.url for server in self.engine.servers)}"

    async def generate(self, body: Json) -> Json:
        """See ``Served``: asked of the server with the least to do, and of others where it is lost.

        Raises:
            ServerLost: no server answers.
            BackendTimeout: those that are left do not answer in time.
        """
        left = list(self.engine.servers)
        while True:
            server = min(left, key=lambda each: (each.avoided, each.busy))
            left.remove(server)
            try:
                return await self.engine.ask(server, self, body)
            except (ServerLost, BackendTimeout) as error:
                server.lose(error)
                if not left:
                    raise await server.explain(error) from error.__cause__


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
        try:
            self._folder = Path(tempfile.mkdtemp(prefix="rlkit-vllm-", dir=settings.folder))
        except OSError as error:
            raise ConfigError("Vllm(folder)", str(error), "a folder that exists, in which to write") from error
        self._process = os.getpid()
        self._run, self._count = secrets.token_hex(4), 0
        self._recent: deque[ServedPolicy] = deque(maxlen=_KEPT)
        self._loaded: weakref.WeakValueDictionary[int, ServedPolicy] = weakref.WeakValueDictionary()
        self._folders: dict[str, Path] = {}  # of adapters that servers may have
        self._dropped: deque[str] = deque()  # those from which no one samples any more
        self._tokens = trained.tokenizer.encode(PROBE)[:PROBE_LENGTH]
        self._tolerance = settings.tolerance or _TOLERANCE.get(trained.dtype, _TOLERANCE["bfloat16"])
        self._earlier: tuple[str, np.ndarray] | None = None
        self._program: Program | None = None
        self.servers: list[Server] = []
        try:
            client = partial(VllmClient, deadline=settings.deadline)
            self.servers = [Server(client(url, key=settings.key)) for url in settings.urls]
            if not self.servers:
                left = ["rm", "-rf", str(self._folder)]  # where this process is killed
                self._program, url, key = prepare_server(settings, trained, grace=_GRACE, ending=left)
                self.servers = [Server(client(url, key=key), self._program.start())]
            weakref.finalize(self, _clean_up, self._program, self._folder, self._process)
            self._begin(settings.start or (_LISTENS if settings.urls else _START))
            self._base = ServedPolicy(self, self._trained.logprobs(self._tokens, 1.0, 0.0))
            self._compare(self._base, self.servers)
        except BaseException:
            self.close()
            raise

    def load_adapter(self, adapter: LoraAdapter, version: int) -> None:
        """Write it into a folder, have all servers load it, and compare a few of its logprobs with the trainer's."""
        policy = self._load(adapter, version)
        self._loaded[version] = policy
        self._recent.append(policy)
        self._earlier = f"version {version}'s: the server does not use the new adapter", policy.expected

    def try_adapter(self, adapter: LoraAdapter) -> bool:
        """Do the same with one that is forgotten at once; called while the trainer's own is that one, too.

        Returns:
            False: nothing was done, since it changes too little to be told from the base model.
        """
        if distance(self._trained.logprobs(self._tokens), self._base.expected) <= 10 * self._tolerance:
            return False
        self._load(adapter, 0)
        return True

    def sampler(self, version: int) -> Sampler | None:
        """Return a sampler of that version while servers have it."""
        policy = self._loaded.get(version)
        return None if policy is None else self._sampler(policy)

    def base_sampler(self) -> Sampler:
        """Return a sampler of the base model."""
        return self._sampler(self._base)

    def close(self) -> None:
        """End the server that it started, or have those of others forget the adapters. May be called twice."""
        if os.getpid() == self._process:
            with contextlib.suppress(RlkitError, TimeoutError):
                submit(self._end()).result(5.0)
        _clean_up(self._program, self._folder, self._process)
        if self.servers and self.servers[0].ended is not None:
            concurrent.futures.wait([self.servers[0].ended], _GRACE + 5.0)

    async def ask(self, server: Server, policy: ServedPolicy, body: Json) -> Json:
        """Return the answer of one server; one that was lost is checked before, and given the adapter where it lacks.

        Raises:
            ServerLost, BackendTimeout: it is gone, or hangs.
            BackendError: it refuses, or came back with another model.
        """
        server.busy += 1
        request = {**body, "model": policy.model or server.base}
        try:
            if server.doubted:
                async with server.lock:
                    if server.doubted:
                        breaks = server.client.breaks
                        await server.client.check_health(_LOOK)
                        await self._recheck(server, self._base)
                        server.lost, server.breaks = None, breaks
            try:
                return await server.client.generate(request)
            except ModelMissing:
                async with server.lock:
                    if policy.model not in {model.name for model in await server.client.models()}:
                        await self._add(server, policy)
                        await self._recheck(server, policy)
                return await server.client.generate(request)
        finally:
            server.busy -= 1

    def _sampler(self, policy: ServedPolicy) -> VllmSampler:
        trained = self._trained
        lengths = {"max_length": self.max_length, "scored": self._scored}
        return VllmSampler(policy, tokenizer=trained.tokenizer, version=policy.version, seeds=trained.seeds, **lengths)

    def _begin(self, within: float) -> None:
        """Wait for all servers; find out how long their sequences are, and whether they have the tokenizer."""

        async def wait() -> list[BaseException | None]:
            ready = (server.wait_until_ready(within) for server in self.servers)
            return await asyncio.gather(*ready, return_exceptions=True)

        failed = [error for error in submit(wait()).result() if error is not None]
        absent = [str(error) for error in failed if isinstance(error, (ServerLost, BackendTimeout))]
        if len(absent) < len(failed):
            raise next(error for error in failed if not isinstance(error, (ServerLost, BackendTimeout)))
        if absent:
            remedy = f". {_describe_start(self._trained)}" if self._program is None else self._quote()
            raise BackendError(f"connect(sampler): {'; '.join(absent)}{remedy}")
        lengths = []
        for server in self.servers:
            model = submit(server.client.find_model(None)).result()
            server.base = model.name
            submit(server.client.check_tokenizer(model, self._trained.tokenizer)).result()
            lengths.append(model.lengths(self._trained.max_length))
        self.max_length, self._scored = min(longest for longest, _ in lengths), min(scored for _, scored in lengths)

    def _load(self, adapter: LoraAdapter, version: int) -> ServedPolicy:
        model = f"rlkit-{self._run}-{self._count}-version-{version}"
        self._count += 1
        folder = self._folder / model
        adapter.save(folder)
        policy = ServedPolicy(self, self._trained.logprobs(self._tokens), model, folder, version)
        self._folders[model] = folder
        weakref.finalize(policy, self._dropped.append, model).atexit = False
        self._compare(policy, submit(self._add_everywhere(policy)).result())
        return policy

    async def _add_everywhere(self, policy: ServedPolicy) -> list[Server]:
        """Have all servers load an adapter, and unload those that were dropped; return the servers that did."""
        servers = [server for server in self.servers if not server.avoided] or self.servers
        while self._dropped:
            model = self._dropped.popleft()
            await asyncio.gather(*(server.client.unload_adapter(model) for server in servers))
            shutil.rmtree(self._folders.pop(model), ignore_errors=True)
        results = await asyncio.gather(*(self._add(server, policy) for server in servers), return_exceptions=True)
        done, lost = [], None
        for server, result in zip(servers, results, strict=True):
            if isinstance(result, (ServerLost, BackendTimeout)):
                server.lose(result)
                lost = await server.explain(result)
            elif result is not None:
                raise result
            else:
                done.append(server)
        if not done and lost is not None:
            raise lost
        return done

    async def _add(self, server: Server, policy: ServedPolicy) -> None:
        if policy.model is not None:
            await server.client.load_adapter(policy.model, str(policy.folder))

    async def _recheck(self, server: Server, policy: ServedPolicy) -> None:
        """Raise ServerLost unless a server that came back has the policy; the trainer may have gone on."""
        model = policy.model or server.base
        where = f"{model} at {server.client.url}, which came back"

        async def ask(body: Json) -> Json:
            return await server.client.generate({**body, "model": model})

        try:
            scored = read_scores(await ask(score_request(self._tokens, 0)), where, self._tokens, 0)[0]
            await check_logprobs_mode(ask, where, self._tokens, self._trained.tokenizer)
        except BackendError as error:
            raise ServerLost(str(error)) from error
        off = distance(scored, policy.expected)
        if not off <= self._tolerance:
            what = f"its logprobs differ from the trainer's by {off:.2g} nats on average"
            raise ServerLost(f"{where}: {what}: its base model or its options changed")

    def _compare(self, policy: ServedPolicy, servers: Sequence[Server]) -> None:
        """Raise BackendError unless the logprobs of a text, and of what a server samples, are the trainer's.

        Called where the trainer computes, while its weights are the policy's.
        """
        scale, tolerance = float(policy.model is not None), self._tolerance
        drawn = sample_request(self._tokens, _DRAWN, 1, policy.version, _DRAWN.max_tokens, self._trained.tokenizer)
        for server in servers:
            where = f"{policy.model or server.base} at {server.client.url}"
            try:
                answers = [submit(self.ask(server, policy, body)) for body in (score_request(self._tokens, 0), drawn)]
                scored, sampled = (answer.result() for answer in answers)
            except (ServerLost, BackendTimeout) as error:
                server.lose(error)  # it is checked when it comes back, and others sample meanwhile
                if all(other.avoided for other in self.servers):
                    raise
                continue
            logprobs = read_scores(scored, where, self._tokens, 0)[0]
            off = distance(logprobs, policy.expected)
            if not off <= tolerance:
                found = f"its logprobs differ from the trainer's by {off:.2g} nats on average"
                raise BackendError(f"{where}: {found}{self._find_likeness(logprobs, off, policy)}")
            vocabulary = self._trained.tokenizer.vocab_size
            (sample,) = read_samples(sampled, where, self._tokens, _DRAWN, 1, policy.version, vocabulary)
            text, n = np.concatenate([self._tokens, sample.tokens]), sample.tokens.size
            off = distance(sample.logprobs, self._trained.logprobs(text, _DRAWN.temperature, scale)[-n:])
            if not off <= tolerance:
                found = f"the logprobs of tokens sampled at temperature {_DRAWN.temperature} differ by {off:.2g} nats"
                remedy = "start the server with --logprobs-mode processed_logprobs"
                raise BackendError(f"{where}: {found}: they do not belong to the sampled distribution; {remedy}")

    def _find_likeness(self, logprobs: np.ndarray, off: float, policy: ServedPolicy) -> str:
        """Return what the logprobs of a server resemble that are not the trainer's."""
        if policy.model is not None:
            known = [("the base model's: the server does not use the adapter", self._base.expected)]
            for what, values in known + ([self._earlier] if self._earlier else []):
                if distance(logprobs, values) <= max(off / 10, self._tolerance):
                    return f", and equal {what}"
        limit = f"Vllm(tolerance=) sets the limit ({self._tolerance:g})"
        return f": its base model, dtype, numerics, or the adapter's scale differ; {limit}"

    def _quote(self) -> str:
        written = "" if self._program is None else self._program.written[-1500:]
        return f"; the end of its log:\n{written}" if written else ""

    async def _end(self) -> None:
        if self._program is None:
            up = [server for server in self.servers if server.lost is None]
            await asyncio.gather(*(server.client.unload_adapter(name) for server in up for name in self._folders))
        await asyncio.gather(*(server.client.close() for server in self.servers))


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


def _clean_up(program: Program | None, folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        if program is not None:
            program.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _describe_start(trained: TrainedPolicy) -> str:
    """Return the remedy where nothing listens."""
    variables = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    return (
        f"Start one there: {variables} vllm serve {shlex.join([trained.model, *server_options(trained)])} --port PORT; "
        "or let rlkit start one: sampler='vllm'; to wait for a server that is still starting, use "
        "sampler=Vllm(urls=[...], start=SECONDS)"
    )


def _describe_end(ended: concurrent.futures.Future[ProgramResult]) -> tuple[str, bool]:
    """Return how the program of a server ended, and whether that is because vLLM does not support the model."""
    if (error := ended.exception()) is not None:
        return str(error), False
    result = ended.result()
    if result.code < 0:
        return f"the server was killed by {signal.Signals(-result.code).name}", False
    log = f"{result.stdout}\n{result.stderr}".strip()
    told = [line.strip() for line in log.splitlines() if "Error" in line]
    lines = [line for line in told if "WARNING" not in line and "INFO" not in line]
    unable = [line for line in lines if "not support" in line]  # a model class, or adapters on it
    why = [*unable, *lines, log[-300:] or "it wrote nothing"][0]  # the first is the cause of the others
    return f"the server ended with status {result.code}: {why[-400:]}", bool(unable)
