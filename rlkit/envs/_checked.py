"""What environments answer, in its proper form, or an EnvError that names the environment."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeGuard

import numpy as np

from rlkit import _check, _rows
from rlkit._interaction import Observation, StepResult
from rlkit.errors import DataError, EnvError

_FORMS = "text, chat messages or token ids"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


def describe_value(value: object) -> str:
    """Return ``value`` in a message: short, whatever it is, even where its ``__repr__`` raises."""
    text = _SHORT.repr(value)
    return text if value is None else f"{text} ({type(value).__name__})"


def check_first_observation(value: object, *, where: str, max_chars: int) -> Observation:
    """Check what ``reset`` gave: an observation, or gymnasium's pair of one and its info."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], Mapping) and "role" not in value[1]:
        value = value[0]
    first = observation(value, where=where, max_chars=max_chars)
    if len(first) == 0:
        raise EnvError(f"{where}: observation", "is empty", "the text for the policy to answer")
    return first


def observation(value: object, *, where: str, max_chars: int) -> Observation:
    """Return ``value`` as a str, a tuple of messages (copied, so that later changes are not seen), or int64 [T]."""
    where = f"{where}: observation"
    if isinstance(value, str):
        _check_size(where, len(value), max_chars, "characters")
        return _check_text(value, where)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:  # messages, as pandas reads them
        value = list(value)
    if _listed(value):
        _check_size(where, len(value), max_chars, "entries")
    if isinstance(value, np.ndarray) or (_listed(value) and value and not isinstance(value[0], Mapping)):
        try:
            tokens = _check.token_ids(where, value)
        except DataError as error:
            raise EnvError(str(error)) from error
        _check_size(where, tokens.size, max_chars, "tokens")
        return tokens
    if not _listed(value):
        raise EnvError(where, f"got {describe_value(value)}", _FORMS)
    return _copy_messages(value, where, max_chars)


def check_step_result(value: object, *, where: str, max_chars: int) -> StepResult:
    """Return ``value``, a StepResult or the five values of gymnasium, with every part in its proper form."""
    if isinstance(value, tuple) and len(value) == 5:
        try:
            value = StepResult(*value)
        except DataError as error:
            raise EnvError(f"{where}: {str(error).removeprefix('StepResult.')}") from None
    if not isinstance(value, StepResult):
        raise EnvError(where, f"got {describe_value(value)}", "a StepResult")
    terminated = _check.flag(f"{where}: terminated", value.terminated, error=EnvError)
    truncated = _check.flag(f"{where}: truncated", value.truncated, error=EnvError)
    info = {} if value.info is None else value.info
    if not isinstance(info, Mapping):
        raise EnvError(f"{where}: info", f"got {describe_value(info)}", "a mapping")
    last = "" if (terminated or truncated) and value.observation is None else value.observation
    total, several = _rewards(value, where)
    return StepResult(
        observation(last, where=where, max_chars=max_chars),
        total,
        terminated,
        truncated,
        MappingProxyType(dict(info)),
        rewards=several,
    )


def _rewards(value: StepResult, where: str) -> tuple[float, tuple[float, ...] | None]:
    """Return the step's reward, and its parts where it is not one."""
    listed = value.rewards
    if listed is None:
        return (0.0, ()) if value.reward is None else (reward(value.reward, where=where), None)
    if isinstance(listed, (str, bytes, Mapping)) or not hasattr(listed, "__iter__"):
        raise EnvError(f"{where}: rewards", f"got {describe_value(listed)}", "a sequence of numbers")
    several = tuple(reward(x, where=f"{where}: rewards[{i}]") for i, x in enumerate(listed) if x is not None)
    if value.reward not in (None, 0.0) and not np.isclose(reward(value.reward, where=where), sum(several)):
        what = f"is {describe_value(value.reward)}, but the sum of rewards is {sum(several):g}"
        raise EnvError(f"{where}: reward", what, "their sum", "give only rewards")
    return float(sum(several)), several


def reward(value: object, *, where: str) -> float:
    """Return ``value`` as a finite float; booleans, numpy's scalars and arrays without a dimension will do."""
    where = f"{where}: reward"
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    try:
        value = float(value) if isinstance(value, (bool, int)) else value
    except OverflowError as error:
        raise EnvError(where, "got an integer too large for a float", "a finite number") from error
    return _check.real(where, value, low=-_rows.LARGEST, high=_rows.LARGEST, error=EnvError)


def _copy_messages(values: Sequence[object], where: str, max_chars: int) -> tuple[dict[str, object], ...]:
    """Return messages by way of JSON: a user's later changes are not seen, and only JSON is in them."""
    copies, size = [], 0
    for i, value in enumerate(values):
        place, pieces = f"{where}[{i}]", []
        if not isinstance(value, Mapping):
            raise EnvError(place, f"got {describe_value(value)}", "a message", "the others are messages")
        _check.depth(place, value, error=EnvError)
        try:
            for piece in _JSON.iterencode(value):  # in pieces: what is held many times would not end
                size += len(piece)
                _check_size(where, size, max_chars, "characters")
                pieces.append(piece)
        except (TypeError, ValueError, RecursionError) as error:
            raise EnvError(place, f"is not JSON ({error})", "text, numbers, lists and mappings") from error
        message = json.loads(_check_text("".join(pieces), place))
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise EnvError(f"{place}['role']", f"got {describe_value(message.get('role'))}", "a role's name")
        if "content" not in message and "tool_calls" not in message:
            raise EnvError(place, f"has the keys {sorted(message)}", "role and content")
        if not isinstance(message.get("content"), (str, list, type(None))):
            raise EnvError(
                f"{place}['content']", f"got {describe_value(message['content'])}", "text or a list of parts"
            )
        copies.append(message)
    return tuple(copies)


def _convert(value: object) -> object:
    """Return what JSON does not know as something that it does."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    raise TypeError(f"got {describe_value(value)}")


_JSON = json.JSONEncoder(ensure_ascii=False, default=_convert)


def _check_text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise EnvError(where, f"has {text[error.start]!r} at {error.start}", "text that UTF-8 can encode") from error
    return str.__str__(text)


def _check_size(where: str, size: int, most: int, unit: str) -> None:
    if size > most:
        raise EnvError(where, f"has {size} {unit}", f"at most max_chars, {most}", "longer answers could stop the run")


def _listed(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(value, (list, tuple))
