"""``VllmSampler``: what a user holds of a policy that vLLM, or a gateway, samples."""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Coroutine
from typing import NoReturn, Protocol, Self, TypeVar

import numpy as np

from rlkit import _check
from rlkit._calls import answered, hinted
from rlkit._forms import TokenIds
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.sampling import SeedStream, checked_prompt, checked_request
from rlkit.backends.vllm.client import Json
from rlkit.backends.vllm.loop import EventLoop
from rlkit.backends.vllm.wire import read_samples, read_scores, sample_request, score_request
from rlkit.errors import BackendError, DataError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["Served", "VllmSampler"]

T = TypeVar("T")


class Served(Protocol):
    """A policy that servers have: its adapter stays loaded as long as somebody holds this."""

    @property
    def name(self) -> str:
        """For messages: which policy, and where."""

    async def generate(self, body: Json) -> Json:
        """Return the answer to a request, from one of the servers."""


@hinted("sampler")
class VllmSampler:
    """A frozen policy behind vLLM's wire format.

    Args:
        policy: what is asked; held until ``close``, and by requests until they are answered.
        loop: in which requests wait.
        tokenizer: the model's.
        max_length: tokens at most of a prompt and its completion.
        scored: tokens at most of a text whose logprobs are asked for.
        version: optimizer steps that the policy had taken.
        seeds: for requests that bring none.
    """

    def __init__(
        self,
        policy: Served,
        loop: EventLoop,
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
        self._loop = loop
        self._scored = scored
        self._seeds = seeds

    @answered
    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``. A request that was cancelled, or forgotten, is ended on the server, too.

        The same seed draws the same tokens as long as the server computes the same numbers: not beside other
        requests, to the bit, nor on another kind of machine.
        """
        policy, vocab_size = self.policy, self.tokenizer.vocab_size
        tokens = checked_request(prompt, params, n, seed, vocab_size=vocab_size, max_length=self.max_length)
        most = min(params.max_tokens, self.max_length - tokens.size)
        drawn = self._seeds.next() if seed is None else seed
        draws = n if params.temperature > 0 else 1  # vLLM refuses several greedy ones, which are all the same
        body = sample_request(tokens, params, draws, drawn, most, self.tokenizer)

        async def ask() -> list[Sample]:
            answer = await policy.generate(body)
            return read_samples(answer, policy.name, tokens, params, draws, self.version, vocab_size) * (n // draws)

        return self.submit(ask())

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``; vLLM has them at temperature 1 alone."""
        if _check.temperature("logprobs(temperature)", temperature, zero=False) != 1.0:
            raise UnsupportedError(
                f"logprobs(temperature={temperature}): vLLM scores texts at temperature 1 alone; sample at temperature "
                "1, or score with the trainer, or with rlkit.sampler('local')"
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
        """Let the policy go; what was asked for before is still answered."""
        self._policy = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<VllmSampler {'closed' if self._policy is None else self._policy.name}, version {self.version}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a VllmSampler has connections of its own, and cannot be pickled or copied")

    @property
    def policy(self) -> Served:
        """What is asked."""
        if self._policy is None:
            raise BackendError("this sampler is closed")
        return self._policy

    def _score(
        self,
        where: str,
        tokens: TokenIds,
        top: int,
        convert: Callable[[np.ndarray, np.ndarray, np.ndarray], T],
    ) -> Future[T]:
        policy = self.policy
        array = checked_prompt(where, tokens, self.tokenizer.vocab_size, self.max_length)
        if array.size > self._scored:
            what = f"has {array.size} tokens"
            raise DataError(
                _check.problem(where, what, f"at most {self._scored}", "the server samples one behind what it scores")
            )

        async def ask() -> T:
            answer = await policy.generate(score_request(array, top))
            return convert(*read_scores(answer, policy.name, array, top))

        return self.submit(ask())

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Have a request wait in the loop; cancelled, or forgotten, it is ended on the server, too."""
        running = self._loop.submit(work)
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def settle(done: concurrent.futures.Future[T]) -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # it was cancelled
                if done.cancelled():
                    answer.set_exception(BackendError("the sampling engine was closed before it answered"))
                elif (error := done.exception()) is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(done.result())

        def drop() -> None:
            self._loop.soon(running.cancel)

        running.add_done_callback(settle)
        return Future.wrap(answer, on_drop=drop, on_cancel=drop)
