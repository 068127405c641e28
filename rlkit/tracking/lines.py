"""Files of JSON lines: what is whole is read, and what is added stands behind it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import _disk
from rlkit.errors import CheckpointError
from rlkit.tracking.rewinding import record_of

__all__ = ["append", "lines"]


def lines(path: Path) -> Iterator[dict[str, object]]:
    """Return the whole records of a file of JSON lines; nothing where there is no such file."""
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


def append(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to a file of JSON lines; a line that a crash left unfinished is closed off first."""
    try:
        _disk.append(path, (json.dumps(record, allow_nan=False) for record in records))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
