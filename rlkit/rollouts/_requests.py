"""Requests to the sampler: checked, tried again, and one for the first turns of a whole group."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import CallLimit, call
from rlkit.errors import BackendError, BackendTimeout, DataError, RlkitError
from rlkit.rollouts._counters import Counters
from rlkit.rollouts._plan import Plan
from rlkit.types import Sample, SamplingParams

__all__ = ["FirstTurns", "Requests", "RolloutFailed", "retry"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
PAUSE = 0.5  # seconds before the second attempt


class RolloutFailed(Exception):
    """The rollout ends with ``error``, which is not the fault of one episode."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


async def retry(
    work: Callable[[int], Awaitable[T]],
    cause: Callable[[Exception], Exception | None],
    plan: Plan,
    pauses: np.random.Generator,
    time_left: Callable[[], float],
) -> T:
    """Return what ``work(attempt)`` gives, tried ``plan.attempts`` times; attempts count from 1.

    Args:
        work: the attempt.
        cause: gives what ``plan.retry`` may list for what ``work`` raised; None: it is not tried again.
        plan: of the rollout.
        pauses: draws a part of each pause: it doubles from one to the next, and a random half of it is added.
        time_left: gives the seconds that are left; a longer pause is not begun.
    """
    pause = PAUSE
    for attempt in range(1, plan.attempts + 1):
        wait = pause * (1.0 + 0.5 * pauses.random())
        try:
            return await work(attempt)
        except Exception as error:
            failed = cause(error)
            if attempt == plan.attempts or not isinstance(failed, plan.retry) or wait >= time_left():
                raise
        _log.warning("%s: attempt %d of %d follows in %.1f s", type(failed).__name__, attempt + 1, plan.attempts, wait)
        await asyncio.sleep(wait)
        pause = min(pause * 2.0, 30.0)
    raise AssertionError  # the last attempt returns or raises


@attrs.define(eq=False)
class Requests:
    """Requests to one sampler, for all episodes of a rollout.

    A call of ``sample`` may compute, so it is made in a thread, and within ``computing``.
    """

    sampler: Sampler
    _plan: Plan
    _counters: Counters
    _computing: CallLimit
    _last_answer: float = attrs.field(default=-1.0, init=False)

    async def sample(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        *,
        n: int,
        seed: int,
        pauses: np.random.Generator,
        time_left: Callable[[], float],
    ) -> list[Sample]:
        """Ask for ``n`` completions.

        Raises:
            DataError: the sampler refuses this prompt.
            RolloutFailed: it cannot be used.
        """
        began = time.monotonic()

        async def request(attempt: int) -> list[Sample]:
            if attempt > 1:
                self._counters.add("sampler/retried")
            return await self._request(prompt, params, n, seed)

        try:
            samples = await retry(request, lambda error: error, self._plan, pauses, time_left)
        except DataError:
            raise
        except RlkitError as error:
            raise RolloutFailed(error) from error
        except Exception as error:
            failed = BackendError(f"rollout: the sampler failed: {type(error).__name__}: {error}")
            failed.__cause__ = error
            raise RolloutFailed(failed) from error
        self._last_answer = time.monotonic()
        self._counters.add("time/sampler/requests", time.monotonic() - began)
        self._counters.add("sampler/prompt_tokens", prompt.size)
        self._counters.add("sampler/tokens", sum(sample.tokens.size for sample in samples))
        self._counters.add("sampler/samples", len(samples))
        return samples

    def check_alive(self, since: float, deadline: float) -> None:
        """Raise RolloutFailed where nothing has been answered since ``since``, for half the deadline."""
        waited = time.monotonic() - since
        if self._last_answer <= since and waited >= deadline / 2:
            raise RolloutFailed(BackendTimeout(f"rollout: the sampler answered no request for {waited:.1f} s"))

    async def _request(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        self._counters.add("sampler/requests")
        oldest = self.sampler.version
        try:
            async with self._computing.enter():
                # in a tuple, since ``call`` would wait for a future in another loop
                (future,) = await call(lambda: (self.sampler.sample(prompt, params, n=n, seed=seed),), where="sampler")
            samples = await future
        except DataError:
            raise
        except Exception:
            self._counters.add("sampler/errors")
            raise
        fine = isinstance(samples, list) and len(samples) == n and all(isinstance(s, Sample) for s in samples)
        if not fine or not all(np.array_equal(s.prompt, prompt) for s in samples):
            raise BackendError(f"rollout: the sampler did not return {n} completion(s) of the prompt")
        _check_samples(samples, params, oldest, self.sampler.version)
        return list(samples)


def _check_samples(samples: Sequence[Sample], params: SamplingParams, oldest: int, newest: int) -> None:
    """Raise BackendError for a sample that does not say of itself what was asked for; losses and corrections use it.

    ``oldest`` and ``newest`` are the sampler's version before and after: a live sampler may have been updated.
    """
    where = "rollout: a sample of the sampler"
    for sample in samples:
        for name, value in params.sampling_options.items():
            if getattr(sample, name) != value:
                raise BackendError(where, f"has {name}={getattr(sample, name)}", f"{value}", "as requested")
        last = int(sample.token_versions.max(initial=sample.version))
        if not oldest <= sample.version <= last <= newest:
            what = f"has version={sample.version if sample.version < oldest else last}"
            expected = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
            raise BackendError(where, what, expected, "as requested")


@attrs.define(eq=False)
class FirstTurns:
    """The first turns of a group, sampled in one request for the members that begin with the same prompt.

    Sample i is member i's. Where an environment gives members different beginnings, the others ask for themselves.
    """

    _requests: Requests
    _n: int
    _seed: int
    _pauses: np.random.Generator
    _prompt: np.ndarray | None = attrs.field(default=None, init=False)
    _task: asyncio.Task[list[Sample]] | None = attrs.field(default=None, init=False)

    async def sample(
        self, prompt: np.ndarray, params: SamplingParams, member: int, time_left: Callable[[], float]
    ) -> Sample | None:
        """Return member ``member``'s first turn; None where it begins otherwise."""
        if self._task is None:
            self._prompt = prompt
            options = {"n": self._n, "seed": self._seed}
            asked = self._requests.sample(prompt, params, **options, pauses=self._pauses, time_left=time_left)
            self._task = asyncio.create_task(asked)
            self._task.add_done_callback(_read)
        elif self._prompt is None or not np.array_equal(prompt, self._prompt):
            return None
        return (await asyncio.shield(self._task))[member]

    def give_up(self) -> None:
        """Stop waiting for members."""
        if self._task is not None:
            self._task.cancel()


def _read(task: asyncio.Task[list[Sample]]) -> None:
    if not task.cancelled():
        task.exception()  # each waiting member is told; there may be none
