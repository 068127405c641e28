"""Setting a file of JSON lines back to a step, touching no more of it than has to go."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, BinaryIO

from rlkit._disk import replacing, synced
from rlkit._warn import warn
from rlkit.errors import CheckpointError

__all__ = ["record_of", "rewound"]

_log = logging.getLogger(__name__)


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return what a line holds; None where it is not whole."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def rewound(path: Path, step: int, place: int) -> int:
    """Drop the lines behind ``place`` of ``step`` or later, or not whole; return how many were of such a step.

    The file is cut where they begin. Only where something behind them stays, such as what another process has written
    meanwhile, or a line that is damaged further in front, is it written anew, beside, and renamed into place.

    Raises:
        CheckpointError: it cannot be read or written; it stays as it was.
    """
    try:
        size = path.stat().st_size if path.exists() else 0
        if not size and not place:
            return 0
        intact = size >= place and _ends_line(path, place)
        if not intact:
            what = f"has {size} bytes of {place}" if size < place else "is not what it was"
            text = f"{path}: {what}, after the checkpoint of step {step} was made: lines may be lost"
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
    pieces: list[tuple[int, int]] = [(0, place)]  # what stays: from, to
    with path.open("rb") as file:
        file.seek(place)
        end = place
        for line in file:
            begin, end = end, end + len(line)
            record = record_of(line)
            late = record is not None and isinstance(record.get("step"), int) and record["step"] >= step
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
        _log.warning("%s: %d lines were not whole; they were left out", path, broken)
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
            raise OSError("the file became shorter while it was read")
        new.write(piece)
        count -= len(piece)
