"""Batches that are sampled before they are due, so that sampling and training run side by side, and can be resumed."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Mapping
from typing import Any

from rlkit import storage
from rlkit.backends.protocol import Sampler, TrainerBackend
from rlkit.rollouts import Rollouts

__all__ = ["Ahead"]


class Ahead:
    """The batch of each step, sampled up to ``offset`` steps before.

    At step s the batches up to s + offset are begun, with the newest snapshot; a fresh one is taken at the steps that
    ``interval`` divides. So a batch is between offset and offset + interval - 1 steps old, the first ones less, and
    which snapshot it comes from does not depend on timing.

    What is under way when the state is captured is waited for and kept with it, so that a run goes on with the very
    batches that it had sampled (``rlkit.rollouts.async_rollouts`` samples them anew). A snapshot is not kept: a run
    that goes on at a step that ``interval`` does not divide takes a fresh one.

    Args:
        policy: whose snapshots sample.
        play: (sampler, step) -> the step's batch; called in a thread where offset > 0.
        end: how many steps there are.
        offset: >= 0.
        interval: >= 1.
    """

    def __init__(
        self,
        policy: TrainerBackend,
        play: Callable[[Sampler, int], Rollouts],
        *,
        end: int,
        offset: int = 0,
        interval: int = 1,
    ) -> None:
        self._policy, self._play = policy, play
        self._end, self._offset, self._interval = end, offset, interval
        self._sampler: Sampler | None = None
        self._under_way: dict[int, concurrent.futures.Future[Rollouts]] = {}

    def batch(self, step: int) -> Rollouts:
        """The batch of a step; steps are asked for in order."""
        if self._sampler is None or step % self._interval == 0:
            self._sampler = self._policy.sampler().result()
        first = max([step - 1, *self._under_way]) + 1
        for begun in range(first, min(step + self._offset + 1, self._end)):
            self._under_way[begun] = self._begun(self._sampler, begun)
        return self._under_way.pop(step).result()

    def state(self) -> Mapping[str, Any]:
        """The batches that were sampled and not yet asked for."""
        return {str(step): _record(future.result()) for step, future in self._under_way.items()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Becomes what ``state`` was taken from."""
        self._under_way = {}
        for step, record in state.items():
            groups = [storage.from_record(each) for each in record["groups"]]
            done: concurrent.futures.Future[Rollouts] = concurrent.futures.Future()
            done.set_result(Rollouts(groups, {name: float(value) for name, value in record["metrics"].items()}))
            self._under_way[int(step)] = done

    def _begun(self, sampler: Sampler, step: int) -> concurrent.futures.Future[Rollouts]:
        future: concurrent.futures.Future[Rollouts] = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(self._play(sampler, step))
            except BaseException as error:  # noqa: BLE001  # raised again where the batch is asked for
                future.set_exception(error)

        if self._offset == 0:
            work()
        else:  # a daemon, so that an interrupted program does not wait for it
            threading.Thread(target=work, name=f"rlkit-step-{step}", daemon=True).start()
        return future


def _record(batch: Rollouts) -> dict[str, Any]:
    metrics = {name: str(value) for name, value in batch.metrics.items()}  # text, since JSON has no NaN
    return {"groups": [storage.to_record(group) for group in batch], "metrics": metrics}
