"""Trackers of other packages: MLflow, TensorBoard, Trackio, Weights & Biases."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from rlkit import _check, _runtime
from rlkit._secrets import mask, redact
from rlkit.errors import ConfigError
from rlkit.tracking import protocol
from rlkit.trajectory import Group, Trajectory
from rlkit.trajectory.types import checked_groups

__all__ = ["Mlflow", "TensorBoard", "Trackio", "Wandb"]

Run: TypeAlias = Any  # a run of a service's package
Row: TypeAlias = tuple[object, ...]  # of COLUMNS
COLUMNS = ("step", "env", "index", "reward", "turns", "tokens", "ended", "text")


class ServiceTracker(ABC):
    """A tracker that connects at the first call, which ``Several`` makes in a thread, so that no run waits for it.

    A subclass names the package that it needs, and defines ``_open``, ``_log``, ``_texts`` and ``_end``.

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
        self._run: Run = None
        self._closed = False

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """Return the tracker of a run in ``folder``, under the folder's name."""
        make: Callable[..., Self] = cls
        return make(name=folder.resolve().name)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the numbers of a step."""
        numbers, step = protocol.checked(metrics, step)
        if numbers:
            self._log(self._opened(), numbers, step)

    def log_trajectories(self, groups: Iterable[Group], step: int, **_: Sequence[object] | None) -> None:
        """Send some trajectories as text."""
        rows = examples(checked_groups(groups), _check.integer("step", step, low=0), self._most)
        if rows:
            self._texts(self._opened(), rows, step)

    def close(self) -> None:
        """End the run at the service."""
        if self._run is not None and not self._closed:
            self._end(self._run)
        self._closed = True

    def _opened(self) -> Run:
        if self._closed:
            raise ConfigError(f"{type(self).__name__} is closed")
        if self._run is None:
            self._run = self._open()
        return self._run

    @abstractmethod
    def _open(self) -> Run:
        """Connect to the service; the result is ``run`` below."""

    @abstractmethod
    def _log(self, run: Run, metrics: Mapping[str, object], step: int) -> None:
        """Send the numbers of a step."""

    @abstractmethod
    def _texts(self, run: Run, rows: Sequence[Row], step: int) -> None:
        """Send trajectories, one row of ``COLUMNS`` each."""

    @abstractmethod
    def _end(self, run: Run) -> None:
        """Close the connection to the service."""


class _WithTables(ServiceTracker):
    """A service whose package has tables, and whose runs have ``finish``."""

    def _texts(self, run: Run, rows: Sequence[Row], step: int) -> None:
        table = importlib.import_module(self.package).Table(columns=list(COLUMNS), data=[list(row) for row in rows])
        self._log(run, {"trajectories": table}, step)

    def _end(self, run: Run) -> None:
        run.finish()


def examples(groups: Sequence[Group], step: int, most: int) -> list[Row]:
    """Return up to ``most`` trajectories as rows of ``COLUMNS``, evenly spaced over all."""
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


_OTHER = re.compile(r"[^A-Za-z0-9_\-. :/]")  # what a name there cannot hold


class Mlflow(ServiceTracker):
    """A tracker that logs to a tracking server or database of MLflow (extra ``mlflow``).

    Metrics go there with their steps; characters that MLflow does not allow in names become "_". Settings become
    parameters, trajectories a JSON file among the run's artifacts.

    Args:
        experiment: its name; created if missing.
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

    def _open(self) -> Run:
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

    def _log(self, run: Run, metrics: Mapping[str, object], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        listed = [Metric(_OTHER.sub("_", name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(listed), 1000):
            self._client.log_batch(run, metrics=listed[start : start + 1000])

    def _texts(self, run: Run, rows: Sequence[Row], step: int) -> None:
        text = json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], ensure_ascii=False, indent=1)
        self._client.log_text(run, text, f"trajectories/{step:08d}.json")

    def _end(self, run: Run) -> None:
        self._client.set_terminated(run)


def _flat(config: object, prefix: str = "") -> list[tuple[str, str]]:
    """Return ("a.b", text) pairs of nested settings."""
    if isinstance(config, dict) and config:
        named = ((f"{prefix}.{key}" if prefix else str(key), value) for key, value in config.items())
        return [pair for key, value in named for pair in _flat(value, key)]
    return [(prefix, config if isinstance(config, str) else json.dumps(config, default=str))] if prefix else []


class TensorBoard(ServiceTracker):
    """A tracker that writes event files for TensorBoard, with tensorboardX (extra ``tensorboard``).

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
        """Return the tracker of a run in ``folder``, with event files in their own folder."""
        return cls(folder / "tensorboard")

    def rewind(self, step: int) -> None:
        """Hide the entries of older event files from ``step`` on."""
        if self._run is not None:
            self.close()
            self._run, self._closed = None, False
        self._purge = step

    _purge: int | None = None

    def _open(self) -> Run:
        from tensorboardX import SummaryWriter

        # A file is named after the second in which it is opened: a run that resumes at once would overwrite it.
        suffix = f".{time.time_ns()}"
        writer = SummaryWriter(self._folder, purge_step=self._purge, flush_secs=10, filename_suffix=suffix)
        if self._config:
            writer.add_text("config", _fenced(json.dumps(self._config, indent=1, default=str)), 0)
        return writer

    def _log(self, run: Run, metrics: Mapping[str, object], step: int) -> None:
        for name, value in metrics.items():
            run.add_scalar(name, value, step)

    def _texts(self, run: Run, rows: Sequence[Row], step: int) -> None:
        for i, row in enumerate(rows):
            facts = ", ".join(f"{name} {value}" for name, value in zip(COLUMNS[:-1], row[:-1], strict=True))
            run.add_text(f"trajectories/{i}", _fenced(f"{facts}\n\n{row[-1]}"), step)

    def _end(self, run: Run) -> None:
        run.close()


def _fenced(text: str) -> str:
    """Return a text as a block of code: TensorBoard reads texts as Markdown."""
    return "\n".join("    " + line for line in text.splitlines())


class Trackio(_WithTables):
    """A tracker that logs to Trackio's local database, or to a Space of the user's (extra ``trackio``).

    Args:
        project: the project's name there.
        name: the run's; None: Trackio makes one up.
        resume: "never", "allow" or "must": whether to continue a run of that name.
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

    def _open(self) -> Run:
        import trackio

        quiet = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        return trackio.init(config=self._config, **self._options, **quiet)

    def _log(self, run: Run, metrics: Mapping[str, object], step: int) -> None:
        run.log(metrics, step=step)


class Wandb(_WithTables):
    """A tracker that sends metrics, and some trajectories as a table, to Weights & Biases (extra ``wandb``).

    The key is what wandb itself finds in the environment. Steps are logged as a metric called "step", which is the x
    axis, so that a run that was resumed from an earlier step may log it again. wandb is configured not to record
    the program, its command line, its output or its repository.

    Args:
        project: the project's name there.
        name: the run's; None: wandb makes one up.
        id: of a run to go on with; None: a new one.
        folder: for wandb's own files; None: its choice.
        mode: "online", "offline" or "disabled"; None: the environment's setting, else online.
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
        """Return the tracker of a run in ``folder``, under the folder's name, with wandb's own files in it."""
        return cls(name=folder.resolve().name, folder=folder)

    def _open(self) -> Run:
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

    def _log(self, run: Run, metrics: Mapping[str, object], step: int) -> None:
        run.log({**metrics, "step": step})
