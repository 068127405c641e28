"""Settings: attrs classes filled from YAML and from dotted overrides, with every key checked.

    @attrs.frozen
    class Settings:
        rate: float = 1e-4
        policy: PolicySettings = PolicySettings()

    settings = rlkit.config.load(Settings, "run.yaml", ["policy.rank=8"])

OmegaConf (the extra ``config``) reads the file; the classes alone define the keys.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from rlkit import _check
from rlkit._runtime import missing
from rlkit.errors import ConfigError

__all__ = ["describe", "dump", "load", "read", "structure"]

T = TypeVar("T")
_MAX_BYTES = 1_000_000


@attrs.frozen
class _Interpolated:
    """A text that ``${oc.env:NAME}`` or another interpolation gave, and the interpolation as it is written."""

    text: str
    source: str


def load(kind: type[T], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> T:
    """Fill an attrs class from its defaults, a YAML file and overrides; later ones win.

    Args:
        kind: the class; its fields may be attrs classes too.
        path: the file; None for none. ``${other.key}`` is another value, ``${oc.env:NAME,default}`` that of
            an environment variable. Such a text is read as YAML where the setting is a number, a boolean or another
            type without texts; 0 and 1 are booleans, too. It stays text where the setting takes any value.
        overrides: texts ``"a.b=value"``, the value as in YAML; ``"a.0.b=value"`` is of the first entry of a list.

    Raises:
        ConfigError: the file cannot be read, a key is unknown, or a value has another type; the message has the whole
            path of the key, and the closest one that exists.

    >>> @attrs.frozen
    ... class Lora:
    ...     rank: int = 32
    >>> @attrs.frozen
    ... class Settings:
    ...     lora: Lora = Lora()
    ...     rate: float = 1e-4
    >>> load(Settings, overrides=["lora.rank=8", "rate=1e-3"])
    Settings(lora=Lora(rank=8), rate=0.001)
    >>> load(Settings, overrides=["lora.rnak=8"])
    Traceback (most recent call last):
    rlkit.errors.ConfigError: lora.rnak: unknown setting; did you mean 'rank'? There are: rank
    """
    if not attrs.has(kind):
        raise ConfigError("load(kind)", f"got {_check.describe(kind)}", "a class made with attrs")
    made: T = structure(kind, read(path, overrides))
    return made


def dump(config: Any) -> dict[str, Any]:
    """Return ``config`` as plain data; ``load`` reads it back.

    >>> @attrs.frozen
    ... class Settings:
    ...     sizes: tuple[int, ...] = (1, 2)
    >>> dump(Settings())
    {'sizes': [1, 2]}
    """
    return {field.name: to_plain(getattr(config, field.name)) for field in attrs.fields(type(config))}


def describe(kind: type[attrs.AttrsInstance]) -> str:
    """Return one line per setting: its key, type, default, and description from the class's docstring.

    >>> @attrs.frozen
    ... class Settings:
    ...     '''Of a run.
    ...
    ...     Args:
    ...         rate: of learning.
    ...     '''
    ...     rate: float = 1e-4
    >>> print(describe(Settings))
    rate  float = 0.0001  of learning.
    """
    rows = list(_rows(kind, ""))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return "\n".join(f"{key:{widths[0]}}  {shown:{widths[1]}}  {text}".rstrip() for key, shown, text in rows)


def structure(kind: type[attrs.AttrsInstance], values: Any, where: str = "") -> Any:
    """Make an instance of an attrs class from the mapping at ``where``, such as ``read`` returns, as ``load`` does."""
    _check.require(isinstance(values, Mapping), where or "the settings", values, "a mapping")
    fields = {field.name: field for field in _fields(kind) if field.init}
    arguments: dict[str, object] = {}
    for key, value in values.items():
        path = f"{where}.{_cut(str(key), 60)}".lstrip(".")
        if key not in fields:
            raise ConfigError(f"{path}: unknown setting{_check.suggest(str(key), fields)}")
        arguments[key] = _convert(fields[key].type, value, path)
    for name, field in fields.items():
        if name not in arguments and field.default is attrs.NOTHING:
            raise ConfigError(f"{where}.{name}".lstrip(".") + ": required setting is missing")
    try:
        return kind(**arguments)
    except ConfigError as error:
        sources = {key: value.source for key, value in values.items() if isinstance(value, _Interpolated)}
        notes = [f" ({key} is written as {sources[key]})" for key in sources if re.search(rf"\b{key}\b", str(error))]
        raise ConfigError(f"{where}: {error}".removeprefix(": ") + "".join(notes)) from error


def read(path: str | os.PathLike[str] | None, overrides: Sequence[str] = ()) -> dict[str, object]:
    """Return what a YAML file holds, changed by overrides, with its interpolations resolved, for ``structure``.

    Raises:
        ConfigError: the file or an override cannot be read.
    """
    omega = _import("omegaconf").OmegaConf
    settings = omega.create({}) if path is None else _read_file(Path(path))
    for text in overrides:
        if not isinstance(text, str) or not re.fullmatch(r"[\w.\-/\[\]]+=.*", text, re.DOTALL):
            raise ConfigError("override", f"is {_cut(repr(text))}", "key.of.it=value")
        key, _, assigned = text.partition("=")
        with _explain(f"{_cut(key)}: cannot be set"):
            omega.update(settings, key, _parse(assigned), merge=True, force_add=True)
    with _explain("the settings" if path is None else str(path)):
        resolved = omega.to_container(settings, resolve=True, throw_on_missing=True)
        written = omega.to_container(settings, resolve=False)
    return {key: _mark(value, written[key]) for key, value in resolved.items()}


def _read_file(path: Path) -> Any:
    omega = _import("omegaconf")
    with _explain(f"{path} cannot be read as settings"):
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise ConfigError("it is not a file")
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"it has more than {_MAX_BYTES} bytes, the limit for settings")
        text = path.read_text("utf-8")
        _check_limits(text)
        settings = omega.OmegaConf.create(text)
        if not isinstance(settings, omega.DictConfig):
            raise ConfigError("it does not hold a mapping of settings")
    return settings


def _check_limits(text: str) -> None:
    """Raise for a YAML text whose few lines expand to more than fits into memory or on the stack."""
    yaml = _import("yaml")
    aliases, depth, references = 0, 0, text.count("${")
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        aliases += isinstance(event, yaml.AliasEvent)
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > 50 or aliases > 100 or references > 1000:
            raise ConfigError("more than 50 levels, 100 aliases or 1000 references, the limits for settings")


def _parse(text: str) -> object:
    """Return the value that ``text`` has in YAML."""
    _check_limits(text)
    omega = _import("omegaconf").OmegaConf
    return omega.to_container(omega.from_dotlist([f"it={text}"]))["it"]


def _mark(resolved: Any, written: Any) -> object:
    """Return ``resolved`` with each text that an interpolation gave as ``_Interpolated``."""
    if isinstance(resolved, (dict, list)):
        pairs = resolved.items() if isinstance(resolved, dict) else enumerate(resolved)
        inner = {key: _mark(x, written if isinstance(written, str) else written[key]) for key, x in pairs}
        return inner if isinstance(resolved, dict) else list(inner.values())
    interpolated = isinstance(resolved, str) and isinstance(written, str) and "${" in written
    return _Interpolated(resolved, _cut(written, 80)) if interpolated else resolved


def to_plain(value: Any) -> Any:
    """Return ``value`` as plain data: attrs classes as dicts, paths and what interpolations gave as texts."""
    if isinstance(value, _Interpolated):
        return value.text
    if isinstance(value, Mapping):
        return {key: to_plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(x) for x in value]
    return dump(value) if attrs.has(type(value)) else str(value) if isinstance(value, Path) else value


def flatten(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield ("a.b", text) of each entry of nested mappings of plain data; a list is one value.

    >>> list(flatten({"a": {"b": [1, None]}, "c": "text", "d": {}}))
    [('a.b', '[1, null]'), ('c', 'text'), ('d', '{}')]
    """
    if isinstance(value, Mapping) and (value or not key):
        for name, each in value.items():
            yield from flatten(each, f"{key}.{name}" if key else name)
    else:
        yield key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _convert(hint: Any, value: Any, where: str) -> object:
    """Return ``value`` as the type of an annotation; it converts only whole numbers for floats, and interpolations."""
    kind, parts = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in (Any, object, None):
        return to_plain(value)
    if kind in (typing.Union, types.UnionType):
        return _convert_union(parts, value, where)
    if isinstance(value, _Interpolated):
        return _convert_interpolated(hint, value, where)
    if attrs.has(kind):
        return structure(kind, value, where)
    if kind in (list, tuple, Sequence):
        _check.require(isinstance(value, (list, tuple)), where, value, "a list")
        items = [_convert(parts[0] if parts else object, item, f"{where}[{i}]") for i, item in enumerate(value)]
        return tuple(items) if kind is tuple else items
    if kind in (dict, Mapping):
        _check.require(isinstance(value, Mapping), where, value, "a mapping")
        return {str(key): _convert(parts[1] if parts else object, x, f"{where}.{key}") for key, x in value.items()}
    return _convert_choice(parts, value, where) if kind is Literal else _convert_plain(kind, value, where)


def _convert_union(options: Sequence[Any], value: object, where: str) -> object:
    """Return ``value`` as the first of the types that takes it; the error is the last one's, but never None's."""
    problem: ConfigError | None = None
    for option in sorted(options, key=lambda option: option is types.NoneType):
        try:
            return _convert(option, value, where)
        except ConfigError as error:
            problem = problem if option is types.NoneType else error
    raise problem or ConfigError(where, "has no type")


def _convert_interpolated(hint: Any, value: _Interpolated, where: str) -> object:
    """Return the text if the annotation takes it, otherwise its value in YAML."""
    with contextlib.suppress(ConfigError):
        return _convert(hint, value.text, where)
    try:
        if not value.text.strip():  # YAML would read null
            raise ConfigError(where, "is empty", "a value, or the text null")
        if hint is bool and value.text in ("0", "1"):  # as programs read variables, though not YAML
            return value.text == "1"
        with _explain(f"{where}: {_cut(repr(value.text))} cannot be read"):
            parsed = _parse(value.text)
        return _convert(hint, parsed, where)
    except ConfigError as error:
        raise ConfigError(f"{error} (written as {value.source})") from error


def _convert_choice(choices: Sequence[object], value: object, where: str) -> object:
    if isinstance(value, bool):  # which YAML makes of some words
        words = ("yes", "on", "true") if value else ("no", "off", "false")
        value = next((word for word in words if word in choices), value)
    if value in choices and not isinstance(value, bool):
        return value
    raise ConfigError(where, f"is {_cut(repr(value))}", "one of " + ", ".join(map(repr, choices)))


def _convert_plain(kind: Any, value: object, where: str) -> object:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(where, "is larger than any float", "a value of type float") from error
    if kind is Path and isinstance(value, str):
        return Path(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(where, f"is {_cut(repr(value))}", f"a value of type {_name(kind)}")


def _fields(kind: type[attrs.AttrsInstance]) -> Sequence[Any]:
    """Return the fields with their types, also of a class that was made in a function and names others from there."""
    near = {type(f.default).__name__: type(f.default) for f in attrs.fields(kind) if attrs.has(type(f.default))}
    found: Sequence[Any] = attrs.fields(attrs.resolve_types(kind, localns=near))
    return found


def _rows(kind: type[attrs.AttrsInstance], where: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, type with default, and description of each setting."""
    found = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {8}.*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    texts = {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
    for field in _fields(kind):
        if attrs.has(field.type):
            yield from _rows(field.type, f"{where}{field.name}.")
            continue
        default, make = field.default, getattr(field.default, "factory", None)
        if make is not None:
            default = "..." if default.takes_self else make()
        if isinstance(default, str) and not default.isprintable():
            default = repr(default)  # so that it stays in its line
        shown = "" if default is attrs.NOTHING else f" = {default}"
        yield f"{where}{field.name}", _name(field.type) + shown, texts.get(field.name, "")


def _name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing("rlkit.config", "omegaconf", "config") from error


@contextlib.contextmanager
def _explain(where: str) -> Iterator[None]:
    """Turn what the parsers raise, among it Python's own errors about a value, into one short line."""
    try:
        yield
    except Exception as error:
        mark = getattr(error, "problem_mark", None)  # of a yaml.MarkedYAMLError
        if mark is not None:
            text = f"line {mark.line + 1}, column {mark.column + 1}: {getattr(error, 'problem', '')}"
        else:  # the first line: others may hold the whole text
            text = re.sub(r"^\w+ raised while resolving interpolation: ", "", str(error).strip().partition("\n")[0])
        place = getattr(error, "full_key", None)
        place = f"{_cut(place)}: " if place and place not in where else ""
        raise ConfigError(f"{where}: {place}{_cut(text.strip(chr(34))) or type(error).__name__}") from error


def _cut(text: str, most: int = 200) -> str:
    """Shorten ``text``, which may be a whole file, to ``most`` characters."""
    return text if len(text) <= most else text[: most - 3] + "..."
