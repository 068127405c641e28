"""The terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self, TextIO

from rlkit import _check
from rlkit._secrets import redact
from rlkit.metrics.names import combine, general, reduction
from rlkit.tracking import check_metrics
from rlkit.trajectory import Group, checked_groups

__all__ = ["Console"]

# Heading -> metrics, in any environment; of several the first that was logged. With rewards a loss says nothing:
# on-policy it is 0 up to rounding.
_SHOWN = {
    "reward": ("rollout/reward", "env/*/reward"),
    "eval": ("eval/mean",),
    "signal": ("train/with_signal", "rollout/with_signal"),
    "cut": ("rollout/cut",),
    "failed": ("env/*/failed",),
    "loss": ("train/loss",),
    "kl": ("train/kl_k3",),
}
_NO_PARTS = {"time/env", "time/close", "time/sampler", "time/sampler/requests"}  # sums over parallel work
_AGAIN = 20  # rows between headings


class Console:
    """A tracker that prints a row for each call of ``log`` with numbers that it shows, usually one per step.

    A row has the reward, the evaluation, the share of groups that can teach something (``signal``), the share of
    answers that reached max_tokens (``cut``), failed episodes, the KL of the sampler from the trainer, and the seconds
    of the step and its parts, as far as they are logged; the loss where no reward is. Over several environments
    rewards are averaged, and failures are added up.

    Args:
        columns: heading -> the metric's name, instead of these.
        file: the output; None: standard output.

    >>> import sys
    >>> console = Console(file=sys.stdout)
    >>> console.log({"env/sums/reward": 0.25, "rollout/cut": 0.5, "time/train": 2.0, "time/step": 3.5}, step=0)
        step    reward       cut   train s    step s
           0      0.25       0.5         2       3.5
    """

    def __init__(self, columns: Mapping[str, str] | None = None, *, file: TextIO | None = None) -> None:
        self._columns = {heading: (name,) for heading, name in (columns or {}).items()}
        self._file = file
        self._headings: list[str] = []
        self._rows = 0

    @classmethod
    def for_run(cls, folder: Path) -> Self:  # noqa: ARG003  # as for the others
        """Return the tracker of a run in ``folder``: the default columns."""
        return cls()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the shown columns of these numbers, if there are any."""
        floats, step = check_metrics(metrics, step)
        cells = self._cells(floats)
        if not cells:
            return
        if not cells.keys() <= set(self._headings) or self._rows % _AGAIN == 0:
            self._headings = [*cells, *(x for x in self._headings if x not in cells)]
            self._print("step", {heading: heading for heading in self._headings})
        self._rows += 1
        self._print(str(step), {heading: f"{value:.4g}" for heading, value in cells.items()})

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Do nothing: trajectories are shown on the run page."""
        checked_groups(groups)
        _check.integer("step", step, low=0)

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _cells(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return heading -> number."""
        named: dict[str, list[float]] = {}
        for name, value in metrics.items():
            for key in {name, general(name)}:
                named.setdefault(key, []).append(value)
        cells = {}
        for heading, names in (self._columns or _SHOWN).items():
            wanted = next((name for name in names if name in named), None)
            if wanted is not None and not (heading == "loss" and "reward" in cells):
                cells[heading] = combine(reduction(wanted), named[wanted])
        if not self._columns:
            parts = [name for name in metrics if name.startswith("time/") and name not in _NO_PARTS]
            for name in sorted(parts, key=lambda name: name == "time/step"):
                cells[f"{name.removeprefix('time/')} s"] = metrics[name]
        return cells

    def _print(self, step: str, cells: Mapping[str, str]) -> None:
        row = [f" {step}".rjust(8), *(f" {cells.get(x, '')}".rjust(max(10, len(x) + 2)) for x in self._headings)]
        text = "".join(c if c.isprintable() else "?" for c in redact("".join(row)))  # no cursor moves, no colours
        print(text, file=sys.stdout if self._file is None else self._file, flush=True)
