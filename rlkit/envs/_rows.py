"""Rows that a user gave, and what is the user's own about them: a reward, and the errors that it raises."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from rlkit import _check
from rlkit.errors import DataError, UnknownNameError

__all__ = ["named", "noted", "rows_of"]


def rows_of(rows: object, split: str, *, where: str, forms: str, function: str) -> Sequence[object]:
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
        if split not in rows:
            known = ", ".join(map(str, rows)) or "none"
            raise UnknownNameError(f"{function}: no split named {split!r}. There are: {known}")
        rows = rows[split]
    if isinstance(rows, str) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise DataError(where, f"got {_check.shown(rows)}", forms)
    if len(rows) == 0:
        raise DataError(where, "is empty", "at least one row")
    return cast("Sequence[object]", rows)


@contextlib.contextmanager
def noted(where: str) -> Iterator[None]:
    """Let an error of the user's own function pass, with a note of where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def named(function: Callable[..., object]) -> str:
    """Return a function's name, quoted."""
    return repr(getattr(function, "__name__", type(function).__name__))
