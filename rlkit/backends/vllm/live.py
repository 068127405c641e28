"""``ContinuingSampler``: a policy that vLLM samples, updated while its requests run.

A request that runs when a newer adapter is there is aborted, which vLLM answers with what was drawn so far, and goes on
under the newer adapter, with those tokens behind its prompt. So keys and values are computed anew, and adapters keep
names that are used once. vLLM 0.32 can also replace an adapter in place between /pause and /resume, but in its
development mode alone; and its prefix cache, which goes by an adapter's name, would give later requests keys and values
of older weights.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Literal, Protocol, cast

import numpy as np

from rlkit._calls import answered, hinted
from rlkit._forms import TokenIds
from rlkit.backends.live import SuccessiveSampler
from rlkit.backends.protocol import Sampler
from rlkit.backends.sampling import SeedStream, Stop, checked_request
from rlkit.backends.vllm.client import Json
from rlkit.backends.vllm.loop import EventLoop
from rlkit.backends.vllm.sampler import VllmSampler
from rlkit.backends.vllm.wire import read_samples, sample_request, seed_of
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["ABORTED", "ContinuingSampler"]

ABORTED = "generate-tokens-"  # stands before a request's own id where a server is told to abort it
_AGAIN = 0.1  # seconds until a request that has not ended, since it had perhaps not begun, is aborted again
_LACKS = ("presence_penalty", "frequency_penalty")  # count what was drawn, which is a prompt once it is continued


class Aborts(Protocol):
    """Has servers abort requests."""

    async def __call__(self, request: str) -> None:
        """Abort the request of that id, wherever it is; one that is nowhere is no error."""


@hinted("sampler")
class ContinuingSampler(SuccessiveSampler):
    """A ``LiveSampler`` over servers of vLLM.

    Args:
        first: the policy as it is.
        update: as for ``SuccessiveSampler``.
        loop: in which requests wait.
        abort: aborts them.
        seeds: for requests that bring none.
    """

    switches: Literal["token", "request"] = "token"

    def __init__(
        self,
        first: Sampler,
        update: Callable[[SuccessiveSampler], Future[int]],
        *,
        loop: EventLoop,
        abort: Aborts,
        seeds: SeedStream,
    ) -> None:
        super().__init__(first, update)
        self._loop, self._abort, self._seeds = loop, abort, seeds
        self._updated = asyncio.Event()  # set and replaced in the loop, once a newer policy is there

    def become(self, sampler: Sampler) -> int:
        """Have all requests go on under ``sampler``, and return its version; from any thread."""
        changed = sampler.version != self.version
        version = super().become(sampler)
        if changed:
            self._loop.soon(self._interrupt)
        return version

    @answered
    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``; presence and frequency penalties are refused, since vLLM forgets what they count."""
        policy = cast("VllmSampler", self._open())
        vocab_size, most = self.tokenizer.vocab_size, self.max_length
        tokens = checked_request(prompt, params, n, seed, vocab_size=vocab_size, max_length=most, lacks=_LACKS)
        drawn = self._seeds.next() if seed is None else seed
        draws = n if params.temperature > 0 else 1
        left = min(params.max_tokens, most - tokens.size)
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
        row = Sample(prompt, [], [], "length", **params.drawn_with, version=policy.version)
        versions: list[int] = []
        stop = Stop(params.stop, self.tokenizer)
        number, ended = seed_of(seed) + index, False
        while not ended and row.tokens.size < most:
            updated = self._updated
            policy = cast("VllmSampler", self._newest) or policy  # closed: what was asked for is still answered
            text, begun = np.concatenate([prompt, row.tokens]), row.tokens.size
            body = sample_request(text, params, 1, seed, most - begun, self.tokenizer)
            how = cast("Mapping[str, object]", body["sampling_params"])
            answer = await self._until(updated, policy, {**body, "sampling_params": {**how, "seed": number}})
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
            row = Sample(prompt, tokens, logprobs, reason, **params.drawn_with, versions=np.array(versions, np.int64))
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
                await self._abort(ABORTED + request)
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
