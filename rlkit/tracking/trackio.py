"""Trackio."""

from __future__ import annotations

from typing import Any

from rlkit.tracking.service import COLUMNS, ServiceTracker

__all__ = ["Trackio"]


class Trackio(ServiceTracker):
    """Logs to Trackio's local database, or to a Space of the user's (extra ``trackio``).

    Args:
        project: the project's name there.
        name: the run's; None: Trackio makes one up.
        resume: "never", "allow" or "must": whether a run of that name is gone on with.
        space: of Hugging Face, to log to; None: this machine, in ``$TRACKIO_DIR``.
        config, trajectories: as for ``ServiceTracker``: settings, which are masked, and how many trajectories a step.

    Raises:
        ConfigError: trackio is not installed.
    """

    package = "trackio"
    extra = "trackio"

    def __init__(
        self,
        project: str = "rlkit",
        *,
        name: str | None = None,
        resume: str = "allow",
        space: str | None = None,
        config: object = None,
        trajectories: int = 8,
    ) -> None:
        super().__init__(config=config, trajectories=trajectories)
        self._options = {"project": project, "name": name, "resume": resume, "space_id": space}

    def _open(self) -> object:
        import trackio

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return trackio.init(config=self._config, **self._options, **quiet)

    def _log(self, run: Any, metrics: dict[str, float], step: int) -> None:
        run.log(metrics, step=step)

    def _texts(self, run: Any, rows: list[tuple[Any, ...]], step: int) -> None:
        import trackio

        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        run.log({"trajectories": table}, step=step)

    def _end(self, run: Any) -> None:
        run.finish()
