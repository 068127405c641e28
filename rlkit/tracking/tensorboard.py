"""TensorBoard."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Self

from rlkit.tracking.service import COLUMNS, ServiceTracker

__all__ = ["TensorBoard"]


class TensorBoard(ServiceTracker):
    """Writes event files for TensorBoard, with tensorboardX (extra ``tensorboard``).

    Args:
        folder: where the event files go.
        config, trajectories: as for ``ServiceTracker``: settings, which are masked, and how many trajectories a step.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    package = "tensorboardX"
    extra = "tensorboard"

    def __init__(self, folder: str | Path, *, config: object = None, trajectories: int = 8) -> None:
        super().__init__(config=config, trajectories=trajectories)
        self._folder = str(folder)

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """As a run in ``folder`` has it: event files in a folder of their own."""
        return cls(folder / "tensorboard")

    def rewind(self, step: int) -> None:
        """Hide what older event files hold from ``step`` on."""
        if self._run is not None:
            self.close()
            self._run, self._closed = None, False
        self._purge = step

    _purge: int | None = None

    def _open(self) -> object:
        from tensorboardX import SummaryWriter

        # A file is named after the second in which it is opened: a run that goes on at once would write over it.
        suffix = f".{time.time_ns()}"
        writer = SummaryWriter(self._folder, purge_step=self._purge, flush_secs=10, filename_suffix=suffix)
        if self._config:
            writer.add_text("config", _fenced(json.dumps(self._config, indent=1, default=str)), 0)
        return writer

    def _log(self, run: Any, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            run.add_scalar(name, value, step)

    def _texts(self, run: Any, rows: list[tuple[Any, ...]], step: int) -> None:
        for i, row in enumerate(rows):
            facts = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS[:-1], row[:-1], strict=True))
            run.add_text(f"trajectories/{i}", _fenced(f"{facts}\n\n{row[-1]}"), step)

    def _end(self, run: Any) -> None:
        run.close()


def _fenced(text: str) -> str:
    """As a block of code: TensorBoard reads texts as Markdown."""
    return "\n".join("    " + line for line in text.splitlines())
