"""``Run``: what a loop needs to go on exactly where it was cut off."""

from __future__ import annotations

import os
import signal
import threading
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

import numpy as np

from rlkit import _check, backends
from rlkit._calls import answered
from rlkit.backends.options import LocalOptions, TinkerOptions, ToyOptions
from rlkit.backends.protocol import Storage, TrainerBackend
from rlkit.errors import BackendError, CheckpointError, ConfigError, DataError
from rlkit.runs import beginning, handover, logs
from rlkit.runs import record as records
from rlkit.runs.lock import Lock
from rlkit.runs.record import Record
from rlkit.runs.retention import Retention
from rlkit.runs.signals import Stopper
from rlkit.runs.state import capture, encode, restore
from rlkit.tracking import surroundings, values

if TYPE_CHECKING:
    from rlkit.critics.protocol import Critic

__all__ = ["Run"]

T = TypeVar("T")


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
        CheckpointError: it can not be read or written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        seed: int | None = None,
        config: Any = None,
        retention: Retention | None = None,
        trackers: Sequence[Any] = ("jsonl", "console"),
        grace: float = 3.0,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise ConfigError(_check.problem("Run(folder)", f"got {_check.shown(folder)}", "a path"))
        if retention is not None and not isinstance(retention, Retention):
            raise ConfigError(
                _check.problem("Run(retention)", f"got {_check.shown(retention)}", "rlkit.Retention(...)")
            )
        grace = _check.real("Run(grace)", grace, low=0.0, why="seconds")
        self.folder = Path(folder).absolute()
        self.retention = Retention() if retention is None else retention
        handover.take_over(self.folder)
        with records.typed(f"{folder} can not be opened as a run"):
            self._open(seed, config, trackers)
        self._stopper = Stopper(grace)
        self._policies: dict[str, Any] = {}  # the critics too
        self._critics: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # what each of them was made with
        self._kept: dict[str, Any] = {}
        self._total: int | None = None
        self._inside = False
        self.closed = False
        self.saved = self.step
        self.looping: int | None = None
        weakref.finalize(self, self._lock.release)  # a run that is forgotten is in nobody's way
        handover.opened(self)

    def _open(self, seed: int | None, config: Any, trackers: Sequence[Any]) -> None:
        self._new = beginning.missing(self.folder)  # what is made now, and taken back if the run is refused
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in (records.POLICIES, records.CHECKPOINTS):
            (self.folder / name).mkdir(exist_ok=True, mode=0o700)
        self._lock = Lock(self.folder)
        try:
            self.record = records.latest(self.folder)
            self.step = 0 if self.record is None else self.record.step
            self.seed = beginning.seed_of(self.folder, seed, self.record, stacklevel=4)
            beginning.note_config(self.folder, config, stacklevel=4)
            surroundings.note(self.folder)
            self.trackers = logs.made(trackers, self.folder)
            logs.rewind(self.trackers, self.record)
            from rlkit.tracking import Several

            self._several = Several(self.trackers) if self.trackers else None
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
    def connect(self, name: str, *, role: str = ..., **options: Any) -> TrainerBackend: ...

    def connect(self, name: str, *, role: str = "policy", **options: Any) -> TrainerBackend:
        """``rlkit.connect``, from the last checkpoint where there is one; it is closed with the run.

        Args:
            name, options: as for ``rlkit.connect``. ``init_from=`` and ``resume_from=`` count where there is no
                checkpoint yet. ``folder=`` is the run's, and ``seed=`` its own unless given. Asked again with the same
                ones, it gives the same policy.
            role: what it is called in checkpoints, where a loop has several.

        Raises:
            ConfigError: the run has a policy of that role, made with other options, or goes on from a checkpoint that
                has none, so that what was trained would be lost.
        """
        policy: TrainerBackend = self._opened(backends.connect, name, role, options)
        for tracker in self.trackers:
            if hasattr(tracker, "speak"):
                tracker.speak(policy.tokenizer)
        return policy

    def critic(self, name: str, *, role: str = "critic", **options: Any) -> Critic:
        """``rlkit.critic``, from the last checkpoint where there is one; it is in every checkpoint from now on.

        Args:
            name, options: as for ``rlkit.critic``; the rest is as for ``connect``.
            role: what it is called in checkpoints.
        """
        from rlkit.critics import critic

        made: Critic = self._opened(critic, name, role, options)
        self._critics[role] = made
        return made

    def keep(self, name: str, kept: T) -> T:
        """Keeps ``kept`` in checkpoints from now on, and makes it what it was in the last one.

        Args:
            name: its name there.
            kept: a numpy Generator, a ``random.Random``, an attrs object, something with ``state()`` and ``restore()``,
                or a dict or list of plain data. It is changed in place.

        Raises:
            ConfigError: it can not be kept, or the name is taken.
            CheckpointError: what was saved under that name is something else.
        """
        self._check_open("keep")
        if _named("keep(name)", name) in self._kept:
            if self._kept[name] is kept:
                return kept
            why = "in a notebook, open the run again to define it anew"
            what = f"got {_check.shown(name)}"
            raise ConfigError(_check.problem("keep(name)", what, "a name that is not taken", why))
        capture(name, kept)
        if self.record is not None:
            if name in self.record.kept:
                restore(name, kept, self.record.kept[name])
            else:
                warnings.warn(f"the checkpoint has no {name!r}: it starts anew", RuntimeWarning, stacklevel=2)
        self._kept[name] = kept
        return kept

    def rng(self, name: str) -> np.random.Generator:
        """A generator of the run's own, whose state is kept; the same one whenever it is asked for."""
        there: np.random.Generator | None = self._kept.get(f"rng/{_named('rng(name)', name)}")
        if there is not None:
            return there
        return self.keep(f"rng/{name}", np.random.default_rng(self._stream(name)))

    def value(self, name: str, make: Callable[[], T]) -> T:
        """What ``make()`` gave the first time: plain data, such as the path of a state that serves as a reference."""
        key = f"value/{_named('value(name)', name)}"
        box = self._kept[key] if key in self._kept else self.keep(key, {})
        if "value" not in box:
            box["value"] = make()
            encode(name, box["value"])
        found: T = box["value"]
        return found

    def batch(self, items: Sequence[T], size: int, *, name: str = "data") -> list[T]:
        """The items of this step: ``size`` of an endless row of epochs, each a shuffle of all items.

        It depends on the run's seed, ``name``, the step and how many items there are, and on nothing else.
        """
        _named("batch(name)", name)
        _check.integer("batch(size)", size, low=1)
        if not items:
            raise ConfigError("batch(items): there are none")
        places = np.arange(self.step * size, (self.step + 1) * size)
        found: list[T] = []
        for epoch in np.unique(places // len(items)):
            order = np.random.default_rng(self._stream(f"batch/{name}", int(epoch))).permutation(len(items))
            found += [items[order[place % len(items)]] for place in places[places // len(items) == epoch]]
        return found

    def steps(self, total: int) -> Iterator[int]:
        """The steps that are left of ``total``.

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
                self._stop_if_asked()
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
        """Saves everything at the end of a step, and removes what ``retention`` does not keep.

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
        for role, given in saved.items():
            if not callable(getattr(given, "save", None)):
                what = f"got {_check.shown(given)}"
                raise ConfigError(_check.problem(f"checkpoint({role})", what, "a policy, such as connect gives"))
        if not (saved or self._policies):
            remedy = (
                "connect the policy with run.connect(...) instead of rlkit.connect(...), or give it: "
                "run.checkpoint(policy)"
            )
            if not self._kept:
                raise ConfigError(f"checkpoint: there is nothing to save; {remedy}")
            if self.saved == 0:
                warnings.warn(f"this checkpoint holds no policy; {remedy}", RuntimeWarning, stacklevel=2)
        content = {
            "kept": {
                **({} if self.record is None else self.record.kept),
                **{name: capture(name, kept) for name, kept in self._kept.items()},
            },
            "metrics": encode("checkpoint(metrics)", values.checked(metrics or {}, after, "checkpoint")[0]),
            "seed": self.seed,
            "logged": logs.positions(self.trackers),
        }
        saved = self._critics | saved if saved else self._policies
        futures = {role: x.save(f"step-{after:08d}") for role, x in saved.items()}
        content["policies"] = {role: self._relative(future.result()) for role, future in futures.items()}
        record = records.write(self.folder, after, content)
        self.saved = after
        self._remove_spent()
        return record

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers of this step, for every tracker.

        Raises:
            ConfigError: the run is closed.
            DataError: ``metrics`` is no mapping. A single number that cannot be logged is left out and counted instead.
        """
        self._check_open("log")
        if not isinstance(metrics, Mapping):
            what = f"got {_check.shown(metrics)}"
            raise DataError(_check.problem("log(metrics)", what, "a mapping from names to numbers"))
        if self._several is not None:
            self._several.log(metrics, self.step if step is None else step)

    def log_trajectories(self, groups: Any, step: int | None = None, **options: Any) -> None:
        """Trajectories of this step, for the trackers that keep such. See ``rlkit.tracking.Tracker``."""
        self._check_open("log_trajectories")
        if self._several is not None:
            self._several.log_trajectories(groups, self.step if step is None else step, **options)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Writes the run as one HTML page, report.html in its folder. See ``rlkit.report.write``."""
        from rlkit.report import write

        return write(self.folder, None if out is None else Path(out))

    def close(self) -> None:
        """Closes the policies and the trackers, and lets other processes write. May be called twice."""
        self._close(refused=False)

    def _close(self, *, refused: bool) -> None:
        self.closed = True
        self._stopper.unwatch()
        for policy in self._policies.values():
            policy.close()
        if self._several is not None:
            self._several.close()
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

    def _opened(self, opener: Callable[..., T], name: str, role: str, options: dict[str, Any]) -> T:
        """What ``opener`` gives, from the newest checkpoint that it can go on from, with the run's folder and seed."""
        self._check_open("connect")
        if _named("connect(role)", role) in self._policies:
            handover.check_same(role, self._asked[role], (name, options))
            there: T = self._policies[role]
            return there
        asked = (name, dict(options))
        options.setdefault("folder", str(self.folder / records.POLICIES))
        options.setdefault("seed", self._stream(f"connect/{role}").generate_state(1, np.uint32).item())
        opened = self._policies[role] = self._restored(opener, name, role, options)
        self._asked[role] = asked
        return opened

    def _restored(self, opener: Callable[..., T], name: str, role: str, options: dict[str, Any]) -> T:
        while self.record is not None and self.record.policy(role) is not None:
            own = {k: v for k, v in options.items() if k not in ("init_from", "resume_from", "seed")}
            try:
                return opener(name, **own, resume_from=self.record.policy(role))
            except CheckpointError as error:
                older = [r for r in records.records(self.folder) if r.step < self.record.step]
                if not older or self._policies:
                    raise
                message = (
                    f"skipped the checkpoint of step {self.record.step}, going on from step {older[-1].step}: {error}"
                )
                warnings.warn(message, RuntimeWarning, stacklevel=3)
                self._go_back(older[-1])
        if self.record is not None and not {"init_from", "resume_from"} & options.keys():
            there = ", ".join(map(repr, self.record.policies)) or "no policy at all"
            raise ConfigError(
                f"connect(role): the checkpoint of step {self.record.step} has {there}, but no {role!r}, so what was "
                "trained would be lost; begin anew in another folder, or say where it begins: init_from="
            )
        return opener(name, **options)

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise ConfigError(f"{call}: the run in {self.folder} is closed; open it again: rlkit.Run(folder)")

    def _go_back(self, record: Record) -> None:
        self.record, self.step = record, record.step
        for name, kept in self._kept.items():
            if name in record.kept:
                restore(name, kept, record.kept[name])
        logs.rewind(self.trackers, record)

    def _remove_spent(self) -> None:
        """Removes what retention does not keep; what can not be removed now is no reason to end the run."""
        try:
            found = records.records(self.folder, verify=False)
            spent = self.retention.spent(found)
            for record in spent:
                for path in records.remove(record):
                    owner = next((p for p in self._policies.values() if isinstance(p, Storage)), None)
                    if owner is not None:
                        owner.delete(path)
            records.tidy(self.folder, [record for record in found if record not in spent])
        except (OSError, BackendError) as error:
            warnings.warn(f"a checkpoint that is spent could not be removed: {error}", RuntimeWarning, stacklevel=3)

    def _relative(self, path: str) -> str:
        own = "://" not in path and self.folder in Path(path).absolute().parents
        return str(Path(path).absolute().relative_to(self.folder)) if own else path

    def _stream(self, name: str, *numbers: int) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(zlib.crc32(name.encode()), *numbers))

    def _stop_if_asked(self) -> None:
        if self._stopper.signal is None:
            return
        self._stopper.unwatch()
        if self._stopper.signal == signal.SIGTERM:
            raise SystemExit(143)
        raise KeyboardInterrupt(f"stopped before step {self.step}; run again to go on")


def _named(where: str, name: Any) -> str:
    if not isinstance(name, str) or not name or name.encode("utf-8", "replace").decode() != name:
        raise ConfigError(_check.problem(where, f"got {_check.shown(name)}", "a name: text that is not empty"))
    return name
