"""Rows of prompts, and the fields that a reward function gets."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import attrs
import numpy as np

from rlkit import _check
from rlkit.envs._checked import observation
from rlkit.envs.protocol import Observation
from rlkit.errors import ConfigError, DataError, EnvError, UnknownNameError

__all__ = ["name_of", "note_errors", "read_rows"]

_ROWS = "convert it: [dict(zip(columns, row)) for row in zip(*columns.values())]"


def read_rows(rows: object, split: str, *, where: str, forms: str, function: str) -> Sequence[object]:
    """Return the rows of a split: anything with a length and an index, or a mapping from splits to such.

    Args:
        rows, split: as given.
        where: the argument, for messages.
        forms: what it may be, for messages.
        function: whose argument it is, for messages.

    Raises:
        DataError: there are no rows.
        UnknownNameError: no such split.
    """
    if isinstance(rows, Mapping):
        if split not in rows and "prompt" in rows:
            raise DataError(where, "got a dict of columns", forms, _ROWS)
        if split not in rows:
            known = ", ".join(map(str, rows)) or "none"
            raise UnknownNameError(f"{function}: no split named {split!r}. There are: {known}")
        rows = rows[split]
    if isinstance(rows, str) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(where, f"got {_check.describe(rows)}", forms)
    if len(rows) == 0:
        raise DataError(where, "is empty", "at least one row")
    return cast("Sequence[object]", rows)


@contextlib.contextmanager
def note_errors(where: str) -> Iterator[None]:
    """Add a note of where it was raised to an error of the user's own function."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def name_of(function: Callable[..., object]) -> str:
    """Return a function's name, quoted."""
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return repr(getattr(function, "__name__", type(function).__name__))


_FORMS = "rows of text, messages or token ids, or mappings with a 'prompt'"


class Rows:
    """Prompts of one split, and a reward that is called with those of a row's fields that it names.

    Args:
        adapter: whose they are, for messages.
        prompts: anything with a length and an index, or a mapping from splits to such.
        reward: a function of the answer, and by keyword of a row's fields.
        split: which rows to take, where there are several splits.
        offered: names besides the row's fields that the reward may have; the caller of the reward adds them.

    Raises:
        DataError: there are no rows, or one has another form.
        ConfigError: the reward is not a function, or wants a field that the rows do not have.
        UnknownNameError: no such split.
    """

    def __init__(
        self,
        adapter: str,
        prompts: object,
        reward: Callable[..., object],
        *,
        split: str,
        offered: Mapping[str, object] | None = None,
    ) -> None:
        self._rows = read_rows(prompts, split, where="prompts", forms=_FORMS, function=f"rlkit.envs.{adapter}")
        number = isinstance(reward, type) and issubclass(reward, (int, float))  # float("0.5") is a reward
        good = callable(reward) and (number or not isinstance(reward, type))
        _check.require(good, "reward", reward, "a function of the answer")
        self._reward = reward
        self._fields = _fields(reward)
        self._offered = {} if offered is None else offered
        ready = isinstance(self._rows, (list, tuple))  # others may read each row from a disk
        for i in range(len(self._rows) if ready else 1):
            self[i]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Return a row, which is read once."""
        value = self._rows[index]
        where = f"prompts[{index}]"
        all_fields = value if isinstance(value, Mapping) else {"prompt": value}
        fields = self._fields(where, {**self._offered, **all_fields})
        info = {"answer": all_fields["answer"]} if "answer" in all_fields else {}
        note = f"in the reward {name_of(self._reward)} for {where}"
        return Row(_prompt(where, value), all_fields, fields, info, note)


@attrs.frozen(eq=False)
class Row:
    """One row.

    Attributes:
        prompt: the first message to the policy.
        all_fields: all its fields.
        fields: those that the reward names.
        info: goes into a step's ``info``: the right answer, where it has one.
        note: is added to an error that the reward raises.
    """

    prompt: Observation
    all_fields: Mapping[str, object]
    fields: dict[str, object]
    info: dict[str, object]
    note: str


def _prompt(where: str, row: object) -> Observation:
    """Return the prompt of a row."""
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise DataError(where, f"has only {sorted(map(str, row))}", "a field 'prompt'")
        row, where = row["prompt"], f"{where}['prompt']"
    if isinstance(row, np.ndarray) and row.dtype.kind not in "iuO":
        raise DataError(where, f"got {_check.describe(row)}", "text, chat messages or token ids")
    try:
        return observation(row, where=where, max_chars=10**9)
    except EnvError as error:
        raise DataError(str(error)) from error


def _fields(reward: Callable[..., object]) -> Callable[[str, Mapping[str, object]], dict[str, object]]:
    """Return a function of (where, row) that gives the fields of a row that the reward names."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())[1:]
    except ValueError:  # some built-in functions do not say
        return lambda where, row: {}
    _check_form(reward)
    wanted = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def fields(where: str, row: Mapping[str, object]) -> dict[str, object]:
        for parameter in wanted:
            if parameter.default is parameter.empty and parameter.name not in row:
                what = f"has no field {parameter.name!r}"
                raise ConfigError(where, what, "all fields that the reward names", ", ".join(map(str, row)))
        return {str(k): v for k, v in row.items() if every or k in {p.name for p in wanted}}

    return fields


def _check_form(reward: Callable[..., object]) -> None:
    """Raise ConfigError for a reward of another library's form, which takes all completions and gives a list."""
    names = list(inspect.signature(reward).parameters)
    why = ""
    if {"completions", "completion_ids"} & set(names):
        why = "it takes completions and returns a list of rewards"
    elif {"solution_str", "data_source"} <= set(names):
        why = "it takes data_source and solution_str"
    if why:
        raise ConfigError(
            f"reward: {name_of(reward)} has another library's signature: {why}; rlkit calls it once for each answer: "
            "def reward(text, answer): return 1.0, with the row's fields by name (for whole groups: group=True)"
        )
