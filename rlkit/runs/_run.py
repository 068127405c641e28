"""``Run``, with which a loop resumes exactly where it was interrupted."""

from __future__ import annotations

import os
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name  # the report reads runs: a run finds it by name
from typing import TYPE_CHECKING, Any, Self, TypeVar

import attrs
import numpy as np

from rlkit import _check, backends
from rlkit._runtime import warn
from rlkit._seeds import epoch_places
from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import ConfigError, RlkitError
from rlkit.runs import beginning, lock
from rlkit.runs import record as records
from rlkit.runs._logs import Logs, Silence
from rlkit.runs._models import Model, Models
from rlkit.runs._signals import Stopper
from rlkit.runs.beginning import Kept, check_name
from rlkit.runs.lock import Lock
from rlkit.runs.record import Record, Retention, encode, prune
from rlkit.tracking import Tracker, protocol, surroundings
from rlkit.tracking.surroundings import Settings
from rlkit.trajectory import Group

if TYPE_CHECKING:
    from rlkit.backends.protocol import Critic

__all__ = ["Run"]

T = TypeVar("T")
M = TypeVar("M", bound=Model)


@attrs.frozen(eq=False)
class _Skipped:
    """A checkpoint that was not due: its would-be content.

    Attributes:
        after: its step.
        kept, metrics: as in a checkpoint.
        marks: role -> a policy or critic, and a mark of its state; None where unknown.
        at, cost: when it was taken, and the seconds it took.
    """

    after: int
    kept: Mapping[str, object] | None
    metrics: object
    marks: Mapping[str, tuple[Model, object]] | None
    at: float
    cost: float


class Run:
    """A training run on disk, for a loop that stays the user's own.

    ::

        run = rlkit.Run("runs/first", seed=0, config={"rate": 1e-4})
        policy = run.connect("local", model="smollm2-135m-instruct")  # from the last checkpoint, if there is one
        kl = run.keep("kl", losses.kl.adaptive_coefficient(coef=0.1, target=0.05, horizon=1000))
        for step in run.steps(200):  # goes on with the step that is due
            batch = run.batch(problems, 8)  # a function of seed and step
            ...
            run.log({"train/loss": loss})
            run.checkpoint(policy, every=10)

    Run the program again, and it resumes; in a notebook, too, where the process's open run is closed first. On the toy
    and the local backend on a CPU the resumed run equals the uninterrupted one bit for bit: parameters, optimizer,
    seeds of sampling, everything kept, and the order of the data.

    Args:
        folder: made if missing; one process at a time writes to it.
        seed: of ``rng``, ``batch`` and the backends; None for a fresh one, which the folder then remembers.
        config: plain data or an attrs object, kept in config.json; a change since the last time is warned of.
        retention: which checkpoints stay.
        trackers: the targets of ``log``: names of ``rlkit.tracking.registry`` or objects with ``log`` and ``close``.
            By default: files in the folder, and a row per step in the terminal.
        grace: seconds that a step may still take after SIGTERM. After SIGINT (Ctrl-C) it may take any time; a second
            signal ends it at once.

    Attributes:
        folder: of the run.
        trackers: as objects.
        step: the current step, or the next one.
        seed: as given, or as remembered.
        record: the checkpoint that it resumed from, or None.
        saved: the step of the newest checkpoint, 0 before the first.
        closed: whether it is closed.
        looping: the thread that is in ``steps``, or None.

    Raises:
        ConfigError: another process or thread writes to it, or the seed is not the one it began with.
        CheckpointError: it cannot be read or written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        seed: int | None = None,
        config: object = None,
        retention: Retention | None = None,
        trackers: Sequence[str | Tracker] = ("jsonl", "console"),
        grace: float = 3.0,
    ) -> None:
        _check.require(isinstance(folder, (str, os.PathLike)) and str(folder), "Run(folder)", folder, "a path")
        if retention is not None and not isinstance(retention, Retention):
            raise ConfigError("Run(retention)", f"got {_check.describe(retention)}", "rlkit.Retention(...)")
        self._stopper = Stopper(_check.real("Run(grace)", grace, low=0.0, why="seconds"))
        self.folder = Path(folder).absolute()
        self.retention = Retention() if retention is None else retention
        lock.take_over(self.folder)
        self._kept = Kept()
        self._models = Models(self.folder)
        self._silence = Silence(self._models.max_tokens)
        self._settings = Settings(self.folder)
        self._total: int | None = None
        self._first = 0  # of the steps in ``steps``
        self._inside = False
        self._skipped: _Skipped | None = None  # the newest checkpoint that was not due
        self._newest: Record | None = None
        self._asked: dict[str, Any] | None = None  # the arguments of the last ``checkpoint``
        self.closed = False
        self.looping: int | None = None
        with records.typed(f"{folder} cannot be opened as a run"):
            self._open(seed, config, trackers)
        self.saved = self.step
        self._newest = self.record
        weakref.finalize(self, self._lock.release)  # a forgotten run blocks no other
        lock.opened(self)

    def _open(self, seed: int | None, config: object, trackers: Sequence[str | Tracker]) -> None:
        self._new = beginning.make_folders(self.folder)  # taken back if the run is refused
        self._lock = Lock(self.folder)
        try:
            self.record = records.latest(self.folder)
            self.step = 0 if self.record is None else self.record.step
            self.seed = beginning.seed_of(self.folder, seed, self.record)
            beginning.note_config(self.folder, config)
            surroundings.note(self.folder)
            self._logs = Logs(trackers, self.folder, self.record)
            self.trackers = self._logs.trackers
        except BaseException:
            beginning.withdraw(self._new)
            self._lock.release()
            raise

    def connect(self, name: str, *, role: str = "policy", **options: object) -> TrainerBackend:
        """Call ``rlkit.connect``, from the last checkpoint where there is one; the policy is closed with the run.

        Args:
            name, options: as for ``rlkit.connect``. ``init_from=`` and ``resume_from=`` apply if there is no
                checkpoint yet. ``folder=`` is the run's, and ``seed=`` its own unless given. A second call with the
                same arguments returns the same policy.
            role: its name in checkpoints, if a loop has several.

        Raises:
            ConfigError: the run has a policy of that role, made with other options, or resumes from a checkpoint
                without one, so that its training would be lost.
        """
        policy: TrainerBackend = self._model(backends.connect, name, role, options)
        self._logs.speak(policy.tokenizer)
        return policy

    def critic(self, name: str, *, role: str = "critic", **options: object) -> Critic:
        """Call ``rlkit.critic``, from the last checkpoint where there is one; it is in every checkpoint from now on.

        Args:
            name, options: as for ``rlkit.critic``; the rest is as for ``connect``.
            role: its name in checkpoints.
        """
        from rlkit.critics import critic

        made: Critic = self._model(critic, name, role, options)
        self._models.critics[role] = made
        return made

    def keep(self, name: str, kept: T) -> T:
        """Keep ``kept`` in checkpoints from now on, and restore it from the last one.

        Args:
            name: its name there.
            kept: a numpy Generator, a ``random.Random``, an attrs object, something with ``state()`` and ``restore()``,
                or a dict or list of plain data. It is changed in place.

        Raises:
            ConfigError: it cannot be kept, or the name is taken.
            CheckpointError: the saved state of that name is of another kind.
        """
        self._check_open("keep")
        return self._kept.add(name, kept, self.record)

    def rng(self, name: str) -> np.random.Generator:
        """Return the run's own generator, whose state is kept; every call returns the same one."""
        key = f"rng/{check_name('rng(name)', name)}"
        there = self._kept.objects.get(key)
        return (
            there
            if isinstance(there, np.random.Generator)
            else self.keep(key, np.random.default_rng(self._stream(name)))
        )

    def value(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of the first ``make()``: plain data, such as the path of a state that is a reference."""
        return self._kept.value(name, make, self.record)

    def batch(self, items: Sequence[T], size: int, *, name: str = "data") -> list[T]:
        """Return the items of this step: ``size`` of an endless row of epochs, each a shuffle of all items.

        It depends only on the run's seed, ``name``, the step and the number of items.
        """
        check_name("batch(name)", name)
        _check.integer("batch(size)", size, low=1)
        if not items:
            raise ConfigError("batch(items): is empty; expected at least one item")
        places = epoch_places(len(items), self.step, size, self.seed, f"batch/{name}")
        return [items[place] for place in places]

    def steps(self, total: int) -> Iterator[int]:
        """Yield the remaining steps of ``total``.

        SIGINT (Ctrl-C) and SIGTERM let the step in progress finish, make its ``checkpoint`` due, and then end the loop
        with KeyboardInterrupt or SystemExit(143). A second signal, or ``grace`` seconds after SIGTERM, abandons the
        step: KeyboardInterrupt is raised in it, and its text names the steps that will be repeated.
        """
        self._check_open("steps")
        self._total = _check.integer("steps(total)", total, low=0)
        self._stopper.watch(self._finishing, self._abandoned)
        self.looping, self._first = threading.get_ident(), self.step
        try:
            while self.step < total and not self.closed:
                self._inside = True
                yield self.step
                self._inside = False
                self.step += 1
                if self.step == self._first + 1:  # from now on there is something to show
                    self._settings.note(self._models.facts({}))
                late = self._stopper.signal is not None and self.saved < self.step  # it came after ``checkpoint``
                if late and self._asked is not None and not self.closed:
                    self.checkpoint(**self._asked)
                self._stopper.stop_if_asked(self.step)
        finally:
            self._inside = False
            self.looping = None
            self._stopper.unwatch()

    def checkpoint(
        self,
        policy: TrainerBackend | None = None,
        *,
        every: int = 1,
        metrics: Mapping[str, float] | None = None,
        **policies: TrainerBackend,
    ) -> Record | None:
        """Save everything at the end of a step, and remove what ``retention`` does not keep.

        Args:
            policy: the policy; None, and no ``policies``: all that ``connect`` made. Critics are always saved.
            every: only after every so many steps, after the last one, and when the run is being stopped.
            metrics: numbers by which ``retention`` may choose.
            policies: further ones, by role.

        Returns:
            The checkpoint, or None where none was due.

        Raises:
            ConfigError: there is nothing to save, or an argument cannot be saved.
            CheckpointError: it could not be written; earlier ones are unchanged.
        """
        self._check_open("checkpoint")
        _check.integer("checkpoint(every)", every, low=1)
        self._asked = {"policy": policy, "metrics": metrics, **policies}
        after = self.step + 1 if self._inside else self.step
        last = self._total is not None and after == self._total
        saved = dict(policies) if policy is None else {"policy": policy, **policies}
        if not (after % every == 0 or last or self._stopper.signal is not None):
            self._skip(after, saved, metrics)
            return None
        self._models.check(saved, anything_else=bool(self._kept.objects), first=self.saved == 0)
        numbers = _encode_metrics(metrics, after)
        kept, logged = self._kept.state(self.record), self._logs.positions()
        self._settings.note(self._models.facts(saved))
        record = self._write(after, kept, numbers, logged, self._models.save(after, saved))
        prune(self.folder, self.retention, self._models.delete)
        return record

    def _write(self, after: int, kept: object, numbers: object, logged: object, paths: Mapping[str, str]) -> Record:
        content = {"kept": kept, "metrics": numbers, "seed": self.seed, "logged": logged}
        self._newest = records.write(self.folder, after, {**content, "policies": paths})
        self._skipped, self.saved = None, after
        return self._newest

    def _skip(self, after: int, policies: Mapping[str, Model], metrics: Mapping[str, float] | None) -> None:
        """Remember the content of a checkpoint that is not due, besides the policies, for an abandoned step."""
        before, began = self._skipped, time.monotonic()
        self._skipped = None
        if before is not None and 20 * before.cost > began - before.at:
            self._skipped = attrs.evolve(before, marks=None)  # the steps are too quick for it
            return
        try:
            kept = self._kept.now(self.record)
            marks = self._models.marks(policies)
            numbers = _encode_metrics(metrics, after)
        except RlkitError:  # a checkpoint that is due says so
            return
        now = time.monotonic()
        self._skipped = _Skipped(after, kept, numbers, marks if kept is not None else None, now, now - began)

    def _finishing(self) -> str:
        saves = self._asked is not None or self.step == self._first  # in the first step it is not known yet
        return f"finishing step {self.step}" + (", then saving" if saves else "; the loop makes no checkpoint")

    def _abandoned(self) -> str:
        """Return the text on what is lost with the step in progress."""
        if self.saved > self.step:
            return f"step {self.step} is abandoned; its checkpoint is saved, so no step will be repeated"
        last = "none" if self._newest is None else f"step {self.saved}"
        again = f"step {self.step}" if self.saved >= self.step else f"steps {self.saved}-{self.step}"
        return f"step {self.step} is abandoned; last checkpoint: {last}; {again} will be repeated"

    def _rescue(self) -> None:
        """Save the last whole step of a run whose step was abandoned, if that can be done exactly and at once."""
        self._models.give_up()
        skipped, error = self._skipped, self._stopper.error
        if skipped is None or skipped.marks is None or skipped.after != self.step or error is None:
            return
        try:
            if self._models.go_back(skipped.marks, timeout=1.0):
                paths = self._models.save(skipped.after, {r: m for r, (m, _) in skipped.marks.items()}, timeout=1.5)
                self._write(skipped.after, skipped.kept, skipped.metrics, {}, paths)
        except (RlkitError, TimeoutError, OSError) as failed:
            warn(f"step {skipped.after - 1} could not be saved: {failed}", RuntimeWarning)
        error.args = (f"{error.args[0].partition(':')[0]}: {self._abandoned()}",)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of this step with every tracker.

        Raises:
            ConfigError: the run is closed.
            DataError: ``metrics`` is not a mapping. A single number that cannot be logged is left out and counted
                instead.
        """
        self._check_open("log")
        at = self.step if step is None else step
        self._logs.log(metrics, at)
        self._silence.look(metrics, at)

    def log_trajectories(self, groups: Iterable[Group], step: int | None = None, **options: object) -> None:
        """Log trajectories of this step with the trackers that keep them. See ``rlkit.tracking.Tracker``."""
        self._check_open("log_trajectories")
        self._logs.log_trajectories(groups, self.step if step is None else step, **options)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the run as one HTML page, report.html in its folder. See ``rlkit.report.write``."""
        page: Path = resolve_name("rlkit.report:write")(self.folder, None if out is None else Path(out))
        return page

    def close(self) -> None:
        """Close the policies and the trackers, and let other processes write. May be called twice."""
        self._close(refused=False, timeout=None)

    def _close(self, *, refused: bool, timeout: float | None) -> None:
        abandoned = self._stopper.error is not None and not self.closed
        self.closed = True
        self._stopper.unwatch()
        if abandoned:
            self._rescue()
        self._models.close(timeout)
        self._logs.close(timeout)
        if refused:
            beginning.withdraw(self._new)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        stopped = error is not None and error is self._stopper.error  # after a second signal, do not wait
        self._close(refused=kind is not None and self._total is None, timeout=0.5 if stopped else None)

    def __repr__(self) -> str:
        return f"<Run {str(self.folder)!r}, step {self.step}{', closed' if self.closed else ''}>"

    def _model(self, opener: Callable[..., M], name: str, role: str, options: dict[str, object]) -> M:
        """Open a policy or critic, from the newest checkpoint that it can resume from."""
        self._check_open("connect")
        seed = self._stream(f"connect/{check_name('connect(role)', role)}").generate_state(1, np.uint32).item()
        model, record = self._models.open(opener, name, role, options, self.record, seed)
        if record is not None and record is not self.record:  # the newest one could not be loaded
            self.record, self.step = record, record.step
            self._kept.restore(record)
            self._logs.rewind(record)
        self._settings.note(self._models.facts({}))
        return model

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise ConfigError(f"{call}: the run in {self.folder} is closed; open it again: rlkit.Run(folder)")

    def _stream(self, name: str) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(zlib.crc32(name.encode()),))


def _encode_metrics(metrics: Mapping[str, float] | None, after: int) -> object:
    return encode("checkpoint(metrics)", protocol.checked(metrics or {}, after, "checkpoint")[0])
