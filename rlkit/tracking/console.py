"""The terminal."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self, TextIO

from rlkit import _check
from rlkit._secrets import redact
from rlkit.errors import ConfigError
from rlkit.tracking import values
from rlkit.tracking.names import general
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Console"]

# What is shown of a step where nothing else is asked for: a heading, and the metric's name for any environment.
_SHOWN = {
    "reward": "env/*/reward",
    "eval": "eval/mean",
    "turns": "env/*/turns",
    "tokens": "env/*/tokens",
    "failed": "env/*/failed",
    "loss": "train/loss",
    "grad norm": "train/grad_norm",
    "kl": "train/kl_k3",
    "entropy": "train/entropy",
    "s": "time/step",
}
_SUMS = ("failed",)
_WIDTH = 10
_AGAIN = 20  # rows between headings


class Console:
    """Prints a row per step: in colour where there is a terminal and rich is installed.

    Args:
        columns: heading -> the metric's name; None: reward, tokens, loss, KL and the like, of those that there are
            (over several environments the mean).
        file: where to; None: standard output.

    Raises:
        ConfigError: the columns are no mapping of text to text.

    >>> import sys
    >>> console = Console({"reward": "env/sums/reward"}, file=sys.stdout)
    >>> console.log({"env/sums/reward": 0.25, "other": 1.0}, step=0)
        step    reward
           0      0.25
    """

    def __init__(self, columns: Mapping[str, str] | None = None, *, file: TextIO | None = None) -> None:
        if columns is not None and (
            not isinstance(columns, Mapping)
            or not columns
            or not all(isinstance(x, str) and x for pair in columns.items() for x in pair)
        ):
            raise ConfigError("columns", f"got {_check.shown(columns)}", "headings with metrics' names")
        self._columns = None if columns is None else dict(columns)
        self._file = file
        self._heading: list[str] = []
        self._rows = 0

    @classmethod
    def for_run(cls, folder: Path) -> Self:  # noqa: ARG003  # as for the others
        """As a run in ``folder`` has it: the default columns."""
        return cls()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print what is shown of these numbers; nothing where that is nothing."""
        numbers, step = values.checked(metrics, step)
        cells = self._cells(numbers)
        if not cells:
            return
        if list(cells) != self._heading or self._rows % _AGAIN == 0:
            self._heading = list(cells)
            self._print(["step", *cells], "bold")
        self._rows += 1
        self._print([str(step), *(_short(value) for value in cells.values())], None)

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Nothing: trajectories are looked at on the run page."""
        checked_groups(groups)
        _check.integer("step", step, low=0)

    def close(self) -> None:
        """Nothing is held."""

    def _cells(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if self._columns is not None:
            return {heading: metrics[name] for heading, name in self._columns.items() if name in metrics}
        named = [(general(name), value) for name, value in metrics.items()]
        cells = {}
        for heading, wanted in _SHOWN.items():
            numbers = [value for name, value in named if name == wanted]
            if numbers:
                cells[heading] = sum(numbers) / (1 if heading in _SUMS else len(numbers))
        return cells

    def _print(self, cells: Sequence[str], style: str | None) -> None:
        file = sys.stdout if self._file is None else self._file
        widths = [8] + [max(_WIDTH, len(name) + 2) for name in self._heading]
        shown = (redact(_visible(cell)) for cell in cells)
        text = "".join(f" {cell}".rjust(width) for cell, width in zip(shown, widths, strict=True))
        if style is None or not file.isatty() or importlib.util.find_spec("rich") is None:
            print(text, file=file, flush=True)
            return
        from rich.console import Console as Rich
        from rich.text import Text

        Rich(file=file).print(Text(text, style=style), soft_wrap=True)  # a Text: names are no markup


def _short(value: float) -> str:
    return f"{value:.4g}"


def _visible(text: str) -> str:
    """Without characters that could move the cursor or change colours."""
    return "".join(c if c.isprintable() else "?" for c in text)
