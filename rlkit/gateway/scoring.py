"""Logprobs of given tokens, for clients that ask for more than those of what was drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from rlkit.backends.protocol import Sampler, TopK
from rlkit.errors import DataError, RlkitError
from rlkit.futures import Future
from rlkit.gateway.types import GatewayError
from rlkit.types import Sample

__all__ = ["Scorer"]

T = TypeVar("T")


class Scorer:
    """Asks one sampler. Logprobs are those of the policy itself, at temperature 1."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    async def prompt(self, tokens: np.ndarray, k: int) -> tuple[np.ndarray, list[Mapping[int, float]] | None]:
        """Return logprobs [P] of a prompt, 0 for its first token, and ``k`` alternatives for each (None: k is 0).

        Raises:
            GatewayError: 400 where the sampler gives no alternatives or refuses the tokens, 503 where it fails.
        """
        logprobs = await self._asked(lambda: self._sampler.logprobs(tokens))
        return logprobs, await self._alternatives(tokens, 0, k) if k else None

    async def top(self, sample: Sample, k: int) -> list[Mapping[int, float]]:
        """Return ``k`` alternatives for each token of a sample, id -> logprob, the most probable first."""
        tokens = np.concatenate([sample.prompt, sample.tokens])
        return await self._alternatives(tokens, int(sample.prompt.size), k)

    async def _alternatives(self, tokens: np.ndarray, start: int, k: int) -> list[Mapping[int, float]]:
        sampler = self._sampler
        if not isinstance(sampler, TopK):
            what = "this policy's sampler gives no alternatives to tokens"
            raise GatewayError(400, f"{what}; ask for logprobs without top_logprobs", param="top_logprobs")
        ids, logprobs = await self._asked(lambda: sampler.top_logprobs(tokens, k))
        rows = zip(ids[start:].tolist(), logprobs[start:].tolist(), strict=True)
        return [dict(zip(*row, strict=True)) for row in rows]

    async def _asked(self, submit: Callable[[], Future[T]]) -> T:
        try:
            future = await asyncio.to_thread(submit)
            return await future
        except DataError as error:
            raise GatewayError(400, str(error)) from error
        except RlkitError as error:
            raise GatewayError(503, f"the policy cannot be scored: {error}", code="sampler") from error
