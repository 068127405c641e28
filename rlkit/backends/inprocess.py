"""What the toy and the local backend share: arguments checked at the call, calls in order, and the failure rule.

A backend in this process writes five hooks (``_run``, ``_step``, ``_snapshot``, ``_write``, ``_drop``), which its one
worker thread calls; everything that a user sees is here.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import attrs

from rlkit import _check
from rlkit._calls import answered, hinted
from rlkit.backends import saves
from rlkit.backends.checking import OF_DISTRIBUTION, checked_call
from rlkit.backends.protocol import LossLike, Sampler, Tokenizer
from rlkit.backends.worker import Background, Worker
from rlkit.errors import BackendError, ConfigError, TrainerFailed
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["InProcessBackend"]


@attrs.frozen(eq=False)
class _Failure:
    """A training call that failed; the calls of its epoch and before are refused."""

    epoch: int
    call: str
    error: BaseException


@hinted("policy")
class InProcessBackend(ABC):
    """The protocol, over hooks that run in one worker thread."""

    def __init__(
        self,
        name: str,
        *,
        tokenizer: Tokenizer,
        max_length: int,
        folder: str | Path | None,
        background: Background | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_length = max_length
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
            raise ConfigError(
                _check.problem("folder", f"got {_check.shown(folder)}", "a path, or None for rlkit-saves")
            )
        self.folder = Path("rlkit-saves" if folder is None else folder)
        self._name = name
        self._worker = Worker(name, background)
        self._lock = threading.RLock()
        self._closed = False
        # As the calls were made:
        self._epoch = 0
        self._pending = False
        # As the worker has carried them out:
        self._failure: _Failure | None = None
        self._accumulated = False
        self.version = 0

    # The hooks, all called in the worker's thread.

    @abstractmethod
    def _run(
        self, data: Sequence[Datum], loss: Any, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        """Forward, and with ``backward`` adds the gradient, all or nothing; yields between its parts."""

    @abstractmethod
    def _step(self, params: Adam) -> Mapping[str, float]:
        """Applies the accumulated gradient and clears it, or raises and changes nothing."""

    @abstractmethod
    def _snapshot(self) -> Sampler:
        """A sampler of the policy as it is."""

    @abstractmethod
    def _base(self) -> Sampler:
        """A sampler of the base model."""

    @abstractmethod
    def _write(self, folder: Path, *, optimizer: bool) -> Mapping[str, Any]:
        """Writes the state's arrays into ``folder``; returns what ``state.json`` is to hold beside them."""

    @abstractmethod
    def _drop(self) -> None:
        """Clears the accumulated gradient."""

    # The protocol.

    def forward(
        self,
        data: Sequence[Datum],
        loss: LossLike | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Logprobs, ``want``, and the value of ``loss``; no gradient. See ``TrainerBackend.forward``."""
        if loss is None and config:
            raise ConfigError("forward: got config= without a loss")
        data, prepared, want = self._checked(data, loss, config, want)
        return self._submit("forward", lambda: self._run(data, prepared, want, backward=False), trains=False)

    @answered
    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossLike,
        *,
        config: Mapping[str, Any] | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Adds the loss's gradient, all or nothing. See ``TrainerBackend.forward_backward``."""
        if loss is None:
            raise ConfigError("forward_backward: loss is None; give a name or a function, or call forward")
        data, prepared, want = self._checked(data, loss, config, want)
        adds = any(datum.mask.any() for datum in data)

        def job() -> Generator[None, None, ForwardBackwardOutput]:
            output = yield from self._run(data, prepared, want, backward=True)
            self._accumulated = self._accumulated or adds
            return output

        with self._lock:
            future = self._submit("forward_backward", job, trains=True)
            self._pending = self._pending or adds
        return future

    @answered
    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """One AdamW step. See ``TrainerBackend.optim_step``.

        Raises:
            BackendError: nothing was accumulated since the last step.
        """
        if not isinstance(params, Adam):
            raise ConfigError(_check.problem("optim_step(params)", f"got {_check.shown(params)}", "rlkit.Adam(...)"))

        def job() -> Mapping[str, float]:
            metrics = self._step(params)
            self._accumulated = False
            self.version += 1
            return metrics

        with self._lock:
            self._check_open()
            if not self._pending:
                raise BackendError(
                    "optim_step: no gradient is accumulated; call forward_backward first (datums without a masked-in "
                    "token add none)"
                )
            future = self._submit("optim_step", job, trains=True)
            self._pending = False
        return future

    def sampler(self) -> Future[Sampler]:
        """A snapshot of the policy as of this call. See ``TrainerBackend.sampler``."""
        return self._submit("sampler", self._snapshot, trains=False)

    def base_sampler(self) -> Future[Sampler]:
        """The base model. See ``TrainerBackend.base_sampler``."""
        return self._submit("base_sampler", self._base, trains=False)

    @answered
    def save(self, name: str, *, optimizer: bool = True, sampler: bool = False) -> Future[str]:
        """Writes weights and optimizer to a new folder under ``folder``. See ``TrainerBackend.save``.

        ``sampler`` asks for weights to sample from, which every save has here.

        Raises:
            BackendError: a gradient is accumulated and would be lost; step or ``discard()`` first.
            ConfigError: ``name`` holds more than letters, digits, dot, dash and underscore.
            CheckpointError: it could not be written (when the future is read).
        """
        saves.check_label(name)
        _check.flag("save(optimizer)", optimizer)
        _check.flag("save(sampler)", sampler)

        def job() -> str:
            def write(folder: Path) -> dict[str, Any]:
                return {"backend": self._name, "version": self.version, **self._write(folder, optimizer=optimizer)}

            return str(saves.write(self.folder, f"{name}-{self.version:06d}", write))

        with self._lock:
            self._check_open()
            if self._pending:
                raise BackendError(
                    "save: a gradient is accumulated and would be lost; call optim_step or discard first"
                )
            return self._submit("save", job, trains=False)

    def discard(self) -> Future[None]:
        """Drops the accumulated gradient, and has the backend accept calls again after a failure."""

        def job() -> None:
            self._drop()
            self._accumulated = False

        with self._lock:
            self._epoch += 1
            self._pending = False
            return self._submit("discard", job, trains=False)

    def close(self) -> None:
        """Finishes the calls made so far, frees the model, and refuses what comes after. May be called twice."""
        with self._lock:
            self._closed = True
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    about = ""
    """The model and its adapter, in words."""

    def __repr__(self) -> str:
        if not hasattr(self, "version"):  # in a traceback that shows locals
            return f"<{type(self).__name__} not connected>"
        known = [self.about, f"version {self.version}", "closed" if self._closed else ""]
        return f"<{type(self).__name__} {', '.join(filter(None, known))}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"a {type(self).__name__} holds a model and a thread, and cannot be pickled or copied; save it, and "
            "connect with resume_from= where it is wanted"
        )

    # How calls are checked, queued and refused.

    def _checked(
        self, data: Sequence[Datum], loss: LossLike | None, config: Mapping[str, Any] | None, want: Sequence[str]
    ) -> tuple[list[Datum], PreparedLoss | None, tuple[str, ...]]:
        size, wanted = self.tokenizer.vocab_size, OF_DISTRIBUTION
        return checked_call(self._name, data, loss, config, want, wanted, vocab_size=size, max_length=self.max_length)

    def _submit(self, call: str, job: Callable[[], Any], *, trains: bool) -> Future[Any]:
        """Queues ``job``; a failure of one that trains refuses what was queued behind it."""
        with self._lock:
            self._check_open()
            epoch = self._epoch

            def run() -> Any:
                failure = self._failure
                if failure is not None and epoch <= failure.epoch:
                    message = f"{call}: refused, because the {failure.call} before it failed: {failure.error}"
                    raise TrainerFailed(message) from failure.error
                return self._guarded(call, job, epoch) if trains else job()

            return Future.wrap(self._worker.submit(run), on_error=lambda error: self._read(error, epoch))

    def _guarded(self, call: str, job: Callable[[], Any], epoch: int) -> Generator[None, None, Any]:
        try:
            result = job()
            return (yield from result) if isinstance(result, Generator) else result
        except BaseException as error:
            with self._lock:
                self._failure = _Failure(epoch, call, error)
            raise

    def _read(self, error: BaseException, epoch: int) -> None:
        """An error reached its reader: once it is one of the failure's, later calls are accepted again."""
        with self._lock:
            failure = self._failure
            if failure is None or self._epoch != epoch or failure.epoch != epoch:
                return
            if error is failure.error or isinstance(error, TrainerFailed):
                self._epoch += 1
                self._pending = self._accumulated

    def _check_open(self) -> None:
        if self._closed:
            raise BackendError(f"the {self._name} backend is closed")
