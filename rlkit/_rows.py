"""Batches of rows: one row, equally long rows, or rows of different lengths, held as one flat array.

Everything around the losses takes a 1-D array (one row), a 2-D array (one row per line) or a list of 1-D arrays, and
gives back the same form. Flat storage makes one numpy call serve all rows, whatever their lengths.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import attrs
import numpy as np

from rlkit import _check
from rlkit._forms import Arrays, RowsLike
from rlkit.errors import DataError

LARGEST = 1e150  # squares and sums of squares of anything smaller stay finite in float64
_FORMS = "a 1-D array, a 2-D array or a list of 1-D arrays of numbers"


@attrs.frozen(eq=False, slots=False)
class Rows:
    """``flat`` [N] holds the rows one after the other; ``lengths`` [B] says how long they are."""

    where: str
    flat: np.ndarray
    lengths: np.ndarray
    form: Literal["one", "matrix", "list", "flat"]  # "flat": given and wanted as they are stored, by by_group

    @cached_property
    def ends(self) -> np.ndarray:
        """Where each row ends in ``flat`` [B]."""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """Where each row starts in ``flat`` [B]."""
        return np.asarray(self.ends - self.lengths)

    def reduce(self, ufunc: np.ufunc, values: np.ndarray, empty: float = 0.0) -> np.ndarray:
        """``ufunc`` over each row of ``values`` [N] -> [B]; a row without entries gives ``empty``.

        One way of adding up for all forms, so that a row gives the same bits alone, in a matrix and in a list.
        """
        filled = self.lengths > 0
        if filled.all():
            return np.asarray(ufunc.reduceat(values, self.starts))
        result = np.full(self.lengths.size, empty, values.dtype)
        if filled.any():
            result[filled] = ufunc.reduceat(values, self.starts[filled])
        return result

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of each row [B]."""
        return self.reduce(np.add, values)

    def spread(self, per_row: np.ndarray) -> np.ndarray:
        """One number per row [B] -> one per entry [N]."""
        return np.repeat(per_row, self.lengths)

    def restore(self, flat: np.ndarray) -> Arrays:
        """[N] in the form in which the rows came."""
        if self.form in ("one", "flat"):
            return flat
        if self.form == "matrix":
            return flat.reshape(self.lengths.size, -1)
        return [flat[a:b] for a, b in itertools.pairwise([0, *self.ends.tolist()])]

    def row_name(self, row: int, where: str | None = None) -> str:
        """How a user writes that row."""
        where = self.where if where is None else where
        return where if self.form == "one" else f"{where}[{row}]"

    def name(self, index: int, where: str | None = None) -> str:
        """How a user writes the entry at ``index`` of ``flat``."""
        row = int(np.searchsorted(self.ends, index, side="right"))
        return f"{self.row_name(row, where)}[{index - int(self.starts[row])}]"

    def check_finite(
        self, flat: np.ndarray, *, where: str | None = None, nan: bool = False, among: np.ndarray | None = None
    ) -> None:
        """Raise for the first entry (``among`` those that count) that is no finite number; NaN may be allowed."""
        with np.errstate(invalid="ignore"):
            if flat.size == 0 or (flat.min() >= -LARGEST and flat.max() <= LARGEST):
                return  # the usual case, without temporary arrays
            good = np.abs(flat) <= LARGEST
        if nan:
            good |= np.isnan(flat)
        if among is not None:
            good |= ~among
        if not good.all():
            index = int(np.argmin(good))
            expected = f"a number between -{LARGEST:g} and {LARGEST:g}" + (", or NaN for unscored" if nan else "")
            raise DataError(self.name(index, where), f"is {flat[index]}", expected)

    def require(self, where: str, flat: np.ndarray, good: np.ndarray, expected: str) -> None:
        """Raise for the first entry of ``flat`` [N], of the argument ``where``, that is not ``good``."""
        if not good.all():
            index = int(np.argmin(good))
            raise DataError(self.name(index, where), f"is {flat[index]}", expected)

    def like(self, where: str, value: RowsLike, *, boolean: bool = False) -> np.ndarray:
        """``value`` as a flat array, required to have the layout of these rows; its entries are not checked."""
        other = parse(where, value, boolean=boolean, empty=True)
        if (other.form == "one") != (self.form == "one") or other.lengths.size != self.lengths.size:
            raise DataError(where, f"has {_layout(other)}", _layout(self), f"shaped like {self.where}")
        wrong = np.flatnonzero(other.lengths != self.lengths)
        if wrong.size:
            row = int(wrong[0])
            name, what = other.row_name(row), f"has length {other.lengths[row]}"
            raise DataError(name, what, f"{self.lengths[row]}", f"as long as {self.row_name(row)}")
        return other.flat


def parse(where: str, value: RowsLike | Rows, *, boolean: bool = False, empty: bool = False) -> Rows:
    """``value`` as rows of float64 (bool where ``boolean``); ``empty`` allows rows without entries.

    Raises:
        DataError: naming the row or entry that is no number, text, None, or (for numbers) a boolean.
    """
    if isinstance(value, Rows):
        return value
    if isinstance(value, (list, tuple)) and value:
        kinds = set(map(type, value))
        if kinds == {np.ndarray} and not boolean and _plain(value):
            rows = list(value)
        elif any(issubclass(kind, (list, tuple)) or hasattr(kind, "__array__") for kind in kinds) and any(
            not is_one(entry) for entry in value if isinstance(entry, (list, tuple)) or hasattr(entry, "__array__")
        ):
            rows = _each(where, value, boolean)
        else:
            rows = None
        if rows is not None:
            return _join(where, rows, boolean=boolean, empty=empty)
    array = _numbers(where, value, boolean)
    _check.require(array.ndim in (1, 2), where, value, _FORMS, error=DataError)
    if array.ndim == 2:
        lengths = np.full(array.shape[0], array.shape[1])
        return _filled(Rows(where, array.reshape(-1), lengths, "matrix"), empty=empty)
    return _filled(Rows(where, array, np.array([array.size]), "one"), empty=empty)


def vector(where: str, value: Any, length: int | None = None, *, boolean: bool = False, why: str = "") -> np.ndarray:
    """``value`` as a 1-D float64 (or bool) array, of ``length`` entries where that is given."""
    array = _numbers(where, value, boolean)
    if array.ndim != 1 or (length is not None and array.size != length):
        raise DataError(where, f"has shape {array.shape}", "a 1-D array" if length is None else f"({length},)", why)
    return array


def is_one(value: Any) -> bool:
    """Whether ``value`` is one entry, not a sequence; numpy's ``ndim`` would fail where lists are ragged."""
    return not isinstance(value, (list, tuple)) and np.ndim(value) == 0


def labels(where: str, value: Any, length: int, why: str = "one label per reward") -> tuple[np.ndarray, int]:
    """Labels [length] as codes 0, 1, ... in order of appearance, and how many different ones there are."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__len__") or hasattr(value, "__array__")):
        raise DataError(where, f"got {_check.shown(value)}", f"{length} labels", why)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.shape == (length,) and length:
        quick = _integer_codes(value)
        if quick is not None:
            return quick
    listed = np.asarray(value).tolist() if hasattr(value, "__array__") else list(value)
    if len(listed) != length:
        raise DataError(where, f"has length {len(listed)}", f"{length}", why)
    known: dict[Any, int] = {}
    try:
        codes = np.array([known.setdefault(label, len(known)) for label in listed], np.int64)
    except TypeError as error:
        bad = next(i for i, label in enumerate(listed) if not _hashable(label))
        what = f"is {_check.shown(listed[bad])}"
        raise DataError(f"{where}[{bad}]", what, "a hashable label, such as a string") from error
    for label in known:
        if label is None or label != label:  # noqa: PLR0124 - NaN, which would be a group of its own every time
            what = f"is {_check.shown(label)}"
            raise DataError(f"{where}[{listed.index(label)}]", what, "a label, such as a string or number")
    return codes, len(known)


def _integer_codes(label: np.ndarray) -> tuple[np.ndarray, int] | None:
    """Return the codes of integer labels that rise, or span no more than a few times their number, without a loop."""
    if (label[1:] >= label[:-1]).all():
        codes = np.zeros(label.size, np.int64)
        np.cumsum(label[1:] != label[:-1], out=codes[1:])
        return codes, int(codes[-1]) + 1
    lowest, highest = int(label.min()), int(label.max())
    if highest - lowest > 8 * label.size or highest >= 2**63:
        return None
    place = label.astype(np.int64) - lowest
    first = np.full(highest - lowest + 1, label.size)
    first[place[::-1]] = np.arange(label.size)[::-1]  # of several, the last assignment stays
    present = np.flatnonzero(first < label.size)
    code = np.empty(first.size, np.int64)
    code[present[np.argsort(first[present])]] = np.arange(present.size)
    return code[place], present.size


def _plain(value: Any) -> bool:
    """Whether all arrays are 1-D numbers; a hundred thousand of them are common, so this runs without a loop."""
    dtypes = set(map(attrgetter("dtype"), value))
    return set(map(attrgetter("ndim"), value)) == {1} and all(dtype.kind in "iuf" for dtype in dtypes)


def _hashable(label: Any) -> bool:
    try:
        hash(label)
    except TypeError:
        return False
    return True


def _each(where: str, value: Any, boolean: bool) -> list[np.ndarray]:
    rows = []
    for i, row in enumerate(value):
        name = f"{where}[{i}]"
        array = _numbers(name, row, boolean)
        if array.ndim != 1:
            raise DataError(name, f"has shape {array.shape}", "a 1-D array", f"{where} is {_FORMS}")
        rows.append(array)
    return rows


def _join(where: str, rows: list[np.ndarray], *, boolean: bool, empty: bool) -> Rows:
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    flat = np.concatenate(rows).astype(bool if boolean else np.float64, copy=False)
    form: Literal["matrix", "list"] = "matrix" if lengths[0] > 0 and (lengths == lengths[0]).all() else "list"
    return _filled(Rows(where, flat, lengths, form), empty=empty)


def _filled(rows: Rows, *, empty: bool) -> Rows:
    if rows.lengths.size == 0 or (not empty and rows.form == "one" and rows.flat.size == 0):
        raise DataError(rows.where, "is empty", "at least one entry")
    if not empty and (rows.lengths == 0).any():
        raise DataError(rows.row_name(int(np.argmin(rows.lengths))), "is empty", "at least one entry")
    return rows


def _numbers(where: str, value: Any, boolean: bool) -> np.ndarray:
    """``value`` as float64 of any dimension, or as bool where 0 and 1 are expected."""
    expected = "True or False for each entry" if boolean else "numbers"
    if isinstance(value, (list, tuple)):
        if not value:
            return np.zeros(0, bool if boolean else np.float64)
        _check_entries(where, value, boolean)
    array = _check.as_array(where, value, expected)
    if boolean:
        wrong = np.argwhere((array != 0) & (array != 1))
        if wrong.size:
            index = "".join(f"[{i}]" for i in wrong[0])
            raise DataError(where + index, f"is {array[tuple(wrong[0])]}", "True or False")
        return array.astype(bool)
    if array.dtype.kind == "b":
        raise DataError(where, "holds booleans", "numbers", "write 0.0 and 1.0")
    return np.array(array, np.float64, order="C")


def _check_entries(where: str, value: Any, boolean: bool) -> None:
    """Name the entry of a list that is text, None or a boolean, which numpy would convert or turn into objects."""
    wrong: Callable[[type], bool] = lambda kind: (  # noqa: E731
        kind is type(None) or issubclass(kind, (str, bytes)) or (not boolean and issubclass(kind, (bool, np.bool_)))
    )
    if any(map(wrong, set(map(type, value)))):
        i = next(i for i, entry in enumerate(value) if wrong(type(entry)))
        raise DataError(f"{where}[{i}]", f"is {_check.shown(value[i])}", "True or False" if boolean else "a number")


def _layout(rows: Rows) -> str:
    if rows.form == "one":
        return f"shape ({rows.flat.size},)"
    return f"{rows.lengths.size} rows"
