"""What a run's folder holds, as the page needs it. Lines that cannot be read are left out and counted."""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlkit import _check, storage
from rlkit._json import plain
from rlkit.errors import CheckpointError, ConfigError, DataError
from rlkit.harnesses import Result, results
from rlkit.tracking import masked, read_metrics, surroundings
from rlkit.tracking.jsonl import FILES, MetricsRow
from rlkit.tracking.lines import lines
from rlkit.tracking.vocabulary import read_vocabulary
from rlkit.trajectory import Group

__all__ = ["RunFolder"]


class RunFolder:
    """The files of a run, read as they are asked for.

    Args:
        folder: with any of ``metrics.jsonl``, ``trajectories.jsonl`` and ``config.json``.

    Raises:
        ConfigError: it is no path.
        CheckpointError: there is no such folder, or it holds none of these files.
    """

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not str(folder):
            raise ConfigError("folder", f"got {_check.shown(folder)}", "the path of a run's folder")
        self.path = Path(folder)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: there is no such folder")
        names = (FILES["metrics"], FILES["trajectories"], "config.json")
        if not any((self.path / name).exists() for name in names):
            raise CheckpointError(f"{self.path}: is no run's folder: it has none of {', '.join(names)}")
        self.unread = 0

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.path.resolve().name

    def metrics(self) -> list[MetricsRow]:
        """As ``rlkit.tracking.read_metrics``."""
        return read_metrics(self.path)

    def results(self) -> list[Result]:
        """What evaluation harnesses said about it, the last step first."""
        return results(self.path)[::-1]

    def config(self) -> dict[str, Any]:
        """Return the settings, keys masked; {} where there are none that can be read."""
        try:
            settings = plain(masked(json.loads((self.path / "config.json").read_text("utf-8"))))
        except (OSError, ValueError, RecursionError):
            return {}
        return settings if isinstance(settings, dict) else {"config": settings}

    def surroundings(self) -> dict[str, object]:
        """Return what it ran on, keys masked; {} where that is not known."""
        shown = plain(masked(surroundings.found(self.path)))
        return shown if isinstance(shown, dict) else {}

    def vocabulary(self) -> dict[str, str]:
        """Token id -> text, as far as it was kept."""
        return read_vocabulary(self.path / FILES["vocabulary"])

    def sizes(self) -> list[tuple[int, int]]:
        """(trajectories, bytes) of each line of trajectories, without making objects of them."""
        path = self.path / FILES["trajectories"]
        if not path.exists():
            return []
        try:
            with path.open("rb") as file:
                return [(line.count(b'"turns": ['), len(line)) for line in file]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error

    def groups(self, wanted: frozenset[int] | None = None) -> Iterator[tuple[Group, dict[str, list[object]]]]:
        """Each group with what belongs to its tokens: name -> one entry per trajectory.

        Args:
            wanted: which lines of the file to read, counted from 0; None: all.
        """
        path = self.path / FILES["trajectories"]
        extras: dict[tuple[object, ...], deque[dict[str, object]]] = defaultdict(deque)
        for record in lines(self.path / FILES["tokens"]):
            extras[_key(record)].append(record)
        self.unread = 0
        try:
            with path.open("rb") as file:
                for number, line in enumerate(file):
                    if not line.strip() or (wanted is not None and number not in wanted):
                        continue
                    group = _group(line, f"{path}:{number + 1}")
                    if group is None:
                        self.unread += 1
                    else:
                        yield group, _extras(group, extras)
        except FileNotFoundError:
            return
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _group(line: bytes, where: str) -> Group | None:
    try:
        return storage.from_record(json.loads(line), where=where)
    except (ValueError, RecursionError, DataError):
        return None


def _key(record: Mapping[str, object]) -> tuple[object, ...]:
    return tuple(repr(record.get(name)) for name in ("step", "env", "index", "number"))


def _extras(group: Group, extras: dict[tuple[Any, ...], deque[dict[str, Any]]]) -> dict[str, list[Any]]:
    """Return the first record under the group's key that fits its tokens."""
    key = _key({"step": group.step, "env": group.env, "index": group.index, "number": group.number})
    waiting = extras.get(key)
    while waiting:
        record = waiting.popleft()
        named: dict[str, list[Any]] = {
            name: record[name] for name in ("advantages", "trainer_logprobs") if name in record
        }
        if all(_fits(entries, group) for entries in named.values()):
            return named
    return {}


def _fits(entries: object, group: Group) -> bool:
    return (
        isinstance(entries, list)
        and len(entries) == len(group)
        and all(
            not isinstance(e, list) or len(e) == t.token_count for e, t in zip(entries, group.trajectories, strict=True)
        )
    )
