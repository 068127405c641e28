"""Logprobs of given tokens, for clients that ask for more than those of what was drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler, TopK
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
        rows = [
            await self._alternatives(np.concatenate([reply.prompt, x.sample.tokens]), k) for x in reply.choices if k
        ]
        choices = [attrs.evolve(x, top=row[size:]) for x, row in zip(reply.choices, rows, strict=bool(k))]
        reply = attrs.evolve(reply, choices=choices or reply.choices)
        if of_prompt is None:
            return reply
        logprobs = await self._asked(lambda: self._sampler.logprobs(reply.prompt))
        top = None
        if of_prompt:
            top = rows[0][:size] if rows and k == of_prompt else await self._alternatives(reply.prompt, of_prompt)
        return attrs.evolve(reply, prompt_logprobs=logprobs, prompt_top=top)

    async def _alternatives(self, tokens: np.ndarray, k: int) -> list[Mapping[int, float]]:
        """Return ``k`` alternatives for each token, id -> logprob, the most probable first."""
        sampler = self._sampler
        if not isinstance(sampler, TopK):
            what = "this policy's sampler gives no alternatives to tokens"
            raise GatewayError(400, f"{what}; ask for logprobs without top_logprobs", param="top_logprobs")
        ids, logprobs = await self._asked(lambda: sampler.top_logprobs(tokens, k))
        rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
        return [dict(zip(*row, strict=True)) for row in rows]

    async def _asked(self, submit: Callable[[], Future[T]]) -> T:
        try:
            future = await asyncio.to_thread(submit)
            return await future
        except DataError as error:
            raise GatewayError(400, str(error)) from error
        except RlkitError as error:
            raise GatewayError(503, f"the policy cannot be scored: {error}", code="sampler") from error
