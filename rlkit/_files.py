"""Files that outlast a power failure, JSON lines that can be rewound, and YAML read within limits."""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import logging
import math
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from rlkit._runtime import missing, warn
from rlkit.errors import CheckpointError, ConfigError

# Errors of systems that cannot sync, on network drives and some that are mounted by programs.
_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_warned: set[int] = set()  # devices
_PIECE = 1 << 20  # bytes that are copied at a time


@contextlib.contextmanager
def as_checkpoint_error(path: Path, done: str) -> Iterator[None]:
    """Turn the system's errors into a CheckpointError: ``path`` cannot be ``done``."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be {done}: {error}") from error


def append(path: Path, lines: Iterable[str], *, mode: int = 0o600) -> None:
    """Append lines to a file, each in one write; first end a line that a crash left unfinished.

    Args:
        path: made with ``mode`` if it does not exist. Several processes may append to it.
        lines: without their ends.
        mode: the permissions of a new file.

    Raises:
        OSError: a line could not be written; earlier ones stay.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), mode)
    with os.fdopen(descriptor, "rb+", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        end = b"\n" if file.read(1) not in (b"\n", b"") else b""
        for line in lines:
            data = end + line.encode("utf-8", errors="backslashreplace") + b"\n"
            end = b""
            if file.write(data) != len(data):
                raise OSError("the line was written only in part")


def read_line(line: bytes) -> dict[str, object] | None:
    """Return the record of a JSON line; None if it is incomplete or holds something else."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_lines(path: Path) -> Iterator[dict[str, object]]:
    """Yield the whole records of a file of JSON lines; none if it does not exist.

    Raises:
        CheckpointError: it cannot be read.
    """
    with as_checkpoint_error(path, "read"), contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        yield from filter(None, map(read_line, file))


def rewind(path: Path, step: int, position: int = 0) -> int:
    """Drop lines beyond ``position`` that are of ``step`` or later, or incomplete; return how many are of such a step.

    Only what lies beyond the position is read. The file is truncated where later lines begin; it is replaced only if
    an earlier step comes after them, such as a line of another process.

    Args:
        path: a file of JSON lines; it may be missing.
        step: the key "step" of a line is compared with it.
        position: bytes that stay. A file that ended elsewhere at that time has lost lines: it is read from its
            beginning, with a warning.

    Raises:
        CheckpointError: it cannot be read or written; it stays as it was.
    """
    with as_checkpoint_error(path, f"rewound to step {step}"):
        size = path.stat().st_size if path.exists() else 0
        if size < position or not _ends_line(path, position):  # the system may leave zeros where lines were
            what = f"shrank from {position} to {size} bytes" if size < position else "has changed"
            warn(f"{path}: {what} since the checkpoint of step {step}: lines may be lost", RuntimeWarning)
            position = 0
        return _rewind(path, step, position) if size else 0


def _rewind(path: Path, step: int, position: int) -> int:
    dropped = torn = 0
    end, gap, scattered = position, False, False
    for line, record, late in _read_tail(path, step, position):
        dropped += late
        torn += record is None and bool(line.strip())
        if late or record is None:
            gap = True
        elif gap:
            scattered = True
        else:
            end += len(line)
    if scattered:
        with replace_file(path) as temporary, path.open("rb") as old, temporary.open("wb") as new:
            for start in range(0, position, _PIECE):
                new.write(old.read(min(_PIECE, position - start)))
            tail = _read_tail(path, step, position)
            new.writelines(line for line, record, late in tail if record is not None and not late)
    elif gap:
        os.truncate(path, end)
        sync(path)
    if not _ends_line(path, path.stat().st_size):
        with path.open("ab") as file:
            file.write(b"\n")
    if torn:
        logging.getLogger(__name__).warning("%s: %d lines are incomplete and were skipped", path, torn)
    return dropped


def _read_tail(path: Path, step: int, position: int) -> Iterator[tuple[bytes, dict[str, object] | None, bool]]:
    """Yield each line after ``position``, its record, and whether it is of ``step`` or later."""
    with path.open("rb") as file:
        file.seek(position)
        for line in file:
            record = read_line(line)
            found = None if record is None else record.get("step")
            yield line, record, isinstance(found, int) and found >= step


def _ends_line(path: Path, position: int) -> bool:
    """Return whether a line of the file ends at this many bytes."""
    if not position:
        return True
    with path.open("rb") as file:
        file.seek(position - 1)
        return file.read(1) == b"\n"


@contextlib.contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield an empty file next to ``path`` that only its owner reads; it replaces ``path`` if the block raises nothing.

    Raises:
        OSError: it could not be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Sync a file or a folder.

    A file system that cannot sync is not an error: for files it warns once for each, for folders never, as databases
    do, since most that cannot sync a folder write names at once.

    Raises:
        OSError: syncing is supported, and failed.
    """
    folder = path.is_dir()
    if folder and os.name == "nt":  # which opens no folders
        return
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNKNOWN:
            raise
        device = os.fstat(descriptor).st_dev
        if not folder and device not in _warned:
            _warned.add(device)
            text = f"the file system of {path} cannot sync: a power failure may lose the last writes"
            warn(text, RuntimeWarning)
    finally:
        os.close(descriptor)


def make_private(path: Path) -> None:
    """Restrict reading a file to its owner, where the file system knows owners."""
    try:
        path.chmod(0o600)
    except OSError as error:
        if error.errno not in _UNKNOWN | {errno.EPERM}:
            raise


_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def to_json(value: float) -> float | str:
    """Return the number as JSON has it: non-finite numbers become "NaN", "Infinity" or "-Infinity".

    >>> [to_json(x) for x in (0.5, float("nan"), float("-inf"))]
    [0.5, 'NaN', '-Infinity']
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_json(value: object) -> float | None:
    """Return the number that ``to_json`` wrote; None for anything else.

    >>> [from_json(x) for x in (1, "Infinity", "1", None, True)]
    [1.0, inf, None, None, None]
    """
    if isinstance(value, str):
        return _WORDS.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def plain(value: object) -> object:
    """Return ``value`` as plain JSON: numbers as ``to_json``, arrays as lists, anything else as text.

    >>> import numpy as np
    >>> plain({"rate": np.float32(0.5), "clip": float("inf"), 3: np.array([True, False]), "kind": complex})
    {'rate': 0.5, 'clip': 'Infinity', '3': [True, False], 'kind': "<class 'complex'>"}
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        item = value.tolist()
        return str(value) if isinstance(item, np.generic) else plain(item)  # of what Python has no number for
    if isinstance(value, int):
        return int(value)
    return to_json(float(value)) if isinstance(value, float) else str(value)


_MAX_BYTES = 1_000_000
_MAX_ALIASES = 100
_SHOWN = 200  # characters of somebody else's message
_MAX_DEPTH = 50  # the parsers' time grows with its square


class Interpolated(str):
    """A text from ``${oc.env:NAME}`` or another interpolation; ``source`` is the interpolation as it is written."""

    __slots__ = ("source",)
    source: str

    def __new__(cls, text: str, source: str) -> Self:
        made = super().__new__(cls, text)
        made.source = cut(source, 80)
        return made

    def parse(self) -> object:
        """Return the value of an override with this text. Raises ConfigError: it is not valid YAML."""
        omega = _omegaconf()
        try:
            _shallow(self.source, self)
            return _value(omega, self)
        except _failures(omega) as error:
            raise ConfigError(f"{cut(repr(str(self)))} cannot be read: {_reason(error)}") from error


def read(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> dict[str, object]:
    """Return what a file holds, changed by overrides, with its interpolations resolved; their texts know their source.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    omega = _omegaconf()
    settings = omega.OmegaConf.create({}) if path is None else _read(omega, Path(path))
    for text in overrides:
        if not isinstance(text, str) or "=" not in text or not re.fullmatch(r"[\w.\-/\[\]]+", text.partition("=")[0]):
            raise ConfigError("override", f"is {cut(repr(text))}", "key.of.it=value")
        key, _, assigned = text.partition("=")
        _shallow(key, text)
        try:
            omega.OmegaConf.update(settings, key, _value(omega, assigned), merge=True, force_add=True)
        except _failures(omega) as error:
            raise ConfigError(f"{cut(key)}: cannot be set: {_reason(error)}") from error
    try:
        resolved = omega.OmegaConf.to_container(settings, resolve=True, throw_on_missing=True)
    except _failures(omega) as error:
        where = "the settings" if path is None else str(path)
        place = getattr(error, "full_key", None)
        raise ConfigError(f"{where}: {f'{cut(place)}: ' if place else ''}{_reason(error)}") from error
    written = omega.OmegaConf.to_container(settings, resolve=False)
    return {key: _mark(written, written[key], value) for key, value in resolved.items()}


def _value(omega: types.ModuleType, text: str) -> object:
    """Return the value that ``text`` has in YAML."""
    return omega.OmegaConf.to_container(omega.OmegaConf.from_dotlist([f"it={text}"]))["it"]


def _mark(root: Mapping[object, object], written: object, resolved: object) -> object:
    """Return ``resolved`` with each text that an interpolation gave as ``Interpolated``."""
    while isinstance(written, str) and (reference := re.fullmatch(r"\$\{([\w.]+)\}", written)):
        found: object = root  # a reference to another setting has the source of that one
        for part in reference[1].split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if found is None:
            break
        written = found
    if isinstance(resolved, dict):
        inner = written if isinstance(written, Mapping) else dict.fromkeys(resolved, written)
        return {key: _mark(root, inner.get(key), value) for key, value in resolved.items()}
    if isinstance(resolved, list):
        items = written if isinstance(written, list) else [written] * len(resolved)
        return [_mark(root, *pair) for pair in zip(items, resolved, strict=True)]
    if isinstance(resolved, str) and isinstance(written, str) and "${" in written:
        return Interpolated(resolved, written)
    return resolved


def _omegaconf() -> types.ModuleType:
    try:
        importlib.import_module("omegaconf.errors")
    except ImportError as error:
        raise missing("rlkit.config", "omegaconf", "config") from error
    return importlib.import_module("omegaconf")


def _read(omega: types.ModuleType, path: Path) -> object:
    yaml = importlib.import_module("yaml")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise ConfigError(f"{path} cannot be read as settings: it is not a file")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes, the limit for settings")
        text = path.read_text("utf-8")
        _shallow(str(path), text)
        aliases = depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError(f"{path} is nested more than {_MAX_DEPTH} deep, the limit for settings")
        if aliases > _MAX_ALIASES:  # a few lines of aliases can expand to more than fits into memory
            raise ConfigError(f"{path} has {aliases} aliases; at most {_MAX_ALIASES} are read")
        settings = omega.OmegaConf.create(text)
    except ConfigError:
        raise
    except _failures(omega) as error:
        raise ConfigError(f"{path} cannot be read as settings: {_reason(error)}") from error
    if not isinstance(settings, omega.DictConfig):
        raise ConfigError(f"{path} does not hold a mapping of settings")
    return settings


def _failures(omega: types.ModuleType) -> tuple[type[Exception], ...]:
    """Return what reading, setting and resolving raise; the parsers pass on Python's own errors about a value."""
    ours = (omega.errors.OmegaConfBaseException, importlib.import_module("yaml").YAMLError)
    return (
        *ours,
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RecursionError,
    )


def _shallow(where: str, text: str) -> None:
    """Raise where brackets are nested deeper than in any settings, before a parser sees them."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{cut(where)}: brackets are nested more than {_MAX_DEPTH} deep, the limit for settings")
    if text.count("${") > _MAX_BYTES // 1000:
        raise ConfigError(f"{cut(where)}: more than {_MAX_BYTES // 1000} references to other values")


def _reason(error: Exception) -> str:
    """Return a parser's message as one short line; its own may hold the whole text."""
    mark = getattr(error, "problem_mark", None)  # of a yaml.MarkedYAMLError
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {cut(str(getattr(error, 'problem', '')))}"
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).strip().partition("\n")[0]).strip('"')
    return cut(text) or type(error).__name__


def cut(text: str, most: int = _SHOWN) -> str:
    """Shorten ``text`` to ``most`` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
