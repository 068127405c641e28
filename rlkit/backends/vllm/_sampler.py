"""``VllmSampler``: the user's object for a policy that vLLM, or a gateway, samples.

``ContinuingSampler``: a policy that vLLM samples, updated while its requests run.

A request that runs when a newer adapter is there is aborted, which vLLM answers with what was drawn so far, and goes on
under the newer adapter, with those tokens after its prompt. So keys and values are computed anew, and adapters keep
names that are used once. vLLM 0.32 can also replace an adapter in place between /pause and /resume, but in its
development mode alone; and its prefix cache, which goes by an adapter's name, would give later requests keys and values
of older weights.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import secrets
import threading
from collections.abc import Callable, Collection, Coroutine
from typing import Protocol, TypeVar, cast

import numpy as np

from rlkit import _check
from rlkit._check import TokenIds
from rlkit._runtime import Resource
from rlkit._seeds import SeedStream
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.backends.requests import Stop, check_prompt, check_request
from rlkit.backends.samplers import SuccessiveSampler
from rlkit.backends.vllm._client import Json, read_samples, read_scores, sample_request, score_request, seed_of
from rlkit.errors import BackendError, DataError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["ContinuingSampler", "EventLoop", "Served", "VllmSampler"]

T = TypeVar("T")


class EventLoop:
    """Runs coroutines that other threads give to it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.at_end: list[Callable[[], Coroutine[object, object, None]]] = []  # what is to be closed in it
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[object, object, T]) -> concurrent.futures.Future[T]:
        """Run ``work``; cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def soon(self, call: Callable[[], object]) -> None:
        """Make the loop call it; takes no lock, and does nothing once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(call)

    def keep(self, work: Coroutine[object, object, None]) -> None:
        """Run ``work`` to its end; called in the loop."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self, *, wait: bool = True) -> None:
        """Cancel what runs, close what is to be closed, and end the thread. May be called twice, and from within."""
        self.soon(self.loop.stop)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(
                asyncio.gather(*tasks, *(close() for close in self.at_end), return_exceptions=True)
            )
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.run_until_complete(asyncio.sleep(0))  # transports say in a turn of the loop that they are closed
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()


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
        loop: in which requests wait.
        tokenizer: the model's.
        max_length: tokens at most of a prompt and its completion.
        scored: tokens at most of a text that is scored.
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

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``. A request that was cancelled, or forgotten, is ended on the server, too.

        The same seed draws the same tokens as long as the server computes the same numbers: not with other
        requests, to the bit, nor on another kind of machine.
        """
        policy, size = self.policy, self.tokenizer.vocab_size
        tokens, drawn, draws, most = self.begin(prompt, params, n, seed)
        body = sample_request(tokens, params, draws, drawn, most, self.tokenizer)

        async def ask() -> list[Sample]:
            answer = await policy.generate(body)
            return read_samples(answer, policy.name, tokens, params, draws, self.version, size) * (n // draws)

        return self.submit(ask())

    def begin(
        self, prompt: TokenIds, params: SamplingParams, n: int, seed: int | None, lacks: Collection[str] = ()
    ) -> tuple[np.ndarray, int, int, int]:
        """Check a request; return its prompt, its seed, how many samples to draw, and the tokens that each may have."""
        size, longest = self.tokenizer.vocab_size, self.max_length
        tokens = check_request(prompt, params, n, seed, vocab_size=size, max_length=longest, lacks=lacks)
        draws = n if params.temperature > 0 else 1  # vLLM refuses several greedy ones, which are all the same
        return tokens, self._seeds.of(seed, params), draws, min(params.max_tokens, longest - tokens.size)

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

    @property
    def policy(self) -> Served:
        """Return the policy that is sampled."""
        if self._policy is None:
            raise BackendError("this sampler is closed")
        return self._policy

    def _score(
        self, where: str, tokens: TokenIds, top: int, convert: Callable[[np.ndarray, np.ndarray, np.ndarray], T]
    ) -> Future[T]:
        policy = self.policy
        array = check_prompt(where, tokens, self.tokenizer.vocab_size, self.max_length)
        if array.size > self._scored:
            what = f"has {array.size} tokens"
            raise DataError(where, what, f"at most {self._scored}", "the server samples one token after scoring")

        async def ask() -> T:
            answer = await policy.generate(score_request(array, top))
            return convert(*read_scores(answer, policy.name, array, top))

        return self.submit(ask())

    def submit(self, work: Coroutine[object, object, T]) -> Future[T]:
        """Run a request in the loop; cancelled, or forgotten, it is ended on the server, too."""
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


_AGAIN = 0.1  # seconds until a request that has not ended, since it had perhaps not begun, is aborted again
_LACKS = ("presence_penalty", "frequency_penalty")  # count the drawn tokens, which are a prompt once it is continued


class Aborts(Protocol):
    """Has servers abort requests."""

    async def __call__(self, request: str) -> None:
        """Abort the request of that id, wherever it is; one that is nowhere is not an error."""


class ContinuingSampler(SuccessiveSampler):
    """A ``LiveSampler`` over servers of vLLM.

    Args:
        first: the policy as it is.
        update: as for ``SuccessiveSampler``.
        loop: in which requests wait.
        abort: aborts them.
    """

    def __init__(
        self,
        first: Sampler,
        update: Callable[[SuccessiveSampler], Future[int]],
        *,
        loop: EventLoop,
        abort: Aborts,
    ) -> None:
        super().__init__(first, update, switches="token")
        self._loop, self._abort = loop, abort
        self._updated = asyncio.Event()  # set and replaced in the loop, once a newer policy is there

    def switch_to(self, sampler: Sampler) -> int:
        """Move all requests to ``sampler``, and return its version; from any thread."""
        changed = sampler.version != self.version
        version = super().switch_to(sampler)
        if changed:
            self._loop.soon(self._interrupt)
        return version

    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``; presence and frequency penalties are refused, since vLLM forgets what they count."""
        policy = cast("VllmSampler", self._open())
        tokens, drawn, draws, left = policy.begin(prompt, params, n, seed, _LACKS)
        sample_request(tokens, params, 1, drawn, left, self.tokenizer)  # raises here what it cannot be asked for

        async def ask() -> list[Sample]:
            rows = (self._row(policy, tokens, params, drawn, i, left) for i in range(draws))
            return list(await asyncio.gather(*rows)) * (n // draws)

        return policy.submit(ask())

    def _interrupt(self) -> None:
        self._updated.set()
        self._updated = asyncio.Event()

    async def _row(
        self, policy: VllmSampler, prompt: np.ndarray, params: SamplingParams, seed: int, index: int, most: int
    ) -> Sample:
        """Draw sample ``index``, by as many requests as it takes."""
        row = Sample(prompt, [], [], "length", **params.sampling_options, version=policy.version)
        versions: list[int] = []
        stop = Stop(params.stop, self.tokenizer)
        number, ended = seed_of(seed) + index, False
        while not ended and row.tokens.size < most:
            updated = self._updated
            policy = cast("VllmSampler", self._newest) or policy  # closed: earlier requests are still answered
            text, begun = np.concatenate([prompt, row.tokens]), row.tokens.size
            body = sample_request(text, params, 1, seed, most - begun, self.tokenizer)
            answer = await self._until(updated, policy, {**body, "seed": number})
            answer, ended = _ended(answer)
            where, size = policy.policy.name, self.tokenizer.vocab_size
            (part,) = read_samples(answer, where, text, params, 1, policy.version, size)
            versions += [policy.version] * part.tokens.size
            tokens, logprobs = (np.append(a, b) for a, b in ((row.tokens, part.tokens), (row.logprobs, part.logprobs)))
            reason = part.stop_reason
            if begun:  # a text that ends it may have begun before
                at = next((i for i in range(begun, tokens.size) if stop(tokens[: i + 1].tolist())), None)
                if at is not None:
                    tokens, logprobs, versions = tokens[: at + 1], logprobs[: at + 1], versions[: at + 1]
                    reason, ended = "stop", True
            row = Sample(
                prompt, tokens, logprobs, reason, **params.sampling_options, versions=np.array(versions, np.int64)
            )
            number = seed_of(int(np.random.SeedSequence([seed, index, tokens.size]).generate_state(1, np.uint64)[0]))
        return row

    async def _until(self, updated: asyncio.Event, policy: VllmSampler, body: Json) -> Json:
        """Return the answer to a request, which is aborted when there is a newer policy."""
        request = secrets.token_hex(8)
        asked = asyncio.ensure_future(policy.policy.generate({**body, "request_id": request}))
        waited = asyncio.ensure_future(updated.wait())
        try:
            await asyncio.wait({asked, waited}, return_when=asyncio.FIRST_COMPLETED)
            while not asked.done():
                await self._abort(f"cmpl-{request}-0")  # as vLLM calls the first prompt of that request
                await asyncio.wait({asked}, timeout=_AGAIN)
            return await asked
        finally:
            waited.cancel()
            asked.cancel()


def _ended(answer: Json) -> tuple[Json, bool]:
    """Return an answer in which nothing was aborted, and whether nothing was."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not any(c.get("finish_reason") == "abort" for c in choices):
        return answer, True
    return {**answer, "choices": [{**choice, "finish_reason": "length"} for choice in choices]}, False
