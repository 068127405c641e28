"""A run's folder: metrics and trajectories as lines of JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rlkit import _check, storage
from rlkit.errors import CheckpointError, ConfigError
from rlkit.tracking import pertoken, values
from rlkit.tracking.secrets import masked, redact
from rlkit.tracking.vocabulary import Vocabulary
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["FILES", "Jsonl", "lines", "read_metrics"]

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
        ConfigError: the folder is no path, or the tokenizer can not decode.
        CheckpointError: the folder can not be made or written.

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

    def __init__(self, folder: str | Path, *, tokenizer: Any = None, clock: Callable[[], float] = time.time) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise ConfigError(_check.problem("Jsonl(folder)", f"got {_check.shown(folder)}", "a path"))
        self.folder = Path(folder)
        self._clock = clock
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in FILES.values():
                if name != FILES["vocabulary"] or tokenizer is not None:
                    _created(self.folder / name)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: can not be written: {error}") from error
        self._vocabulary = None if tokenizer is None else Vocabulary(self.folder / FILES["vocabulary"], tokenizer)

    def speak(self, tokenizer: Any) -> None:
        """Keeps the texts of tokens from now on, if it does not yet; ``rlkit.Run`` calls it with its policy's.

        Raises:
            ConfigError: the tokenizer can not decode.
            CheckpointError: the file can not be written.
        """
        if self._vocabulary is None:
            try:
                _created(self.folder / FILES["vocabulary"])
            except OSError as error:
                raise CheckpointError(f"{self.folder}: can not be written: {error}") from error
            self._vocabulary = Vocabulary(self.folder / FILES["vocabulary"], tokenizer)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Adds a line. What is not finite is written as "NaN", "Infinity" or "-Infinity".

        Raises:
            DataError, ConfigError: a name is no text, a value no number, the step no integer >= 0.
            CheckpointError: the file can not be written.
        """
        found, step = values.checked(metrics, step)
        written = {name: values.to_json(value) for name, value in found.items()}
        append(self.folder / FILES["metrics"], [{"step": step, "time": self._clock(), "metrics": written}])

    def log_trajectories(
        self,
        groups: Iterable[Group],
        step: int,
        *,
        advantages: Sequence[Any] | None = None,
        trainer_logprobs: Sequence[Any] | None = None,
    ) -> None:
        """Adds the groups under this step. Keys are masked in messages, tags and failures; tokens stay as they are.

        Raises:
            DataError: something else than groups; advantages or logprobs that do not fit them.
            ConfigError: the step is no integer >= 0.
            CheckpointError: the file can not be written.
        """
        step = _check.integer("log_trajectories(step)", step, low=0)
        groups = checked_groups(groups)
        extras = pertoken.records(groups, step, advantages=advantages, trainer_logprobs=trainer_logprobs)
        if self._vocabulary is not None:
            self._vocabulary.add(groups)
        append(self.folder / FILES["tokens"], extras)
        storage.append(self.folder / FILES["trajectories"], [_clean(group, step) for group in groups])

    def rewind(self, step: int) -> int:
        """Drops what was logged at or after ``step``, and lines that are not whole; how many of metrics.

        A run that resumes at ``step`` calls it once, so that each step is there once.

        Raises:
            ConfigError: the step is no integer >= 0.
            CheckpointError: a file can not be read or written; it stays as it was.
        """
        _check.integer("rewind(step)", step, low=0)
        dropped = {name: _rewound(self.folder / FILES[name], step) for name in ("metrics", "tokens", "trajectories")}
        return dropped["metrics"]

    def close(self) -> None:
        """Makes what was logged outlast a power failure too."""
        for name in FILES.values():
            path = self.folder / name
            if path.exists():
                _synced(path)

    def __repr__(self) -> str:
        return f"Jsonl({str(self.folder)!r})"


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's ``metrics.jsonl``: {"step": int, "time": float, "metrics": {name: float}}; [] without one.

    What is not finite is a float again. Lines that are not whole, and values that are no numbers, are left out.

    Raises:
        CheckpointError: the file can not be read.
    """
    rows = []
    for record in lines(Path(folder) / FILES["metrics"]):
        metrics = record.get("metrics")
        step, seconds = record.get("step"), values.from_json(record.get("time"))
        if not isinstance(metrics, dict) or isinstance(step, bool) or not isinstance(step, int) or step < 0:
            continue
        numbers = {name: values.from_json(value) for name, value in metrics.items()}
        kept = {name: value for name, value in numbers.items() if value is not None}
        rows.append({"step": step, "time": seconds or 0.0, "metrics": kept})
    return rows


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole records of a file of JSON lines; nothing where there is no such file."""
    try:
        with path.open("rb") as file:
            for line in file:
                record = _record(line)
                if record is not None:
                    yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path}: can not be read: {error}") from error


def append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Adds records to a file of JSON lines; a line that a crash left unfinished is closed off first."""
    if not records:
        return
    text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
    try:
        _created(path)
        with path.open("rb+", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            if size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    text = "\n" + text
        with path.open("ab", buffering=0) as file:
            data = text.encode()
            if file.write(data) != len(data):
                raise OSError("the line was not written to its end")
    except OSError as error:
        raise CheckpointError(f"{path}: can not be written: {error}") from error


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _clean(group: Group, step: int) -> Group:
    """The group under ``step``, without keys in its texts."""
    trajectories = [attrs.evolve(t, messages=masked(t.messages), tags=masked(t.tags)) for t in group.trajectories]
    failures = [attrs.evolve(failure, message=redact(failure.message)) for failure in group.failures]
    return attrs.evolve(group, trajectories=trajectories, failures=failures, step=step)


def _created(path: Path) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600))


def _rewound(path: Path, step: int) -> int:
    """Rewrites the file without the lines at or after ``step``; how many that were."""
    dropped = broken = 0
    temporary = path.with_name(f".{path.name}.partial")
    try:
        if not path.exists():
            return 0
        temporary.unlink(missing_ok=True)
        _created(temporary)
        with path.open("rb") as old, temporary.open("ab") as new:
            for line in old:
                record = _record(line)
                if record is None:
                    broken += bool(line.strip())
                elif not isinstance(record.get("step"), int) or record["step"] < step:
                    new.write(line if line.endswith(b"\n") else line + b"\n")
                else:
                    dropped += 1
        if dropped or broken:
            _synced(temporary)
            temporary.replace(path)
            _synced(path.parent)
    except OSError as error:
        raise CheckpointError(f"{path}: can not be rewound to step {step}: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if broken:
        _log.warning("%s: %d lines were not whole; they were left out", path, broken)
    return dropped


def _synced(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
