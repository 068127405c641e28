"""Files that outlast a power failure, strict JSON, and YAML read within limits."""

from __future__ import annotations

import contextlib
import errno
import importlib
import math
import os
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np

from rlkit._runtime import missing, warn
from rlkit.errors import ConfigError

__all__ = ["Interpolated", "append", "cut", "from_json", "owned", "plain", "read", "replacing", "synced", "to_json"]

# Errors of systems that cannot sync, on network drives and some that are mounted by programs.
_UNKNOWN = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
_warned: set[int] = set()  # devices


def append(path: Path, lines: Iterable[str], *, mode: int = 0o600) -> None:
    """Append lines to a file, each in one write; first end a line that a crash left unfinished.

    Args:
        path: made with ``mode`` if it is not there. Several processes may append to it.
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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield an empty file next to ``path`` that only its owner reads; it replaces ``path`` if the block raises nothing.

    Raises:
        OSError: it could not be written; ``path`` is as it was.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        os.close(os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
        yield temporary
        synced(temporary)
        temporary.replace(path)
        synced(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def synced(path: Path) -> None:
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


def owned(path: Path) -> None:
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
