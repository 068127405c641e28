"""``Run``: what a loop needs to go on exactly where it was cut off."""

from __future__ import annotations

import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self, TypeVar, Unpack, overload

import numpy as np

from rlkit import _check, backends
from rlkit._calls import answered
from rlkit._shuffle import epoch_places, old_places
from rlkit.backends.options import LocalOptions, TinkerOptions, ToyOptions
from rlkit.backends.protocol import TrainerBackend
from rlkit.errors import ConfigError
from rlkit.runs import beginning, handover
from rlkit.runs import record as records
from rlkit.runs.kept import Kept, check_name
from rlkit.runs.lock import Lock
from rlkit.runs.logs import Logs
from rlkit.runs.models import Model, Models
from rlkit.runs.record import Record
from rlkit.runs.retention import Retention, prune
from rlkit.runs.signals import Stopper
from rlkit.runs.state import encode
from rlkit.tracking import Tracker, surroundings, values
from rlkit.trajectory import Group

if TYPE_CHECKING:
    from rlkit.critics.protocol import Critic

__all__ = ["Run"]

T = TypeVar("T")
M = TypeVar("M", bound=Model)


@answered
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

    Run again, and it goes on; in a notebook, too, where the run that the process has open is closed first. On the toy
    and the local backend on a CPU what follows is bit for bit what would have followed: parameters, optimizer, seeds of
    sampling, everything kept, and the order of the data.

    Args:
        folder: made if missing; one process at a time writes to it.
        seed: of ``rng``, ``batch`` and the backends; None for a fresh one, which the folder then remembers.
        config: plain data or an attrs object, kept in config.json; a change since the last time is warned of.
        retention: which checkpoints stay.
        trackers: what ``log`` writes to: names of ``rlkit.tracking.registry`` or objects with ``log`` and ``close``.
            As it stands: files in the folder, and a row per step in the terminal.
        grace: seconds that a step may still take after SIGINT or SIGTERM; a second signal ends it at once.

    Attributes:
        folder: of the run.
        trackers: as objects.
        step: the step that is being done, or is due.
        seed: as given, or as remembered.
        record: the checkpoint that it went on from, or None.
        saved: the step of the newest checkpoint, 0 before the first.
        closed: whether it is.
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
            raise ConfigError("Run(retention)", f"got {_check.shown(retention)}", "rlkit.Retention(...)")
        self._stopper = Stopper(_check.real("Run(grace)", grace, low=0.0, why="seconds"))
        self.folder = Path(folder).absolute()
        self.retention = Retention() if retention is None else retention
        handover.take_over(self.folder)
        self._kept = Kept()
        self._models = Models(self.folder)
        self._total: int | None = None
        self._inside = False
        self.closed = False
        self.looping: int | None = None
        with records.typed(f"{folder} cannot be opened as a run"):
            self._open(seed, config, trackers)
        self.saved = self.step
        weakref.finalize(self, self._lock.release)  # a run that is forgotten is in nobody's way
        handover.opened(self)

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

    @overload
    def connect(self, name: Literal["toy"], *, role: str = ..., **options: Unpack[ToyOptions]) -> TrainerBackend: ...

    @overload
    def connect(
        self, name: Literal["local"], *, role: str = ..., **options: Unpack[LocalOptions]
    ) -> TrainerBackend: ...

    @overload
    def connect(
        self, name: Literal["tinker"], *, role: str = ..., **options: Unpack[TinkerOptions]
    ) -> TrainerBackend: ...

    @overload
    def connect(self, name: str, *, role: str = ..., **options: object) -> TrainerBackend: ...

    def connect(self, name: str, *, role: str = "policy", **options: object) -> TrainerBackend:
        """Call ``rlkit.connect``, from the last checkpoint where there is one; the policy is closed with the run.

        Args:
            name, options: as for ``rlkit.connect``. ``init_from=`` and ``resume_from=`` count where there is no
                checkpoint yet. ``folder=`` is the run's, and ``seed=`` its own unless given. Asked again with the same
                ones, it gives the same policy.
            role: what it is called in checkpoints, where a loop has several.

        Raises:
            ConfigError: the run has a policy of that role, made with other options, or goes on from a checkpoint that
                has none, so that what was trained would be lost.
        """
        policy: TrainerBackend = self._model(backends.connect, name, role, options)
        self._logs.speak(policy.tokenizer)
        return policy

    def critic(self, name: str, *, role: str = "critic", **options: object) -> Critic:
        """Call ``rlkit.critic``, from the last checkpoint where there is one; it is in every checkpoint from now on.

        Args:
            name, options: as for ``rlkit.critic``; the rest is as for ``connect``.
            role: what it is called in checkpoints.
        """
        from rlkit.critics import critic

        made: Critic = self._model(critic, name, role, options)
        self._models.critics[role] = made
        return made

    def keep(self, name: str, kept: T) -> T:
        """Keep ``kept`` in checkpoints from now on, and makes it what it was in the last one.

        Args:
            name: its name there.
            kept: a numpy Generator, a ``random.Random``, an attrs object, something with ``state()`` and ``restore()``,
                or a dict or list of plain data. It is changed in place.

        Raises:
            ConfigError: it cannot be kept, or the name is taken.
            CheckpointError: what was saved under that name is something else.
        """
        self._check_open("keep")
        return self._kept.add(name, kept, self.record)

    def rng(self, name: str) -> np.random.Generator:
        """Return a generator of the run's own, whose state is kept; the same one whenever it is asked for."""
        key = f"rng/{check_name('rng(name)', name)}"
        there = self._kept.objects.get(key)
        return (
            there
            if isinstance(there, np.random.Generator)
            else self.keep(key, np.random.default_rng(self._stream(name)))
        )

    def value(self, name: str, make: Callable[[], T]) -> T:
        """Return what ``make()`` gave the first time: plain data, such as the path of a state that is a reference."""
        return self._kept.value(name, make, self.record)

    def batch(self, items: Sequence[T], size: int, *, name: str = "data") -> list[T]:
        """Return the items of this step: ``size`` of an endless row of epochs, each a shuffle of all items.

        It depends on the run's seed, ``name``, the step and how many items there are, and on nothing else.
        """
        check_name("batch(name)", name)
        _check.integer("batch(size)", size, low=1)
        if not items:
            raise ConfigError("batch(items): there are none")
        places = epoch_places if self.record is None or self.record.order == 2 else old_places
        return [items[place] for place in places(len(items), self.step, size, self.seed, f"batch/{name}")]

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps that are left of ``total``.

        SIGINT and SIGTERM let the step in progress finish, make its ``checkpoint`` due, and then end the loop with
        KeyboardInterrupt or SystemExit(143).
        """
        self._check_open("steps")
        self._total = _check.integer("steps(total)", total, low=0)
        self._stopper.watch()
        self.looping = threading.get_ident()
        try:
            while self.step < total and not self.closed:
                self._inside = True
                yield self.step
                self._inside = False
                self.step += 1
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
        """Save everything at the end of a step, and removes what ``retention`` does not keep.

        Args:
            policy: the policy; None, and no ``policies``: all that ``connect`` made. Critics are always saved.
            every: only after every so many steps, after the last one, and when the run is being stopped.
            metrics: numbers by which ``retention`` may choose.
            policies: further ones, by role.

        Returns:
            The checkpoint, or None where none was due.

        Raises:
            ConfigError: there is nothing to save, or what is given cannot be saved.
            CheckpointError: it could not be written; the ones before are as they were.
        """
        self._check_open("checkpoint")
        _check.integer("checkpoint(every)", every, low=1)
        after = self.step + 1 if self._inside else self.step
        last = self._total is not None and after == self._total
        if not (after % every == 0 or last or self._stopper.signal is not None):
            return None
        saved = dict(policies) if policy is None else {"policy": policy, **policies}
        self._models.check(saved, anything_else=bool(self._kept.objects), first=self.saved == 0)
        content = {
            "kept": self._kept.state(self.record),
            "metrics": encode("checkpoint(metrics)", values.checked(metrics or {}, after, "checkpoint")[0]),
            "seed": self.seed,
            "order": 2 if self.record is None else self.record.order,
            "logged": self._logs.positions(),
            "policies": self._models.save(after, saved),
        }
        record = records.write(self.folder, after, content)
        self.saved = after
        prune(self.folder, self.retention, self._models.delete)
        return record

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of this step with every tracker.

        Raises:
            ConfigError: the run is closed.
            DataError: ``metrics`` is no mapping. A single number that cannot be logged is left out and counted instead.
        """
        self._check_open("log")
        self._logs.log(metrics, self.step if step is None else step)

    def log_trajectories(self, groups: Iterable[Group], step: int | None = None, **options: object) -> None:
        """Log trajectories of this step with the trackers that keep such. See ``rlkit.tracking.Tracker``."""
        self._check_open("log_trajectories")
        self._logs.log_trajectories(groups, self.step if step is None else step, **options)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the run as one HTML page, report.html in its folder. See ``rlkit.report.write``."""
        from rlkit.report import write

        return write(self.folder, None if out is None else Path(out))

    def close(self) -> None:
        """Close the policies and the trackers, and lets other processes write. May be called twice."""
        self._close(refused=False)

    def _close(self, *, refused: bool) -> None:
        self.closed = True
        self._stopper.unwatch()
        self._models.close()
        self._logs.close()
        if refused:
            beginning.withdraw(self._new)
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        self._close(refused=kind is not None and self._total is None)

    def _repr_html_(self) -> str:
        from rlkit.report import Display

        return Display(self.folder)._repr_html_()  # it has no other name

    def __repr__(self) -> str:
        return f"<Run {str(self.folder)!r}, step {self.step}{', closed' if self.closed else ''}>"

    def _model(self, opener: Callable[..., M], name: str, role: str, options: dict[str, object]) -> M:
        """Open a policy or critic, from the newest checkpoint that it can go on from."""
        self._check_open("connect")
        seed = self._stream(f"connect/{check_name('connect(role)', role)}").generate_state(1, np.uint32).item()
        model, record = self._models.open(opener, name, role, options, self.record, seed)
        if record is not None and record is not self.record:  # the newest one could not be loaded
            self.record, self.step = record, record.step
            self._kept.restore(record)
            self._logs.rewind(record)
        return model

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise ConfigError(f"{call}: the run in {self.folder} is closed; open it again: rlkit.Run(folder)")

    def _stream(self, name: str) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(zlib.crc32(name.encode()),))
