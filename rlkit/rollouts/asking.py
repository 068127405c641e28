"""Asking the sampler: with retries that spare a sampler in trouble, and one request for a group's first turns."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np

from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import call
from rlkit.errors import BackendError, BackendTimeout, DataError, RlkitError
from rlkit.rollouts.counters import Counters
from rlkit.rollouts.faults import CannotGoOn
from rlkit.rollouts.lanes import Lanes
from rlkit.rollouts.plan import Plan
from rlkit.types import Sample, SamplingParams

__all__ = ["Asker", "SamplerFailed", "Start", "attempts"]

_log = logging.getLogger(__name__)
PAUSE = 0.5  # seconds before the second attempt


class SamplerFailed(CannotGoOn):
    """The sampler does not work."""


async def attempts(
    plan: Plan, listed: Callable[[Exception], bool], pauses: np.random.Generator, left: Callable[[], float]
) -> AsyncIterator[Attempt]:
    """Yield context managers, one per attempt, with pauses that double in between and have a random part of a half."""
    pause = PAUSE
    for num in range(1, plan.attempts + 1):
        attempt = Attempt(num, listed if num < plan.attempts else _never, pause * (1.0 + 0.5 * pauses.random()), left)
        yield attempt
        if attempt.failed is None:
            return
        kind = type(getattr(attempt.failed, "error", attempt.failed)).__name__
        _log.warning("%s: attempt %d of %d follows in %.1f s", kind, num + 1, plan.attempts, attempt.wait)
        await asyncio.sleep(attempt.wait)
        pause = min(pause * 2.0, 30.0)


class Attempt:
    """Swallows an error after which there is another attempt, and keeps it in ``failed``."""

    def __init__(self, num: int, listed: Callable[[Exception], bool], wait: float, left: Callable[[], float]) -> None:
        self.num = num
        self.wait = wait  # seconds before the next one
        self.failed: Exception | None = None
        self._listed = listed
        self._left = left

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and self._listed(error) and self.wait < self._left():
            self.failed = error
        return self.failed is not None


def _never(error: Exception) -> bool:  # noqa: ARG001
    return False


class Asker:
    """Requests to one sampler, for all episodes of a rollout.

    A call of ``sample`` may compute, so it is made in a thread. Once a request has failed, one episode alone tries
    again, with pauses, and all others wait until it succeeds: a sampler that is down is not flooded by many episodes.
    """

    def __init__(self, sampler: Sampler, plan: Plan, counters: Counters, computing: Lanes) -> None:
        self.sampler = sampler
        self._computing = computing
        self._plan = plan
        self._counters = counters
        self._probe = asyncio.Lock()
        self._trouble = False
        self._last_answer = -1.0

    async def sample(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        n: int,
        seed: int,
        pauses: np.random.Generator,
        left: Callable[[], float],
    ) -> list[Sample]:
        """Ask for ``n`` completions.

        Raises:
            DataError: the sampler refuses this prompt.
            SamplerFailed: it cannot be used.
        """
        began = time.monotonic()
        try:
            samples = await self._ask(prompt, params, n, seed, pauses, left)
        except DataError:
            raise
        except RlkitError as error:
            raise SamplerFailed(error) from error
        except Exception as error:
            failed = BackendError(f"rollout: the sampler failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            raise SamplerFailed(failed) from error
        self._last_answer = time.monotonic()
        self._counters.add("time/sampler/requests", time.monotonic() - began)
        self._counters.add("sampler/prompt_tokens", prompt.size)
        self._counters.add("sampler/tokens", sum(sample.tokens.size for sample in samples))
        self._counters.add("sampler/samples", len(samples))
        return samples

    def dead(self, since: float, deadline: float) -> BackendTimeout | None:
        """Return the error to end with where nothing was answered for half the deadline since ``since``."""
        waited = time.monotonic() - since
        if self._last_answer > since or waited < deadline / 2:
            return None
        return BackendTimeout(f"rollout: the sampler answered no request for {waited:.1f} s")

    def _listed(self, error: Exception) -> bool:
        return isinstance(error, self._plan.retry)

    async def _ask(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        n: int,
        seed: int,
        pauses: np.random.Generator,
        left: Callable[[], float],
    ) -> list[Sample]:
        if self._trouble:
            async with self._probe:
                pass
        try:
            return await self._request(prompt, params, n, seed)
        except self._plan.retry as error:
            failed = error
        samples: list[Sample] = []
        async with self._probe:
            async for attempt in attempts(self._plan, self._listed, pauses, left):
                with attempt:
                    if attempt.num == 1 and self._trouble:  # that was the first attempt
                        raise failed
                    self._counters.add("sampler/retried")
                    samples = await self._request(prompt, params, n, seed)
        return samples

    async def _request(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        self._counters.add("sampler/requests")
        oldest = self.sampler.version
        try:
            async with self._computing.lane():
                held: _Held = await call(self._submit, prompt, params, n, seed, where="sampler")
            samples: Any = await held.future
        except DataError:
            raise
        except Exception:
            self._trouble = True
            self._counters.add("sampler/errors")
            raise
        self._trouble = False
        fine = isinstance(samples, list) and len(samples) == n and all(isinstance(s, Sample) for s in samples)
        if not fine or not all(np.array_equal(s.prompt, prompt) for s in samples):
            raise BackendError(f"rollout: the sampler's answer is not the {n} completion(s) of the prompt it was sent")
        newest = self.sampler.version  # another one where it is a live sampler that was updated
        for sample in samples:  # losses and corrections take these from the sample
            for name, value in params.drawn_with.items():
                if getattr(sample, name) != value:
                    what = f"has {name}={getattr(sample, name)}"
                    raise BackendError("rollout: a sample of the sampler", what, f"{value}", "as asked")
            last = int(sample.token_versions.max(initial=sample.version))
            if not oldest <= sample.version <= last <= newest:
                what = f"has version={sample.version if sample.version < oldest else last}"
                expected = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
                raise BackendError("rollout: a sample of the sampler", what, expected, "as asked")
        return list(samples)

    def _submit(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> _Held:
        return _Held(self.sampler.sample(prompt, params, n=n, seed=seed))


class _Held:
    """A future that ``call`` must not wait for itself: it is awaited in the loop of the rollout."""

    def __init__(self, future: Any) -> None:
        self.future = future


class Start:
    """The first turns of a group, sampled in one request for the members that begin with the same prompt.

    Sample i is member i's. Where an environment gives members different beginnings, the others ask for themselves.
    """

    def __init__(self, asker: Asker, n: int, seed: int, pauses: np.random.Generator) -> None:
        self._asker = asker
        self._n = n
        self._seed = seed
        self._pauses = pauses
        self._prompt: np.ndarray | None = None
        self._task: asyncio.Task[list[Sample]] | None = None

    async def sample(
        self, prompt: np.ndarray, params: SamplingParams, member: int, left: Callable[[], float]
    ) -> Sample | None:
        """Return member ``member``'s first turn; None where it begins otherwise."""
        if self._task is None:
            self._prompt = prompt
            asked = self._asker.sample(prompt, params, n=self._n, seed=self._seed, pauses=self._pauses, left=left)
            self._task = asyncio.create_task(asked)
            self._task.add_done_callback(_read)
        elif self._prompt is None or not np.array_equal(prompt, self._prompt):
            return None
        return (await asyncio.shield(self._task))[member]

    def give_up(self) -> None:
        """Stop waiting for members."""
        if self._task is not None:
            self._task.cancel()


def _read(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()  # each member that waits is told; where none does, nobody needs to be
