"""What environments answer, in its proper form, or an EnvError that names the environment."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeGuard, cast

import numpy as np

from rlkit import _check, _rows
from rlkit._interaction import Observation, StepResult
from rlkit.errors import DataError, EnvError

_FORMS = "text, chat messages or token ids"
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_DEEPEST = 32  # levels of lists and mappings inside of a message


def shown(value: object) -> str:
    """Return ``value`` in a message: short, whatever it is and however large, and without trusting its ``__repr__``."""
    text = _SHORT.repr(value)
    return text if value is None else f"{text} ({type(value).__name__})"


def first_observation(value: object, *, where: str, max_chars: int) -> Observation:
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
        return _Copy(where, max_chars).text(value, where)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, np.ndarray) and value.dtype == object and value.ndim == 1:  # messages, as pandas reads them
        value = list(value)
    if _listed(value) and len(value) > max_chars:
        raise EnvError(where, f"has {len(value)} entries", f"at most {max_chars}")
    if isinstance(value, np.ndarray) or (_listed(value) and value and not isinstance(value[0], Mapping)):
        try:
            tokens = _check.token_ids(where, value)
        except DataError as error:
            raise EnvError(str(error)) from error
        if tokens.size > max_chars:
            raise EnvError(where, f"has {tokens.size} tokens", f"at most {max_chars}")
        return tokens
    if not _listed(value):
        raise EnvError(where, f"got {shown(value)}", _FORMS)
    copy = _Copy(where, max_chars)
    return tuple(_message(copy, f"{where}[{i}]", message) for i, message in enumerate(value))


def step_result(value: object, *, where: str, max_chars: int) -> StepResult:
    """Return ``value``, a StepResult or the five values of gymnasium, with every part in its proper form."""
    if isinstance(value, tuple) and len(value) == 5:
        try:
            value = StepResult(*value)
        except DataError as error:
            raise EnvError(f"{where}: {str(error).removeprefix('StepResult.')}") from None
    if not isinstance(value, StepResult):
        raise EnvError(where, f"got {shown(value)}", "a StepResult")
    terminated = _check.flag(f"{where}: terminated", value.terminated, error=EnvError)
    truncated = _check.flag(f"{where}: truncated", value.truncated, error=EnvError)
    info = {} if value.info is None else value.info
    if not isinstance(info, Mapping):
        raise EnvError(f"{where}: info", f"got {shown(info)}", "a mapping")
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
        raise EnvError(f"{where}: rewards", f"got {shown(listed)}", "a sequence of numbers")
    several = tuple(reward(x, where=f"{where}: rewards[{i}]") for i, x in enumerate(listed) if x is not None)
    if value.reward not in (None, 0.0) and not np.isclose(reward(value.reward, where=where), sum(several)):
        what = f"is {shown(value.reward)}, but the sum of rewards is {sum(several):g}"
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


def _message(copy: _Copy, where: str, value: object) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise EnvError(where, f"got {shown(value)}", "a message", "the others are messages")
    if not isinstance(value.get("role"), str) or not value["role"]:
        raise EnvError(f"{where}['role']", f"got {shown(value.get('role'))}", "a role's name")
    if "content" not in value and "tool_calls" not in value:
        raise EnvError(where, f"has the keys {sorted(map(str, value))}", "role and content")
    content = value.get("content", "")
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise EnvError(f"{where}['content']", f"got {shown(content)}", "text or a list of parts")
    return cast("dict[str, object]", copy.of(value, where, 0))


class _Copy:
    """A copy of a message's contents, limited to JSON and to ``max_chars`` characters."""

    def __init__(self, where: str, max_chars: int) -> None:
        self._where = where
        self._max = max_chars
        self._chars = 0

    def of(self, value: object, where: str, depth: int) -> object:
        if isinstance(value, str):
            return self.text(value, where)
        self._count(1)  # so that there is an end to empty lists, too
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, (int, np.integer)):
            return int(value)
        if isinstance(value, (float, np.floating)):
            return float(value)
        if depth < _DEEPEST and isinstance(value, Mapping):
            return {self.text(str(k), where): self.of(v, f"{where}[{k!r}]", depth + 1) for k, v in value.items()}
        if depth < _DEEPEST and _listed(value):
            return [self.of(part, f"{where}[{i}]", depth + 1) for i, part in enumerate(value)]
        raise EnvError(where, f"got {shown(value)}", "a JSON value, not nested too deeply")

    def text(self, value: str, where: str) -> str:
        self._count(len(value))
        try:
            value.encode()
        except UnicodeEncodeError as error:
            what = f"has {value[error.start]!r} at {error.start}"
            raise EnvError(where, what, "text that UTF-8 can encode") from error
        return str.__str__(value)

    def _count(self, chars: int) -> None:
        self._chars += chars
        if self._chars > self._max:
            what = f"has more than {self._max} characters"
            raise EnvError(self._where, what, "at most max_chars", "longer answers could stop the run")


def _listed(value: object) -> TypeGuard[list[object] | tuple[object, ...]]:
    return isinstance(value, (list, tuple))
