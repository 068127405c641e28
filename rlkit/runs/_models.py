"""The policies and critics that a run has open: opened from its checkpoints, and saved into them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from rlkit import _check, backends
from rlkit._runtime import warn
from rlkit.backends import Sampler, saves
from rlkit.backends.protocol import Storage
from rlkit.errors import CheckpointError, ConfigError
from rlkit.futures import Future
from rlkit.runs import record as records
from rlkit.runs.record import Record, is_run, newest

__all__ = ["Models", "sampler"]


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
    saved = str(newest(path, role=role, step=step).policy(role)) if is_run(path) else os.fspath(path)
    if not saved.startswith("tinker://"):
        _, state = saves.read(saved, backend=None)
        return backends.sampler(state["backend"], path=saved, **options)
    if "/weights/" in saved:  # a state to train from, the service first has to make a snapshot of it
        return backends.connect("tinker", init_from=saved, **options).sampler().result()
    return backends.sampler("tinker", path=saved, **options)


class Model(Protocol):
    """The common protocol of a policy and a critic in a run."""

    def save(self, name: str, /) -> Future[str]:
        """Write the state."""

    def close(self) -> None:
        """End it."""


M = TypeVar("M", bound=Model)


class Models:
    """A run's policies and critics by role."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened: dict[str, Model] = {}
        self.critics: dict[str, Model] = {}
        self._asked: dict[str, tuple[str, Mapping[str, object]]] = {}  # the arguments that made each of them

    def open(
        self,
        opener: Callable[..., M],
        name: str,
        role: str,
        options: dict[str, object],
        record: Record | None,
        seed: int,
    ) -> tuple[M, Record | None]:
        """Open a model from ``record`` if it has one, or a new one with ``seed``; the same call gives the same model.

        Returns:
            The model, and its checkpoint: an older one if the newest cannot be loaded.

        Raises:
            ConfigError: the role has a model made otherwise, or ``record`` has none and no start is given.
        """
        if role in self.opened:
            _check_same(role, self._asked[role], (name, options))
            return cast("M", self.opened[role]), record
        with_folder = {"folder": str(self.folder / records.POLICIES), "seed": seed, **options}
        model, record = self._resume(opener, name, role, with_folder, record)
        self.opened[role], self._asked[role] = model, (name, dict(options))
        return model, record

    def _resume(
        self, opener: Callable[..., M], name: str, role: str, options: Mapping[str, object], record: Record | None
    ) -> tuple[M, Record | None]:
        while record is not None and record.policy(role) is not None:
            kept_options = {k: v for k, v in options.items() if k not in ("init_from", "resume_from", "seed")}
            try:
                return opener(name, **kept_options, resume_from=record.policy(role)), record
            except CheckpointError as error:
                older = [r for r in records.records(self.folder) if r.step < record.step]
                if not older or self.opened:
                    raise
                message = f"skipped the checkpoint of step {record.step}, resuming from step {older[-1].step}: {error}"
                warn(message, RuntimeWarning)
                record = older[-1]
        if record is not None and not {"init_from", "resume_from"} & options.keys():
            there = ", ".join(map(repr, record.policies)) or "no policy"
            raise ConfigError(
                f"connect(role): the checkpoint of step {record.step} has {there}, but no {role!r}, so its training "
                "would be lost; use another folder for a new run, or give a start with init_from="
            )
        return opener(name, **options), record

    def check(self, policies: Mapping[str, object], *, anything_else: bool, first: bool) -> None:
        """Raise if there is nothing to save, or it cannot be saved; warn of a first checkpoint without a policy."""
        for role, model in policies.items():
            if not callable(getattr(model, "save", None)):
                what = f"got {_check.describe(model)}"
                raise ConfigError(f"checkpoint({role})", what, "a policy, as connect returns")
        remedy = (
            "connect the policy with run.connect(...) instead of rlkit.connect(...), or pass it: run.checkpoint(policy)"
        )
        if not (policies or self.opened or anything_else):
            raise ConfigError(f"checkpoint: nothing to save; {remedy}")
        if not (policies or self.opened) and first:
            warn(f"this checkpoint holds no policy; {remedy}", RuntimeWarning)

    def save(self, step: int, policies: Mapping[str, Model], timeout: float | None = None) -> dict[str, str]:
        """Save ``policies`` (none: all that are open) and every critic; return their paths, relative within the run."""
        futures = {role: model.save(f"step-{step:08d}") for role, model in self._saved(policies).items()}
        return {role: self._relative(future.result(timeout)) for role, future in futures.items()}

    def _saved(self, policies: Mapping[str, Model]) -> Mapping[str, Model]:
        return self.critics | dict(policies) if policies else self.opened

    def delete(self, paths: Iterable[str]) -> None:
        """Delete saves on a service."""
        for path in paths:
            owner = next((model for model in self.opened.values() if isinstance(model, Storage)), None)
            if owner is not None:
                owner.delete(path)

    def facts(self, policies: Mapping[str, Model]) -> dict[str, object]:
        """Return by role how each was made: backend, options, and its own facts."""
        facts: dict[str, object] = {}
        for role, model in {**self.opened, **policies}.items():
            backend, options = self._asked.get(role, (type(model).__name__, {}))
            known = getattr(model, "_facts", dict[str, object])()
            facts[role] = {"backend": backend, "options": options, **known}
        return facts

    def max_tokens(self) -> int | None:
        """Return ``max_tokens`` of the last requests to a policy; None where unknown."""
        for model in self.opened.values():
            params = getattr(getattr(model, "_seeds", None), "params", None)
            if params is not None:
                return int(params.max_tokens)
        return None

    def marks(self, policies: Mapping[str, Model]) -> dict[str, tuple[Model, object]] | None:
        """Return the models that ``save`` would save, with marks of their state; None if changes cannot be detected."""
        marks = {}
        for role, model in self._saved(policies).items():
            mark = getattr(model, "_mark", lambda: None)()
            if mark is None:
                return None
            marks[role] = (model, mark)
        return marks

    def go_back(self, marks: Mapping[str, tuple[Any, object]], timeout: float) -> bool:
        """Restore them to their marks; return False where that is impossible."""
        return all(model._back_to(mark, timeout) for model, mark in marks.values())  # noqa: SLF001  # a hook for runs

    def give_up(self) -> None:
        """Abort their running work, where supported."""
        for model in self.opened.values():
            getattr(model, "_give_up", lambda: None)()

    def close(self, timeout: float | None = None) -> None:
        """Close them all; in ``timeout`` seconds, after which the rest ends with the process."""
        if timeout is None:
            for model in self.opened.values():
                model.close()
            return
        deadline = time.monotonic() + timeout
        threads = [threading.Thread(target=model.close, daemon=True) for model in self.opened.values()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _relative(self, path: str) -> str:
        within = "://" not in path and self.folder in Path(path).absolute().parents
        return str(Path(path).absolute().relative_to(self.folder)) if within else path


def _check_same(role: str, made: tuple[str, Mapping[str, object]], asked: tuple[str, Mapping[str, object]]) -> None:
    """Raise where the model of that role was ``made`` with another backend or options than are ``asked``."""
    (backend, before), (name, options) = made, asked
    what = "" if name == backend else f"uses the backend {backend!r}"
    for key in sorted(before.keys() | options.keys()):
        if not what and not (key in before and key in options and _equal(before[key], options[key])):
            what = f"was opened with a different {key}="
    if what:
        raise ConfigError(
            f"connect: the run's {role!r} {what}; open the run again, rlkit.Run(folder), or set role= for another one"
        )


def _equal(one: object, two: object) -> bool:
    try:
        return one is two or bool(one == two)
    except (TypeError, ValueError):  # of arrays and the like
        return False
