"""A run's folder: metrics and trajectories as lines of JSON, which can be rewound to a step."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypedDict

import attrs
import numpy as np

from rlkit import _check, _files, storage
from rlkit._files import from_json, replacing, synced, to_json
from rlkit._runtime import warn
from rlkit._secrets import mask, redact
from rlkit.backends.protocol import Tokenizer
from rlkit.errors import CheckpointError, ConfigError
from rlkit.tracking import _training, protocol
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["FILES", "Jsonl", "MetricsRow", "Vocabulary", "lines", "read_metrics", "read_vocabulary"]


def lines(path: Path) -> Iterator[dict[str, object]]:
    """Return the whole records of a file of JSON lines; an empty result if the file does not exist."""
    try:
        with path.open("rb") as file:
            for line in file:
                record = record_of(line)
                if record is not None:
                    yield record
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def append(path: Path, records: Iterable[Mapping[str, object]]) -> None:
    """Add records to a file of JSON lines; first end a line that a crash left unfinished."""
    try:
        _files.append(path, (json.dumps(record, allow_nan=False) for record in records))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error


_log = logging.getLogger(__name__)


def record_of(line: bytes) -> dict[str, object] | None:
    """Return the content of a line; None if it is incomplete."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def rewound(path: Path, step: int, place: int) -> int:
    """Drop lines after ``place`` of ``step`` or later, and incomplete ones; return how many were of such a step.

    The file is cut where they begin. Only if a later part stays, such as lines of another process, or an earlier line
    is damaged, is a new file written next to it and renamed into place.

    Raises:
        CheckpointError: it cannot be read or written; it stays as it was.
    """
    try:
        size = path.stat().st_size if path.exists() else 0
        if not size and not place:
            return 0
        intact = size >= place and _ends_line(path, place)
        if not intact:
            what = f"shrank from {place} to {size} bytes" if size < place else "has changed"
            text = f"{path}: {what} since the checkpoint of step {step}: lines may be lost"
            warn(text, RuntimeWarning)
            if not size:
                return 0
        return _cut(path, step, place if intact else 0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be rewound to step {step}: {error}") from error


def _ends_line(path: Path, place: int) -> bool:
    if not place:
        return True
    with path.open("rb") as file:
        file.seek(place - 1)
        return file.read(1) == b"\n"


def _cut(path: Path, step: int, place: int) -> int:
    dropped = broken = 0
    pieces: list[tuple[int, int]] = [(0, place)]  # the kept parts: from, to
    with path.open("rb") as file:
        file.seek(place)
        end = place
        for line in file:
            begin, end = end, end + len(line)
            record = record_of(line)
            at = None if record is None else record.get("step")
            late = isinstance(at, int) and at >= step
            dropped += late
            broken += record is None and bool(line.strip())
            if record is None or late:
                continue
            if pieces[-1][1] == begin:
                pieces[-1] = (pieces[-1][0], end)
            else:
                pieces.append((begin, end))
        unfinished = pieces[-1][1] == end and end > 0 and not _ends_line(path, end)
    if len(pieces) == 1:
        if pieces[0][1] < end:
            os.truncate(path, pieces[0][1])
            synced(path)
    else:
        _rewritten(path, pieces)
    if unfinished:
        with path.open("ab") as file:
            file.write(b"\n")
    if broken:
        _log.warning("%s: %d lines are incomplete and were skipped", path, broken)
    return dropped


def _rewritten(path: Path, pieces: list[tuple[int, int]]) -> None:
    """Replace a file by these pieces of it."""
    with replacing(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
        for begin, end in pieces:
            old.seek(begin)
            _copied(old, new, end - begin)


def _copied(old: BinaryIO, new: BinaryIO, count: int) -> None:
    while count > 0:
        piece = old.read(min(count, 1 << 20))
        if not piece:
            raise OSError("the file was truncated while it was read")
        new.write(piece)
        count -= len(piece)


_UNCLEAR = "\ufffd"  # the decoded form of bytes that are a part of a character
_LONGEST = 12  # tokens of a run that are decoded together


class Vocabulary:
    """A file of token id -> text, a line for each addition, in the order in which they are first seen.

    Tokens that hold a part of a character have no own text; runs of them are kept together, under their ids
    joined by commas.

    Args:
        path: the file; None: in memory only.
        tokenizer: anything with ``decode(tokens, skip_special=...)``.

    Raises:
        ConfigError: the tokenizer cannot decode.

    >>> import rlkit
    >>> from rlkit.trajectory import Trajectory, Turn
    >>> tokens = "né".encode()  # three bytes, which are the toy's tokens
    >>> group = Group([Trajectory([Turn(rlkit.Sample([65], list(tokens), [-1.0] * 3))])])
    >>> Vocabulary(None, rlkit.connect("toy").tokenizer).add([group])
    {'65': 'A', '110': 'n', '195': '\ufffd', '169': '\ufffd', '195,169': 'é'}
    """

    def __init__(self, path: Path | None, tokenizer: Tokenizer) -> None:
        if not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError(
                "tokenizer", f"got {_check.describe(tokenizer)}", "the policy's tokenizer, policy.tokenizer"
            )
        self._path = path
        self._tokenizer = tokenizer
        self._texts: dict[str, str] = {} if path is None else read_vocabulary(path)

    def add(self, groups: Iterable[Group]) -> dict[str, str]:
        """Return the texts of new tokens in these groups."""
        new: dict[str, str] = {}
        for group in groups:
            for trajectory in group.trajectories:
                before = np.zeros(0, np.int64)
                for turn in trajectory.turns:
                    whole = np.concatenate([turn.prompt, turn.tokens])
                    known = before.size if np.array_equal(whole[: before.size], before) else 0
                    self._add(whole[known:].tolist(), new)
                    before = whole
        if new and self._path is not None:
            append(self._path, [{"texts": new}])
        self._texts |= new
        return new

    def _add(self, tokens: list[int], new: dict[str, str]) -> None:
        for token in dict.fromkeys(tokens):
            if str(token) not in self._texts and str(token) not in new:
                new[str(token)] = self._tokenizer.decode([token], skip_special=False)
        unclear = {t for t in set(tokens) if _UNCLEAR in (new.get(str(t)) or self._texts.get(str(t), ""))}
        for run in runs(tokens, unclear) if unclear else ():
            key = ",".join(map(str, run))
            if len(run) > 1 and key not in self._texts and key not in new:
                text = self._tokenizer.decode(run, skip_special=False)
                if _UNCLEAR not in text:
                    new[key] = text


def runs(tokens: list[int], unclear: set[int]) -> Iterable[list[int]]:
    """Return the unbroken runs of tokens that are in ``unclear``, cut where they are long.

    >>> list(runs([1, 9, 8, 1, 9], {8, 9}))
    [[9, 8], [9]]
    """
    run: list[int] = []
    for token in tokens:
        if token in unclear and len(run) < _LONGEST:
            run.append(token)
            continue
        if run:
            yield run
        run = [token] if token in unclear else []
    if run:
        yield run


def read_vocabulary(path: Path) -> dict[str, str]:
    """Return the texts in a file that ``Vocabulary`` wrote; {} without one."""
    vocabulary: dict[str, str] = {}
    for record in lines(path):
        texts = record.get("texts")
        if isinstance(texts, dict):
            vocabulary |= {key: text for key, text in texts.items() if isinstance(text, str)}
    return vocabulary


FILES = {
    "metrics": "metrics.jsonl",
    "trajectories": "trajectories.jsonl",
    "tokens": "tokens.jsonl",
    "vocabulary": "vocabulary.jsonl",
}


class Jsonl:
    """A tracker that writes ``metrics.jsonl`` and ``trajectories.jsonl`` into a folder at once.

    Each line is appended before the call returns: a crash harms the last line at most, which readers leave out.

    Args:
        folder: created if missing; only the owner can read its files.
        tokenizer: the policy's, so that the run page can show tokens as text; None: it shows ids, and the messages.
        clock: gives the time of a line, in seconds since 1970.

    Raises:
        ConfigError: the folder is not a path, or the tokenizer cannot decode.
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
        except OSError as error:
            raise CheckpointError(f"{self.folder}: cannot be written: {error}") from error
        for name in ("metrics", "trajectories", "tokens"):
            append(self.folder / FILES[name], ())
        self._vocabulary: Vocabulary | None = None
        if tokenizer is not None:
            self.speak(tokenizer)

    def speak(self, tokenizer: Tokenizer) -> None:
        """Record the texts of tokens from now on; ``rlkit.Run`` calls it with its policy's tokenizer.

        Raises:
            ConfigError: the tokenizer cannot decode.
            CheckpointError: the file cannot be written.
        """
        if self._vocabulary is None:
            append(self.folder / FILES["vocabulary"], ())
            self._vocabulary = Vocabulary(self.folder / FILES["vocabulary"], tokenizer)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a line. Non-finite numbers are written as "NaN", "Infinity" or "-Infinity".

        Raises:
            DataError, ConfigError: a name is not text, a value not a number, or the step not an integer >= 0.
            CheckpointError: the file cannot be written.
        """
        numbers, step = protocol.checked(metrics, step)
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
            DataError: an object that is not a group; advantages or logprobs that do not fit them.
            ConfigError: the step is not an integer >= 0.
            CheckpointError: the file cannot be written.
        """
        step = _check.integer("log_trajectories(step)", step, low=0)
        groups = checked_groups(groups)
        extras = _training.records(groups, step, advantages=advantages, trainer_logprobs=trainer_logprobs)
        if self._vocabulary is not None:
            self._vocabulary.add(groups)
        append(self.folder / FILES["tokens"], extras)
        storage.append(self.folder / FILES["trajectories"], [_clean(group, step) for group in groups])

    def sync(self) -> dict[str, int]:
        """Sync the log to disk; return file -> bytes, for ``rewind(at=)``.

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
        """Drop lines of ``step`` and later, and incomplete ones; return how many lines of metrics were dropped.

        A run that resumes at ``step`` calls it once, so that each step occurs once.

        Args:
            step: the next step.
            at: the result of ``sync`` when the checkpoint was made. Earlier lines stay and are not read again; if
                the file is shorter, lines were lost, and a warning says so.

        Raises:
            ConfigError: the step is not an integer >= 0.
            CheckpointError: a file cannot be read or written; it is unchanged.
        """
        _check.integer("rewind(step)", step, low=0)
        if at is not None and not isinstance(at, Mapping):
            raise CheckpointError(f"rewind(at): got {_check.describe(at)}; expected a position returned by sync()")
        self._synced = {}
        dropped = {}
        for name in ("metrics", "tokens", "trajectories"):
            place = (at or {}).get(FILES[name], 0)
            if type(place) is not int or place < 0:
                raise CheckpointError(f"rewind(at): {FILES[name]} is {_check.describe(place)}; expected bytes")
            dropped[name] = rewound(self.folder / FILES[name], step, place)
        return dropped["metrics"]

    def close(self) -> None:
        """Sync the log to disk."""
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

    Non-finite numbers are floats again. Incomplete lines, and values that are not numbers, are left out.

    Raises:
        CheckpointError: there is no such folder, it is not a run's, or the file cannot be read.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in (*FILES.values(), "run.json", "config.json")):
        raise CheckpointError(f"{folder}: is not a run's folder: it has no {FILES['metrics']}")
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
    trajectories = [attrs.evolve(t, messages=mask(t.messages), tags=mask(t.tags)) for t in group.trajectories]
    failures = [attrs.evolve(failure, message=redact(failure.message)) for failure in group.failures]
    return attrs.evolve(group, trajectories=trajectories, failures=failures, step=step)
