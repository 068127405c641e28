"""YAML files and dotted overrides as plain data, read by OmegaConf (the extra ``config``) within limits."""

from __future__ import annotations

import importlib
import os
import re
import types
from collections.abc import Sequence
from pathlib import Path

from rlkit._lazy import missing
from rlkit.errors import ConfigError

__all__ = ["cut", "read"]

_MAX_BYTES = 1_000_000
_MAX_ALIASES = 100
_SHOWN = 200  # characters of somebody else's message
_MAX_DEPTH = 50  # the parsers' time grows with its square


def read(path: str | os.PathLike[str] | None, overrides: Sequence[str]) -> dict[str, object]:
    """Return what a file holds, changed by overrides, with its references resolved.

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
            parsed = omega.OmegaConf.to_container(omega.OmegaConf.from_dotlist([f"it={assigned}"]))["it"]
            omega.OmegaConf.update(settings, key, parsed, merge=True, force_add=True)
        except _failures(omega) as error:
            raise ConfigError(f"{cut(key)}: cannot be set: {_reason(error)}") from error
    try:
        return dict(omega.OmegaConf.to_container(settings, resolve=True, throw_on_missing=True))
    except _failures(omega) as error:
        where = "the settings" if path is None else str(path)
        raise ConfigError(f"{where}: {_reason(error)}") from error


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
            raise ConfigError(f"{path} cannot be read as settings: it is no file")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} has more than {_MAX_BYTES} bytes, which no settings need")
        text = path.read_text("utf-8")
        _shallow(str(path), text)
        aliases = depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            aliases += isinstance(event, yaml.AliasEvent)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_DEPTH:
                raise ConfigError(f"{path} is nested more than {_MAX_DEPTH} deep, which no settings are")
        if aliases > _MAX_ALIASES:  # a few lines of them can stand for more than fits into memory
            raise ConfigError(f"{path} has {aliases} aliases; at most {_MAX_ALIASES} are read")
        settings = omega.OmegaConf.create(text)
    except ConfigError:
        raise
    except _failures(omega) as error:
        raise ConfigError(f"{path} cannot be read as settings: {_reason(error)}") from error
    if not isinstance(settings, omega.DictConfig):
        raise ConfigError(f"{path} holds no mapping of settings")
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
            raise ConfigError(f"{cut(where)}: brackets are nested more than {_MAX_DEPTH} deep, which no settings are")
    if text.count("${") > _MAX_BYTES // 1000:
        raise ConfigError(f"{cut(where)}: there are more than {_MAX_BYTES // 1000} references to other values")


def _reason(error: Exception) -> str:
    """Return a parser's message as one short line; its own may hold the whole text."""
    mark = getattr(error, "problem_mark", None)  # of a yaml.MarkedYAMLError
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {cut(str(getattr(error, 'problem', '')))}"
    return cut(str(error).strip().partition("\n")[0]) or type(error).__name__


def cut(text: str, most: int = _SHOWN) -> str:
    """Shorten ``text`` to ``most`` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
