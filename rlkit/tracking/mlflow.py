"""MLflow."""

from __future__ import annotations

import json
import re
import time

from rlkit.tracking.service import COLUMNS, ServiceTracker

__all__ = ["Mlflow"]

_OTHER = re.compile(r"[^A-Za-z0-9_\-. :/]")  # what a name there cannot hold


class Mlflow(ServiceTracker):
    """Logs to a tracking server or database of MLflow (extra ``mlflow``).

    Metrics go there with their steps; characters that MLflow does not take in names become "_". Settings become
    parameters, trajectories a JSON file among the run's artifacts.

    Args:
        experiment: its name; made if it is not there.
        name: the run's; None: MLflow makes one up.
        id: of a run to go on with; None: a new one.
        uri: of the server or database; None: what MLflow finds in the environment.
        config, trajectories: as for ``ServiceTracker``: settings, which are masked, and how many trajectories a step.

    Raises:
        ConfigError: mlflow is not installed.
    """

    package = "mlflow"
    extra = "mlflow"

    def __init__(
        self,
        experiment: str = "rlkit",
        *,
        name: str | None = None,
        id: str | None = None,  # noqa: A002
        uri: str | None = None,
        config: object = None,
        trajectories: int = 8,
    ) -> None:
        super().__init__(config=config, trajectories=trajectories)
        self._experiment, self._name, self._id, self._uri = experiment, name, id, uri

    def _open(self) -> object:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri)
        if self._id is not None:
            return self._id
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        run = self._client.create_run(experiment, run_name=self._name).info.run_id
        params = [Param(_OTHER.sub("_", key), text[:6000]) for key, text in _flat(self._config)]
        for start in range(0, len(params), 100):  # as many as a request may hold
            self._client.log_batch(run, params=params[start : start + 100])
        return run

    def _log(self, run: object, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        listed = [Metric(_OTHER.sub("_", name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(listed), 1000):
            self._client.log_batch(run, metrics=listed[start : start + 1000])

    def _texts(self, run: object, rows: list[tuple[object, ...]], step: int) -> None:
        text = json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], ensure_ascii=False, indent=1)
        self._client.log_text(run, text, f"trajectories/{step:08d}.json")

    def _end(self, run: object) -> None:
        self._client.set_terminated(run)


def _flat(config: object, prefix: str = "") -> list[tuple[str, str]]:
    """("a.b", text) pairs of nested settings."""
    if isinstance(config, dict) and config:
        named = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in config.items())
        return [pair for key, value in named for pair in _flat(value, key)]
    return [(prefix, config if isinstance(config, str) else json.dumps(config, default=str))] if prefix else []
