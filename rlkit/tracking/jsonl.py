"""A run's folder: metrics and trajectories as lines of JSON, which can be rewound to a step."""

from __future__ import annotations

import math
import numbers
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict

import attrs
import numpy as np

from rlkit import _check, _files, storage
from rlkit._secrets import mask, redact
from rlkit.errors import CheckpointError, DataError
from rlkit.trajectory import Group, checked_groups

__all__ = ["FILES", "Jsonl", "MetricsRow", "PerToken", "check_metrics", "check_per_token", "read_metrics"]

FILES = METRICS, TRAJECTORIES = "metrics.jsonl", "trajectories.jsonl"


PerToken: TypeAlias = Sequence[object] | None
"""An entry for each trajectory: a number, or one for each token of the policy."""


def check_metrics(metrics: object, step: object, where: str = "log") -> tuple[dict[str, float], int]:
    """Return the metrics as name -> float, keys in names masked, and the step.

    Raises:
        DataError: the metrics are not a mapping of names to numbers.
        ConfigError: the step is not an integer >= 0.

    >>> import numpy as np
    >>> check_metrics({"a": np.float32(0.5), "b": True, "c": np.array(2)}, 3)
    ({'a': 0.5, 'b': 1.0, 'c': 2.0}, 3)
    """
    step = _check.integer(f"{where}(step)", step, low=0)
    if not isinstance(metrics, Mapping):
        raise DataError(f"{where}(metrics)", f"got {_check.describe(metrics)}", "a mapping of names to numbers")
    floats = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}(metrics)", f"has the key {_check.describe(name)}", "non-empty names")
        value = _check.plain(value)
        if not isinstance(value, numbers.Real):
            found = f"got {redact(_check.describe(value))}"
            raise DataError(f"{where}(metrics)[{redact(name)!r}]", found, "a number")
        try:
            floats[redact(name)] = float(value)
        except OverflowError:  # an integer beyond what a float can hold
            floats[redact(name)] = -math.inf if value < 0 else math.inf
    return floats, step


def check_per_token(groups: Sequence[Group], **given: PerToken) -> list[dict[str, object]]:
    """Return the given values of each trajectory, over all groups: name -> a number, or one per token of the policy.

    Args:
        groups: where the values belong.
        given: name -> one entry per trajectory; None is left out. Only "advantages" may be numbers.

    Raises:
        DataError: naming the entry that does not fit.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    found: list[dict[str, object]] = [{} for _ in trajectories]
    for name, values in given.items():
        if values is None:
            continue
        _check.entries(name, values, len(trajectories), "one per trajectory, over all groups")
        for i, (value, trajectory) in enumerate(zip(values, trajectories, strict=True)):
            array = _check.as_array(f"{name}[{i}]", value, "a number, or one per token")
            if array.shape != (trajectory.token_count,) and (array.shape or name != "advantages"):
                expected = f"{'a number, or ' * (name == 'advantages')}shape ({trajectory.token_count},)"
                raise DataError(f"{name}[{i}]", f"has shape {array.shape}", expected, "one per token of the policy")
            found[i][name] = np.asarray(array, np.float64).tolist()  # float32 is exact in float64, and that in JSON
    return found


class Jsonl:
    """A tracker that writes ``metrics.jsonl`` and ``trajectories.jsonl`` into a folder at once.

    Each line is appended before the call returns: a crash harms the last line at most, which readers leave out.

    Args:
        folder: created if missing; only the owner can read its files.
        clock: gives the time of a line, in seconds since 1970.

    Raises:
        ConfigError: the folder is not a path.
        CheckpointError: the folder cannot be made or written.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> tracker = Jsonl(folder)
    >>> for step in range(3):
    ...     tracker.log({"train/loss": 1.0 / (step + 1)}, step)
    >>> tracker.rewind(2)  # resumed from a checkpoint made before step 2
    1
    >>> [row["metrics"] for row in read_metrics(folder)]
    [{'train/loss': 1.0}, {'train/loss': 0.5}]
    """

    inline = True

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        _check.require(isinstance(folder, (str, os.PathLike)) and str(folder), "Jsonl(folder)", folder, "a path")
        self.folder = Path(folder)
        self._clock = clock
        self._synced: dict[str, int] = {}
        with _files.as_checkpoint_error(self.folder, "written"):
            self.folder.mkdir(parents=True, exist_ok=True)
        for name in FILES:
            self._append(name, ())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a line. Non-finite numbers are written as "NaN", "Infinity" or "-Infinity".

        Raises:
            DataError, ConfigError: a name is not text, a value not a number, or the step not an integer >= 0.
            CheckpointError: the file cannot be written.
        """
        floats, step = check_metrics(metrics, step)
        self._append(METRICS, [{"step": step, "time": self._clock(), "metrics": floats}])

    def log_trajectories(
        self, groups: Iterable[Group], step: int, *, advantages: PerToken = None, trainer_logprobs: PerToken = None
    ) -> None:
        """Add a line for each group, under this step, which ``rlkit.storage.read`` reads.

        An entry of its "trajectories" gets "advantages" and "trainer_logprobs", where they are given. Keys are masked
        in messages, tags and failures; tokens stay as they are.

        Raises:
            DataError: an object that is not a group; advantages or logprobs that do not fit them.
            ConfigError: the step is not an integer >= 0.
            CheckpointError: the file cannot be written.
        """
        step = _check.integer("log_trajectories(step)", step, low=0)
        groups = checked_groups(groups)
        values = iter(check_per_token(groups, advantages=advantages, trainer_logprobs=trainer_logprobs))
        records = [storage.to_record(_mask_texts(group, step)) for group in groups]
        for trajectory in (each for record in records for each in record["trajectories"]):
            trajectory.update(next(values))
        self._append(TRAJECTORIES, records)

    def sync(self) -> dict[str, int]:
        """Sync the log to disk; return its position, for ``rewind``: file -> bytes.

        ``rlkit.Run`` calls it for each checkpoint, which then holds where the logs ended.

        Raises:
            CheckpointError: a file cannot be read or written.
        """
        with _files.as_checkpoint_error(self.folder, "synced"):
            sizes = {name: (self.folder / name).stat().st_size for name in FILES if (self.folder / name).exists()}
            for name, _ in sizes.items() - self._synced.items():
                _files.sync(self.folder / name)
            if sizes and not self._synced:
                _files.sync(self.folder)
        self._synced = dict(sizes)
        return sizes

    def rewind(self, step: int, position: Mapping[str, int] | None = None) -> int:
        """Drop lines of ``step`` and later, and incomplete ones; return how many lines of metrics were dropped.

        A run that resumes at ``step`` calls it once, so that each step occurs once.

        Args:
            step: the next step.
            position: the result of ``sync`` when the checkpoint was made. Earlier lines stay and are not read again;
                if the file is shorter, lines were lost, and a warning says so.

        Raises:
            ConfigError: the step is not an integer >= 0.
            CheckpointError: a file cannot be read or written; it is unchanged.
        """
        _check.integer("rewind(step)", step, low=0)
        ends = {} if position is None else position
        if not isinstance(ends, Mapping) or not all(type(ends.get(x, 0)) is int and ends.get(x, 0) >= 0 for x in FILES):
            raise CheckpointError(f"rewind(position): got {_check.describe(position)}; expected what sync() returned")
        self._synced = {}
        dropped = [_files.rewind(self.folder / name, step, ends.get(name, 0)) for name in FILES]
        return dropped[0]

    def close(self) -> None:
        """Sync the log to disk."""
        self.sync()

    def __repr__(self) -> str:
        return f"Jsonl({str(self.folder)!r})"

    def _append(self, name: str, records: Iterable[Mapping[str, object]]) -> None:
        with _files.as_checkpoint_error(self.folder / name, "written"):
            _files.append(self.folder / name, map(storage.to_line, records))


class MetricsRow(TypedDict):
    """A line of ``metrics.jsonl``."""

    step: int
    time: float
    metrics: dict[str, float]


def read_metrics(folder: str | Path) -> list[MetricsRow]:
    """Read a run's ``metrics.jsonl``: {"step": int, "time": float, "metrics": {name: float}}; [] where it has
    logged none yet.

    Non-finite numbers are floats again. Incomplete lines, and values that are not numbers, are left out.

    Raises:
        CheckpointError: the folder does not exist or is not a run's, or the file cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in (*FILES, "run.json", "config.json")):
        raise CheckpointError(f"{folder}: is not a run's folder: it has no {METRICS}")
    rows: list[MetricsRow] = []
    for record in _files.read_lines(folder / METRICS):
        metrics, step = record.get("metrics"), record.get("step")
        if isinstance(metrics, dict) and type(step) is int and step >= 0:
            floats = {name: _files.from_json(value) for name, value in metrics.items()}
            readable = {name: value for name, value in floats.items() if value is not None}
            rows.append({"step": step, "time": _files.from_json(record.get("time")) or 0.0, "metrics": readable})
    return rows


def _mask_texts(group: Group, step: int) -> Group:
    """Return the group under ``step``, without keys in its texts."""
    trajectories = [attrs.evolve(t, messages=mask(t.messages), tags=mask(t.tags)) for t in group.trajectories]
    failures = [attrs.evolve(failure, message=redact(failure.message)) for failure in group.failures]
    return attrs.evolve(group, trajectories=trajectories, failures=failures, step=step)
