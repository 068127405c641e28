"""Logprobs of given tokens, for clients that ask for more than those of what was drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs
import numpy as np

from rlkit.backends.protocol import PromptLogprobs, Sampler, TopK
from rlkit.errors import DataError, RlkitError
from rlkit.futures import Future
from rlkit.gateway.types import GatewayError, Reply, Request

__all__ = ["Scorer"]

T = TypeVar("T")


class Scorer:
    """Asks one sampler. Logprobs are those of the policy itself, at temperature 1."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def scored(self, request: Request, reply: Reply) -> Reply:
        """Return the reply with the logprobs and alternatives that were asked for.

        Where a prompt is to have the same number of alternatives as its completions (lm-eval's requests are such), both
        are of one pass.

        Raises:
            GatewayError: 400 where the sampler gives no alternatives or refuses the tokens, 503 where it fails.
        """
        size, k, of_prompt = int(reply.prompt.size), request.top_logprobs or 0, request.prompt_logprobs
        texts = [np.concatenate([reply.prompt, choice.sample.tokens]) for choice in reply.choices if k]
        logprobs: np.ndarray | None = None
        rows = []
        if k and of_prompt == k:
            logprobs, row = await self._both(texts.pop(0), k)
            rows.append(row)
        rows += [await self._alternatives(text, k) for text in texts]
        if k:
            choices = [attrs.evolve(x, top=row[size:]) for x, row in zip(reply.choices, rows, strict=True)]
            reply = attrs.evolve(reply, choices=choices)
        if of_prompt is None:
            return reply
        if logprobs is not None:
            return attrs.evolve(reply, prompt_logprobs=logprobs[:size], prompt_top=rows[0][:size])
        logprobs = await self._asked(lambda: self._sampler.logprobs(reply.prompt))
        top = await self._alternatives(reply.prompt, of_prompt) if of_prompt else None
        return attrs.evolve(reply, prompt_logprobs=logprobs, prompt_top=top)

    async def _both(self, tokens: np.ndarray, k: int) -> tuple[np.ndarray, list[Mapping[int, float]]]:
        """Return each token's own logprob [T] and its alternatives, of one pass where the sampler has that."""
        sampler = self._sampler
        if not isinstance(sampler, PromptLogprobs):
            return await self._asked(lambda: sampler.logprobs(tokens)), await self._alternatives(tokens, k)
        logprobs, ids, best = await self._asked(lambda: sampler.prompt_logprobs(tokens, k))
        return logprobs, _by_id(ids, best)

    async def _alternatives(self, tokens: np.ndarray, k: int) -> list[Mapping[int, float]]:
        """Return ``k`` alternatives for each token, id -> logprob, the most probable first."""
        sampler = self._sampler
        if not isinstance(sampler, TopK):
            what = "this policy's sampler gives no alternatives to tokens"
            raise GatewayError(400, f"{what}; ask for logprobs without top_logprobs", param="top_logprobs")
        ids, logprobs = await self._asked(lambda: sampler.top_logprobs(tokens, k))
        return _by_id(ids, logprobs)

    async def _asked(self, submit: Callable[[], Future[T]]) -> T:
        try:
            future = await asyncio.to_thread(submit)
            return await future
        except DataError as error:
            raise GatewayError(400, str(error)) from error
        except RlkitError as error:
            raise GatewayError(503, f"the policy cannot be scored: {error}", code="sampler") from error


def _by_id(ids: np.ndarray, logprobs: np.ndarray) -> list[Mapping[int, float]]:
    return [dict(zip(*row, strict=True)) for row in zip(ids.tolist(), logprobs.tolist(), strict=True)]
