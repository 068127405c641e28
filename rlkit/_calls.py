"""Calls with arguments that there are not, answered in words."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast

from rlkit import _aliases, _check
from rlkit.errors import ArgumentError

__all__ = ["answered", "estimator", "hinted"]

T = TypeVar("T")


def answered(thing: T, *, kind: str | None = None) -> T:
    """Decorate a function or class: a call that does not fit its signature raises an ArgumentError that helps.

    Args:
        thing: the function, or the class, whose ``__init__`` is wrapped.
        kind: whose names of other libraries are known (``_aliases``); None: those of ``thing`` itself.

    >>> @answered
    ... def area(width, *, height=1.0): return width * height
    >>> area(2.0, heigth=3.0)
    Traceback (most recent call last):
    rlkit.errors.ArgumentError: area: no argument 'heigth'; did you mean 'height'? There are: width, height
    """
    target: Any = thing
    function: Callable[..., object] = target.__init__ if inspect.isclass(target) else target
    name = str(target.__name__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            text = _misfit(function, args, kwargs, name if kind is None else kind)
            if text:
                raise ArgumentError(f"{name}: {text}") from None
            raise  # it comes from inside

    if inspect.isclass(target):
        target.__init__ = call  # type: ignore[method-assign]
        return thing
    return call  # type: ignore[return-value]


def estimator(function: T) -> T:
    """Apply ``answered``, with the names that other libraries give the settings of estimators."""
    return answered(function, kind="estimators")


def hinted(kind: str) -> Callable[[T], T]:
    """Decorate a class: an attribute that it lacks, and that other libraries have, is answered.

    It stays an AttributeError, so that ``hasattr`` and ``getattr`` with a default are as ever.
    """
    hints = _aliases.ATTRIBUTES[kind]

    def lacking(self: Any, name: str) -> NoReturn:
        text = f"{type(self).__name__!r} object has no attribute {name!r}"
        raise AttributeError(f"{text}; {hints[name]}" if name in hints else text, name=name, obj=self)

    def add(thing: T) -> T:
        if not any("__getattr__" in vars(base) for base in cast("type", thing).__mro__):
            cast("Any", thing).__getattr__ = lacking
        return thing

    return add


def _misfit(function: Callable[..., object], args: Any, kwargs: Mapping[str, Any], kind: str) -> str:
    """Return why the call does not fit the signature; "" where it fits."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        problem = str(error)
    else:
        return ""
    known = {key: p for key, p in signature.parameters.items() if key != "self"}
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for key in kwargs:
            if key not in known:
                return f"no argument {key!r}" + (_aliases.answer(kind, key, known) or _check.near(key, known))
    ordered = [key for key, p in known.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positional = len(args) - ("self" in signature.parameters)
    if positional > len(ordered):
        named = [f"{key}=" for key, p in known.items() if p.kind is p.KEYWORD_ONLY]
        named += [key for key, p in known.items() if p.kind is p.VAR_KEYWORD]
        rest = f"; by name only: {', '.join(named)}" if named else ""
        return f"got {positional} positional arguments; it takes {', '.join(ordered) or 'none'}{rest}"
    lacking = [
        key
        for i, (key, p) in enumerate(known.items())
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and key not in kwargs
        and (key not in ordered or i >= positional)
    ]
    return f"lacks {', '.join(f'{key}=' for key in lacking)}" if lacking else problem
