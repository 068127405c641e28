"""Groups of trajectories as lines of JSON: readable, appended to while a run goes on, complete enough for training."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlkit import _check, _files
from rlkit._runtime import warn
from rlkit.errors import DataError
from rlkit.trajectory import Failure, Group, Trajectory, Turn, checked_groups
from rlkit.types import SAMPLING_OPTIONS, Sample

__all__ = ["TornLine", "append", "from_record", "read", "to_record"]

FORMAT = "rlkit.group"
VERSION = 4
_OF_GROUP = ("env", "step", "number", "index")
_DRAWN = ("stop_reason", "version", *SAMPLING_OPTIONS)  # of a sample
_ENDS = ("nonterminal_reward", "nonterminal_override")
_PLAIN = ("ended", "terminated", "truncated", "env", "index", "seed", "reduction", *_ENDS)  # of a trajectory


class TornLine(UserWarning):
    """The warning that an incomplete line was left out."""


def append(path: str | Path, groups: Iterable[Group] | Group) -> int:
    """Add groups to a file of JSON lines, one line each, and return how many.

    A line is appended in one write, so several processes may append to one file, and a crash harms the last line at
    most. The next append ends an unfinished line instead of overwriting it.

    Args:
        path: the file; created if missing.
        groups: at any point of a run.

    Raises:
        DataError: an object that is not a group; nothing was written.
        CheckpointError: the file cannot be written; earlier lines stay as they were.
    """
    lines = [to_line(to_record(group)) for group in checked_groups(groups)]
    where = _path(path)
    with _files.as_checkpoint_error(where, "written"):
        _files.append(where, lines, mode=0o666)
        _files.sync(where)
    return len(lines)


def read(path: str | Path, *, strict: bool = False) -> Iterator[Group]:
    """Return the groups of such a file, one after the other, exactly: tokens, logprobs and rewards bit for bit.

    Args:
        path: the file.
        strict: whether an incomplete line raises instead of a ``TornLine`` warning.

    Raises:
        CheckpointError: the file cannot be read.
        DataError: a line is of another format or a newer version, holds an invalid group, or (strict) is incomplete.
    """
    where = _path(path)
    _check.flag("strict", strict)
    return _groups(where, strict=strict)


def _groups(where: Path, *, strict: bool) -> Iterator[Group]:
    with _files.as_checkpoint_error(where, "read"), where.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line, parse_constant=_refuse_constant)
            except (ValueError, RecursionError) as error:
                text = f"{where}:{number}: the line is incomplete and was skipped"
                if strict:
                    raise DataError(text) from error
                warn(TornLine(text))
                continue
            yield from_record(record, where=f"{where}:{number}")


def to_record(group: Group) -> dict[str, Any]:
    """Return a group's line: plain JSON, NaN as null, and each prompt as what it adds to the turn before.

    >>> from rlkit import Sample
    >>> turns = [Turn(Sample([5, 6], [7], [-0.5]), 1.0), Turn(Sample([5, 6, 7, 1], [8], [-0.25]))]
    >>> record = to_record(Group([Trajectory(turns)]))
    >>> record["trajectories"][0]["turns"][1]["prompt"]  # three tokens as before, then one more
    {'kept': 3, 'added': [1]}
    """
    return {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(group, name) for name in _OF_GROUP},
        "rewards": [_number(reward) for reward in group.rewards.tolist()],
        "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
        "failures": [attrs.asdict(failure) for failure in group.failures],
    }


def to_line(record: Mapping[str, Any]) -> str:
    """Return a record as a line of JSON; other values, which tags and messages may hold, become text."""
    try:
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):
        return json.dumps(_files.plain(record), ensure_ascii=False, allow_nan=False)


def from_record(record: object, *, where: str = "record") -> Group:
    """Return the group of a line; keys that others add to it, such as a tracker's advantages, are ignored.

    Raises:
        DataError: naming the place, where the record is not a group's, or of another version.
    """
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise DataError(where, "does not have this format", f"{FORMAT!r}")
    if record.get("version") != VERSION:
        what = f"has the version {record.get('version')!r}"
        raise DataError(where, what, f"{VERSION}", "read it with the rlkit that wrote it")
    try:
        trajectories = [_read_trajectory(each) for each in record["trajectories"]]
        failures = [Failure(**each) for each in record["failures"]]
        return Group(trajectories, failures=failures, **{name: record[name] for name in _OF_GROUP})
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise DataError(f"{where}: is damaged: {type(error).__name__}: {error}") from error


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    before = np.zeros(0, np.int64)
    turns = []
    for turn in trajectory.turns:
        sample = turn.sample
        kept = _common(before, turn.prompt)
        turns.append(
            {
                "reward": _number(turn.reward),
                "rewards": None if turn.rewards is None else [_number(reward) for reward in turn.rewards],
                **{name: getattr(sample, name) for name in _DRAWN},
                "metrics": dict(turn.metrics),
                "weight": turn.weight,
                "versions": None if sample.versions is None else sample.versions.tolist(),
                "prompt": {"kept": kept, "added": turn.prompt[kept:].tolist()},
                "tokens": turn.tokens.tolist(),
                "logprobs": turn.logprobs.tolist(),  # float32 is exact in float64, and that in JSON
            }
        )
        before = np.concatenate([turn.prompt, turn.tokens])
    return {
        "reward": _number(trajectory.reward),
        **{name: getattr(trajectory, name) for name in _PLAIN},
        "tags": dict(trajectory.tags),
        "metrics": dict(trajectory.metrics),
        "messages": [dict(message) for message in trajectory.messages],
        "turns": turns,
    }


def _read_trajectory(record: Mapping[str, Any]) -> Trajectory:
    before = np.zeros(0, np.int64)
    turns = []
    for each in record["turns"]:
        kept = _check.integer("prompt.kept", each["prompt"]["kept"], low=0, high=before.size, error=DataError)
        added = np.asarray(each["prompt"]["added"], dtype=np.int64)
        drawn = {name: each[name] for name in (*_DRAWN, "versions")}
        sample = Sample(np.concatenate([before[:kept], added]), each["tokens"], each["logprobs"], **drawn)
        several = None if each["rewards"] is None else [_reward(x) for x in each["rewards"]]
        turns.append(Turn(sample, _reward(each["reward"]), each["metrics"], rewards=several, weight=each["weight"]))
        before = np.concatenate([sample.prompt, sample.tokens])
    return Trajectory(turns, **{name: record[name] for name in (*_PLAIN, "tags", "metrics", "messages")})


def _common(one: np.ndarray, two: np.ndarray) -> int:
    """Return the length of the common beginning of two sequences."""
    size = min(one.size, two.size)
    different = np.flatnonzero(one[:size] != two[:size])
    return int(different[0]) if different.size else size


def _reward(value: float | None) -> float:
    return math.nan if value is None else value


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _path(path: str | Path) -> Path:
    _check.require(isinstance(path, (str, os.PathLike)) and str(path), "path", path, "a path")
    return Path(path)
