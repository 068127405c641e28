"""Whom batches are sampled from that are begun ahead of training: snapshots, or a policy that is updated in flight."""

from __future__ import annotations

import asyncio
import bisect
import concurrent.futures
from collections.abc import Callable, Coroutine, Mapping
from typing import Literal, Protocol, TypeAlias, cast

import numpy as np

from rlkit.backends.protocol import LiveSampler, LiveSampling, Sampler, TrainerBackend
from rlkit.errors import UnsupportedError
from rlkit.futures import Future
from rlkit.metrics import token_lag
from rlkit.rollouts.api import Rollouts

__all__ = ["Batch", "InFlight", "InFlightOption", "Lent", "Policies", "Snapshots"]

Lent: TypeAlias = Callable[[], Coroutine[object, object, tuple[Sampler, Mapping[str, float]]]]
"""Waits for a sampler; gives it, and what to add to the metrics of its batch."""
Batch: TypeAlias = "concurrent.futures.Future[Rollouts]"
InFlightOption: TypeAlias = bool | Literal["requests"]


class Policies(Protocol):
    """Gives a sampler to each batch that is begun."""

    def advance(self, step: int, *, begins: bool) -> None:
        """Note that ``step`` is asked for, in the thread that trains; ``begins``: and that batches begin now."""

    def lend(self, due: int) -> Lent:
        """Return the sampler of the batch of step ``due``, which begins now, and what to add to its metrics."""

    def hand(self, batch: Batch, step: int) -> Coroutine[object, object, Rollouts] | None:
        """Return what waits for the batch of ``step``, which was asked for, and completes its metrics; None: itself."""

    def state(self) -> dict[str, int]:
        """Return what a run that goes on has to know."""

    def restore(self, state: Mapping[str, int]) -> None:
        """Become what ``state`` was taken from."""


class Snapshots:
    """A snapshot at the steps that ``interval`` divides, at the first one, and behind a checkpoint."""

    def __init__(self, policy: TrainerBackend, interval: int) -> None:
        self._policy, self._interval = policy, interval
        self._taken: tuple[int, Future[Sampler]] | None = None

    def advance(self, step: int, *, begins: bool) -> None:
        """See ``Policies``."""
        since = -1 if self._taken is None else self._taken[0]
        if begins and (self._taken is None or (step % self._interval == 0 and since < step)):
            self._taken = (step, self._policy.sampler())

    def lend(self, due: int) -> Lent:
        """See ``Policies``; the lag is known beforehand."""
        since, snapshot = cast("tuple[int, Future[Sampler]]", self._taken)

        async def lent() -> tuple[Sampler, Mapping[str, float]]:
            return await snapshot, {"sampler/lag": float(due - since)}

        return lent

    def hand(self, batch: Batch, step: int) -> None:  # noqa: ARG002  # as the protocol has it
        """See ``Policies``."""
        return

    def state(self) -> dict[str, int]:
        """Return nothing: a run that goes on has no older snapshot, so the one that goes through takes a fresh one."""
        self._taken = None
        return {}

    def restore(self, state: Mapping[str, int]) -> None:  # noqa: ARG002  # as above
        """See ``Policies``."""
        self._taken = None


class InFlight:
    """A live sampler, updated at the steps that ``interval`` divides.

    Args:
        policy: it is a ``LiveSampling``.
        interval: >= 1.
        requests: whether it will do that requests end under the policy with which they began.
        recompute: as for ``LiveSampling.live_sampler``.
    """

    def __init__(self, policy: TrainerBackend, interval: int, *, requests: bool, recompute: bool) -> None:
        if not isinstance(policy, LiveSampling):
            raise UnsupportedError(
                f"async_rollouts(in_flight): {type(policy).__name__} has no live_sampler; leave it out, and batches "
                "are sampled from snapshots"
            )
        self._policy: LiveSampling = policy
        self._interval, self._requests, self._recompute = interval, requests, recompute
        self._live: Future[LiveSampler] | None = None
        self._update: Future[int] | None = None  # the newest, of step ``_since``
        self._since = 0
        self._versions: dict[int, int] = {}  # step of an update -> version since then

    def advance(self, step: int, *, begins: bool) -> None:  # noqa: ARG002  # what was begun goes on under it, too
        """See ``Policies``."""
        if self._live is None:
            self._live, self._since = self._policy.live_sampler(recompute=self._recompute), step
        elif step % self._interval == 0:
            self._update, self._since = self._live.result().update(), step

    def lend(self, due: int) -> Lent:  # noqa: ARG002  # as the protocol has it
        """See ``Policies``."""
        opened, update = cast("Future[LiveSampler]", self._live), self._update

        async def lent() -> tuple[Sampler, Mapping[str, float]]:
            live = await opened
            if live.switches != "token" and not self._requests:
                raise UnsupportedError(
                    f"async_rollouts(in_flight=True): requests to {type(self._policy).__name__} end under the policy "
                    "with which they began; in_flight='requests' lets later turns take the newer one"
                )
            if update is not None:
                await update
            return live, {}

        return lent

    def hand(self, batch: Batch, step: int) -> Coroutine[object, object, Rollouts]:
        """See ``Policies``."""
        opened, update, since = cast("Future[LiveSampler]", self._live), self._update, self._since

        async def handed() -> Rollouts:
            groups = await asyncio.wrap_future(batch)
            self._versions[since] = (await opened).version if update is None else await update
            groups.metrics |= self._lag(groups, step)
            return groups

        return handed()

    def state(self) -> dict[str, int]:
        """Return the versions since each update."""
        return {str(step): version for step, version in self._versions.items()}

    def restore(self, state: Mapping[str, int]) -> None:
        """See ``Policies``."""
        self._versions = {int(step): int(version) for step, version in state.items()}

    def _lag(self, groups: Rollouts, step: int) -> dict[str, float]:
        """Return how old the tokens are, in rounds, and the share of turns that several policies drew."""
        steps, versions = list(self._versions), list(self._versions.values())
        rounds = []
        for turn in (turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns):
            drawn = turn.sample.token_versions
            rounds.append(np.array([steps[max(0, bisect.bisect_right(versions, v) - 1)] for v in drawn], np.int64))
        if not any(x.size for x in rounds):
            return {}
        lag = token_lag(versions=rounds, current=step)
        return {"sampler/lag": lag["mean"], "sampler/lag/max": lag["max"], "sampler/mixed": lag["mixed"]}
