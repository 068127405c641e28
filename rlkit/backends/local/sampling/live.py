"""``LiveLocalSampler``: a policy of the local backend that is updated while its requests run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import attrs

from rlkit._calls import hinted
from rlkit.backends.local.sampling.requests import SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.sampler import LocalSampler, Owner
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.queue import CallQueue
from rlkit.backends.sampling import SeedStream
from rlkit.futures import Future

__all__ = ["LiveLocalSampler", "Updated"]


class Updated(Protocol):
    """What decodes: a ``Scheduler``, or several on other processes."""

    def submit(self, request: SampleRequest | ScoreRequest) -> None:
        """Queue a request; from any thread."""

    def update(
        self, snapshot: Snapshot, newer: Snapshot, *, recompute: bool, done: Callable[[], None] | None = None
    ) -> None:
        """See ``Scheduler.update``."""


@hinted("sampler")
class LiveLocalSampler(LocalSampler):
    """A ``LiveSampler`` of a local backend, whose requests have a decoder of their own.

    Args:
        owner: the backend.
        newest: takes a snapshot of its policy; called in its thread.
        seeds: for requests that bring none.
        scheduler: decodes them.
        queue: of the backend's calls, in whose order updates stand.
        recompute: as for ``LiveSampling.live_sampler``.
    """

    switches: Literal["token", "request"] = "token"

    def __init__(
        self,
        owner: Owner,
        newest: Callable[[], Snapshot],
        seeds: SeedStream,
        scheduler: Updated,
        queue: CallQueue,
        *,
        recompute: bool,
    ) -> None:
        super().__init__(owner, attrs.evolve(newest()), seeds, scheduler.submit)
        self._newest, self._scheduler, self._queue, self._recompute = newest, scheduler, queue, recompute

    def update(self) -> Future[int]:
        """See ``LiveSampler.update``. Texts that are being scored are scored anew, so that no two policies mix."""
        snapshot = self.snapshot

        def became() -> None:
            self.version = snapshot.version

        def job() -> int:
            newest = self._newest()
            if newest.version != snapshot.version:
                self._scheduler.update(snapshot, newest, recompute=self._recompute, done=became)
            return snapshot.version

        return self._queue.submit("update", job)
