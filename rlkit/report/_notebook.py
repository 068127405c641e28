"""A run in a notebook: a summary with its curves, and one that follows the run."""

from __future__ import annotations

import base64
import html
import io
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit import _check, _runtime
from rlkit._secrets import redact
from rlkit.errors import ConfigError
from rlkit.report import _curves
from rlkit.report._page import RunFolder
from rlkit.tracking import check_metrics, read_metrics
from rlkit.tracking.jsonl import MetricsRow
from rlkit.trajectory import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Display", "Live", "live"]

_MOST = 6  # panels
_COLOURS = ("#2459d3", "#d9580d", "#0e8a5f", "#9b3fbf", "#c08a00", "#0b8aa5", "#c22e63", "#6b7686")


class Display:
    """A run's last numbers and curves at one moment, for a notebook.

    Args:
        folder: the run's.

    Raises:
        ConfigError: it is not a path.
        CheckpointError: it is not a run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = RunFolder(folder).path

    def _repr_html_(self) -> str:
        return summary(self.folder.resolve().name, read_metrics(self.folder))

    def __repr__(self) -> str:
        rows = read_metrics(self.folder)
        return f"Display({str(self.folder)!r}, {_curves.table(rows).last + 1} steps)"


class Live:
    """A tracker that draws the curves in a notebook's cell while the run goes on. Made by ``live``.

    Args:
        name: the heading.
        every: seconds between two drawings, >= 0.

    Raises:
        ConfigError: an argument is not what it should be, or IPython is not installed.
    """

    def __init__(self, name: str = "run", *, every: float = 2.0) -> None:
        try:
            from IPython.display import HTML, display
        except ImportError as error:
            raise ConfigError("live: IPython is not installed; live plots work only in notebooks") from error
        self._every = _check.real("every", every, low=0.0, why="seconds")
        self._name = name
        self._rows: list[MetricsRow] = []
        self._drawn = float("-inf")
        self._html = HTML
        self._handle = display(HTML(summary(name, [])), display_id=True)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step, and draw if it is time."""
        numbers, step = check_metrics(metrics, step)
        self._rows.append({"step": step, "time": time.time(), "metrics": numbers})
        if time.monotonic() - self._drawn >= self._every:
            self._draw()

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Do nothing: trajectories are shown on the run page."""

    def rewind(self, step: int, position: object = None) -> None:  # noqa: ARG002
        """Drop what was logged at or after ``step``."""
        self._rows = [row for row in self._rows if row["step"] < step]

    def close(self) -> None:
        """Draw the last numbers."""
        self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._handle is not None:
            self._handle.update(self._html(summary(self._name, self._rows)))


def live(folder: str | Path | None = None, *, every: float = 2.0) -> Live:
    """Make a tracker that draws curves in the notebook's cell, starting with what the folder holds.

    Args:
        folder: of a run that is resumed or under way; None: an empty start.
        every: seconds between two drawings, >= 0.

    Raises:
        ConfigError, CheckpointError: as for ``Live`` and ``Display``.
    """
    if folder is None:
        return Live(every=every)
    path = Path(folder)
    rows = read_metrics(path) if path.is_dir() else []
    tracker = Live(path.resolve().name, every=every)
    for row in rows:
        tracker.log(row["metrics"], row["step"])
    return tracker


def summary(name: str, rows: Sequence[MetricsRow]) -> str:
    """Return the HTML: a heading, the last values, and the curves as a picture. It loads no external resources."""
    table = _curves.table(rows)
    shown = [panel for panel in _curves.panels(table) if panel["standard"]] or _curves.panels(table)
    shown = shown[:_MOST]
    facts = [f"{table.last + 1} steps"] if table.last >= 0 else ["nothing logged yet"]
    for panel in shown:
        curve = panel["curves"][0]
        if curve["y"] and panel["unit"] != "stack":
            facts.append(f"{panel['title'].lower()} {curve['y'][-1]:.4g}")
    text = html.escape(" · ".join(redact(fact) for fact in facts))
    picture = _picture(shown) if shown else ""
    style = "font:13px system-ui,sans-serif;max-width:960px"
    return f'<div style="{style}"><b>{html.escape(redact(name))}</b><br>{text}{picture}</div>'


def _picture(panels: Sequence[_curves.Chart]) -> str:
    """Return the panels as a PNG inside an <img>, on a background that suits light and dark pages."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return f"<br><i>{html.escape(_runtime.command('report'))} shows the curves here</i>"
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(3.4 * columns, 2.2 * rows), layout="constrained", facecolor="white")
    for i, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, i + 1)
        _draw(axes, panel)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    encoded = base64.b64encode(data.getvalue()).decode()
    return f'<br><img alt="curves" style="max-width:100%" src="data:image/png;base64,{encoded}">'


def _draw(axes: Axes, panel: _curves.Chart) -> None:
    labels = [_text(curve["label"]) for curve in panel["curves"]]
    if panel["unit"] == "stack" and panel["curves"][0]["x"]:
        heights = [curve["y"] for curve in panel["curves"]]
        axes.stackplot(panel["curves"][0]["x"], heights, labels=labels, colors=_COLOURS)
    else:
        for i, curve in enumerate(panel["curves"]):
            colour, marker = _COLOURS[i % len(_COLOURS)], "o" if len(curve["x"]) < 2 else ""
            axes.plot(curve["x"], curve["y"], color=colour, linewidth=1.3, label=labels[i], marker=marker, markersize=3)
    axes.set_title(_text(panel["title"]), fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if len(labels) > 1:
        axes.legend(fontsize=6, frameon=False)


def _text(text: str) -> str:
    """Escape a text for matplotlib, which would read mathematics, and leave out names that begin with "_"."""
    return redact(text).replace("$", r"\$").lstrip("_")[:60]
