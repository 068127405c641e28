"""Trackers of other packages: MLflow, TensorBoard, Trackio, Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import textwrap
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from rlkit import _check, _runtime
from rlkit._secrets import mask, redact
from rlkit.errors import ConfigError
from rlkit.tracking import check_metrics
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Mlflow", "TensorBoard", "Trackio", "Wandb"]

COLUMNS = ("step", "env", "index", "reward", "turns", "tokens", "ended", "text")


class ServiceTracker(ABC):
    """A tracker that connects at the first call, which ``MultiTracker`` makes in a thread: no run waits for it.

    A subclass names the package that it needs, and defines ``_open``, ``_log``, ``_log_texts`` and ``_end``.

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
            raise ConfigError(f"{text}install it with {_runtime.command(self.extra)}")
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError("config", f"got {redact(_check.describe(config))}", "a mapping")
        self._config: dict[str, object] = mask(config or {})
        self._most = _check.integer("trajectories", trajectories, low=0)
        self._run: Any = None  # of the service's package
        self._closed = False

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """Return the tracker of a run in ``folder``, under the folder's name."""
        make: Callable[..., Self] = cls
        return make(name=folder.resolve().name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""
        floats, step = check_metrics(metrics, step)
        if floats:
            self._log(self._connect(), floats, step)

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Send up to ``trajectories`` of them as text, evenly spaced over all."""
        step = _check.integer("step", step, low=0)
        played = [trajectory for group in checked_groups(groups) for trajectory in group.trajectories]
        rows: list[list[object]] = []
        for i in range(count := min(self._most, len(played))):
            t = played[i * len(played) // count]
            text = redact("\n\n".join(f"[{m.get('role', '')}]\n{m.get('content', '')}" for m in t.messages))
            index = -1 if t.index is None else t.index
            rows.append([step, t.env, index, t.reward, len(t.turns), t.token_count, t.ended, text])
        if rows:
            self._log_texts(self._connect(), rows, step)

    def close(self) -> None:
        """End the run at the service."""
        if self._run is not None and not self._closed:
            self._end(self._run)
        self._closed = True

    def _connect(self) -> Any:
        if self._closed:
            raise ConfigError(f"{type(self).__name__} is closed")
        if self._run is None:
            self._run = self._open()
        return self._run

    @abstractmethod
    def _open(self) -> Any:
        """Connect to the service; the result is ``run`` below."""

    @abstractmethod
    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        """Send the numbers of a step."""

    @abstractmethod
    def _log_texts(self, run: Any, rows: list[list[object]], step: int) -> None:
        """Send trajectories, one row of ``COLUMNS`` each."""

    @abstractmethod
    def _end(self, run: Any) -> None:
        """Close the connection to the service."""


class Wandb(ServiceTracker):
    """A tracker that sends metrics, and some trajectories as a table, to Weights & Biases (extra ``wandb``).

    The key is what wandb itself finds in the environment. Steps are logged as a metric called "step", which is the x
    axis, so that a run that was resumed from an earlier step may log it again. wandb is configured not to record
    the program, its command line, its output or its repository.

    Args:
        project: the project's name there.
        name: the run's; None: wandb makes one up.
        id: of a run to continue; None: a new one.
        folder: for wandb's own files; None: its choice.
        mode: "online", "offline" or "disabled"; None: the environment's setting, else online.
        config, trajectories: as for ``ServiceTracker``: settings, which are mask, and how many trajectories a step.

    Raises:
        ConfigError: wandb is not installed.
    """

    package = extra = "wandb"

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
        options = {"project": project, "name": name, "id": id, "dir": folder, "mode": mode}
        self._options: dict[str, Any] = {key: value for key, value in options.items() if value is not None}

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """Return the tracker of a run in ``folder``, under the folder's name, with wandb's own files in it."""
        return cls(name=folder.resolve().name, folder=folder)

    def _open(self) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
        )
        resume = "allow" if "id" in self._options else None
        run = wandb.init(config=self._config, reinit="create_new", settings=settings, resume=resume, **self._options)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        run.log({**metrics, "step": step})

    def _log_texts(self, run: Any, rows: list[list[object]], step: int) -> None:
        table = importlib.import_module(self.package).Table(columns=list(COLUMNS), data=rows)
        self._log(run, {"trajectories": table}, step)

    def _end(self, run: Any) -> None:
        run.finish()


class Trackio(Wandb):
    """A tracker that logs to Trackio's local database, or to a Space of the user's (extra ``trackio``).

    Args:
        project: the project's name there.
        name: the run's; None: Trackio makes one up.
        resume: "never", "allow" or "must": whether to continue a run of that name.
        space: of Hugging Face, to log to; None: this machine, in ``$TRACKIO_DIR``.
        config, trajectories: as for ``ServiceTracker``: settings, which are mask, and how many trajectories a step.

    Raises:
        ConfigError: trackio is not installed.
    """

    package = extra = "trackio"

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
        super().__init__(project, name=name, config=config, trajectories=trajectories)
        self._options = {"project": project, "name": name, "resume": resume, "space_id": space}
        self._options |= {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """Return the tracker of a run in ``folder``, under the folder's name."""
        return cls(name=folder.resolve().name)

    def _open(self) -> Any:
        import trackio

        return trackio.init(config=self._config, **self._options)

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        run.log(metrics, step=step)


class TensorBoard(ServiceTracker):
    """A tracker that writes event files for TensorBoard, with tensorboardX (extra ``tensorboard``).

    Args:
        folder: where the event files go.
        config, trajectories: as for ``ServiceTracker``: settings, which are mask, and how many trajectories a step.

    Raises:
        ConfigError: tensorboardX is not installed.
    """

    package = "tensorboardX"
    extra = "tensorboard"

    def __init__(self, folder: str | Path, *, config: object = None, trajectories: int = 8) -> None:
        super().__init__(config=config, trajectories=trajectories)
        self._folder = str(folder)
        self._purge: int | None = None

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """Return the tracker of a run in ``folder``, with event files in their own folder."""
        return cls(folder / "tensorboard")

    def rewind(self, step: int, position: object = None) -> None:  # noqa: ARG002  # its files need none
        """Hide the entries of older event files from ``step`` on."""
        if self._run is not None:
            self.close()
            self._run, self._closed = None, False
        self._purge = step

    def _open(self) -> Any:
        from tensorboardX import SummaryWriter

        # A file is named after the second in which it is opened: a run that resumes at once would overwrite it.
        suffix = f".{time.time_ns()}"
        writer = SummaryWriter(self._folder, purge_step=self._purge, flush_secs=10, filename_suffix=suffix)
        if self._config:
            writer.add_text("config", _as_code(json.dumps(self._config, indent=1, default=str)), 0)
        return writer

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        for name, value in metrics.items():
            run.add_scalar(name, value, step)

    def _log_texts(self, run: Any, rows: list[list[object]], step: int) -> None:
        for i, row in enumerate(rows):
            facts = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS[:-1], row[:-1], strict=True))
            run.add_text(f"trajectories/{i}", _as_code(f"{facts}\n\n{row[-1]}"), step)

    def _end(self, run: Any) -> None:
        run.close()


def _as_code(text: str) -> str:
    """Return a text as a block of code: TensorBoard reads texts as Markdown."""
    return textwrap.indent(text, "    ", lambda _: True)


class Mlflow(ServiceTracker):
    """A tracker that logs to a tracking server or database of MLflow (extra ``mlflow``).

    Metrics go there with their steps; characters that MLflow does not allow in names become "_". Settings become
    parameters, trajectories a JSON file among the run's artifacts.

    Args:
        experiment: its name; created if missing.
        name: the run's; None: MLflow makes one up.
        id: of a run to continue; None: a new one.
        uri: of the server or database; None: what MLflow finds in the environment.
        config, trajectories: as for ``ServiceTracker``: settings, which are mask, and how many trajectories a step.

    Raises:
        ConfigError: mlflow is not installed.
    """

    package = extra = "mlflow"

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

    def _open(self) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri)
        if self._id is not None:
            return self._id
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        run = self._client.create_run(experiment, run_name=self._name).info.run_id
        params = [Param(_name(key), text[:6000]) for key, text in _flat(self._config)]
        for start in range(0, len(params), 100):  # as many as a request may hold
            self._client.log_batch(run, params=params[start : start + 100])
        return run

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        listed = [Metric(_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(listed), 1000):
            self._client.log_batch(run, metrics=listed[start : start + 1000])

    def _log_texts(self, run: Any, rows: list[list[object]], step: int) -> None:
        text = json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], ensure_ascii=False, indent=1)
        self._client.log_text(run, text, f"trajectories/{step:08d}.json")

    def _end(self, run: Any) -> None:
        self._client.set_terminated(run)


def _name(text: str) -> str:
    """Return a name as MLflow allows it."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", text)


def _flat(config: object, prefix: str = "") -> list[tuple[str, str]]:
    """Return ("a.b", text) pairs of nested settings."""
    if isinstance(config, dict) and config:
        named = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in config.items())
        return [pair for key, value in named for pair in _flat(value, key)]
    return [(prefix, config if isinstance(config, str) else json.dumps(config, default=str))] if prefix else []
