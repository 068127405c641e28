"""Rows of a file or of a data set on a hub: mappings, read at once."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit import _check
from rlkit.errors import ConfigError, DataError

__all__ = ["field", "read"]

_KINDS = (".jsonl", ".json", ".parquet")


def read(
    path: str | None, *, where: str, split: str = "train", subset: str | None = None
) -> Sequence[Mapping[str, Any]]:
    """Return the rows.

    Args:
        path: a .jsonl, .json (a list) or .parquet file; a folder of such files that are named after splits, as
            ``train.jsonl`` or ``test-00000-of-00002.parquet``; or, if there is nothing of that name, an id of a data
            set on a hub, such as "openai/gsm8k", which needs the package datasets and a network.
        where: the setting that names it, for messages.
        split: which rows. Of a file those whose field ``split`` says so, or all if it is named after the split; "train"
            is all of a file that has no such field.
        subset: of a data set on a hub; of a folder, the folder in it.

    Raises:
        ConfigError: there is no such file, or it cannot be read.
        DataError: a row is no mapping.
    """
    if not path:
        raise ConfigError(where, "is not given", "a file, a folder, or a data set's name")
    place = Path(path)
    if place.is_dir():
        files = _of_split(place, split, subset, where)
        return [row for file in files for row in _file(file, where)]
    if place.suffix not in _KINDS:
        if place.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
            expected = (
                "a file that ends in " + ", ".join(_KINDS) + ", a folder, or a data set's name such as openai/gsm8k"
            )
            raise ConfigError(where, f"is {path!r}", expected)
        return _hub(path, split, subset, where)
    if not place.is_file():
        raise ConfigError(where, f"is {path!r}", "a file that exists")
    rows = _file(place, where)
    if any("split" in row for row in rows):
        chosen = [row for row in rows if row.get("split", "train") == split]
        if chosen:
            return chosen
    elif split == "train" or _named(place, split):
        return rows
    known = sorted({str(row["split"]) for row in rows if "split" in row}) or ["train"]
    why = "what is held out needs a file, a folder or a field of its own"
    raise ConfigError(f"{where.rpartition('.')[0]}.split", f"is {split!r}", " or ".join(known), why)


def _of_split(folder: Path, split: str, subset: str | None, where: str) -> list[Path]:
    """Return the files of a split, in the order of their names."""
    inner = folder / subset if subset and (folder / subset).is_dir() else folder
    places = [inner, inner / "data"] if (inner / "data").is_dir() else [inner]
    files = sorted(file for place in places for file in place.iterdir() if file.suffix in _KINDS)
    of_split = [file for file in files if _named(file, split)]
    if not of_split:
        names = ", ".join(file.name for file in files[:8]) or "no such files"
        what, expected = f"the folder {str(inner)!r} has {names}", f"{split}.jsonl, or .json or .parquet"
        raise ConfigError(f"{where.rpartition('.')[0]}.split", what, expected)
    return of_split


def _named(file: Path, split: str) -> bool:
    """Return whether a file is named after the split: ``test.jsonl``, ``test-00000-of-00002.parquet``."""
    return split in re.split(r"[-_.]", file.stem)


def _file(file: Path, where: str) -> list[Any]:
    try:
        rows = {".jsonl": _lines, ".json": _list, ".parquet": _table}[file.suffix](file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {file} cannot be read: {error}") from error
    if not rows:
        raise ConfigError(where, f"{file} is empty", "at least one row")
    for i, row in enumerate(rows):
        _check.require(isinstance(row, Mapping), f"{file}: row {i}", row, "a mapping", error=DataError)
    return rows


def field(row: Mapping[str, Any], key: str, where: str) -> Any:
    """Return ``row[key]``, or where there is no such key and it has dots, what ``row["a"]["b"]`` is of "a.b".

    Raises:
        DataError: the row has none, naming those that it has.
    """
    value: Any = row.get(key)
    if value is None and "." in key:
        value = row
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise DataError(where, f"has the fields {sorted(map(str, row))}", f"a field {key!r}")
    return value


def _lines(file: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return rows


def _list(file: Path) -> list[Any]:
    rows = json.loads(file.read_text("utf-8"))
    if not isinstance(rows, list):
        raise ValueError("it holds no list")  # noqa: TRY004  # told as what cannot be read
    return rows


def _table(file: Path) -> list[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"{file}: a parquet file needs pyarrow: pip install pyarrow") from error
    rows: list[Any] = parquet.read_table(file).to_pylist()
    return rows


def _hub(name: str, split: str, subset: str | None, where: str) -> Sequence[Mapping[str, Any]]:
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        text = f"{where}: {name!r} is no file; a data set on a hub needs the package datasets: pip install datasets"
        raise ConfigError(text) from error
    try:
        rows: Sequence[Mapping[str, Any]] = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the package raises of many kinds
        text = f"{where}: the data set {name!r} (split {split!r}) could not be had from the hub, which needs a network"
        raise ConfigError(f"{text}: {error}") from error
    return rows
