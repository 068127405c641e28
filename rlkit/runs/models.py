"""The policies and critics that a run has open: opened from its checkpoints, and saved into them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rlkit import _check
from rlkit._warn import warn
from rlkit.backends.protocol import Storage
from rlkit.errors import CheckpointError, ConfigError
from rlkit.futures import Future
from rlkit.runs import record as records
from rlkit.runs.record import Record

__all__ = ["Models"]


class Model(Protocol):
    """What a policy and a critic have in common for a run."""

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
        self._asked: dict[str, tuple[str, Mapping[str, object]]] = {}  # what each of them was made with

    def open(
        self,
        opener: Callable[..., M],
        name: str,
        role: str,
        options: dict[str, object],
        record: Record | None,
        seed: int,
    ) -> tuple[M, Record | None]:
        """Open a model from ``record`` where it is there, or anew with ``seed``; the same call gives the same model.

        Returns:
            The model, and the checkpoint that it is from: an older one where the newest cannot be loaded.

        Raises:
            ConfigError: the role has a model made otherwise, or ``record`` has none and it is not said where to begin.
        """
        if role in self.opened:
            _check_same(role, self._asked[role], (name, options))
            there: Any = self.opened[role]
            return there, record
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
                message = f"skipped the checkpoint of step {record.step}, going on from step {older[-1].step}: {error}"
                warn(message, RuntimeWarning)
                record = older[-1]
        if record is not None and not {"init_from", "resume_from"} & options.keys():
            there = ", ".join(map(repr, record.policies)) or "no policy at all"
            raise ConfigError(
                f"connect(role): the checkpoint of step {record.step} has {there}, but no {role!r}, so what was "
                "trained would be lost; begin anew in another folder, or say where it begins: init_from="
            )
        return opener(name, **options), record

    def check(self, policies: Mapping[str, object], *, anything_else: bool, first: bool) -> None:
        """Raise where nothing, or something that cannot be saved, is to be saved; warn of a first without a policy."""
        for role, model in policies.items():
            if not callable(getattr(model, "save", None)):
                what = f"got {_check.shown(model)}"
                raise ConfigError(f"checkpoint({role})", what, "a policy, such as connect gives")
        remedy = (
            "connect the policy with run.connect(...) instead of rlkit.connect(...), or give it: run.checkpoint(policy)"
        )
        if not (policies or self.opened or anything_else):
            raise ConfigError(f"checkpoint: there is nothing to save; {remedy}")
        if not (policies or self.opened) and first:
            warn(f"this checkpoint holds no policy; {remedy}", RuntimeWarning)

    def save(self, step: int, policies: Mapping[str, Model]) -> dict[str, str]:
        """Save ``policies`` (none: all that are open) and every critic; return their paths, relative within the run."""
        saved = self.critics | dict(policies) if policies else self.opened
        futures = {role: model.save(f"step-{step:08d}") for role, model in saved.items()}
        return {role: self._relative(future.result()) for role, future in futures.items()}

    def delete(self, paths: Iterable[str]) -> None:
        """Delete saves on a service."""
        for path in paths:
            owner = next((model for model in self.opened.values() if isinstance(model, Storage)), None)
            if owner is not None:
                owner.delete(path)

    def close(self) -> None:
        """Close them all."""
        for model in self.opened.values():
            model.close()

    def _relative(self, path: str) -> str:
        within = "://" not in path and self.folder in Path(path).absolute().parents
        return str(Path(path).absolute().relative_to(self.folder)) if within else path


def _check_same(role: str, made: tuple[str, Mapping[str, object]], asked: tuple[str, Mapping[str, object]]) -> None:
    """Raise where the model of that role was ``made`` with another backend or options than are ``asked``."""
    (backend, before), (name, options) = made, asked
    what = "" if name == backend else f"is of the backend {backend!r}"
    for key in sorted(before.keys() | options.keys()):
        if not what and not (key in before and key in options and _equal(before[key], options[key])):
            what = f"was made with another {key}="
    if what:
        raise ConfigError(
            f"connect: the run's {role!r} {what}; open the run again, rlkit.Run(folder), or give role= for another one"
        )


def _equal(one: object, two: object) -> bool:
    try:
        return one is two or bool(one == two)
    except (TypeError, ValueError):  # of arrays and the like
        return False
