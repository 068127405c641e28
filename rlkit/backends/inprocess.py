"""What the toy and the local backend share, and the critics: a queue run by one thread, and saving to folders.

A trainer in this process writes hooks, which its one worker thread calls; all that a user sees is in ``BaseTrainer``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from rlkit import _check
from rlkit._resource import Resource
from rlkit.backends import saves
from rlkit.backends.checking import OF_DISTRIBUTION, Checked, check_adam, checked_data
from rlkit.backends.protocol import Config, LiveSampler, LossLike, Sampler, Tokenizer
from rlkit.backends.queue import Background, CallQueue, Job, RunHere, Sent, Worker
from rlkit.backends.sampling import SeedStream
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["BaseTrainer", "InProcessBackend", "InProcessTrainer", "Mark"]


class BaseTrainer(Resource):
    """The training calls of ``TrainerBackend`` and ``Critic``, over hooks.

    Attributes:
        about: the model and its adapter, for ``repr``.
    """

    tokenizer: Tokenizer
    max_length: int
    version: int
    about: str = ""
    _instead: ClassVar[str] = "save it, and connect with resume_from= in the other process"
    _name: str  # of the backend, for messages
    _last_loss: PreparedLoss | None = None
    _last_adam: object = None
    _queue: CallQueue
    _wanted: ClassVar[Sequence[str]] = ()  # the names that ``want`` may have
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

    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None, want: Sequence[str] = ()
    ) -> Future[ForwardBackwardOutput]:
        """Add the loss's gradient, all or nothing. See ``TrainerBackend.forward_backward``."""
        data, prepared, want = self._checked(data, loss, config, want, backward=True)
        self._last_loss = prepared
        adds = any(datum.mask.any() for datum in data)
        return self._queue.forward_backward(lambda: self._run(data, prepared, want, backward=True), adds=adds)

    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """Apply the accumulated gradient and clear it. See ``TrainerBackend.optim_step``.

        Raises:
            BackendError: nothing was accumulated since the last step.
        """
        future = self._queue.optim_step(self._optimize(params))
        self._last_adam = params
        return future

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

    def _facts(self) -> dict[str, object]:
        """Return what it was made of, as far as that is known, and what was last asked of it; for a run's page."""
        facts: dict[str, object] = {"about": self.about} if self.about else {}
        facts["max_length"] = self.max_length
        if self._last_loss is not None:
            facts["last loss"] = {"name": self._last_loss.name, **self._last_loss.settings}
        if self._last_adam is not None:
            facts["last optimizer step"] = self._last_adam
        seeds: SeedStream | None = getattr(self, "_seeds", None)
        if seeds is not None and seeds.params is not None:
            facts["last sampling"] = seeds.params
        return facts

    def _checked(
        self,
        data: Sequence[Datum],
        loss: LossLike | None,
        config: Config | None,
        want: Sequence[str],
        *,
        backward: bool,
    ) -> Checked:
        """Return ``data`` as a list, the loss prepared and tried out on made-up logprobs, and ``want`` as a tuple.

        Args:
            data, loss, config, want: as in ``TrainerBackend.forward``.
            backward: whether a gradient is asked for.
        """
        if loss is None and backward:
            raise ConfigError("forward_backward: loss is None; expected a name or a function (or call forward)")
        if loss is None and config:
            raise ConfigError("forward: got config= without a loss")
        _check.require(not isinstance(want, str) and isinstance(want, Sequence), "want", want, "a sequence of names")
        for output in want:
            if output not in self._wanted:
                has = f"it has: {', '.join(self._wanted)}" if self._wanted else "it has only logprobs"
                raise UnsupportedError(f"want: the {self._name} backend has no output {output!r}; {has}")
        data = checked_data(data, self.tokenizer.vocab_size, self.max_length)
        if loss is None:
            return data, None, tuple(want)
        from rlkit.losses.prepare import prepare

        prepared = prepare(loss, config)
        self._check_loss(prepared)
        prepared.check(data)
        prepared.try_out(data)
        return data, prepared, tuple(want)

    def _check_loss(self, prepared: PreparedLoss) -> None:
        """Raise UnsupportedError for a loss that needs what the model does not give."""
        if prepared.driver not in self._drivers:
            why = "a value head, which a policy does not have; use a critic"
            if prepared.driver != "values":
                why = f"{prepared.driver}, which a critic lacks; it takes losses of values, such as value_clipped"
            raise UnsupportedError(f"the loss {prepared.name!r} needs {why}")
        if prepared.entropy and "entropy" not in self._wanted:
            raise UnsupportedError(
                f"the loss {prepared.name!r} needs exact entropies, which the {self._name} backend cannot give; use "
                "the sampled estimate, rlkit.advantages.entropy_bonus"
            )

    def __repr__(self) -> str:
        if not hasattr(self, "_queue"):  # in a traceback that shows locals
            return f"<{type(self).__name__} not connected>"
        known = [self.about, f"version {self.version}", "closed" if self._queue.closed else ""]
        return f"<{type(self).__name__} {', '.join(filter(None, known))}>"


Mark: TypeAlias = tuple[Future[int], int]


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
        """Write the state's arrays into ``folder``; return the other fields of ``state.json``."""

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

    def _mark(self) -> Mark | None:
        """Return a mark that tells whether the state has changed since this call; None where that cannot be told."""
        seeds: SeedStream | None = getattr(self, "_seeds", None)
        return self._queue.submit("mark", lambda: self.version), 0 if seeds is None else seeds.count

    def _give_up(self) -> None:
        """End the calls made so far, the running one after its present part, so that ``close`` does not wait long."""
        self._worker.give_up()

    def _back_to(self, mark: Mark, timeout: float) -> bool:
        """Drop what was done since ``mark``; return False where an optimizer step was, which cannot be."""
        version, requests = mark
        self.discard().result(timeout)
        if not version.done() or version.result() != self.version:
            return False
        seeds: SeedStream | None = getattr(self, "_seeds", None)
        if seeds is not None:
            seeds.count = requests
        return True


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
