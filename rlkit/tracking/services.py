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
from typing import Any, ClassVar, Self

import attrs

from rlkit import _check, _runtime
from rlkit._files import plain
from rlkit._secrets import mask, redact
from rlkit.config import flatten
from rlkit.errors import ConfigError
from rlkit.tracking import check_metrics
from rlkit.trajectory import Group, checked_groups

__all__ = ["Mlflow", "TensorBoard", "Trackio", "Wandb"]

COLUMNS = ("step", "env", "index", "reward", "turns", "tokens", "ended", "text")


@attrs.define(eq=False, repr=False)
class ServiceTracker(ABC):
    """A tracker that connects at the first call, which ``MultiTracker`` makes in a thread: no run waits for it.

    A subclass names the package that it needs, and defines ``_open``, ``_log``, ``_log_texts`` and ``_end``.

    Args:
        config: the run's settings; secrets are masked before they leave.
        trajectories: how many of a step's trajectories are sent as text, >= 0.

    Raises:
        ConfigError: the package is not installed; the message names the extra.
    """

    package: ClassVar[str]
    extra: ClassVar[str]
    _config: Any = attrs.field(default=None, kw_only=True)
    _trajectories: int = attrs.field(default=8, kw_only=True)
    _run: Any = attrs.field(default=None, init=False)  # of the service's package
    _closed: bool = attrs.field(default=False, init=False)

    def __attrs_post_init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            text = f"{type(self).__name__}: the package {self.package!r} is not installed; "
            raise ConfigError(f"{text}install it with {_runtime.command(self.extra)}")
        if self._config is not None and not isinstance(self._config, Mapping):
            raise ConfigError("config", f"got {redact(_check.describe(self._config))}", "a mapping")
        self._config = plain(mask(self._config or {}))
        _check.integer("trajectories", self._trajectories, low=0)

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
        count = min(self._trajectories, len(played))
        rows: list[list[object]] = []
        for t in (played[i * len(played) // count] for i in range(count)):
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


class _WandbTracker(ServiceTracker):
    """What wandb and trackio have in common: tables, and runs that are finished."""

    def _log_texts(self, run: Any, rows: list[list[object]], step: int) -> None:
        table = importlib.import_module(self.package).Table(columns=list(COLUMNS), data=rows)
        self._log(run, {"trajectories": table}, step)

    def _end(self, run: Any) -> None:
        run.finish()


@attrs.define(eq=False, repr=False)
class Wandb(_WandbTracker):
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
        config, trajectories: as for ``ServiceTracker``: settings, which are masked, and how many trajectories a step.

    Raises:
        ConfigError: wandb is not installed.
    """

    package = extra = "wandb"
    _project: str = "rlkit"
    _name: str | None = attrs.field(default=None, kw_only=True)
    _id: str | None = attrs.field(default=None, kw_only=True)
    _folder: str | Path | None = attrs.field(default=None, kw_only=True)
    _mode: str | None = attrs.field(default=None, kw_only=True)

    @classmethod
    def for_run(cls, folder: Path) -> Self:
        """Return the tracker of a run in ``folder``, under the folder's name, with wandb's own files in it."""
        return cls(name=folder.resolve().name, folder=folder)

    def _open(self) -> Any:
        import wandb

        settings = wandb.Settings(
            console="off", silent=True, disable_git=True, disable_code=True, x_disable_meta=True, x_disable_stats=True
        )
        options = {
            "project": self._project,
            "name": self._name,
            "id": self._id,
            "dir": self._folder,
            "mode": self._mode,
        }
        resume = None if self._id is None else "allow"
        run = wandb.init(config=self._config, reinit="create_new", settings=settings, resume=resume, **options)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        run.log({**metrics, "step": step})


@attrs.define(eq=False, repr=False)
class Trackio(_WandbTracker):
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

    package = extra = "trackio"
    _project: str = "rlkit"
    _name: str | None = attrs.field(default=None, kw_only=True)
    _resume: str = attrs.field(default="allow", kw_only=True)
    _space: str | None = attrs.field(default=None, kw_only=True)

    def _open(self) -> Any:
        import trackio

        options = {"project": self._project, "name": self._name, "resume": self._resume, "space_id": self._space}
        return trackio.init(config=self._config, embed=False, auto_log_gpu=False, auto_log_cpu=False, **options)

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        run.log(metrics, step=step)


@attrs.define(eq=False, repr=False)
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
    _folder: str | Path
    _purge: int | None = attrs.field(default=None, init=False)

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
        writer = SummaryWriter(str(self._folder), purge_step=self._purge, flush_secs=10, filename_suffix=suffix)
        if self._config:
            writer.add_text("config", _as_code(json.dumps(self._config, indent=1)), 0)
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


@attrs.define(eq=False, repr=False)
class Mlflow(ServiceTracker):
    """A tracker that logs to a tracking server or database of MLflow (extra ``mlflow``).

    Metrics go there with their steps; characters that MLflow does not allow in names become "_". Settings become
    parameters, trajectories a JSON file among the run's artifacts.

    Args:
        experiment: its name; created if missing.
        name: the run's; None: MLflow makes one up.
        id: of a run to continue; None: a new one.
        uri: of the server or database; None: what MLflow finds in the environment.
        config, trajectories: as for ``ServiceTracker``: settings, which are masked, and how many trajectories a step.

    Raises:
        ConfigError: mlflow is not installed.
    """

    package = extra = "mlflow"
    _experiment: str = "rlkit"
    _name: str | None = attrs.field(default=None, kw_only=True)
    _id: str | None = attrs.field(default=None, kw_only=True)
    _uri: str | None = attrs.field(default=None, kw_only=True)
    _client: Any = attrs.field(default=None, init=False)

    def _open(self) -> Any:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri)
        if self._id is not None:
            return self._id
        known = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if known is None else known.experiment_id
        run = self._client.create_run(experiment, run_name=self._name).info.run_id
        params = [Param(_clean_name(key), text[:6000]) for key, text in flatten(self._config)]
        for start in range(0, len(params), 100):  # as many as a request may hold
            self._client.log_batch(run, params=params[start : start + 100])
        return run

    def _log(self, run: Any, metrics: Mapping[str, Any], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        listed = [Metric(_clean_name(name), value, now, step) for name, value in metrics.items()]
        for start in range(0, len(listed), 1000):
            self._client.log_batch(run, metrics=listed[start : start + 1000])

    def _log_texts(self, run: Any, rows: list[list[object]], step: int) -> None:
        text = json.dumps([dict(zip(COLUMNS, row, strict=True)) for row in rows], ensure_ascii=False, indent=1)
        self._client.log_text(run, text, f"trajectories/{step:08d}.json")

    def _end(self, run: Any) -> None:
        self._client.set_terminated(run)


def _clean_name(text: str) -> str:
    """Replace the characters that MLflow does not allow in names."""
    return re.sub(r"[^A-Za-z0-9_\-. :/]", "_", text)
