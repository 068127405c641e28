"""Settings: attrs classes filled from YAML and from dotted overrides, with every key checked.

    @attrs.frozen
    class Settings:
        rate: float = 1e-4
        policy: PolicySettings = PolicySettings()

    settings = rlkit.config.load(Settings, "run.yaml", ["policy.rank=8"])

Reading is left to OmegaConf (the extra ``config``); what the keys may be is said by the classes alone.
"""

from __future__ import annotations

import importlib
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import attrs

from rlkit import _check, _install
from rlkit.errors import ConfigError

__all__ = ["describe", "dump", "load", "read_env", "secret"]

T = TypeVar("T")
_MAX_BYTES = 1_000_000
_MAX_ALIASES = 100
_SHOWN = 200  # characters of somebody else's message
_MAX_DEPTH = 50  # the parsers' time grows with its square
_ENV_LINE = re.compile(r"""([A-Za-z_]\w*)\s*=\s*(?:"([^"]*)"|'([^']*)'|((?![\"']).*?))(?:\s+#.*)?""")
SECRET = "rlkit.secret"  # noqa: S105  # the name of a mark


def secret(variable: str) -> Any:
    """A field that comes from the environment alone: ``key: str | None = secret("SERVICE_KEY")``.

    It may not stand in a file or an override, is not shown, and is never written. None where the variable is not set.
    """
    return attrs.field(default=None, repr=False, metadata={SECRET: variable})


def load(kind: type[T], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()) -> T:
    """An instance of an attrs class from its defaults, a YAML file, and overrides, the later the stronger.

    Args:
        kind: the class; its fields may be attrs classes too.
        path: the file; None for none. ``${other.key}`` stands for another value, ``${oc.env:NAME}`` for the
            environment's.
        overrides: texts ``"a.b=value"``, the value as in YAML; ``"a.0.b=value"`` is of the first entry of a list.

    Raises:
        ConfigError: the file can not be read, a key is unknown, or a value is of another kind; the message has the
            whole path of the key, and the nearest one that exists.

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
    rlkit.errors.ConfigError: lora.rnak: there is no such setting; did you mean 'rank'? There are: rank
    """
    if not attrs.has(kind):
        raise ConfigError(_check.problem("load(kind)", f"got {_check.shown(kind)}", "a class made with attrs"))
    omega = _omegaconf()
    given = omega.OmegaConf.create({})
    if path is not None:
        given = omega.OmegaConf.merge(given, _read(omega, Path(path)))
    for text in overrides:
        if not isinstance(text, str) or "=" not in text or not re.fullmatch(r"[\w.\-/\[\]]+", text.partition("=")[0]):
            raise ConfigError(_check.problem("override", f"is {_cut(repr(text))}", "key.of.it=value"))
        key, _, value = text.partition("=")
        _shallow(key, text)
        try:
            read = omega.OmegaConf.to_container(omega.OmegaConf.from_dotlist([f"it={value}"]))["it"]
            omega.OmegaConf.update(given, key, read, merge=True, force_add=True)
        except _failures(omega) as error:
            raise ConfigError(f"{_cut(key)}: can not be set: {_reason(error)}") from error
    try:
        plain = omega.OmegaConf.to_container(given, resolve=True, throw_on_missing=True)
    except _failures(omega) as error:
        where = "the settings" if path is None else str(path)
        raise ConfigError(f"{where}: {_reason(error)}") from error
    found: T = _built(kind, plain, "")
    return found


def dump(config: Any) -> dict[str, Any]:
    """``config`` as plain data, without its secrets; ``load`` takes it back.

    >>> @attrs.frozen
    ... class Settings:
    ...     sizes: tuple[int, ...] = (1, 2)
    ...     key: str | None = secret("SERVICE_KEY")
    >>> dump(Settings())
    {'sizes': [1, 2]}
    """
    plain: dict[str, Any] = {}
    for field in attrs.fields(type(config)):
        if SECRET not in field.metadata:
            plain[field.name] = _plain(getattr(config, field.name))
    return plain


def describe(kind: type[Any]) -> str:
    """One line for each setting: its key, kind, default, and what the class's docstring says of it.

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
    """Puts the lines ``NAME=value`` of a file such as .env into the environment, where it does not have them.

    A value may stand in quotes; ``#`` after a space begins a comment; ``export`` before the name does nothing. Nothing
    is put in for other variables. A file that is not there is as an empty one.

    Raises:
        ConfigError: it can not be read, or a line has another form; the message names the line, not what is in it.

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
        raise ConfigError(f"{path} can not be read: {type(error).__name__}") from error
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").strip()
        if not text or text.startswith("#"):
            continue
        found = _ENV_LINE.fullmatch(text)
        if found is None:
            raise ConfigError(f"{path}, line {number}: is not of the form NAME=value")
        os.environ.setdefault(found[1], next(x for x in found.groups()[1:] if x is not None))


def _omegaconf() -> Any:
    try:
        omega = importlib.import_module("omegaconf")
        importlib.import_module("omegaconf.errors")
    except ImportError as error:
        raise ConfigError(f"rlkit.config needs omegaconf: {_install.command('config')}") from error
    return omega


def _read(omega: Any, path: Path) -> Any:
    yaml = importlib.import_module("yaml")
    try:
        if path.exists() and not path.is_file():  # a pipe or a device has no end
            raise ConfigError(f"{path} can not be read as settings: it is no file")
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
        found = omega.OmegaConf.create(text)
    except ConfigError:
        raise
    except _failures(omega) as error:
        raise ConfigError(f"{path} can not be read as settings: {_reason(error)}") from error
    if not isinstance(found, omega.DictConfig):
        raise ConfigError(f"{path} holds no mapping of settings")
    return found


def _failures(omega: Any) -> tuple[type[Exception], ...]:
    """What reading, setting and resolving raise: the parsers pass on what Python says of a value."""
    yaml = importlib.import_module("yaml").YAMLError
    kinds = (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        AssertionError,
        RecursionError,
    )
    return (omega.errors.OmegaConfBaseException, yaml, *kinds)


def _shallow(where: str, text: str) -> None:
    """Raises where brackets are nested deeper than settings are, before a parser sees them."""
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        if depth > _MAX_DEPTH:
            raise ConfigError(f"{_cut(where)}: brackets are nested more than {_MAX_DEPTH} deep, which no settings are")
    if text.count("${") > _MAX_BYTES // 1000:
        raise ConfigError(f"{_cut(where)}: there are more than {_MAX_BYTES // 1000} references to other values")


def _reason(error: Exception) -> str:
    """Why a file can not be read, in one short line: the parsers' own messages show the place, or all of a text."""
    mark = getattr(error, "problem_mark", None)  # of a yaml.MarkedYAMLError
    if mark is not None:
        return f"line {mark.line + 1}, column {mark.column + 1}: {_cut(str(getattr(error, 'problem', '')))}"
    return _cut(str(error).strip().partition("\n")[0]) or type(error).__name__


def _cut(text: str, most: int = _SHOWN) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _built(kind: type[Any], given: Any, where: str) -> Any:
    """An instance of an attrs class from a mapping."""
    if not isinstance(given, Mapping):
        raise ConfigError(_check.problem(where or "the settings", f"got {_check.shown(given)}", "a mapping"))
    fields = {field.name: field for field in attrs.fields(kind) if field.init}
    hints = _hints(kind)
    values: dict[str, Any] = {}
    for key, value in given.items():
        path = f"{where}.{_cut(str(key), 60)}" if where else _cut(str(key), 60)
        field = fields.get(key)
        if field is None:
            raise ConfigError(f"{path}: there is no such setting{_check.near(str(key), fields)}")
        if SECRET in field.metadata:
            raise ConfigError(f"{path}: is read from the environment alone, from {field.metadata[SECRET]}")
        values[key] = _value(hints.get(key, Any), value, path)
    for name, field in fields.items():
        if SECRET in field.metadata:
            values[name] = os.environ.get(field.metadata[SECRET]) or None
        elif name not in values and field.default is attrs.NOTHING:
            raise ConfigError(f"{where}.{name}".lstrip(".") + ": is needed, and is not given")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}" if where else str(error)) from error


def _value(hint: Any, value: Any, where: str) -> Any:
    """``value`` as what the annotation says."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [a for a in arguments if a is not type(None)]
        for option in options[:-1]:
            try:
                return _value(option, value, where)
            except ConfigError:
                continue
        return _value(options[-1], value, where)
    if origin is Literal:
        if isinstance(value, bool):  # which YAML makes of some words
            words = ("yes", "on", "true") if value else ("no", "off", "false")
            value = next((word for word in words if word in arguments), value)
        if value in arguments and not isinstance(value, bool):
            return value
        raise ConfigError(_check.problem(where, f"is {_cut(repr(value))}", "one of " + ", ".join(map(repr, arguments))))
    if isinstance(hint, type) and attrs.has(hint):
        return _built(hint, value, where)
    if origin in (list, tuple, Sequence) or hint in (list, tuple):
        if not isinstance(value, (list, tuple)):
            raise ConfigError(_check.problem(where, f"is {_check.shown(value)}", "a list"))
        item = arguments[0] if arguments else Any
        made = [_value(item, x, f"{where}[{i}]") for i, x in enumerate(value)]
        return tuple(made) if tuple in (origin, hint) else made
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(value, Mapping):
            raise ConfigError(_check.problem(where, f"is {_check.shown(value)}", "a mapping"))
        item = arguments[1] if arguments else Any
        return {str(k): _value(item, v, f"{where}.{k}") for k, v in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError as error:
            raise ConfigError(_check.problem(where, "is larger than any float", "a value of kind float")) from error
    if isinstance(hint, type) and isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    raise ConfigError(_check.problem(where, f"is {_cut(repr(value))}", f"a value of kind {_name(hint)}"))


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return dump(value)
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    return str(value) if isinstance(value, Path) else value


def _rows(kind: type[Any], where: str) -> Any:
    hints, texts = _hints(kind), _texts(kind)
    for field in attrs.fields(kind):
        hint, key = hints.get(field.name, Any), f"{where}{field.name}"
        if isinstance(hint, type) and attrs.has(hint):
            yield from _rows(hint, f"{key}.")
            continue
        variable = field.metadata.get(SECRET)
        default = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory() if not default.takes_self else "..."
        if isinstance(default, str) and not default.isprintable():
            default = repr(default)  # so that it stays in its line
        shown = _name(hint) if default is attrs.NOTHING else f"{_name(hint)} = {default}"
        yield key, f"from ${variable}" if variable else shown, texts.get(field.name, "")


def _hints(kind: type[Any]) -> dict[str, Any]:
    """The annotations, also of a class that was made inside of a function and names others from there."""
    near = {type(f.default).__name__: type(f.default) for f in attrs.fields(kind) if attrs.has(type(f.default))}
    return typing.get_type_hints(kind, localns=near)


def _texts(kind: type[Any]) -> dict[str, str]:
    """What the section Args of the class's docstring says of each field."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (kind.__doc__ or "").partition("Args:")[2].splitlines():
        match = re.match(r"\s*((?:\w+, )*\w+): (.*)", line)
        if match:
            names = match[1].split(", ")
            found |= dict.fromkeys(names, match[2].strip())
        elif line.strip() and names and line.startswith(" " * 8):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif not line.strip():
            names = []
    return found


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint).replace("typing.", "")
