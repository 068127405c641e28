"""Live samplers for backends whose requests cannot change their weights: later requests take the newer policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from rlkit._calls import answered, hinted
from rlkit._forms import TokenIds
from rlkit._resource import Resource
from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.errors import BackendError
from rlkit.futures import Future
from rlkit.types import Sample, SamplingParams

__all__ = ["SuccessiveSampler"]


@hinted("sampler")
class SuccessiveSampler(Resource):
    """A ``LiveSampler`` over snapshots, each of which serves the requests that are made while it is the newest.

    Args:
        first: the policy as it is.
        update: takes a snapshot of the policy as of its call and, when that is there, calls ``become`` with it; the
            future gives its version.
    """

    switches: Literal["token", "request"] = "request"

    def __init__(self, first: Sampler, update: Callable[[SuccessiveSampler], Future[int]]) -> None:
        self._newest: Sampler | None = first
        self._update = update
        self.tokenizer: Tokenizer = first.tokenizer
        self.max_length = first.max_length
        self.version = first.version

    def become(self, sampler: Sampler) -> int:
        """Have later requests go to ``sampler``, and return its version; from any thread."""
        if self._newest is not None:
            self._newest, self.version = sampler, sampler.version
        return sampler.version

    def update(self) -> Future[int]:
        """See ``LiveSampler.update``."""
        self._open()
        return self._update(self)

    @answered
    def sample(
        self, prompt: TokenIds, params: SamplingParams, *, n: int = 1, seed: int | None = None
    ) -> Future[list[Sample]]:
        """See ``Sampler.sample``."""
        return self._open().sample(prompt, params, n=n, seed=seed)

    def logprobs(self, tokens: TokenIds, *, temperature: float = 1.0) -> Future[np.ndarray]:
        """See ``Sampler.logprobs``."""
        return self._open().logprobs(tokens, temperature=temperature)

    def close(self) -> None:
        """Let the policy go; what was asked for before is still answered."""
        self._newest = None

    def __getattr__(self, name: str) -> Any:  # ``top_logprobs`` and what else the backend's samplers have
        newest = None if name.startswith("_") else self._newest
        if newest is None:
            raise AttributeError(name)
        return getattr(newest, name)

    def _open(self) -> Sampler:
        if self._newest is None:
            raise BackendError("this sampler is closed")
        return self._newest
