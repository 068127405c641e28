"""A training call that fails changes nothing, and the calls made after it are refused: this file keeps that contract.

A call's arguments are checked at once, so that a mistake raises there. An accepted call belongs to the generation in
which it was made, and runs in its turn. If a training call then fails, its gradient is dropped whole, and the calls of
its generation that have not run yet are refused with ``TrainerFailed``, whether or not anyone has read the first error.
The next generation begins when an error of that failure is read, or with ``discard``; its calls are accepted. After a
final failure, where a service may have applied something, no call is accepted any more.

A call passes through ``BaseTrainer`` (checks), ``CallQueue`` (order and failures) and an executor: ``ThreadExecutor``
runs it in the one thread of a ``Worker``; ``rlkit.backends.tinker._calls.Calls`` sends it to a service.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import queue
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np

from rlkit import _check
from rlkit._runtime import Resource
from rlkit._seeds import SeedStream
from rlkit.backends import saves
from rlkit.backends.protocol import Config, LiveSampler, LossLike, Sampler, Tokenizer
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.errors import BackendError, ConfigError, DataError, RankLost, TrainerFailed, UnsupportedError
from rlkit.futures import Future
from rlkit.metrics import names
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = [
    "DISTRIBUTION_OUTPUTS",
    "Background",
    "BaseTrainer",
    "Call",
    "CallQueue",
    "Checked",
    "Executor",
    "Failure",
    "InProcessBackend",
    "InProcessCritic",
    "InProcessTrainer",
    "Inner",
    "Job",
    "PendingResult",
    "ThreadExecutor",
    "Worker",
    "assemble_output",
    "check_data",
    "check_process",
    "check_start_options",
    "check_tokenizer",
]

T = TypeVar("T")
Inner: TypeAlias = "concurrent.futures.Future[T]"


# The queue: which calls are accepted, and which of them are refused.


@attrs.frozen(eq=False)
class PendingResult(Generic[T]):
    """A call that was sent to a service: the SDK's futures, and the function from their results to the call's."""

    parts: Sequence[Inner[Any]]
    finish: Callable[[list[Any]], T]


Job: TypeAlias = Callable[[], T | Generator[None, None, T] | PendingResult[T]]
"""The work of a call: it returns the result; in a thread also a generator that does; on a service ``PendingResult``."""


@attrs.frozen(eq=False)
class Failure:
    """The training call that failed. ``final``: it had been sent, so the state of the service is unknown."""

    call: str
    generation: int
    error: BaseException
    final: bool


class Executor(Protocol):
    """Carries out calls, one after the other in the order of ``start``."""

    def start(self, call: Call[T]) -> Inner[T]:
        """Queue ``call``: ``check`` it, run its job, report how that ended, then settle the future."""

    def drain(self) -> None:
        """Wait until the jobs of all calls made so far have run."""

    def close(self) -> None:
        """Finish the calls that were started, and end. May be called twice."""


class CallQueue:
    """The calls of one policy or critic.

    Args:
        name: of the backend, for messages.
        executor: carries the calls out.

    Attributes:
        closed: whether ``close`` was called.
        generation: of new calls.
        pending: whether a gradient is accumulated, by the calls as they were made.
        accumulated: the same, by the calls as they were carried out (on a service: sent).
        failure: the latest; it refuses the calls of its generation and of earlier ones.
    """

    def __init__(self, name: str, executor: Executor) -> None:
        self._name, self._executor = name, executor
        self.lock = threading.RLock()
        self.closed = False
        self.generation = 0
        self.pending = False
        self.accumulated = False
        self.failure: Failure | None = None

    def enqueue(self, name: str, job: Job[T], *, trains: bool = False, accumulates: bool | None = None) -> Future[T]:
        """Queue a call. One that does not train, such as a forward pass or a snapshot, fails alone. See ``Call``."""
        with self.lock:
            self._check_open()
            call: Call[T] = Call(self, name, job, self.generation, trains, accumulates)
            # Started under the lock, so that the executor gets the calls in the order of their generations.
            future: Future[T] = Future.wrap(self._executor.start(call), on_error=call.accept_next_generation)
            if accumulates is not None:
                self.pending = accumulates
            return future

    def forward_backward(self, job: Job[T], *, adds: bool) -> Future[T]:
        """Queue a call that adds to the gradient; ``adds`` False: its data has no token that could."""
        return self.enqueue("forward_backward", job, trains=True, accumulates=True if adds else None)

    def optim_step(self, job: Job[T]) -> Future[T]:
        """Queue a call that applies and clears the gradient; BackendError where none is accumulated."""
        with self.lock:
            self._check_open()  # first: a closed queue says so, whatever it has accumulated
            if not self.pending:
                why = "call forward_backward first (datums with no masked-in token add no gradient)"
                raise BackendError(f"optim_step: no gradient is accumulated; {why}")
            return self.enqueue("optim_step", job, trains=True, accumulates=False)

    def save(self, job: Job[T]) -> Future[T]:
        """Queue a call that saves weights and optimizer; BackendError where a gradient would be lost."""
        with self.lock:
            self._check_open()
            if self.pending and not (self.failure is not None and self.failure.final):  # then it is refused for that
                raise BackendError("save: the accumulated gradient would be lost; call optim_step or discard() first")
            return self.enqueue("save", job)

    def discard(self, clear: Callable[[], None] | None) -> Future[None]:
        """Begin the next generation without a gradient.

        Args:
            clear: drops the accumulated gradient; None where a service holds it, which has no call for that. Then this
                waits until all calls have been sent.

        Raises:
            BackendError: the service holds a gradient, or its state is unknown (``TrainerFailed``).
        """
        self._check_open()
        if clear is None:
            self._executor.drain()  # without the lock, which jobs take when they report a failure
        with self.lock:
            if self.failure is not None and self.failure.final:
                raise _make_refusal("discard", self.failure)
            if clear is None and self.accumulated:
                what = "connect anew with resume_from= and the path of the last saved state"
                raise BackendError(f"discard: the service holds the gradient and has no call to drop it; {what}")
            self.generation += 1
            self.pending = False
            return Future.of(None) if clear is None else self.enqueue("discard", clear, accumulates=False)

    def close(self) -> None:
        """Finish the calls made so far and refuse later ones. May be called twice."""
        with self.lock:
            self.closed = True
        self._executor.close()

    def _check_open(self) -> None:
        if self.closed:
            raise BackendError(f"the {self._name} backend is closed")


@attrs.frozen(eq=False)
class Call(Generic[T]):
    """One call, as an executor sees it.

    Attributes:
        name: for messages.
        trains: whether its failure refuses the calls after it.
        accumulates: whether a gradient is accumulated once it was carried out; None: as before.
    """

    queue: CallQueue
    name: str
    job: Job[T]
    generation: int
    trains: bool
    accumulates: bool | None

    def check(self, *, sent: bool = False) -> None:
        """Raise TrainerFailed (or RankLost) if a failure refuses this call; once ``sent``, only a final one does."""
        # No lock: a failure is replaced as a whole. A call that was sent came before any failure that is not final, or
        # belongs to a later generation.
        failure = self.queue.failure
        if failure is not None and (failure.final or (not sent and self.generation <= failure.generation)):
            raise _make_refusal(self.name, failure, sent=sent)

    def run(self) -> Generator[None, None, Any]:
        """Run its job in a thread of this process, once it is the call's turn."""
        self.check()  # only now: until its turn an earlier call may fail
        try:
            result = yield from run_parts(self.job)
            self.report_done()
        except BaseException as error:  # whatever it is, the calls after this one must not run
            self.report_failure(error)
            raise
        return result

    def report_done(self) -> None:
        """Report that its job has run; on a service, that it was sent."""
        if self.accumulates is not None:
            self.queue.accumulated = self.accumulates

    def report_failure(self, error: BaseException, *, final: bool = False) -> None:
        """Report its error, before the future has it. ``final``: something was sent, so the outcome is unknown."""
        if self.trains and not isinstance(error, TrainerFailed):  # that is a refusal: the failure is an earlier one
            with self.queue.lock:
                if self.queue.failure is None or not self.queue.failure.final:
                    self.queue.failure = Failure(self.name, self.generation, error, final)

    def accept_next_generation(self, error: BaseException) -> None:
        """Begin the next generation if ``error``, which a reader is about to get, comes from this one's failure."""
        calls = self.queue
        with calls.lock:
            failure = calls.failure
            # One failure begins one generation: its first reader begins it, and readers of older errors begin none.
            if failure is None or failure.final or not self.generation == failure.generation == calls.generation:
                return
            if error is failure.error or isinstance(error, TrainerFailed | RankLost):
                calls.generation += 1
                calls.pending = calls.accumulated  # calls made after the failure were refused, and add nothing


def _make_refusal(call: str, failure: Failure, *, sent: bool = False) -> TrainerFailed | RankLost:
    message = f"{call}: refused, because the earlier {failure.call} failed: {failure.error}"
    if sent:
        message += "; the call was already sent and may have been carried out"
    if failure.final and "resume_from=" not in message:
        message += ". The policy takes no more calls: connect anew with resume_from= and the last saved path"
    lost = isinstance(failure.error, RankLost)  # then every call says so, also those that were made before
    error = RankLost(message) if lost else TrainerFailed(message)
    error.__cause__ = failure.error
    return error


# The thread of a trainer in this process.


class ThreadExecutor:
    """An executor that runs jobs in the one thread of ``worker``."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.drain, self.close = worker, worker.drain, worker.close

    def start(self, call: Call[T]) -> Inner[T]:
        """Queue ``call``. See ``Executor``."""
        return self._worker.submit(call.run)


def run_parts(job: Callable[[], Any]) -> Generator[None, None, Any]:
    """Run ``job`` to its end, and return its result; yield where it yields, if it returns a generator."""
    result = job()
    return (yield from result) if isinstance(result, Generator) else result


class Background(Protocol):
    """Work that may run between the parts of a job, such as decoding."""

    def delay(self) -> float | None:
        """Return the seconds until the next ``turn``; 0 for now, None for nothing to do."""

    def turn(self) -> None:
        """Do one part of the work."""

    def stop(self) -> None:
        """Drop the remaining work."""


class _Idle:
    """No background work."""

    def delay(self) -> float | None:
        return None

    def turn(self) -> None: ...

    def stop(self) -> None: ...


class Worker:
    """Run jobs one after the other in its own thread.

    A job is a function, or a function that returns a generator, which the worker drives to its end. After each part the
    background gets as much time as the part took, if it has so much to do. The thread ends with ``close``, or when the
    worker is forgotten.
    """

    def __init__(self, name: str, background: Background | None = None) -> None:
        self._loop = _Loop(background or _Idle())
        self.wake = self._loop.wake  # not a method of this class: a background keeps it, and would keep the worker
        self._name, self._process = name, os.getpid()
        self._thread = threading.Thread(target=self._loop.run, name=f"rlkit-{name}", daemon=True)
        self._thread.start()
        _running[self._loop] = self._thread
        # A finalizer that held ``self`` would keep the worker alive. At exit ``_end_all`` does more.
        weakref.finalize(self, self._loop.jobs.put, _END).atexit = False

    @property
    def forked(self) -> bool:
        """Return whether this process was forked off the one that has the thread."""
        return os.getpid() != self._process

    def submit(self, job: Callable[[], T | Generator[None, None, T]]) -> Inner[T]:
        """Queue ``job`` after what was submitted before. Raises BackendError: in a process that was forked off."""
        check_process(self._name, self._process)
        future: Inner[T] = concurrent.futures.Future()
        self._loop.jobs.put((job, future, self._loop.given_up))
        return future

    def drain(self) -> None:
        """Wait until the jobs submitted so far have run."""
        concurrent.futures.wait([self.submit(lambda: None)])

    def give_up(self) -> None:
        """End the jobs submitted so far with a BackendError, the running one after its present part."""
        self._loop.given_up += 1

    def close(self) -> None:
        """Finish the jobs submitted so far, stop the background, and end the thread; do nothing after a fork."""
        if not self.forked:
            self._loop.jobs.put(_END)
            if threading.current_thread() is not self._thread:  # a job may close its own worker
                self._thread.join()


def check_process(name: str, opened: int) -> None:
    """Raise BackendError unless the process is ``opened``, the one that has the thread of the backend ``name``.

    It takes no lock, which in a forked process may be held for ever.

    >>> check_process("toy", 0)
    Traceback (most recent call last):
    rlkit.errors.BackendError: the toy backend was opened in process 0, and a fork does not copy its thread...
    """
    if os.getpid() != opened:
        raise BackendError(
            f"the {name} backend was opened in process {opened}, and a fork does not copy its thread; open a backend "
            "in this process, or start processes with the 'spawn' method"
        )


_END, _WAKE = object(), object()


class _Loop:
    """The work of a worker's thread. It must not refer to the worker, or a forgotten one would never end.

    Attributes:
        jobs: (job, future, ``given_up`` when it was submitted), ``_WAKE`` and ``_END``.
        given_up: how often ``Worker.give_up`` was called; it ends the jobs with a lower number.
        budget: seconds that the background may use now; below 0 after a turn that took longer than it had.
    """

    def __init__(self, background: Background) -> None:
        self.background = background
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.given_up = 0
        self.budget = 0.0

    def wake(self) -> None:
        """Have the thread ask ``background.delay()`` again."""
        self.jobs.put(_WAKE)

    def run(self) -> None:
        """Run jobs and the background until ``_END``."""
        closing = False
        while True:
            delay = 0 if closing else self.background.delay()
            try:
                item = self.jobs.get(delay != 0, delay)
            except queue.Empty:
                if closing:  # the jobs that the last job submitted have run, too
                    break
                if self.background.delay() == 0:
                    self.background.turn()
                continue
            if item is _END:
                closing = True
            elif item is not _WAKE:
                self.run_job(*item)
            del item  # else the thread would keep a finished job until there is another one
        self.background.stop()

    def run_job(self, job: Callable[[], Any], future: Inner[Any], given_up: int) -> None:
        """Run a job to its end, settle its future, and run the background after each of its parts."""
        parts = run_parts(job)
        while not future.done():
            began = time.monotonic()
            try:
                if self.given_up > given_up:  # as if the next part had failed
                    parts.throw(BackendError("cancelled, because the run was stopped"))
                next(parts)
            except StopIteration as end:
                future.set_result(end.value)
            except BaseException as error:  # noqa: BLE001  # the thread goes on; the reader of the future gets it
                future.set_exception(error)
            self.run_background(time.monotonic() - began)

    def run_background(self, seconds: float) -> None:
        """Give the background the ``seconds`` that a part of a job took, less what its turns have overrun."""
        self.budget += seconds
        while self.budget > 0 and self.background.delay() == 0:
            began = time.monotonic()
            self.background.turn()
            self.budget -= time.monotonic() - began
        self.budget = min(self.budget, 0.0)  # unused time is not saved up


_running: weakref.WeakKeyDictionary[_Loop, threading.Thread] = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """Wait at exit for the running parts to end, so that no native code runs while the interpreter goes."""
    left = list(_running.items())
    for loop, _ in left:
        loop.given_up += 1
        loop.jobs.put(_END)
    deadline = time.monotonic() + 2.5
    for _, thread in left:
        thread.join(timeout=max(0.0, deadline - time.monotonic()))


if hasattr(os, "register_at_fork"):  # the threads are gone, and their locks may be held for ever
    os.register_at_fork(after_in_child=_running.clear)


# The checks and the output of every trainer.

# Outputs of backends that have the full distribution p, per token: its entropy, and the sums of p^2 and of p^2 log p.
DISTRIBUTION_OUTPUTS = ("entropy", "sum_p2", "sum_p2_logp")

Checked: TypeAlias = "tuple[list[Datum], PreparedLoss | None, tuple[str, ...]]"


def check_start_options(
    opener: str, model: object, lora: object, folder: object, resume_from: str | None, init_from: str | None
) -> tuple[str | None, bool]:
    """Check the options that all trainers take; ``opener`` is "connect" or "critic".

    Returns:
        The saved path to start from, None for a new state; and whether its optimizer is resumed.
    """
    if resume_from is not None and init_from is not None:
        raise ConfigError(f"{opener}: got both resume_from= and init_from=; give one of them")
    _check.require(model is None or isinstance(model, (str, os.PathLike)), "model", model, "a name or None")
    _check.require(lora is None or isinstance(lora, Lora), "lora", lora, "rlkit.Lora(...) or None")
    good = folder is None or (isinstance(folder, (str, os.PathLike)) and str(folder))
    _check.require(good, "folder", folder, "a path, or None for rlkit-saves")
    return (init_from if resume_from is None else resume_from), resume_from is not None


def check_data(data: Sequence[Datum], vocab_size: int, max_length: int) -> list[Datum]:
    """Return ``data`` as a non-empty list of datums that fit the model, or raise a DataError naming datum and token."""
    good = isinstance(data, Sequence) and not isinstance(data, str)
    _check.require(good, "data", data, "a list of Datum", error=DataError)
    if not data:
        raise DataError("data is empty; expected at least one Datum")
    for i, datum in enumerate(data):
        _check.require(isinstance(datum, Datum), f"data[{i}]", datum, "a Datum", error=DataError)
        if len(datum) > max_length:
            raise DataError(f"data[{i}].tokens", f"has {len(datum)}", f"<= {max_length}", "the context")
        _check.token_ids(f"data[{i}].tokens", datum.tokens, vocab_size=vocab_size)
        targets = datum.inputs.get("target_tokens")
        if targets is not None and (targets.ndim == 0 or targets.max() >= vocab_size or targets.min() < -1):
            what = f"spans [{targets.min()}, {targets.max()}] in shape {targets.shape}"
            raise DataError(f"data[{i}].inputs['target_tokens']", what, f"ids in [0, {vocab_size}) or -1 for none")
    return list(data)


def check_tokenizer(given: object, own: Tokenizer | None) -> Tokenizer:
    """Return the policy's tokenizer, if it is one and reads text as the critic's ``own`` does.

    Raises:
        ConfigError: it is not a tokenizer, or gives other ids.
    """
    if not isinstance(given, Tokenizer):
        raise ConfigError(f"critic(tokenizer): got {type(given).__name__}; expected the policy's, policy.tokenizer")
    if own is not None and (problem := same_tokenizer(given, own, ends=False)):
        raise ConfigError(
            f"critic(tokenizer): the critic's tokenizer differs from the policy's: it {problem}; its values would "
            "belong to other texts, so choose model= from the policy's family"
        )
    return given


def assemble_output(
    data: Sequence[Datum],
    logprobs: Sequence[np.ndarray] | None,
    outputs: Mapping[str, Sequence[np.ndarray]],
    parts: Sequence[LossGradient | None] = (),
    *,
    metrics: Mapping[str, float] | None = None,
) -> ForwardBackwardOutput:
    """Return the output of one call.

    Args:
        data: the datums.
        logprobs: [n] per datum; None for a critic.
        outputs: name -> [n] per datum.
        parts: of the loss, one for each micro-batch; None without a loss.
        metrics: of the loss, if a service has computed them; then there are no ``parts``.
    """
    masks = [datum.mask for datum in data]
    sizes = [int(mask.sum()) for mask in masks]
    if metrics is None:
        summed = {"loss:sum": 0.0}
        for part in filter(None, parts):
            summed["loss:sum"] += part.value
            names.add(summed, part.metrics)
        # A mean is over the datums that the loss was given: those with a token that the policy chose.
        metrics = names.averaged(summed, max(sum(n > 0 for n in sizes), 1))
    metrics = {**metrics, "tokens:sum": float(sum(sizes)), "datums:sum": float(len(data))}

    def expand(name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        if [np.shape(x) for x in arrays] != [(n,) for n in sizes]:
            found = ", ".join(str(np.shape(x)) for x in arrays[:8])
            raise BackendError(f"the backend's {name}", f"have shapes {found}", f"[n] per datum, n = {sizes[:8]}")
        return [datum.expand(np.asarray(x, np.float32)) for datum, x in zip(data, arrays, strict=True)]

    expanded = {name: expand(name, arrays) for name, arrays in outputs.items()}
    return ForwardBackwardOutput(() if logprobs is None else expand("logprobs", logprobs), expanded, metrics, masks)


# The trainers.


class BaseTrainer(Resource):
    """The training calls of ``TrainerBackend`` and ``Critic``: check the arguments, and queue the job of a hook.

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
    _seeds: SeedStream | None = None  # of sampling; None for a critic
    _queue: CallQueue
    _wanted: ClassVar[Sequence[str]] = ()  # the names that ``want`` may have
    _drivers: ClassVar[Sequence[str]] = ("logprobs", "target_logprobs")  # the inputs that may drive a loss

    # The hooks: the jobs of the queue (see ``Job``).

    @abstractmethod
    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput] | PendingResult[ForwardBackwardOutput]:
        """Run a forward pass, and with ``backward`` add the gradient, all or nothing."""

    @abstractmethod
    def _optimize(self, params: Adam) -> Job[Mapping[str, float]]:
        """Return the job of an optimizer step, which applies the gradient or raises and changes nothing."""

    @abstractmethod
    def _save(self, name: str, *, optimizer: bool, sampler: bool) -> Job[str]:
        """Return the job that saves the state and returns its path."""

    def forward(
        self,
        data: Sequence[Datum],
        loss: LossLike | None = None,
        *,
        config: Config | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Compute logprobs, ``want``, and the value of ``loss``; no gradient. See ``TrainerBackend.forward``."""
        data, prepared, want = self._check_call(data, loss, config, want, backward=False)
        return self._queue.enqueue("forward", lambda: self._run(data, prepared, want, backward=False))

    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike, *, config: Config | None = None, want: Sequence[str] = ()
    ) -> Future[ForwardBackwardOutput]:
        """Add the loss's gradient, all or nothing. See ``TrainerBackend.forward_backward``."""
        data, prepared, want = self._check_call(data, loss, config, want, backward=True)
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
        """Finish the calls made so far, free the model, and refuse later ones. May be called twice."""
        self._queue.close()

    def _check_call(
        self,
        data: Sequence[Datum],
        loss: LossLike | None,
        config: Config | None,
        want: Sequence[str],
        *,
        backward: bool,
    ) -> Checked:
        """Check a call, in this one place; return ``data`` as a list, the loss prepared, and ``want`` as a tuple.

        The loss is tried out on dummy logprobs here, before anything is queued: a mistake in it raises in the call.

        Args:
            data, loss, config, want: as in ``TrainerBackend.forward``.
            backward: whether the call computes a gradient.
        """
        if loss is None and backward:
            raise ConfigError("forward_backward: loss is None; expected a name or a function (or call forward)")
        if loss is None and config:
            raise ConfigError("forward: got config= without a loss")
        _check.require(not isinstance(want, str) and isinstance(want, Sequence), "want", want, "a sequence of names")
        for output in want:
            if output not in self._wanted:
                has = ", ".join(self._wanted) or "no further outputs"
                raise UnsupportedError(f"want: the {self._name} backend has no output {output!r}; it has {has}")
        data = check_data(data, self.tokenizer.vocab_size, self.max_length)
        if loss is None:
            return data, None, tuple(want)
        from rlkit.losses.prepare import prepare

        prepared = prepare(loss, config)
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
        prepared.check(data)
        prepared.try_out(data)
        return data, prepared, tuple(want)

    def _facts(self) -> dict[str, object]:
        """Return its model's description, and its last loss, step and sampling parameters, for a run's page."""
        loss, seeds = self._last_loss, self._seeds
        facts = {
            "about": self.about or None,
            "max_length": self.max_length,
            "last loss": loss and {"name": loss.name, **loss.settings},
            "last optimizer step": self._last_adam,
            "last sampling": seeds and seeds.params,
        }
        return {name: fact for name, fact in facts.items() if fact is not None}

    def __repr__(self) -> str:
        if not hasattr(self, "_queue"):  # in a traceback that shows locals
            return f"<{type(self).__name__} not connected>"
        known = [self.about, f"version {self.version}", "closed" if self._queue.closed else ""]
        return f"<{type(self).__name__} {', '.join(filter(None, known))}>"


class InProcessTrainer(BaseTrainer):
    """A trainer over hooks that run in one thread of this process.

    Args:
        name: of the backend, for messages and saved states.
        tokenizer, max_length: of the model.
        folder: where ``save`` writes; None for ``rlkit-saves``.
        version: optimizer steps of the state that it starts from.
        background: work for the thread between the parts of a call.
    """

    _wanted: ClassVar[Sequence[str]] = DISTRIBUTION_OUTPUTS

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
        self.tokenizer, self.max_length, self.version = tokenizer, max_length, version
        self.folder = Path("rlkit-saves" if folder is None else folder)
        self._name = name
        self._worker = Worker(name, background)
        self._queue = CallQueue(name, ThreadExecutor(self._worker))

    # The hooks, all called in the worker's thread. ``_run`` yields between its parts.

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
        _check.require(isinstance(params, Adam), "optim_step(params)", params, "rlkit.Adam(...)")

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

    def _give_up(self) -> None:
        """End the calls made so far, the running one after its present part, so that ``close`` does not wait long."""
        self._worker.give_up()


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
        return self._queue.enqueue("sampler", self._snapshot)

    def base_sampler(self) -> Future[Sampler]:
        """Return a sampler of the base model. See ``TrainerBackend.base_sampler``."""
        return self._queue.enqueue("base_sampler", self._base)

    def live_sampler(self, *, recompute: bool = False) -> Future[LiveSampler]:
        """Return a sampler that is updated while its requests run. See ``LiveSampling``."""
        _check.flag("live_sampler(recompute)", recompute)
        return self._queue.enqueue("live_sampler", lambda: self._live(recompute=recompute))


class InProcessCritic(InProcessTrainer):
    """``Critic`` over the hooks of ``InProcessTrainer``; ``_compute_values`` replaces ``_run``."""

    _drivers = ("values",)
    _wanted = ()

    @abstractmethod
    def _compute_values(
        self, data: Sequence[Datum], loss: PreparedLoss | None, *, backward: bool
    ) -> Generator[None, None, tuple[Sequence[np.ndarray], Sequence[LossGradient]]]:
        """Return values [n] of every datum and the parts of the loss; with ``backward`` the gradient is added."""

    def values(self, data: Sequence[Datum]) -> Future[list[np.ndarray]]:
        """Compute V before each of the policy's tokens. See ``Critic.values``."""
        data, loss, want = self._check_call(data, None, None, (), backward=False)

        def job() -> Generator[None, None, list[np.ndarray]]:
            output = yield from self._run(data, loss, want, backward=False)
            return list(output.outputs["values"])

        return self._queue.enqueue("values", job)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossLike = "value_clipped",
        *,
        config: Config | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss of ``values``, all or nothing. See ``Critic.forward_backward``."""
        return super().forward_backward(data, loss, config=config, want=want)

    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        del want  # values are the only output
        arrays, parts = yield from self._compute_values(data, loss, backward=backward)
        return assemble_output(data, None, {"values": arrays}, parts)
