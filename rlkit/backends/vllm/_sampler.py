"""``VllmSampler``: the user's object for a policy that vLLM, or a gateway, samples.

``open_sampler``: a policy that a server has already, without a trainer.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import re
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._runtime import Resource, warn
from rlkit._seeds import SeedStream, resolve_seed
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.requests import check_prompt, check_request
from rlkit.backends.tokenizers import tokenizer_from
from rlkit.backends.vllm._client import (
    Json,
    Model,
    VllmClient,
    check_key,
    check_url,
    read_samples,
    read_scores,
    sample_request,
    score_request,
    submit,
)
from rlkit.errors import BackendError, ConfigError, DataError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["PROBE", "PROBE_LENGTH", "Ask", "Served", "VllmSampler", "check_logprobs_mode", "distance", "open_sampler"]

T = TypeVar("T")
Ask: TypeAlias = Callable[[Json], Awaitable[Json]]
"""Return the answer to a request of one model at one server."""

PROBE = "The answer is 42, since 6 * 7 = 42. Next question: why is the sky blue? It scatters"  # like what models know
PROBE_LENGTH = 24  # tokens
_TEMPERATURE = 0.7  # of what is sampled to look at logprobs
_ALIKE = 0.03  # nats on average by which one policy's logprobs may differ between decoding and prompts, in bfloat16
_HUB = re.compile(r"[\w.-]+/[\w.-]+")


class Served(Protocol):
    """A policy that servers have: its adapter stays loaded as long as somebody holds this."""

    @property
    def name(self) -> str:
        """Return the policy and where it is, for messages."""

    async def generate(self, body: Json) -> Json:
        """Return the answer to a request, from one of the servers."""


class VllmSampler(Resource):
    """A frozen policy that is sampled by vLLM's ``/v1/completions``.

    Args:
        policy: what is asked; held until ``close``, and by requests until they are answered.
        tokenizer: the model's.
        max_length: tokens at most of a prompt and its completion.
        scored: tokens at most of a text that is scored.
        version: optimizer steps that the policy had taken.
        seeds: for requests that bring none.
    """

    def __init__(
        self,
        policy: Served,
        *,
        tokenizer: Tokenizer,
        max_length: int,
        scored: int,
        version: int,
        seeds: SeedStream,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.version = version
        self._policy: Served | None = policy
        self._scored = scored
        self._seeds = seeds

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``. A request that was cancelled, or forgotten, is ended on the server, too.

        The same seed draws the same tokens as long as the server computes the same numbers: not with other
        requests, to the bit, nor on another kind of machine.
        """
        policy, size, longest = self._open(), self.tokenizer.vocab_size, self.max_length
        tokens = check_request(prompt, params, n, seed, vocab_size=size, max_length=longest)
        draws = n if params.temperature > 0 else 1  # vLLM refuses several greedy ones, which are all the same
        most = min(params.max_tokens, longest - tokens.size)
        body = sample_request(tokens, params, draws, self._seeds.of(seed, params), most, self.tokenizer)

        async def ask() -> list[Sample]:
            answer = await policy.generate(body)
            return read_samples(answer, policy.name, tokens, params, draws, self.version, size) * (n // draws)

        return _send(ask())

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``; vLLM has them at temperature 1 alone."""
        if _check.temperature("logprobs(temperature)", temperature, zero=False) != 1.0:
            raise UnsupportedError(
                f"logprobs(temperature={temperature}): vLLM scores texts at temperature 1 only; sample at "
                "temperature 1, or score with the trainer, or with rlkit.sampler('local')"
            )
        return self._score("logprobs(tokens)", tokens, 0, lambda logprobs, ids, best: logprobs)

    def top_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray]]:
        """See ``TopK``."""
        _check.integer("top_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        return self._score("top_logprobs(tokens)", tokens, k, lambda logprobs, ids, best: (ids, best))

    def prompt_logprobs(self, tokens: TokenIds, k: int) -> Future[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """See ``PromptLogprobs``."""
        _check.integer("prompt_logprobs(k)", k, low=1, high=self.tokenizer.vocab_size, why="the vocabulary")
        return self._score("prompt_logprobs(tokens)", tokens, k, lambda logprobs, ids, best: (logprobs, ids, best))

    def close(self) -> None:
        """Release the policy; earlier requests are still answered."""
        self._policy = None

    def __repr__(self) -> str:
        return f"<VllmSampler {'closed' if self._policy is None else self._policy.name}, version {self.version}>"

    def _open(self) -> Served:
        if self._policy is None:
            raise BackendError("this sampler is closed")
        return self._policy

    def _score(
        self, where: str, tokens: TokenIds, top: int, convert: Callable[[np.ndarray, np.ndarray, np.ndarray], T]
    ) -> Future[T]:
        policy = self._open()
        array = check_prompt(where, tokens, self.tokenizer.vocab_size, self.max_length)
        if array.size > self._scored:
            what = f"has {array.size} tokens"
            raise DataError(where, what, f"at most {self._scored}", "the server samples one token after scoring")

        async def ask() -> T:
            answer = await policy.generate(score_request(array, top))
            return convert(*read_scores(answer, policy.name, array, top))

        return _send(ask())


def _send(work: Coroutine[object, object, T]) -> Future[T]:
    """Begin a request; cancelled, or forgotten, it is ended on the server, too."""
    running, answer = submit(work), concurrent.futures.Future[T]()

    def settle(done: concurrent.futures.Future[T]) -> None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
            if done.cancelled():
                answer.set_exception(BackendError("the sampling engine was closed before it answered"))
            elif (error := done.exception()) is not None:
                answer.set_exception(error)
            else:
                answer.set_result(done.result())

    def drop() -> None:
        running.cancel()

    running.add_done_callback(settle)
    return Future.wrap(answer, on_drop=drop, on_cancel=drop)


@attrs.frozen(eq=False, weakref_slot=True)
class _Remote:
    """A model of one server that somebody else runs."""

    client: VllmClient
    model: Model

    @property
    def name(self) -> str:
        return f"{self.model.name} at {self.client.url}"

    async def generate(self, body: Json) -> Json:
        draws = {"max_tokens": self.model.least} if "prompt_logprobs" in body else {}
        return await self.client.generate({**body, **draws, "model": self.model.name})


def open_sampler(
    url: str,
    *,
    tokenizer: str | Path | Tokenizer | PreTrainedTokenizerBase | None = None,
    model: str | None = None,
    key: str | None = None,
    seed: int | None = None,
    version: int = 0,
    deadline: float = 1800.0,
) -> VllmSampler:
    """Open a sampler of what a server of vLLM, or a gateway of rlkit, serves: a teacher, a judge, a finished policy.

    Args:
        url: where it listens. vLLM has to be started with ``--logprobs-mode processed_logprobs --generation-config
            vllm``.
        tokenizer: the model's: a folder, a hub id, or one that is open already; None: that of the folder or hub id
            which the server names as its model's. It has to make the tokens that the server makes of a text.
        model: its name there, or that of an adapter; None: the base model.
        key: its API key.
        seed: of requests that bring none; None for a fresh one.
        version: what its samples say.
        deadline: seconds that an answer may take.

    Raises:
        ConfigError: it serves no such model, or has another tokenizer; or an argument is out of range.
        UnsupportedError: it has no /v1/completions, or does not answer with token ids there.
        BackendError: it cannot be reached, or its logprobs are not those of the distribution that it draws from.
    """
    check_url("open_sampler(url)", url)
    check_key("open_sampler(key)", key)
    _check.integer("open_sampler(version)", version, low=0)
    seeds = SeedStream(resolve_seed(seed))
    client = VllmClient(url, key=key, deadline=_check.real("open_sampler(deadline)", deadline, above=0.0))
    try:
        served = submit(client.find_model(model)).result()
        words = _find_tokenizer(served, client.url) if tokenizer is None else tokenizer_from(tokenizer)
        remote = _Remote(client, served)
        problem = submit(_check_server(remote, words)).result()
    except BaseException:
        submit(client.close())
        raise
    if problem:
        warn(problem)
    length, scored = served.lengths(2**31)
    weakref.finalize(remote, lambda: submit(client.close())).atexit = False
    return VllmSampler(remote, tokenizer=words, max_length=length, scored=scored, version=version, seeds=seeds)


async def _check_server(remote: _Remote, tokenizer: Tokenizer) -> str:
    """Raise where a sampler would give wrong numbers, as the first request would show; return what to warn of.

    A gateway has the logprobs of its sampler, which was checked, and would record what is drawn to check them again.
    """
    await remote.client.check_tokenizer(remote.model, tokenizer)
    probe = remote.generate, remote.name, tokenizer.encode(PROBE)[:PROBE_LENGTH], tokenizer
    if remote.model.least:
        await check_logprobs_mode(*probe)
    return await differing_scores(*probe) if remote.model.parent is not None else ""


def _find_tokenizer(model: Model, where: str) -> Tokenizer:
    """Return the tokenizer of a folder or hub id that a server names.

    Raises:
        ConfigError: it names none that can be read here.
    """
    if model.root is None or not (Path(model.root).is_dir() or _HUB.fullmatch(model.root)):
        raise ConfigError(
            f"{where}: the server names {model.root!r} as its model's folder, which this machine does not have; set "
            "tokenizer= to a folder, a hub id or a tokenizer"
        )
    return tokenizer_from(model.root)


async def check_logprobs_mode(ask: Ask, where: str, tokens: np.ndarray, tokenizer: Tokenizer) -> None:
    """Check that a server's logprobs are those of the distribution that it draws from, without knowing its model.

    Where one token alone is left to draw from, its logprob is 0.

    Raises:
        BackendError: they are not.
    """
    params = SamplingParams(max_tokens=4, temperature=_TEMPERATURE, top_k=1, stop=())
    answer = await ask(sample_request(tokens, params, 1, 0, params.max_tokens, tokenizer))
    (sample,) = read_samples(answer, where, tokens, params, 1, 0, tokenizer.vocab_size)
    if sample.logprobs.min() < -1e-3:
        raise BackendError(
            f"{where}: with top_k=1 every token is certain, but one has the logprob {sample.logprobs.min():.2g}: its "
            f"logprobs do not belong to the sampled distribution; start the "
            "server with --logprobs-mode processed_logprobs"
        )


async def differing_scores(ask: Ask, where: str, tokens: np.ndarray, tokenizer: Tokenizer) -> str:
    """Return what tells that a server scores by another policy than it samples from; "" where nothing does.

    It needs no model here: the logprobs that a text was drawn with are those that it is scored with. Some versions of
    vLLM leave an adapter of the head out of the latter.
    """
    params = SamplingParams(max_tokens=8, stop=())
    drawn = await ask(sample_request(tokens, params, 1, 0, params.max_tokens, tokenizer))
    (sample,) = read_samples(drawn, where, tokens, params, 1, 0, tokenizer.vocab_size)
    text = np.concatenate([tokens, sample.tokens])
    off = distance(read_scores(await ask(score_request(text, 0)), where, text, 0)[0][tokens.size :], sample.logprobs)
    if off <= _ALIKE:
        return ""
    return (
        f"{where}: logprobs of a sampled text and of the same text as a prompt differ by {off:.2g} nats on average: it "
        "scores without a part of the adapter, such as that of the head; merge it, or do not score"
    )


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the mean absolute difference."""
    return float(np.abs(a - b).mean()) if np.isfinite(a).all() else math.inf
