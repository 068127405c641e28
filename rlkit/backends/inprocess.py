"""What the toy and the local backend share, and the critics: a queue run by one thread, and saving to folders.

A trainer in this process writes hooks, which its one worker thread calls; all that a user sees is in ``BaseTrainer``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlkit import _check
from rlkit._calls import hinted
from rlkit.backends import saves
from rlkit.backends.base import BaseTrainer
from rlkit.backends.checking import OF_DISTRIBUTION, check_adam
from rlkit.backends.protocol import LiveSampler, Sampler, Tokenizer
from rlkit.backends.queue import CallQueue, Job, RunHere
from rlkit.backends.worker import Background, Worker
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["InProcessBackend", "InProcessTrainer"]


class InProcessTrainer(BaseTrainer):
    """A trainer over hooks that run in one worker thread.

    Args:
        name: of the backend, for messages and saved states.
        tokenizer, max_length: of the model.
        folder: where ``save`` writes; None for ``rlkit-saves``.
        version: optimizer steps that the state that it starts from has taken.
        background: what the thread does between the parts of a call.
    """

    _wanted: ClassVar[Sequence[str]] = OF_DISTRIBUTION

    def __init__(
        self,
        name: str,
        *,
        tokenizer: Tokenizer,
        max_length: int,
        folder: str | Path | None,
        version: int = 0,
        background: Background | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.folder = Path("rlkit-saves" if folder is None else folder)
        self.version = version
        self._name = name
        self._worker = Worker(name, background)
        self._queue = CallQueue(name, RunHere(self._worker))

    # The hooks, all called in the worker's thread.

    @abstractmethod
    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Run a forward pass, and with ``backward`` add the gradient, all or nothing; yield between its parts."""

    @abstractmethod
    def _step(self, params: Adam) -> Mapping[str, float]:
        """Apply the accumulated gradient and clear it, or raise and change nothing."""

    @abstractmethod
    def _write(self, folder: Path, *, optimizer: bool) -> Mapping[str, object]:
        """Write the state's arrays into ``folder``; return what ``state.json`` is to hold beside them."""

    @abstractmethod
    def _drop(self) -> None:
        """Clear the accumulated gradient."""

    def _optimize(self, params: Adam) -> Job[Mapping[str, float]]:
        check_adam(params)

        def job() -> Mapping[str, float]:
            metrics = self._step(params)
            self.version += 1
            return metrics

        return job

    def _save(self, name: str, *, optimizer: bool, sampler: bool) -> Job[str]:
        del sampler  # every state here has weights to sample from
        saves.check_label(name)

        def write(folder: Path) -> dict[str, object]:
            return {"backend": self._name, "version": self.version, **self._write(folder, optimizer=optimizer)}

        return lambda: str(saves.write(self.folder, f"{name}-{self.version:06d}", write))

    def discard(self) -> Future[None]:
        """Drop the accumulated gradient, and accept calls again after a failure."""
        return self._queue.discard(self._drop)


@hinted("policy")
class InProcessBackend(InProcessTrainer):
    """``TrainerBackend`` over the hooks of ``InProcessTrainer`` and three more."""

    @abstractmethod
    def _snapshot(self) -> Sampler:
        """Return a sampler of the policy as it is."""

    @abstractmethod
    def _base(self) -> Sampler:
        """Return a sampler of the base model."""

    @abstractmethod
    def _live(self, *, recompute: bool) -> LiveSampler:
        """Return a live sampler of the policy as it is."""

    def sampler(self) -> Future[Sampler]:
        """Take a snapshot of the policy as of this call. See ``TrainerBackend.sampler``."""
        return self._queue.submit("sampler", self._snapshot)

    def base_sampler(self) -> Future[Sampler]:
        """Return a sampler of the base model. See ``TrainerBackend.base_sampler``."""
        return self._queue.submit("base_sampler", self._base)

    def live_sampler(self, *, recompute: bool = False) -> Future[LiveSampler]:
        """Return a sampler that is updated while its requests run. See ``LiveSampling``."""
        _check.flag("live_sampler(recompute)", recompute)
        return self._queue.submit("live_sampler", lambda: self._live(recompute=recompute))
