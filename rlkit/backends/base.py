"""What all policies and critics do with a call: check its arguments at once, and give it a place in their queue."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from rlkit import _check
from rlkit._calls import answered
from rlkit._resource import Resource
from rlkit.backends.checking import Checked, Remote, checked_call
from rlkit.backends.protocol import Config, LossLike, Tokenizer
from rlkit.backends.queue import CallQueue, Job, Sent
from rlkit.errors import ConfigError
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["BaseTrainer"]


class BaseTrainer(Resource):
    """The training calls of ``TrainerBackend`` and ``Critic``, over hooks.

    Attributes:
        about: the model and its adapter, for ``repr``.
    """

    tokenizer: Tokenizer
    max_length: int
    version: int
    about: str = ""
    _instead: ClassVar[str] = "save it, and connect with resume_from= where it is wanted"
    _name: str  # of the backend, for messages
    _queue: CallQueue
    _wanted: ClassVar[Sequence[str]] = ()  # what there is for ``want``
    _drivers: ClassVar[Sequence[str]] = ("logprobs", "target_logprobs")  # what losses may be driven by

    # The hooks: what a job of the queue does (see ``Job``).

    @abstractmethod
    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput] | Sent[ForwardBackwardOutput]:
        """Run a forward pass, and with ``backward`` add the gradient, all or nothing."""

    @abstractmethod
    def _optimize(self, params: Adam) -> Job[Mapping[str, float]]:
        """Return the job of an optimizer step, which applies the gradient or raises and changes nothing."""

    @abstractmethod
    def _save(self, name: str, *, optimizer: bool, sampler: bool) -> Job[str]:
        """Return the job that saves the state, and that gives its path."""

    def forward(
        self,
        data: Sequence[Datum],
        loss: LossLike | None = None,
        *,
        config: Config | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Compute logprobs, ``want``, and the value of ``loss``; no gradient. See ``TrainerBackend.forward``."""
        data, prepared, want = self._checked(data, loss, config, want, backward=False)
        return self._queue.submit("forward", lambda: self._run(data, prepared, want, backward=False))

    @answered
    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None, want: Sequence[str] = ()
    ) -> Future[ForwardBackwardOutput]:
        """Add the loss's gradient, all or nothing. See ``TrainerBackend.forward_backward``."""
        data, prepared, want = self._checked(data, loss, config, want, backward=True)
        adds = any(datum.mask.any() for datum in data)
        return self._queue.forward_backward(lambda: self._run(data, prepared, want, backward=True), adds=adds)

    @answered
    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """Apply the accumulated gradient and clear it. See ``TrainerBackend.optim_step``.

        Raises:
            BackendError: nothing was accumulated since the last step.
        """
        return self._queue.optim_step(self._optimize(params))

    @answered
    def save(self, name: str, *, optimizer: bool = True, sampler: bool = False) -> Future[str]:
        """Save weights and optimizer; the future gives the path. See ``TrainerBackend.save``.

        Raises:
            BackendError: a gradient is accumulated and would be lost; step or ``discard()`` first.
            ConfigError: ``name`` holds more than letters, digits, dot, dash and underscore.
            CheckpointError: it could not be written (when the future is read).
        """
        _check.flag("save(optimizer)", optimizer)
        _check.flag("save(sampler)", sampler)
        return self._queue.save(self._save(name, optimizer=optimizer, sampler=sampler))

    @abstractmethod
    def discard(self) -> Future[None]:
        """Drop the accumulated gradient, and accept calls again after a failure. See ``TrainerBackend.discard``."""

    def close(self) -> None:
        """Finish the calls made so far, free the model, and refuse what comes after. May be called twice."""
        self._queue.close()

    def _checked(
        self,
        data: Sequence[Datum],
        loss: LossLike | None,
        config: Config | None,
        want: Sequence[str],
        *,
        backward: bool,
        remote: Remote | None = None,
    ) -> Checked:
        """Return the checked arguments of a call. See ``checked_call``."""
        if loss is None and backward:
            raise ConfigError("forward_backward: loss is None; give a name or a function, or call forward")
        if loss is None and config:
            raise ConfigError("forward: got config= without a loss")
        size, longest, drivers = self.tokenizer.vocab_size, self.max_length, self._drivers
        return checked_call(
            self._name, data, loss, config, want, self._wanted, size, longest, drivers=drivers, remote=remote
        )

    def __repr__(self) -> str:
        if not hasattr(self, "_queue"):  # in a traceback that shows locals
            return f"<{type(self).__name__} not connected>"
        known = [self.about, f"version {self.version}", "closed" if self._queue.closed else ""]
        return f"<{type(self).__name__} {', '.join(filter(None, known))}>"
