"""A run's folder: metrics and trajectories as lines of JSON."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import attrs

from rlkit import _check, _disk, storage
from rlkit._disk import synced
from rlkit._json import from_json, to_json
from rlkit._secrets import masked, redact
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import CheckpointError
from rlkit.tracking import pertoken, values
from rlkit.tracking.lines import append, lines
from rlkit.tracking.rewinding import rewound
from rlkit.tracking.vocabulary import Vocabulary
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["FILES", "Jsonl", "read_metrics"]

FILES = {
    "metrics": "metrics.jsonl",
    "trajectories": "trajectories.jsonl",
    "tokens": "tokens.jsonl",
    "vocabulary": "vocabulary.jsonl",
}

_log = logging.getLogger(__name__)


class Jsonl:
    """Writes ``metrics.jsonl`` and ``trajectories.jsonl`` into a folder; what is logged is in the file when it returns.

    A line is written at once and behind what is there: a crash harms the last line at most, which readers leave out.

    Args:
        folder: made if it is not there; its files can be read by their owner only.
        tokenizer: the policy's, so that the run page can show tokens as text; None: it shows ids, and the messages.
        clock: gives the time of a line, in seconds since 1970.

    Raises:
        ConfigError: the folder is no path, or the tokenizer cannot decode.
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

    def __init__(
        self, folder: str | Path, *, tokenizer: Tokenizer | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        _check.require(isinstance(folder, (str, os.PathLike)) and str(folder), "Jsonl(folder)", folder, "a path")
        self.folder = Path(folder)
        self._clock = clock
        self._synced: dict[str, int] = {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in FILES.values():
                if name != FILES["vocabulary"] or tokenizer is not None:
                    _disk.append(self.folder / name, ())
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be written: {error}") from error
        self._vocabulary = None if tokenizer is None else Vocabulary(self.folder / FILES["vocabulary"], tokenizer)

    def speak(self, tokenizer: Tokenizer) -> None:
        """Keep the texts of tokens from now on; ``rlkit.Run`` calls it with its policy's tokenizer.

        Raises:
            ConfigError: the tokenizer cannot decode.
            CheckpointError: the file cannot be written.
        """
        if self._vocabulary is None:
            try:
                _disk.append(self.folder / FILES["vocabulary"], ())
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be written: {error}") from error
            self._vocabulary = Vocabulary(self.folder / FILES["vocabulary"], tokenizer)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a line. What is not finite is written as "NaN", "Infinity" or "-Infinity".

        Raises:
            DataError, ConfigError: a name is no text, a value no number, the step no integer >= 0.
            CheckpointError: the file cannot be written.
        """
        numbers, step = values.checked(metrics, step)
        written = {name: to_json(value) for name, value in numbers.items()}
        append(self.folder / FILES["metrics"], [{"step": step, "time": self._clock(), "metrics": written}])

    def log_trajectories(
        self,
        groups: Iterable[Group],
        step: int,
        *,
        advantages: Sequence[object] | None = None,
        trainer_logprobs: Sequence[object] | None = None,
    ) -> None:
        """Add the groups under this step. Keys are masked in messages, tags and failures; tokens stay as they are.

        Raises:
            DataError: something else than groups; advantages or logprobs that do not fit them.
            ConfigError: the step is no integer >= 0.
            CheckpointError: the file cannot be written.
        """
        step = _check.integer("log_trajectories(step)", step, low=0)
        groups = checked_groups(groups)
        extras = pertoken.records(groups, step, advantages=advantages, trainer_logprobs=trainer_logprobs)
        if self._vocabulary is not None:
            self._vocabulary.add(groups)
        append(self.folder / FILES["tokens"], extras)
        storage.append(self.folder / FILES["trajectories"], [_clean(group, step) for group in groups])

    def sync(self) -> dict[str, int]:
        """Make what was logged so far outlast a power failure too; file -> bytes, for ``rewind(at=)``.

        ``rlkit.Run`` calls it for each checkpoint, which then holds where the logs ended.

        Raises:
            CheckpointError: a file cannot be read or written.
        """
        sizes = {}
        try:
            for name in FILES.values():
                path = self.folder / name
                if path.exists():
                    sizes[name] = path.stat().st_size
                    if self._synced.get(name) != sizes[name]:
                        synced(path)
            if not self._synced and sizes:
                synced(self.folder)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be synced: {error}") from error
        self._synced = dict(sizes)
        return sizes

    def rewind(self, step: int, *, at: Mapping[str, int] | None = None) -> int:
        """Drop what was logged at or after ``step``, and lines that are not whole; return how many of metrics.

        A run that resumes at ``step`` calls it once, so that each step is there once.

        Args:
            step: that is done next.
            at: what ``sync`` gave when the checkpoint was made. What was logged before stays and is not read again;
                where there is less than that, lines were lost, and a warning says so.

        Raises:
            ConfigError: the step is no integer >= 0.
            CheckpointError: a file cannot be read or written; it stays as it was.
        """
        _check.integer("rewind(step)", step, low=0)
        if at is not None and not isinstance(at, Mapping):
            raise CheckpointError(f"rewind(at): got {_check.shown(at)}; expected what sync() gave")
        self._synced = {}
        dropped = {}
        for name in ("metrics", "tokens", "trajectories"):
            place = (at or {}).get(FILES[name], 0)
            if type(place) is not int or place < 0:
                raise CheckpointError(f"rewind(at): {FILES[name]} is {_check.shown(place)}; expected bytes")
            dropped[name] = rewound(self.folder / FILES[name], step, place)
        return dropped["metrics"]

    def close(self) -> None:
        """Make what was logged outlast a power failure too."""
        self.sync()

    def __repr__(self) -> str:
        return f"Jsonl({str(self.folder)!r})"


class MetricsRow(TypedDict):
    """A line of ``metrics.jsonl``."""

    step: int
    time: float
    metrics: dict[str, float]


def read_metrics(folder: str | Path) -> list[MetricsRow]:
    """Read a run's ``metrics.jsonl``: {"step": int, "time": float, "metrics": {name: float}}; [] where it has
    logged none yet.

    What is not finite is a float again. Lines that are not whole, and values that are no numbers, are left out.

    Raises:
        CheckpointError: there is no such folder, it is no run's, or the file cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in (*FILES.values(), "run.json", "config.json")):
        raise CheckpointError(f"{folder}: is no run's folder: it has no {FILES['metrics']}")
    rows: list[MetricsRow] = []
    for record in lines(folder / FILES["metrics"]):
        metrics = record.get("metrics")
        step, seconds = record.get("step"), from_json(record.get("time"))
        if not isinstance(metrics, dict) or isinstance(step, bool) or not isinstance(step, int) or step < 0:
            continue
        numbers = {name: from_json(value) for name, value in metrics.items()}
        readable = {name: value for name, value in numbers.items() if value is not None}
        rows.append({"step": step, "time": seconds or 0.0, "metrics": readable})
    return rows


def _clean(group: Group, step: int) -> Group:
    """Return the group under ``step``, without keys in its texts."""
    trajectories = [attrs.evolve(t, messages=masked(t.messages), tags=masked(t.tags)) for t in group.trajectories]
    failures = [attrs.evolve(failure, message=redact(failure.message)) for failure in group.failures]
    return attrs.evolve(group, trajectories=trajectories, failures=failures, step=step)
