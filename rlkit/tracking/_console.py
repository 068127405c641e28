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
from rlkit.metrics.names import combine, general, reduction
from rlkit.tracking import protocol
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Console"]

# The default columns of a step: a heading, and the metric's name for any environment. Of
# several the first that exists; with rewards a loss says nothing: on-policy it is 0 up to rounding.
_SHOWN = {
    "reward": ("env/*/reward",),
    "eval": ("eval/mean",),
    "signal": ("train/with_signal", "rollout/with_signal"),
    "cut": ("rollout/cut",),
    "tokens": ("env/*/tokens",),
    "failed": ("env/*/failed",),
    "loss": ("train/loss",),
    "grad norm": ("train/grad_norm",),
    "kl": ("train/kl_k3",),
    "entropy": ("train/entropy",),
    "s": ("time/step",),
}
_WIDTH = 10
_AGAIN = 20  # rows between headings


class Console:
    """A tracker that prints a row per step: in colour on a terminal if rich is installed.

    Args:
        columns: heading -> the metric's name. None: reward, signal (the share of groups that can teach something), cut
            (the share that reached max_tokens) and tokens, or else the loss; then KL and others that the run logs.
            Over several environments they are averaged, and failures are added up.
        file: the output; None: standard output.

    Raises:
        ConfigError: the columns are not a mapping of text to text.

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
            raise ConfigError("columns", f"got {_check.describe(columns)}", "headings with metrics' names")
        self._columns = None if columns is None else dict(columns)
        self._file = file
        self._heading: list[str] = []
        self._rows = 0

    @classmethod
    def for_run(cls, folder: Path) -> Self:  # noqa: ARG003  # as for the others
        """Return the tracker of a run in ``folder``: the default columns."""
        return cls()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the shown columns of these numbers, if there are any."""
        numbers, step = protocol.checked(metrics, step)
        cells = self._cells(numbers)
        if not cells:
            return
        if list(cells) != self._heading or self._rows % _AGAIN == 0:
            self._heading = list(cells)
            self._print(["step", *cells], "bold")
        self._rows += 1
        self._print([str(step), *(_short(value) for value in cells.values())], None)

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Do nothing: trajectories are shown on the run page."""
        checked_groups(groups)
        _check.integer("step", step, low=0)

    def close(self) -> None:
        """Do nothing: it holds no resources."""

    def _cells(self, metrics: Mapping[str, float]) -> dict[str, float]:
        if self._columns is not None:
            return {heading: metrics[name] for heading, name in self._columns.items() if name in metrics}
        named: dict[str, list[float]] = {}
        for name, value in metrics.items():
            named.setdefault(general(name), []).append(value)
        cells = {}
        for heading, names in _SHOWN.items():
            wanted = next((name for name in names if name in named), None)
            if wanted is not None and not (heading == "loss" and "signal" in cells):
                cells[heading] = combine(reduction(wanted), named[wanted])
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

        Rich(file=file).print(Text(text, style=style), soft_wrap=True)  # a Text: names are not markup


def _short(value: float) -> str:
    return f"{value:.4g}"


def _visible(text: str) -> str:
    """Return the text without characters that could move the cursor or change colours."""
    return "".join(c if c.isprintable() else "?" for c in text)
