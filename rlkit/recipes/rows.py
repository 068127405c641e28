"""Rows of a file or of a data set on a hub: mappings, read at once."""

from __future__ import annotations

import importlib
import json
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
    """The rows.

    Args:
        path: a .jsonl, .json (a list) or .parquet file; or, if there is no such file, an id of a data set on a hub,
            such as "openai/gsm8k", which needs the package datasets and a network.
        where: the setting that names it, for messages.
        split, subset: of a data set on a hub; a file has the split "train" alone.

    Raises:
        ConfigError: there is no such file, or it can not be read.
        DataError: a row is no mapping.
    """
    if not path:
        raise ConfigError(_check.problem(where, "is not given", "a file, or a data set's name"))
    file = Path(path)
    if file.suffix not in _KINDS:
        if file.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
            expected = "a file that ends in " + ", ".join(_KINDS) + ", or a data set's name such as openai/gsm8k"
            raise ConfigError(_check.problem(where, f"is {path!r}", expected))
        return _hub(path, split, subset, where)
    if not file.is_file():
        raise ConfigError(_check.problem(where, f"is {path!r}", "a file that exists"))
    if split != "train":
        why = "a file has no splits: what is held out needs a file of its own"
        raise ConfigError(_check.problem(f"{where.rpartition('.')[0]}.split", f"is {split!r}", "'train'", why))
    try:
        rows = {".jsonl": _lines, ".json": _list, ".parquet": _table}[file.suffix](file)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: {path} can not be read: {error}") from error
    if not rows:
        raise ConfigError(_check.problem(where, f"{path} is empty", "at least one row"))
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DataError(_check.problem(f"{path}: row {i}", f"got {_check.shown(row)}", "a mapping"))
    return rows


def field(row: Mapping[str, Any], key: str, where: str) -> Any:
    """``row[key]``.

    Raises:
        DataError: the row has none, naming those that it has.
    """
    if key not in row or row[key] is None:
        raise DataError(_check.problem(where, f"has the fields {sorted(map(str, row))}", f"a field {key!r}"))
    return row[key]


def _lines(file: Path) -> list[Any]:
    found = []
    for number, line in enumerate(file.read_text("utf-8").split("\n"), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}, column {error.colno}: {error.msg}") from error
    return found


def _list(file: Path) -> list[Any]:
    found = json.loads(file.read_text("utf-8"))
    if not isinstance(found, list):
        raise ValueError("it holds no list")  # noqa: TRY004  # told as what can not be read
    return found


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
        found: Sequence[Mapping[str, Any]] = datasets.load_dataset(name, subset, split=split)
    except Exception as error:  # the package raises of many kinds
        text = f"{where}: the data set {name!r} (split {split!r}) could not be had from the hub, which needs a network"
        raise ConfigError(f"{text}: {error}") from error
    return found
