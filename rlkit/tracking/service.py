"""What the trackers that hand on to another package have in common."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rlkit import _check, _install
from rlkit._secrets import masked, redact
from rlkit.errors import ConfigError
from rlkit.tracking import values
from rlkit.trajectory import Group, Trajectory
from rlkit.trajectory.types import checked_groups

__all__ = ["COLUMNS", "ServiceTracker", "examples"]

COLUMNS = ("step", "env", "index", "reward", "turns", "tokens", "ended", "text")


class ServiceTracker(ABC):
    """Opens the other side at the first call, which ``Several`` makes in a thread, so that no run waits for it.

    A subclass says which package it needs, and writes ``_open``, ``_log``, ``_texts`` and ``_end``.

    Args:
        config: the run's settings; secrets are masked before they leave.
        trajectories: how many of a step's trajectories are sent as text, >= 0.

    Raises:
        ConfigError: the package is not installed; the message names the extra.
    """

    package: str
    extra: str

    def __init__(self, *, config: object = None, trajectories: int = 8) -> None:
        if importlib.util.find_spec(self.package) is None:
            text = f"{type(self).__name__}: the package {self.package!r} is not installed; "
            raise ConfigError(f"{text}install it with {_install.command(self.extra)}")
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError("config", f"got {redact(_check.shown(config))}", "a mapping")
        self._config: dict[str, Any] = masked(config or {})
        self._most = _check.integer("trajectories", trajectories, low=0)
        self._run: Any = None
        self._closed = False

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """As a run in ``folder`` has it: under the folder's name."""
        make: Callable[..., Self] = cls
        return make(name=folder.resolve().name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""
        numbers, step = values.checked(metrics, step)
        if numbers:
            self._log(self._opened(), numbers, step)

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Send some trajectories as text."""
        rows = examples(checked_groups(groups), _check.integer("step", step, low=0), self._most)
        if rows:
            self._texts(self._opened(), rows, step)

    def close(self) -> None:
        """End the run on the other side."""
        if self._run is not None and not self._closed:
            self._end(self._run)
        self._closed = True

    def _opened(self) -> object:
        if self._closed:
            raise ConfigError(f"{type(self).__name__} is closed")
        if self._run is None:
            self._run = self._open()
        return self._run

    @abstractmethod
    def _open(self) -> object:
        """Open the other side; what is returned is ``run`` below."""

    @abstractmethod
    def _log(self, run: object, metrics: dict[str, float], step: int) -> None:
        """Send the numbers of a step."""

    @abstractmethod
    def _texts(self, run: object, rows: list[tuple[object, ...]], step: int) -> None:
        """Send trajectories, one row of ``COLUMNS`` each."""

    @abstractmethod
    def _end(self, run: object) -> None:
        """Close the other side."""


def examples(groups: Sequence[Group], step: int, most: int) -> list[tuple[object, ...]]:
    """Up to ``most`` trajectories as rows of ``COLUMNS``, evenly spaced over what there is."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories or not most:
        return []
    count = min(most, len(trajectories))
    picked = [trajectories[i * len(trajectories) // count] for i in range(count)]
    return [
        (step, t.env, -1 if t.index is None else t.index, t.reward, len(t.turns), t.token_count, t.ended, _text(t))
        for t in picked
    ]


def _text(trajectory: Trajectory) -> str:
    said = (f"[{message.get('role', '')}]\n{message.get('content', '')}" for message in trajectory.messages)
    return redact("\n\n".join(said))
