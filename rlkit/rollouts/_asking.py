"""Asking the sampler: with retries, and one request for a group's first turns."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import numbers
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler
from rlkit.envs.calling import call
from rlkit.errors import BackendError, BackendTimeout, DataError, RlkitError
from rlkit.rollouts._plan import CannotGoOn, Plan
from rlkit.trajectory import Failure, Group, Trajectory
from rlkit.types import Sample, SamplingParams

__all__ = ["Asker", "Counters", "Lanes", "SamplerFailed", "Start", "attempts", "numeric"]


class Lanes:
    """A limit on calls that compute, which calls that only wait do not count against for long.

    Threads that compute take turns at the interpreter, so the more there are the longer everything else waits, the
    event loop included. A call that takes longer than ``patience`` is taken to be waiting for something, and its lane
    is given to the next.

    Args:
        count: calls at once.
        patience: seconds.
    """

    def __init__(self, count: int, patience: float) -> None:
        self._slots = asyncio.Semaphore(count)
        self._patience = patience

    @contextlib.asynccontextmanager
    async def lane(self) -> AsyncIterator[None]:
        """Wait for a lane."""
        await self._slots.acquire()
        mine = True

        def give_back() -> None:
            nonlocal mine
            if mine:
                mine = False
                self._slots.release()

        timer = asyncio.get_running_loop().call_later(self._patience, give_back)
        try:
            yield
        finally:
            timer.cancel()
            give_back()


class Counters:
    """Sums over the episodes of one rollout; ``metrics()`` gives them by name at any time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.sums: Counter[str] = Counter()
        self._means: dict[str, list[float]] = {}
        self._spreads: set[str] = set()  # of these means also min, max and std are told
        self._names: set[str] = set()

    def together(self, other: Counters) -> Counters:
        """Return what both have counted: counts added up, means over everything."""
        total = Counters()
        total.sums = Counter(self.sums)
        total.sums.update(other.sums)
        names = self._means.keys() | other._means.keys()
        total._means = {name: [*self._means.get(name, ()), *other._means.get(name, ())] for name in names}
        total._spreads = self._spreads | other._spreads
        return total

    def add(self, name: str, number: float = 1) -> None:
        """Add to a count or a sum."""
        self.sums[name] += number  # type: ignore[assignment]  # sums of seconds too

    def mean(self, name: str, number: float) -> None:
        """Take a number into a mean."""
        if math.isfinite(number):
            self._means.setdefault(name, []).append(float(number))

    def spread(self, name: str, number: float) -> None:
        """Take a number into a mean, of which min, max and std are told, too."""
        self._spreads.add(name)
        self.mean(name, number)

    def trajectory(self, trajectory: Trajectory) -> None:
        """Count an episode that was carried through."""
        env = self._env(trajectory.env)
        self.add(f"{env}/episodes")
        self.add(f"{env}/terminated", int(trajectory.terminated))
        self.add(f"{env}/truncated", int(trajectory.truncated))
        if trajectory.truncated:
            self.add(f"{env}/truncated/{trajectory.ended}")
        cut = [turn.stop_reason == "length" for turn in trajectory.turns]
        self.add(f"{env}/cut", sum(cut))
        for each in cut:
            self.mean("rollout/cut", each)
        self.add(f"{env}/empty", sum(not turn.tokens.size for turn in trajectory.turns))
        self.mean(f"{env}/turns", len(trajectory.turns))
        for all_or_one in (env, "rollout"):
            self.spread(f"{all_or_one}/reward", trajectory.reward)
            self.spread(f"{all_or_one}/tokens", trajectory.token_count)
        self.add("rollout/episodes")
        self.add(f"rollout/ended/{trajectory.ended or 'unknown'}")
        if trajectory.turns:
            for name, number in trajectory.turns[-1].metrics.items():
                self.mean(f"{env}/info/{name}", number)

    def failure(self, failure: Failure) -> None:
        """Count an episode that was not."""
        env = self._env(failure.env)
        self.add(f"{env}/episodes", 0)
        self.add(f"{env}/failed")
        self.add(f"{env}/failed/{failure.kind}")
        if failure.kind == "timeout":
            self.add(f"{env}/timed_out")

    def group(self, group: Group, *, kept: bool) -> None:
        """Count a group that is complete."""
        env = self._env(group.env)
        self.add(f"{env}/groups", int(kept))
        self.add(f"{env}/dropped_groups", int(not kept))
        self.add(f"{env}/mixed_groups", int(not group.same_start))
        rewards = [reward for reward in group.rewards.tolist() if math.isfinite(reward)]
        if kept and len(rewards) > 1:
            self.mean("rollout/with_signal", min(rewards) < max(rewards))

    def _env(self, name: str) -> str:
        env = f"env/{name}"
        if name not in self._names:
            self._names.add(name)
            for count in ("episodes", "failed", "timed_out", "truncated", "retried", "abandoned"):
                self.add(f"{env}/{count}", 0)
        return env

    def metrics(self) -> dict[str, float]:
        """Return everything so far, by name."""
        numbers = {name: float(number) for name, number in self.sums.items()}
        # fsum rounds once: a mean does not depend on which episode ended first
        numbers |= {name: math.fsum(values) / len(values) for name, values in self._means.items()}
        for name in self._spreads & self._means.keys():
            values = self._means[name]
            numbers |= {f"{name}/min": min(values), f"{name}/max": max(values)}
            numbers[f"{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        for name in numbers.keys() & {name for name in self.sums if name.startswith("rollout/ended/")}:
            numbers[name] /= numbers["rollout/episodes"]
        numbers["time/rollout"] = time.monotonic() - self._began
        return dict(sorted(numbers.items()))


def numeric(info: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers among what an environment said about a step; booleans count as 0 and 1."""
    plain = {}
    for name, value in info.items():
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if isinstance(name, str) and isinstance(value, numbers.Real):
            try:
                number = float(value)
            except OverflowError:
                continue
            if math.isfinite(number):
                plain[name] = number
    return plain


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


@attrs.define(eq=False)
class Attempt:
    """Suppress an error that is followed by another attempt, and keep it in ``failed``."""

    num: int
    _listed: Callable[[Exception], bool]
    wait: float  # seconds before the next one
    _left: Callable[[], float]
    failed: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, Exception) and self._listed(error) and self.wait < self._left():
            self.failed = error
        return self.failed is not None


def _never(error: Exception) -> bool:  # noqa: ARG001
    return False


@attrs.define(eq=False)
class Asker:
    """Requests to one sampler, for all episodes of a rollout.

    A call of ``sample`` may compute, so it is made in a thread.
    """

    sampler: Sampler
    _plan: Plan
    _counters: Counters
    _computing: Lanes
    _last_answer: float = attrs.field(default=-1.0, init=False)

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
        samples: list[Sample] = []
        try:
            async for attempt in attempts(self._plan, self._listed, pauses, left):
                with attempt:
                    if attempt.num > 1:
                        self._counters.add("sampler/retried")
                    samples = await self._request(prompt, params, n, seed)
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

    async def _request(self, prompt: np.ndarray, params: SamplingParams, n: int, seed: int) -> list[Sample]:
        self._counters.add("sampler/requests")
        oldest = self.sampler.version
        try:
            async with self._computing.lane():
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
        newest = self.sampler.version  # another one where it is a live sampler that was updated
        for sample in samples:  # losses and corrections take these from the sample
            for name, value in params.sampling_options.items():
                if getattr(sample, name) != value:
                    what = f"has {name}={getattr(sample, name)}"
                    raise BackendError("rollout: a sample of the sampler", what, f"{value}", "as requested")
            last = int(sample.token_versions.max(initial=sample.version))
            if not oldest <= sample.version <= last <= newest:
                what = f"has version={sample.version if sample.version < oldest else last}"
                expected = f"{oldest}" if oldest == newest else f"{oldest} to {newest}"
                raise BackendError("rollout: a sample of the sampler", what, expected, "as requested")
        return list(samples)


@attrs.define(eq=False)
class Start:
    """The first turns of a group, sampled in one request for the members that begin with the same prompt.

    Sample i is member i's. Where an environment gives members different beginnings, the others ask for themselves.
    """

    _asker: Asker
    _n: int
    _seed: int
    _pauses: np.random.Generator
    _prompt: np.ndarray | None = attrs.field(default=None, init=False)
    _task: asyncio.Task[list[Sample]] | None = attrs.field(default=None, init=False)

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


def _read(task: asyncio.Task[list[Sample]]) -> None:
    if not task.cancelled():
        task.exception()  # each waiting member is told; there may be none
