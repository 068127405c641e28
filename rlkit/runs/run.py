"""``Run``, with which a loop resumes exactly where it was interrupted."""

from __future__ import annotations

import contextlib
import functools
import logging
import numbers
import os
import signal
import socket
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from pkgutil import resolve_name  # the report is above runs: a run finds it by name
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rlkit import _check, backends, tracking
from rlkit._files import as_checkpoint_error
from rlkit._runtime import Resource, follow_torchrun, warn
from rlkit._seeds import epoch_places
from rlkit.backends import Sampler, saves
from rlkit.backends.protocol import Storage, TrainerBackend
from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.runs import checkpoints
from rlkit.runs.checkpoints import Record, Retention
from rlkit.runs.state import capture, encode, restore
from rlkit.tracking import Tracker, check_metrics
from rlkit.trajectory import Group

if TYPE_CHECKING:
    from filelock import BaseFileLock

    from rlkit.backends.protocol import Critic

__all__ = ["Run", "sampler"]

T = TypeVar("T")
_log = logging.getLogger("rlkit.runs")
_open: weakref.WeakValueDictionary[tuple[int, Path], Run] = weakref.WeakValueDictionary()  # of this process


class Run(Resource):
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
    ) -> None:
        _check.require(isinstance(folder, (str, os.PathLike)) and str(folder), "Run(folder)", folder, "a path")
        self.folder, self.retention = Path(folder).absolute(), Retention() if retention is None else retention
        _check.require(isinstance(self.retention, Retention), "Run(retention)", retention, "rlkit.Retention(...)")
        listed = isinstance(trackers, Sequence) and not isinstance(trackers, str)
        _check.require(listed, "Run(trackers)", trackers, "a sequence of names and trackers")
        self.closed = self._inside = False
        self.looping: int | None = None
        self._total: int | None = None
        self._stop = _StopRequest()
        self._kept: dict[str, object] = {}
        self._models: dict[str, Any] = {}  # role -> policy or critic
        self._critics: set[str] = set()  # their roles
        self._connected: dict[str, dict[str, object]] = {}  # role -> the backend and options that made it
        self._last_call: dict[str, Any] | None = None  # the arguments of the last ``checkpoint``
        self._signals: dict[int, dict[str, float]] | None = {}  # of the last steps; None once it has warned
        follow_torchrun()  # one process writes to the folder
        self._close_open_run()
        with as_checkpoint_error(folder, "opened as a run"):
            for path in (self.folder, self.folder / checkpoints.POLICIES, self.folder / checkpoints.CHECKPOINTS):
                path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _acquire_lock(self.folder)  # a run that is forgotten releases it, too
            try:
                self._start(seed, config, trackers)
            except BaseException:
                self._release()
                raise
        _open[os.getpid(), self.folder.resolve()] = self

    def _start(self, seed: int | None, config: object, trackers: Sequence[str | Tracker]) -> None:
        self.record = checkpoints.find_latest(self.folder)
        self.step = self.saved = 0 if self.record is None else self.record.step
        self._facts = checkpoints.read_facts(self.folder, seed, self.record)
        self.seed: int = self._facts["seed"]
        checkpoints.write_json(self.folder / "run.json", self._facts)
        checkpoints.write_config(self.folder, config)
        self.trackers: list[Any] = [tracking.for_run(x, self.folder) if isinstance(x, str) else x for x in trackers]
        self._logs: dict[str, Any] = {}  # by the names of their classes, numbered from the second of a class on
        for tracker in self.trackers:
            name = type(tracker).__name__
            count = sum(type(x).__name__ == name for x in self._logs.values())
            self._logs[f"{name}-{count + 1}" if count else name] = tracker
        logged = {} if self.record is None else self.record.logged
        for name, tracker in self._logs.items():  # what came after the checkpoint is done again
            if hasattr(tracker, "rewind"):
                tracker.rewind(self.step, logged.get(name))
        self._several = tracking.MultiTracker(self.trackers) if self.trackers else None

    def _close_open_run(self) -> None:
        """Close the run in this folder that this process has open, as where a cell of a notebook is run again."""
        key = os.getpid(), self.folder.resolve()
        run = _open.get(key)
        if run is None or run.closed:
            return
        if run.looping not in (None, threading.get_ident()):
            text = f"{self.folder} is in use by another thread of this process, which must close it: run.close()"
            raise ConfigError(text)
        if run.step > run.saved:
            text = f"{self.folder} was open in this process at step {run.step}; that run is closed, and steps after its"
            warn(f"{text} last checkpoint, step {run.saved}, will be repeated", RuntimeWarning)
        run.close()

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
            CheckpointError: the checkpoint's policy cannot be loaded; the message names the checkpoint before.
        """
        return self._connect(backends.connect, name, role, options)

    def critic(self, name: str, *, role: str = "critic", **options: object) -> Critic:
        """Call ``rlkit.critic``, from the last checkpoint where there is one; it is in every checkpoint from now on.

        Args:
            name, options: as for ``rlkit.critic``; the rest is as for ``connect``.
            role: its name in checkpoints.
        """
        from rlkit.critics import critic

        made = self._connect(critic, name, role, options)
        self._critics.add(role)
        return made

    def _connect(self, opener: Callable[..., T], name: str, role: str, options: Mapping[str, object]) -> T:
        self._check_open("connect")
        seed = self._stream(f"connect/{_check_name('connect(role)', role)}").generate_state(1, np.uint32).item()
        asked = {"backend": name, **options}
        if role in self._models:
            before = self._connected[role]
            different = sorted(key for key in {*before, *asked} if before.get(key, ...) != asked.get(key, ...))
            if different:
                text = f"connect: the run's {role!r} was opened with a different {different[0]}"
                raise ConfigError(f"{text}; open the run again, rlkit.Run(folder), or set role= for another one")
            there: T = self._models[role]
            return there
        given = {"folder": str(self.folder / checkpoints.POLICIES), "seed": seed, **options}
        record = self.record
        saved = None if record is None else record.policy(role)
        if saved is not None:
            given = {key: x for key, x in given.items() if key not in ("init_from", "seed")} | {"resume_from": saved}
        elif record is not None and not {"init_from", "resume_from"} & options.keys():
            roles = ", ".join(map(repr, record.policies)) or "no policy"
            text = f"the checkpoint of step {record.step} has {roles}, but no {role!r}, so its training would be lost"
            remedy = "use another folder for a new run, or give a start with init_from="
            raise ConfigError(f"connect(role): {text}; {remedy}")
        try:
            model = opener(name, **given)
        except CheckpointError as error:  # its files are whole, so nothing falls back in silence
            if record is None or saved is None:
                raise
            older = [each.step for each in checkpoints.records(self.folder) if each.step < record.step]
            remedy = f"to resume from step {older[-1]}, remove {record.path}" if older else "use another folder"
            raise CheckpointError(f"{error}; {remedy}") from error
        self._models[role], self._connected[role] = model, asked
        self._note_models(self._models)
        return model

    def _note_models(self, models: Mapping[str, object]) -> None:
        """Write to run.json how each model was made: its backend, its options, and what became of them."""
        noted = dict(self._facts["models"])
        for role, model in models.items():
            options = dict(self._connected.get(role, {"backend": type(model).__name__}))
            facts = {"backend": options.pop("backend"), "options": options, **getattr(model, "_facts", dict)()}
            noted[role] = checkpoints.as_plain(facts)
        if noted != self._facts["models"]:
            self._facts["models"] = noted
            checkpoints.write_json(self.folder / "run.json", self._facts)

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
        if _check_name("keep(name)", name) in self._kept:
            why = "in a notebook, open the run again to redefine it"
            _check.require(self._kept[name] is kept, "keep(name)", name, "an unused name", why)
            return kept
        capture(name, kept)
        if self.record is not None and name in self.record.kept:
            restore(name, kept, self.record.kept[name])
        elif self.record is not None:
            warn(f"the checkpoint has no {name!r}, which starts from its initial state", RuntimeWarning)
        self._kept[name] = kept
        return kept

    def rng(self, name: str) -> np.random.Generator:
        """Return the run's own generator, whose state is kept; every call returns the same one."""
        key = f"rng/{_check_name('rng(name)', name)}"
        there = self._kept.get(key)
        if isinstance(there, np.random.Generator):
            return there
        return self.keep(key, np.random.default_rng(self._stream(name)))

    def value(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of the first ``make()``: plain data, such as the path of a state that is a reference."""
        key = f"value/{_check_name('value(name)', name)}"
        box: Any = self._kept[key] if key in self._kept else self.keep(key, {})
        if "value" not in box:
            box["value"] = make()
            encode(name, box["value"])
        value: T = box["value"]
        return value

    def batch(self, items: Sequence[T], size: int, *, name: str = "data") -> list[T]:
        """Return the items of this step: ``size`` of an endless row of epochs, each a shuffle of all items.

        It depends only on the run's seed, ``name``, the step and the number of items.
        """
        _check_name("batch(name)", name)
        _check.integer("batch(size)", size, low=1)
        if not items:
            raise ConfigError("batch(items): is empty; expected at least one item")
        return [items[place] for place in epoch_places(len(items), self.step, size, self.seed, f"batch/{name}")]

    def steps(self, total: int) -> Iterator[int]:
        """Yield the remaining steps of ``total``.

        SIGINT (Ctrl-C) and SIGTERM let the step in progress finish, make its ``checkpoint`` due, and then end the loop
        with KeyboardInterrupt or SystemExit(143). A second signal abandons the step with a KeyboardInterrupt whose text
        names the steps that will be repeated; a program that has not ended 4 s later is ended.
        """
        self._check_open("steps")
        self._total = _check.integer("steps(total)", total, low=0)
        self._stop.watch(self._describe_stop)
        self.looping = threading.get_ident()
        try:
            while self.step < total and not self.closed:
                self._inside = True
                yield self.step
                self._inside = False
                self.step += 1
                if self._stop.signal is not None:
                    if self.saved < self.step and self._last_call is not None and not self.closed:
                        self.checkpoint(**self._last_call)  # the signal came after the step's own
                    if self._stop.signal == signal.SIGTERM:
                        raise SystemExit(143)
                    raise _Stopped(f"stopped before step {self.step}; run again to continue")
        finally:
            self._inside, self.looping = False, None
            self._stop.unwatch()

    def _describe_stop(self) -> str:
        if self._stop.abandoned:
            return f"step {self.step} is abandoned; the run resumes with step {self.saved}"
        saves = self._last_call is not None or self.saved == self.step  # in the first step it is not known yet
        then = "then saving" if saves else "which the loop does not save"
        return f"finishing the step, {then}; press Ctrl-C again to stop now"

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
        self._last_call = {"policy": policy, "metrics": metrics, **policies}
        after = self.step + 1 if self._inside else self.step
        if not (after % every == 0 or after == self._total or self._stop.signal is not None):
            return None
        given: dict[str, Any] = dict(policies) if policy is None else {"policy": policy, **policies}
        self._check_saved(given)
        before = {} if self.record is None else self.record.kept  # what this program does not keep, the next one may
        content: dict[str, object] = {
            "kept": {**before, **{name: capture(name, kept) for name, kept in self._kept.items()}},
            "metrics": encode("checkpoint(metrics)", check_metrics(metrics or {}, after, "checkpoint")[0]),
            "seed": self.seed,
        }
        with as_checkpoint_error(self.folder, "synced"):  # the logs first: the checkpoint counts their lines
            content["logged"] = {name: x.sync() for name, x in self._logs.items() if callable(getattr(x, "sync", None))}
        self._note_models({**self._models, **given})
        saved = {role: self._models[role] for role in self._critics} | given if given else self._models
        futures = {role: model.save(f"step-{after:08d}") for role, model in saved.items()}
        content["policies"] = {role: self._relative(future.result()) for role, future in futures.items()}
        record = checkpoints.write(self.folder, after, content)
        self.saved = after
        service = next((model for model in self._models.values() if isinstance(model, Storage)), None)
        checkpoints.prune(self.folder, self.retention, service)
        return record

    def _check_saved(self, given: Mapping[str, object]) -> None:
        """Raise if there is nothing to save, or it cannot be saved; warn of a first checkpoint without a policy."""
        for role, model in given.items():
            good = callable(getattr(model, "save", None))
            _check.require(good, f"checkpoint({role})", model, "a policy, as connect returns")
        if given or self._models:
            return
        remedy = "connect the policy with run.connect(...), not rlkit.connect(...), or pass it: run.checkpoint(policy)"
        if not self._kept:
            raise ConfigError(f"checkpoint: nothing to save; {remedy}")
        if self.saved == 0:
            warn(f"this checkpoint holds no policy; {remedy}", RuntimeWarning)

    def _relative(self, path: str) -> str:
        if "://" in path:
            return path
        place = Path(path).absolute()
        return str(place.relative_to(self.folder) if place.is_relative_to(self.folder) else place)

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers of this step with every tracker.

        Raises:
            ConfigError: the run is closed.
            DataError: ``metrics`` is not a mapping. A single number that cannot be logged is left out and counted
                instead.
        """
        self._check_open("log")
        good = isinstance(metrics, Mapping)
        _check.require(good, "log(metrics)", metrics, "a mapping from names to numbers", error=DataError)
        at = self.step if step is None else step
        if self._several is not None:
            self._several.log(metrics, at)
        self._warn_without_signal(metrics, at)

    def _warn_without_signal(self, metrics: Mapping[str, float], step: int) -> None:
        """Warn once after three steps in a row without reward differences in any group; a step may log in parts."""
        names = ("train/with_signal", "rollout/with_signal", "rollout/cut")
        found = {name: float(metrics[name]) for name in names if isinstance(metrics.get(name), numbers.Real)}
        if self._signals is None or not found:
            return
        seen = {at: known for at, known in self._signals.items() if step - 3 < at <= step}
        seen[step] = seen.get(step, {}) | found
        self._signals = seen
        # advantages know more than rewards: a baseline may make a constant reward a signal
        if [known.get("train/with_signal", known.get("rollout/with_signal")) for known in seen.values()] != [0.0] * 3:
            return
        self._signals, hint = None, "inspect the answers with rlkit report"
        cut = [known["rollout/cut"] for known in seen.values() if "rollout/cut" in known]
        if any(cut):
            facts = [getattr(model, "_facts", dict[str, Any])() for model in self._models.values()]
            limit = next((f"={each['last sampling'].max_tokens}" for each in facts if "last sampling" in each), "")
            hint = f"{100 * sum(cut) / len(cut):.0f} % of answers were cut at max_tokens{limit}"
        text = "no group had different rewards in the last 3 steps: the policy learned nothing; %s"
        _log.warning(text, hint)  # not a Warning, since -W error would end the run

    def log_trajectories(self, groups: Iterable[Group], step: int | None = None, **options: Any) -> None:
        """Log trajectories of this step with the trackers that keep them. See ``rlkit.tracking.Tracker``."""
        self._check_open("log_trajectories")
        if self._several is not None:
            self._several.log_trajectories(groups, self.step if step is None else step, **options)

    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the run as one HTML page, by default report.html in its folder. See ``rlkit.report.write``."""
        tokenizer = next((x.tokenizer for x in self._models.values() if hasattr(x, "tokenizer")), None)
        page: Path = resolve_name("rlkit.report:write")(self.folder, out, tokenizer=tokenizer)
        return page

    def close(self) -> None:
        """Close the policies and the trackers, and let other processes write. May be called twice."""
        self.closed = True
        self._stop.unwatch()
        with contextlib.ExitStack() as stack:  # all of them, the last one first, even if one raises
            stack.callback(self._release)
            for model in self._models.values():
                stack.callback(model.close)
                if self._stop.abandoned:
                    stack.callback(getattr(model, "_give_up", int))
            if self._several is not None:
                stack.callback(self._several.close, 0.5 if self._stop.abandoned else None)

    def _release(self) -> None:
        with contextlib.suppress(OSError):  # the end of the process frees it, too
            self._lock.release(force=True)

    def __repr__(self) -> str:
        return f"<Run {str(self.folder)!r}, step {self.step}{', closed' if self.closed else ''}>"

    def _check_open(self, call: str) -> None:
        if self.closed:
            raise ConfigError(f"{call}: the run in {self.folder} is closed; open it again: rlkit.Run(folder)")

    def _stream(self, name: str) -> np.random.SeedSequence:
        return np.random.SeedSequence(self.seed, spawn_key=(zlib.crc32(name.encode()),))


_PATIENCE = 4.0  # seconds from a second signal to the end of the process


class _Stopped(KeyboardInterrupt):
    """The end of a loop by a signal; where nothing catches it, its text is printed without a traceback."""


class _StopRequest:
    """SIGINT and SIGTERM between ``watch`` and ``unwatch``, in the main thread.

    The interpreter calls handlers in the main thread only, and not while that is in a native call. So another thread
    reads the signals, too: it says what happens, and ends the process where a second signal has not ended it in time.
    """

    def __init__(self) -> None:
        self.signal: int | None = None  # the first
        self.abandoned = False  # whether a second one came
        self._handlers: dict[int, Any] = {}  # those before
        self._describe: Callable[[], str] = str

    def watch(self, describe: Callable[[], str]) -> None:
        """Take over the two signals; ``describe`` returns the text on what happens."""
        if threading.current_thread() is not threading.main_thread() or self._handlers:
            return
        self._describe = describe
        reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, self._catch) for number in (signal.SIGINT, signal.SIGTERM)}
        self._thread = threading.Thread(target=self._read, args=(reader,), daemon=True, name="rlkit-signals")
        self._thread.start()
        _watching.add(self)
        if getattr(sys.excepthook, "func", None) is not _print_stop:
            sys.excepthook = functools.partial(_print_stop, sys.excepthook)

    def unwatch(self) -> None:
        """Restore the previous handlers."""
        if threading.current_thread() is threading.main_thread() and self._handlers:
            self.restore()
            self._writer.close()  # ends the thread
            if not self.abandoned:
                self._thread.join(1.0)
            self._describe = str  # so that a run can be forgotten

    def restore(self) -> None:
        """Restore the previous handlers; in a forked child this is all, since its signals are not the run's."""
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup)
        while self._handlers:
            signal.signal(*self._handlers.popitem())

    def _catch(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None or self.abandoned:
            self.signal, self.abandoned = number, True
            raise _Stopped(f"{signal.Signals(number).name}: {self._describe()}")
        self.signal = number

    def _read(self, reader: socket.socket) -> None:
        count = 0
        with reader:
            while number := reader.recv(1):
                with contextlib.suppress(OSError):  # an event loop waits for signals, too, or nothing does
                    os.write(self._wakeup, number)
                if number[0] not in (signal.SIGINT, signal.SIGTERM):
                    continue
                count += 1
                if count == 1:
                    print(f"\nrlkit: {self._describe()}", file=sys.stderr, flush=True)
                elif not hasattr(sys, "ps1"):  # the process of a notebook stays
                    self.abandoned = True
                    text = self._describe()
                    time.sleep(_PATIENCE)
                    print(f"rlkit: {text}", file=sys.stderr, flush=True)
                    os._exit(128 + number[0])


_watching: weakref.WeakSet[_StopRequest] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: [*map(_StopRequest.restore, _watching)])


def _print_stop(usual: Callable[..., object], kind: type[BaseException], error: BaseException, trace: object) -> None:
    if isinstance(error, _Stopped):
        print(f"rlkit: {error}", file=sys.stderr)
    else:
        usual(kind, error, trace)


def _acquire_lock(folder: Path) -> BaseFileLock:
    """Return the folder's lock, which is free after its release or the end of the process, however that comes.

    Raises:
        ConfigError: another process has it.
    """
    from filelock import FileLock, Timeout

    path = folder / "lock"
    lock = FileLock(path, blocking=False, mode=0o600, thread_local=False)
    try:
        lock.acquire()
    except Timeout as error:
        holder = path.read_text("utf-8", errors="replace").strip()
        who = f"process {holder}" if holder.isdecimal() else "another process"
        raise ConfigError(f"{folder} is in use by {who}; a run has one writer") from error
    if isinstance(lock, FileLock):  # else it is a file in the place of a lock, with its own content
        with contextlib.suppress(OSError):  # Windows allows no writing to a locked file
            path.write_text(f"{os.getpid()}\n", "utf-8")
    return lock


def _check_name(where: str, name: object) -> str:
    """Return ``name`` if it is a text that is not empty and can be written, else raise a ConfigError."""
    good = isinstance(name, str) and name and name.encode("utf-8", "replace").decode() == name
    _check.require(good, where, name, "a name: a non-empty string")
    return str(name)


def sampler(path: str | os.PathLike[str], *, role: str = "policy", step: int | None = None, **options: Any) -> Sampler:
    """Open a run's newest policy, or any saved one, by the backend that saved it.

    Args:
        path: a run's folder, or what ``save`` returned.
        role: which policy of the run.
        step: which checkpoint of the run; None: the newest that is whole.
        options: as in ``rlkit.sampler``. The model and the longest sequence are those of the policy, if not given here;
            on Tinker they are the service's, and a lower ``max_length`` has to be given here again.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: an option is unknown or wrong.

    >>> import tempfile, rlkit
    >>> with rlkit.Run(tempfile.mkdtemp(), seed=0, trackers=()) as run:
    ...     policy = run.connect("toy")
    ...     record = run.checkpoint(policy)
    >>> sampler(run.folder).version
    0
    """
    saved = os.fspath(path)
    if os.path.isdir(Path(saved) / checkpoints.CHECKPOINTS):  # noqa: PTH112  # False for what cannot be a path, too
        there = [record.policy(role) for record in checkpoints.records(saved) if step in (None, record.step)]
        paths = [each for each in there if each is not None]
        if not paths:
            which = "" if step is None else f" of step {step}"
            raise CheckpointError(f"{saved} has no complete checkpoint{which} with a {role!r}")
        saved = paths[-1]
    if not saved.startswith("tinker://"):
        _, state = saves.read(saved, backend=None)
        return backends.sampler(state["backend"], path=saved, **options)
    if "/weights/" in saved:  # a state to train from, the service first has to make a snapshot of it
        return backends.connect("tinker", init_from=saved, **options).sampler().result()
    return backends.sampler("tinker", path=saved, **options)
