"""Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from rlkit.tracking.service import COLUMNS, ServiceTracker

__all__ = ["Wandb"]


class Wandb(ServiceTracker):
    """Sends metrics, and some trajectories as a table, to Weights & Biases (extra ``wandb``).

    The key is what wandb itself finds in the environment. Steps are logged as a metric called "step", which is the x
    axis, so that a run that was resumed from an earlier step may log it again. wandb is asked not to look at the
    program, its command line, its output or its repository.

    Args:
        project: the project's name there.
        name: the run's; None: wandb makes one up.
        id: of a run to go on with; None: a new one.
        folder: for wandb's own files; None: its choice.
        mode: "online", "offline" or "disabled"; None: what the environment says, else online.
        config, trajectories: as for ``ServiceTracker``: settings, which are masked, and how many trajectories a step.

    Raises:
        ConfigError: wandb is not installed.
    """

    package = "wandb"
    extra = "wandb"

    def __init__(
        self,
        project: str = "rlkit",
        *,
        name: str | None = None,
        id: str | None = None,  # noqa: A002
        folder: str | Path | None = None,
        mode: str | None = None,
        config: object = None,
        trajectories: int = 8,
    ) -> None:
        super().__init__(config=config, trajectories=trajectories)
        self._options = {"project": project, "name": name, "id": id, "dir": folder, "mode": mode}

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """As a run in ``folder`` has it: under the folder's name, wandb's own files in it."""
        return cls(name=folder.resolve().name, folder=folder)

    def _open(self) -> object:
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
        )
        options = {key: value for key, value in self._options.items() if value is not None}
        if "id" in options:
            options["resume"] = "allow"
        run = wandb.init(config=self._config, reinit="create_new", settings=settings, **options)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _log(self, run: Any, metrics: dict[str, float], step: int) -> None:
        run.log({**metrics, "step": step})

    def _texts(self, run: Any, rows: list[tuple[Any, ...]], step: int) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        run.log({"trajectories": table, "step": step})

    def _end(self, run: Any) -> None:
        run.finish()
