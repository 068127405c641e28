"""Types for functions that give back the form that they were given: a row for a row, a list of rows for a list."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeAlias, cast, overload

import numpy as np

from rlkit._calls import answered

P = ParamSpec("P")
Number: TypeAlias = float | np.number[Any] | np.bool_
Row: TypeAlias = np.ndarray | Sequence[Number]


class ArrayLike(Protocol):
    """An array of numpy, or what can become one, such as a tensor or a column of a table."""

    def __array__(self) -> Any: ...


RowsLike: TypeAlias = Sequence[Row] | Sequence[Number] | ArrayLike  # one row, or several
Arrays: TypeAlias = np.ndarray | list[np.ndarray]  # an array for one row or for a matrix, a list for a list
Labels: TypeAlias = Sequence[Hashable] | ArrayLike
TokenIds: TypeAlias = Sequence[int] | Sequence[np.integer[Any]] | ArrayLike
Numbers: TypeAlias = Sequence[Number] | ArrayLike


class RowWise(Protocol[P]):
    """A function of rewards (or what else comes in rows), then of whatever ``P`` says."""

    __name__: str

    @overload
    def __call__(self, rewards: Sequence[Row], *args: P.args, **kwargs: P.kwargs) -> list[np.ndarray]: ...

    @overload
    def __call__(self, rewards: Sequence[Number] | ArrayLike, *args: P.args, **kwargs: P.kwargs) -> np.ndarray: ...


class TwoRowWise(Protocol[P]):
    """The same with two results."""

    __name__: str

    @overload
    def __call__(
        self, rewards: Sequence[Row], *args: P.args, **kwargs: P.kwargs
    ) -> tuple[list[np.ndarray], list[np.ndarray]]: ...

    @overload
    def __call__(
        self, rewards: Sequence[Number] | ArrayLike, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[np.ndarray, np.ndarray]: ...


def row_wise(function: Callable[Concatenate[RowsLike, P], Arrays]) -> RowWise[P]:
    """Apply ``answered``, and tell type checkers that an array gives an array, and a list of rows a list.

    A list of numbers is a row, too, and gives an array.
    """
    return cast("RowWise[P]", answered(function, kind="estimators"))


def two_row_wise(function: Callable[Concatenate[RowsLike, P], tuple[Arrays, Arrays]]) -> TwoRowWise[P]:
    """Do the same as ``row_wise`` for a function with two results."""
    return cast("TwoRowWise[P]", answered(function, kind="estimators"))
