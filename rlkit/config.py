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
import os
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from rlkit import _check, _files
from rlkit._secrets import SECRET
from rlkit.errors import ConfigError

__all__ = ["describe", "dump", "load", "read_env", "secret"]

T = TypeVar("T")
_ENV_LINE = re.compile(r"""([A-Za-z_]\w*)\s*=\s*(?:"([^"]*)"|'([^']*)'|((?![\"']).*?))(?:\s+#.*)?""")


def secret(variable: str) -> Any:
    """Make a field that is read from the environment alone: ``key: str | None = secret("SERVICE_KEY")``.

    It must not be in a file or an override, is not shown, and is never written. None where the variable is not set.
    """
    return attrs.field(default=None, repr=False, metadata={SECRET: variable})


def load(kind: type[T], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> T:
    """Fill an attrs class from its defaults, a YAML file and overrides; later ones win.

    Args:
        kind: the class; its fields may be attrs classes too.
        path: the file; None for none. ``${other.key}`` stands for another value, ``${oc.env:NAME,default}`` for that of
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
    made: T = structure(kind, _files.read(path, overrides))
    return made


def dump(config: Any) -> dict[str, Any]:
    """Return ``config`` as plain data without its secrets; ``load`` reads it back.

    >>> @attrs.frozen
    ... class Settings:
    ...     sizes: tuple[int, ...] = (1, 2)
    ...     key: str | None = secret("SERVICE_KEY")
    >>> dump(Settings())
    {'sizes': [1, 2]}
    """
    fields = attrs.fields(type(config))
    return {field.name: _plain(getattr(config, field.name)) for field in fields if SECRET not in field.metadata}


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


def read_env(path: str | os.PathLike[str]) -> None:
    """Set environment variables from the lines ``NAME=value`` of a file such as .env; those that are set stay.

    A value may be quoted; ``#`` after a space begins a comment; ``export`` before the name is ignored; ``$NAME`` is not
    expanded. A missing file is treated as empty.

    Raises:
        ConfigError: it cannot be read, or a line has another form; the message has the line's number, not its text.

    >>> import pathlib, tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp()) / ".env"
    >>> _ = path.write_text("RLKIT_EXAMPLE='a # b'  # a comment")
    >>> read_env(path)
    >>> os.environ.pop("RLKIT_EXAMPLE")
    'a # b'
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} could not be read: {type(error).__name__}") from error
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        match = _ENV_LINE.fullmatch(text)
        if match is None:
            raise ConfigError(f"{path}, line {number}: expected NAME=value")
        os.environ.setdefault(match[1], next(value for value in match.groups()[1:] if value is not None))


def structure(kind: type[attrs.AttrsInstance], values: object, where: str = "") -> Any:
    """Make an instance of an attrs class from the mapping at ``where``, as ``load`` does."""
    if not isinstance(values, Mapping):
        raise ConfigError(where or "the settings", f"got {_check.describe(values)}", "a mapping")
    fields = {field.name: field for field in attrs.fields(kind) if field.init}
    hints = _hints(kind)
    arguments: dict[str, object] = {}
    for key, value in values.items():
        path = f"{where}.{_files.cut(str(key), 60)}".lstrip(".")
        if key not in fields:
            raise ConfigError(f"{path}: unknown setting{_check.suggest(str(key), fields)}")
        if variable := fields[key].metadata.get(SECRET):
            raise ConfigError(f"{path}: is read only from the environment variable {variable}")
        arguments[key] = _convert(hints.get(key, object), value, path)
    for name, field in fields.items():
        if variable := field.metadata.get(SECRET):
            arguments[name] = os.environ.get(variable) or None
        elif name not in arguments and field.default is attrs.NOTHING:
            raise ConfigError(f"{where}.{name}".lstrip(".") + ": required setting is missing")
    try:
        return kind(**arguments)
    except ConfigError as error:
        text = str(error)
        for key, value in values.items():
            if isinstance(value, _files.Interpolated) and re.search(rf"\b{re.escape(key)}\b", str(error)):
                text += f" ({key} is written as {value.source})"
        raise ConfigError(f"{where}: {text}" if where else text) from error


def _convert(hint: Any, value: object, where: str) -> object:
    """Return ``value`` as the type of an annotation; it converts only whole numbers for floats, and interpolations."""
    if hint in (Any, object):
        return _without_sources(value)
    if isinstance(value, _files.Interpolated):
        return _convert_interpolated(hint, value, where)
    convert = _CONVERTERS.get(typing.get_origin(hint) or hint)
    if convert is None:
        convert = structure if attrs.has(hint) else _convert_plain
    return convert(hint, value, where)


def _convert_interpolated(hint: Any, text: _files.Interpolated, where: str) -> object:
    """Return the text if the annotation takes it, otherwise its value in YAML."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    with contextlib.suppress(ConfigError):
        return _convert_union(hint, text, where) if union else _convert(hint, str(text), where)
    try:
        if not text.strip():  # YAML would read null
            raise ConfigError(where, "is empty", "a value, or the text null")
        switch = hint is bool and text in ("0", "1")  # as programs read variables, though not YAML
        return _convert(hint, text == "1" if switch else text.parse(), where)
    except ConfigError as error:
        raise ConfigError(f"{error} (written as {text.source})") from error


def _convert_union(hint: object, value: object, where: str) -> object:
    """Return ``value`` as the first of the types that takes it; the error is the last one's."""
    if value is None and type(None) in typing.get_args(hint):
        return None
    *options, last = [option for option in typing.get_args(hint) if option is not type(None)]
    for option in options:
        with contextlib.suppress(ConfigError):
            return _convert(option, value, where)
    return _convert(last, value, where)


def _convert_choice(hint: object, value: object, where: str) -> object:
    choices = typing.get_args(hint)
    if isinstance(value, bool):  # which YAML makes of some words
        words = ("yes", "on", "true") if value else ("no", "off", "false")
        value = next((word for word in words if word in choices), value)
    if value in choices and not isinstance(value, bool):
        return value
    raise ConfigError(where, f"is {_files.cut(repr(value))}", "one of " + ", ".join(map(repr, choices)))


def _convert_list(hint: object, value: object, where: str) -> object:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(where, f"is {_check.describe(value)}", "a list")
    kind = next(iter(typing.get_args(hint)), object)
    items = [_convert(kind, item, f"{where}[{i}]") for i, item in enumerate(value)]
    return tuple(items) if (typing.get_origin(hint) or hint) is tuple else items


def _convert_mapping(hint: object, value: object, where: str) -> object:
    if not isinstance(value, Mapping):
        raise ConfigError(where, f"is {_check.describe(value)}", "a mapping")
    _, kind = typing.get_args(hint) or (str, object)
    return {str(key): _convert(kind, item, f"{where}.{key}") for key, item in value.items()}


def _convert_plain(hint: object, value: object, where: str) -> object:
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(where, "is larger than any float", "a value of type float") from error
    if isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool)):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    raise ConfigError(where, f"is {_files.cut(repr(value))}", f"a value of type {_name(hint)}")


_CONVERTERS: Mapping[object, Callable[[Any, object, str], object]] = {
    typing.Union: _convert_union,
    types.UnionType: _convert_union,
    Literal: _convert_choice,
    list: _convert_list,
    tuple: _convert_list,
    Sequence: _convert_list,
    dict: _convert_mapping,
    Mapping: _convert_mapping,
}


def _without_sources(value: object) -> object:
    """Return ``value`` with plain texts for those of interpolations."""
    if isinstance(value, Mapping):
        return {key: _without_sources(x) for key, x in value.items()}
    if isinstance(value, list):
        return [_without_sources(x) for x in value]
    return str(value) if isinstance(value, _files.Interpolated) else value


def _plain(value: object) -> object:
    if attrs.has(type(value)):
        return dump(value)
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return str(value) if isinstance(value, Path) else value


def _rows(kind: type[attrs.AttrsInstance], where: str) -> Iterator[tuple[str, str, str]]:
    """Yield key, type with default, and description of each setting."""
    hints, texts = _hints(kind), _descriptions(kind)
    for field in attrs.fields(kind):
        hint, key = hints.get(field.name, Any), f"{where}{field.name}"
        if attrs.has(hint):
            yield from _rows(hint, f"{key}.")
            continue
        variable, default = field.metadata.get(SECRET), field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory() if not default.takes_self else "..."
        if isinstance(default, str) and not default.isprintable():
            default = repr(default)  # so that it stays in its line
        shown = _name(hint) if default is attrs.NOTHING else f"{_name(hint)} = {default}"
        yield key, f"from ${variable}" if variable else shown, texts.get(field.name, "")


def _hints(kind: type[attrs.AttrsInstance]) -> dict[str, Any]:
    """Return the annotations, also of a class that was made inside of a function and names others from there."""
    near = {type(f.default).__name__: type(f.default) for f in attrs.fields(kind) if attrs.has(type(f.default))}
    return typing.get_type_hints(kind, localns=near)


def _descriptions(kind: type[object]) -> dict[str, str]:
    """Return what the section Args of the class's docstring says of each field."""
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in (kind.__doc__ or "").partition("Args:")[2].splitlines():
        if match := re.match(r"\s*((?:\w+, )*\w+): (.*)", line):
            names = match[1].split(", ")
            texts |= dict.fromkeys(names, match[2].strip())
        elif line.strip() and names and line.startswith(" " * 8):
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
        elif not line.strip():
            names = []
    return texts


def _name(hint: object) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
