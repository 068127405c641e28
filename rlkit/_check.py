"""Checks of arguments. Each returns the value in its proper type or raises an error that says where, what,
what was expected, and why.
"""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, TypeVar

import attrs
import numpy as np

from rlkit.errors import ConfigError, DataError, RlkitError

P = ParamSpec("P")
T = TypeVar("T")
_SHOWN = 60
DEEPEST_CALL = 64  # levels of a call that a policy writes, which clients send back inside of a conversation
HIGHEST = 0.1  # a log-sum-exp of 30, rounded to bfloat16, is off by up to 0.0625; beyond this it is not a logprob


class ArrayLike(Protocol):
    """A numpy array, or an object that converts to one, such as a tensor or a column of a table."""

    def __array__(self) -> Any: ...


Number: TypeAlias = float | np.number[Any] | np.bool_
Numbers: TypeAlias = Sequence[Number] | ArrayLike
TokenIds: TypeAlias = Sequence[int] | Sequence[np.integer[Any]] | ArrayLike


def describe(value: object) -> str:
    """Return ``value`` as it appears in an error message: short, with its type."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {value.shape} and dtype {value.dtype}"
    text = repr(value)
    if len(text) > _SHOWN:
        text = text[: _SHOWN - 3] + "..."
    return text if value is None else f"{text} ({type(value).__name__})"


def require(
    good: object, where: str, value: object, expected: str, why: str = "", *, error: type[RlkitError] = ConfigError
) -> None:
    """Raise unless ``good``, a test of ``value``, holds.

    >>> require(callable(3), "Task.make", 3, "a callable")
    Traceback (most recent call last):
    rlkit.errors.ConfigError: Task.make: got 3 (int); expected a callable
    """
    if not good:
        raise error(where, f"got {describe(value)}", expected, why)


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the suffix of an unknown-name error: the closest match, and all known names.

    >>> suggest("rad", ["red", "blue"]), suggest("x", ["red", "blue"])
    ("; did you mean 'red'? There are: red, blue", '. There are: red, blue')
    """
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    return (f"; did you mean {close[0]!r}?" if close else ".") + f" There are: {', '.join(known) or 'none'}"


def require_protocol(where: str, thing: object, protocol: type, hint: str = "") -> None:
    """Raise ConfigError for an object that lacks public members of a protocol.

    >>> from collections.abc import Sized
    >>> class Growing(Sized):
    ...     def grow(self) -> None: ...
    >>> require_protocol("connect(x)", 3, Growing)
    Traceback (most recent call last):
    rlkit.errors.ConfigError: connect(x): got 3 (int), which has no grow; expected a Growing
    """
    lacking = [name for name in vars(protocol) if not name.startswith("_") and not hasattr(thing, name)]
    if lacking or isinstance(thing, type):
        what = f"got {describe(thing)}, which " + (f"has no {', '.join(lacking)}" if lacking else "is a class")
        raise ConfigError(where, what, f"a {protocol.__name__}", hint)


def check_keywords(where: str, make: Callable[..., object], given: Iterable[str], *, more: Iterable[str] = ()) -> None:
    """Raise ConfigError for the first given keyword that ``make`` does not take.

    Args:
        where: what was called.
        make: the function that gets the keywords.
        given: names of the keywords.
        more: names that ``where`` itself takes, which may have been meant.
    """
    known = inspect.signature(make).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in given:
            if name not in known:
                raise ConfigError(f"{where}: no option {name!r}{suggest(name, [*known, *more])}")


def integer(
    where: str,
    value: object,
    *,
    low: int | None = None,
    high: int | None = None,
    why: str = "",
    error: type[RlkitError] = ConfigError,
) -> int:
    """Return ``value`` as an int in [low, high]; booleans and floats are refused."""
    expected = "an integer" + _interval(low, high)
    value = plain(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Integral):
        raise error(where, f"got {describe(value)}", expected, why)
    number = int(value)
    if (low is not None and number < low) or (high is not None and number > high):
        raise error(where, f"got {number}", expected, why)
    return number


def real(
    where: str,
    value: object,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    why: str = "",
    error: type[RlkitError] = ConfigError,
) -> float:
    """Return ``value`` as a finite float in [low, high], or in the open interval (above, below)."""
    bounds = [f">= {low}"] * (low is not None) + [f"> {above}"] * (above is not None)
    bounds += [f"<= {high}"] * (high is not None) + [f"< {below}"] * (below is not None)
    expected = "a finite number" + (" " + " and ".join(bounds) if bounds else "")
    value = plain(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real):
        raise error(where, f"got {describe(value)}", expected, why)
    number = float(value)
    inside = (
        math.isfinite(number)
        and (low is None or number >= low)
        and (high is None or number <= high)
        and (above is None or number > above)
        and (below is None or number < below)
    )
    if not inside:
        raise error(where, f"got {value}", expected, why)
    return number


def temperature(where: str, value: object, *, zero: bool, error: type[RlkitError] = ConfigError) -> float:
    """Return ``value`` if in [1e-3, 1e3], where logits divided by it stay finite, or 0 where that may mean greedy."""
    expected = "a number in [0.001, 1000]" + (", or 0 for greedy" if zero else "")
    number = plain(value)
    if isinstance(number, bool) or not isinstance(number, numbers.Real):
        raise error(where, f"got {describe(value)}", expected)
    if not (1e-3 <= float(number) <= 1e3 or (zero and number == 0)):
        raise error(where, f"got {number}", expected)
    return float(number)


def flag(where: str, value: object, *, error: type[RlkitError] = ConfigError) -> bool:
    """Return ``value`` as a bool; 0, 1 and None are refused."""
    value = plain(value)
    if not isinstance(value, bool):
        raise error(where, f"got {describe(value)}", "True or False")
    return value


def plain(value: object) -> object:
    """Return Python's own number for a scalar of numpy or torch, or for an array without dimensions.

    >>> plain(np.float32(0.5)), plain(np.array(3)), plain([0.5])
    (0.5, 3, [0.5])
    """
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def read_only(value: Any) -> Any:
    """Return a mapping as one that cannot be changed, and anything else as it is."""
    return MappingProxyType(dict(value)) if isinstance(value, Mapping) else value


def checked(
    default: object, check: Callable[..., object], *, none: bool = False, kw_only: bool | None = None, **limits: object
) -> Any:
    """Return a field of an attrs class whose value is what ``check`` returns for it.

    Args:
        default: of the field.
        check: a check of this module; its error names the class and the field.
        none: whether None is allowed, and stays.
        kw_only: as of ``attrs.field``; None: as the class says.
        limits: keyword arguments of ``check``.

    >>> @attrs.frozen
    ... class Pause:
    ...     seconds: float = checked(1.0, real, low=0.0)
    >>> Pause(-1)
    Traceback (most recent call last):
    rlkit.errors.ConfigError: Pause.seconds: got -1; expected a finite number >= 0.0
    """
    # A lambda, since attrs would show the annotation of a function's argument as the field's own.
    converter: Any = attrs.Converter(
        lambda value, made, field: (
            None if value is None and none else check(f"{type(made).__name__}.{field.name}", value, **limits)
        ),
        takes_self=True,
        takes_field=True,
    )
    return attrs.field(default=default, converter=converter, kw_only=kw_only)


def entries(where: str, value: object, count: int | None = None, why: str = "") -> None:
    """Raise DataError unless ``value`` is a sequence or array, of ``count`` entries where that is given."""
    sized: Any = value
    listed = hasattr(value, "__len__") and hasattr(value, "__getitem__") and getattr(value, "ndim", 1) != 0
    if isinstance(value, (str, bytes, Mapping)) or not listed:
        raise DataError(where, f"got {describe(value)}", "a sequence" + f" of {count}" * (count is not None), why)
    if count is not None and len(sized) != count:
        raise DataError(where, f"has length {len(sized)}", f"{count}", why)


def optional(
    check: Callable[Concatenate[str, object, P], T], where: str, value: object, *args: P.args, **kwargs: P.kwargs
) -> T | None:
    """Apply a check unless ``value`` is None."""
    return None if value is None else check(where, value, *args, **kwargs)


def choice(where: str, value: object, options: tuple[str, ...], *, error: type[RlkitError] = ConfigError) -> str:
    """Return ``value`` if it is one of ``options``.

    >>> choice("kl_estimator", "low_var_kl", ("k1", "k3"))
    Traceback (most recent call last):
    rlkit.errors.ConfigError: kl_estimator: got 'low_var_kl' (str); expected one of 'k1', 'k3'
    """
    if not isinstance(value, str) or value not in options:
        raise error(where, f"got {describe(value)}", "one of " + ", ".join(map(repr, options)))
    return value


def token_ids(where: str, value: object, *, vocab_size: int | None = None, low_length: int = 0) -> np.ndarray:
    """Return ``value`` as a read-only int64 array [T] of non-negative ids; text, floats and booleans are refused."""
    if isinstance(value, (str, bytes)):
        raise DataError(where, f"got text {describe(value)}", "token ids", "encode it with the tokenizer")
    array = as_array(where, value, "a 1-D sequence of token ids")
    if array.ndim == 1 and array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(where, f"got {describe(array)}", "a 1-D sequence of integers")
    if array.size < low_length:
        raise DataError(where, f"has length {array.size}", f"at least {low_length} token(s)")
    high = (vocab_size if vocab_size is not None else 2**63) - 1
    bad = np.flatnonzero((array < 0) | (array > high))
    if bad.size:
        bound = f"an id in [0, {high}]" if vocab_size is not None else "an id >= 0"
        raise DataError(f"{where}[{bad[0]}]", f"is {array[bad[0]]}", bound, "the tokenizer has no such token")
    return frozen(array.astype(np.int64))


def messages(where: str, value: object) -> list[Mapping[str, object]]:
    """Return ``value`` as a list of chat messages, mappings with at least a role and content (or tool calls)."""
    expected = 'a list of messages, such as [{"role": "user", "content": "..."}]'
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Sequence) or not value:
        raise DataError(where, f"got {describe(value)}", expected)
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or "role" not in message:
            raise DataError(f"{where}[{i}]", f"got {describe(message)}", "a mapping with a role", expected)
        if "content" not in message and "tool_calls" not in message:
            raise DataError(f"{where}[{i}]", f"has no content, only {sorted(map(str, message))}", expected)
    return list(value)


def roles(messages: Sequence[Mapping[str, object]]) -> str:
    """Return the roles of messages, for an error about them."""
    names = [str(message.get("role")) for message in messages]
    return ", ".join(names if len(names) <= 8 else [*names[:4], "...", *names[-3:]])


def as_array(where: str, value: object, expected: str) -> np.ndarray:
    """Return ``value`` as an array of numbers; ragged lists, None and objects are refused."""
    if value is None:
        raise DataError(where, "is None", expected)
    try:
        array = np.asarray(_of_tensors(value))
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(where, f"got {describe(value)}", expected, str(error)) from error
    if array.dtype.kind not in "iufb":
        raise DataError(where, f"got {describe(value)}", expected)
    return array


def _of_tensors(value: object) -> object:
    """Return ``value`` with torch's tensors, also in a list, turned into arrays; torch is not imported."""
    if isinstance(value, (list, tuple)) and any(hasattr(x, "detach") for x in value):
        return [_of_tensors(x) for x in value]
    if not hasattr(value, "detach"):
        return value
    tensor = value.detach().cpu()
    return (tensor if tensor.dtype.itemsize > 2 or not tensor.dtype.is_floating_point else tensor.float()).numpy()


def squeeze(shape: Sequence[int]) -> str:
    """Return the advice for a matrix where a row was expected."""
    return "squeeze it: one per token" if 1 in shape else "one per token"


def frozen(array: np.ndarray) -> np.ndarray:
    """Return a read-only copy, so that what was checked stays as it was."""
    array = np.array(array)
    array.flags.writeable = False
    return array


def _interval(low: int | None, high: int | None) -> str:
    if low is not None and high is not None:
        return f" in [{low}, {high}]"
    if low is not None:
        return f" >= {low}"
    return f" <= {high}" if high is not None else ""


def finite(text: str) -> float:
    """Return a number of JSON. Raises ValueError: it is not finite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} is not a finite number")
    return number


def depth(where: str, value: object, most: int = 100, *, error: type[RlkitError] = DataError) -> None:
    """Raise ``error`` for a value of JSON's types that is nested deeper than any message, template or schema is.

    Readers and templates, which call themselves, run out of stack at several times that.
    """
    level: list[Any] = [value]
    for _ in range(most):
        inner = (each.values() if isinstance(each, Mapping) else each for each in level)
        found = [each for values in inner for each in values if isinstance(each, (Mapping, list, tuple, np.ndarray))]
        # Each object once: what holds itself twice would double with every level.
        level = [*{id(each): each for each in found if getattr(each, "ndim", 1)}.values()]
    if level:
        raise error(where, "is nested too deeply", f"at most {most} levels")
