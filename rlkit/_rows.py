"""Rows of numbers: read what a user gave, compute over all rows at once, and return the same form.

Every function of arrays takes one row [N], equally long rows [B, N], or a list of rows [N_i], and returns the form it
was given. ``Rows`` holds them one after the other: one numpy call serves all rows of any lengths, memory follows
the number of entries, and a row gives the same bits alone and among others.

The statistics of rows follow three rules: NaN is a missing number, such as the reward of a sample that could
not be scored; a constant row deviates by exactly 0; nothing is ever divided by 0.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._check import HIGHEST, ArrayLike, Number
from rlkit._runtime import warn
from rlkit.errors import DataError

Row: TypeAlias = np.ndarray | Sequence[Number]


RowsLike: TypeAlias = Sequence[Row] | Sequence[Number] | ArrayLike  # one row, or several
Arrays: TypeAlias = Any  # an array for one row or a matrix, a list of arrays for rows of different lengths
Labels: TypeAlias = Sequence[Hashable] | ArrayLike
Places: TypeAlias = np.ndarray | slice  # entries of [N]: a mask, or slice(None) for all

LARGEST = 1e150  # squares and sums of squares of anything smaller stay finite in float64
LARGEST_RATIO = 300.0  # exp(2 * 300) is still finite; a token beyond it is broken, and its exact size does not matter
_ALL = slice(None)
_FORMS = "a 1-D array, a 2-D array or a list of 1-D arrays of numbers"


@attrs.frozen(eq=False)
class Rows:
    """``flat`` [N] holds the rows one after the other; row b is ``flat[starts[b]:ends[b]]``."""

    where: str  # what the user calls the argument
    flat: np.ndarray
    lengths: np.ndarray  # [B]
    form: str  # "row", "matrix" or "list"
    ends: np.ndarray = attrs.field(init=False, default=attrs.Factory(lambda self: np.cumsum(self.lengths), True))
    starts: np.ndarray = attrs.field(init=False, default=attrs.Factory(lambda self: self.ends - self.lengths, True))

    @classmethod
    def parse(cls, where: str, value: RowsLike, *, nan: bool = False, empty: bool = False) -> Rows:
        """Read numbers of at most 1e150; ``nan`` allows unscored ones, ``empty`` rows without entries."""
        rows = cls.read(where, value, empty=empty)
        rows.check_finite(where, rows.flat, nan=nan)
        return rows

    @classmethod
    def vector(cls, where: str, value: RowsLike, size: int | None = None, *, nan: bool = False, why: str = "") -> Rows:
        """Read one row, maybe empty, of ``size`` entries where that is given."""
        rows = cls.parse(where, value, nan=nan, empty=True)
        if rows.form != "row" or size not in (None, rows.flat.size):
            raise DataError(where, f"has {rows.layout}", "a 1-D array" if size is None else f"shape ({size},)", why)
        return rows

    @classmethod
    def read(cls, where: str, value: RowsLike, *, boolean: bool = False, empty: bool = False) -> Rows:
        """Read rows of numbers of any size (of True and False where ``boolean``), always as a copy.

        Raises:
            DataError: naming the row or entry that is text, None or (for numbers) a boolean, or that is missing.
        """
        kinds = "iufb" if boolean else "iuf"
        if isinstance(value, (list, tuple)) and any(map(_is_row, value)):
            arrays: Any = value
            if not all(type(x) is np.ndarray and x.ndim == 1 and x.dtype.kind in kinds for x in value):
                arrays = [_read_array(f"{where}[{i}]", x, boolean, (1,)) for i, x in enumerate(value)]
            lengths = np.array([len(x) for x in arrays], np.int64)
            flat = np.concatenate(arrays)
            form = "matrix" if lengths[0] > 0 and (lengths == lengths[0]).all() else "list"
        else:
            array = _read_array(where, value, boolean, (1, 2))
            form, flat = ("row" if array.ndim == 1 else "matrix"), array.flatten()
            lengths = np.array([array.size]) if form == "row" else np.full(*array.shape)
        rows = cls(where, flat.astype(bool if boolean else np.float64, copy=False), lengths, form)
        if boolean:
            rows.require(where, flat, (flat == 0) | (flat == 1), "True or False")
        if lengths.size == 0 or not (empty or lengths.all()):
            name = rows.name_row(int(np.argmin(lengths))) if lengths.size else where
            raise DataError(name, "is empty", "at least one entry")
        return rows

    def read_like(self, where: str, value: RowsLike, *, boolean: bool = False) -> np.ndarray:
        """Read another argument [N] that has to have the layout of these rows; its numbers are not checked."""
        other = Rows.read(where, value, boolean=boolean, empty=True)
        if (other.form == "row") != (self.form == "row") or other.lengths.size != self.lengths.size:
            raise DataError(where, f"has {other.layout}", self.layout, f"shaped like {self.where}")
        wrong = np.flatnonzero(other.lengths != self.lengths)
        if wrong.size:
            row = int(wrong[0])
            found, expected = f"has length {other.lengths[row]}", f"{self.lengths[row]}"
            raise DataError(other.name_row(row), found, expected, f"as long as {self.name_row(row)}")
        return other.flat

    def read_counts(self, where: str, value: RowsLike, low: int = 0, high: int = 2**53) -> np.ndarray:
        """Read whole numbers [N] in [low, high), such as the tokens of each sample."""
        counts = self.read_like(where, value)
        self.require(where, counts, is_count(counts, low, high), f"an integer >= {low}")
        return counts

    def read_each(self, where: str, value: RowsLike | float) -> np.ndarray:
        """Read a number, or one for each row, as one for each row [B]."""
        if is_one(value):
            return np.full(self.lengths.size, _check.real(where, value, low=-LARGEST, high=LARGEST, error=DataError))
        return Rows.vector(where, value, self.lengths.size, why="one for each row").flat  # type: ignore[arg-type]

    def restore(self, flat: np.ndarray) -> Arrays:
        """Return [N] in the form that was given."""
        if self.form == "row":
            return flat
        if self.form == "matrix":
            return flat.reshape(self.lengths.size, -1)
        return [flat[a:b] for a, b in itertools.pairwise([0, *self.ends.tolist()])]

    def repeat(self, each: np.ndarray) -> np.ndarray:
        """Repeat one number of each row [B] for all of its entries [N]."""
        return np.repeat(each, self.lengths)

    def reduce(self, ufunc: np.ufunc, flat: np.ndarray, empty: float = 0.0) -> np.ndarray:
        """Reduce each row of [N] to a number [B]; a row without entries gives ``empty``."""
        filled = self.lengths > 0
        if filled.all():
            return np.asarray(ufunc.reduceat(flat, self.starts))
        result = np.full(self.lengths.size, empty, flat.dtype)
        result[filled] = ufunc.reduceat(flat, self.starts[filled])
        return result

    def sum(self, flat: np.ndarray) -> np.ndarray:
        """Return the sum of the numbers of each row of [N]."""
        sums = self.reduce(np.add, flat)
        return self.reduce(np.add, fill_missing(flat)) if np.isnan(sums).any() else sums

    def count(self, x: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
        """Return how many numbers each row of ``x`` [N] has, counting each ``times`` [N] times where that is given."""
        missing = np.isnan(x)
        if times is not None:
            return self.sum(np.where(missing, 0.0, times))
        return self.lengths - self.sum(missing.astype(np.int64)) if missing.any() else self.lengths

    def mean(self, x: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
        """Return the mean of each row of ``x`` [N], 0 for a row without numbers."""
        return np.asarray(self.sum(x if times is None else x * times) / np.maximum(self.count(x, times), 1))

    def centre(self, x: np.ndarray, times: np.ndarray | None = None) -> np.ndarray:
        """Return x [N] minus the mean of its row, in which each entry counts once, or ``times`` [N] times.

        The mean is that of the differences from the row's lowest: the mean of equal numbers may round, of zeros it
        cannot.
        """
        counted = x if times is None else np.where(times > 0, x, np.nan)
        above = x - self.repeat(self.reduce(np.fmin, counted))
        return np.asarray(above - self.repeat(self.mean(above, times)))

    def deviation(self, x: np.ndarray, ddof: int) -> np.ndarray:
        """Return the standard deviation [B] of each row of ``x`` [N], 0 where all are equal."""
        unit, _, relative = self._scale(x, ddof)
        return np.asarray(unit * relative)

    def standardize(self, x: np.ndarray, ddof: int, eps: float, times: np.ndarray | None = None) -> np.ndarray:
        """Return (x - mean) / (deviation of the row + eps) [N], exactly 0 in rows where all are equal."""
        unit, distances, relative = self._scale(x, ddof, times)
        with np.errstate(over="ignore"):
            divisor = np.where(relative > 0, relative + eps / unit, np.inf)
        return np.asarray(distances / self.repeat(divisor))

    def _scale(self, x: np.ndarray, ddof: int, times: np.ndarray | None = None) -> tuple[np.ndarray, ...]:
        """Return the largest distance from the mean [B], and in this unit the distances [N] and their deviation [B].

        In this unit squares neither overflow nor vanish.
        """
        centred = self.centre(x, times)
        counted = centred if times is None else np.where(times > 0, centred, np.nan)
        largest = self.reduce(np.fmax, np.abs(counted))
        unit = np.where(largest > 0, largest, 1.0)
        with np.errstate(over="ignore", invalid="ignore"):  # of what counts no time
            d = centred / self.repeat(unit)
            squares = d * d if times is None else np.where(times > 0, times * d * d, 0.0)
        return unit, d, np.sqrt(self.sum(squares) / np.maximum(self.count(x, times) - ddof, 1))

    @property
    def layout(self) -> str:
        """The layout, for an error."""
        return f"{self.lengths.size} rows" if self.form == "list" else f"shape {np.shape(self.restore(self.flat))}"

    def name_row(self, row: int, where: str = "") -> str:
        """Return that row as a user writes it."""
        return where or self.where if self.form == "row" else f"{where or self.where}[{row}]"

    def name(self, index: int, where: str = "") -> str:
        """Return the entry at ``index`` of [N] as a user writes it."""
        row = int(np.searchsorted(self.ends, index, side="right"))
        return f"{self.name_row(row, where)}[{index - int(self.starts[row])}]"

    def require(
        self, where: str, flat: np.ndarray, good: np.ndarray, expected: str, why: str = "", among: Places = _ALL
    ) -> None:
        """Raise DataError for the first entry of [N], ``among`` those that count, that is not ``good``."""
        if not good[among].all():
            index = int(np.arange(flat.size)[among][good[among].argmin()])
            raise DataError(self.name(index, where), f"is {flat[index]}", expected, why)

    def check_finite(self, where: str, flat: np.ndarray, *, nan: bool = False, among: Places = _ALL) -> None:
        """Raise DataError for the first entry that is not a number of at most 1e150; NaN may be allowed."""
        if flat.size and flat.min() >= -LARGEST and flat.max() <= LARGEST:
            return  # as usual, and without a temporary array
        good = np.abs(flat) <= LARGEST
        expected = f"a number between -{LARGEST:g} and {LARGEST:g}" + (", or NaN for unscored" if nan else "")
        self.require(where, flat, good | np.isnan(flat) if nan else good, expected, among=among)

    def check_logprobs(self, where: str, flat: np.ndarray, among: Places = _ALL) -> None:
        """Raise DataError for the first entry that cannot be a logprob."""
        self.check_finite(where, flat, among=among)
        why = f"a logprob is at most 0, plus rounding up to {HIGHEST}; is it a probability, or is its sign reversed?"
        self.require(where, flat, flat <= HIGHEST, "a logprob", why, among)


def is_one(value: Any) -> bool:
    """Return whether ``value`` is one entry, not a sequence; numpy's ``ndim`` would fail where lists are ragged."""
    return not isinstance(value, (list, tuple)) and bool(np.ndim(value) == 0)


def is_count(x: np.ndarray, low: int = 0, high: int | np.ndarray = 2**53) -> np.ndarray:
    """Return where ``x`` is a whole number in [low, high); float64 holds those below 2^53 exactly."""
    return np.asarray((x >= low) & (x < high) & (np.floor(x) == x))


def _is_row(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, (str, bytes)) and not is_one(value)


def _read_array(where: str, value: object, boolean: bool, ndim: tuple[int, ...]) -> np.ndarray:
    """Read numbers, and refuse the text, None and booleans that numpy would convert."""
    refused = {str, bytes, type(None)} if boolean else {str, bytes, type(None), bool, np.bool_}
    if isinstance(value, (list, tuple)) and not refused.isdisjoint(map(type, value)):
        i = next(i for i, entry in enumerate(value) if type(entry) in refused)
        raise DataError(f"{where}[{i}]", f"is {_check.describe(value[i])}", "True or False" if boolean else "a number")
    array = _check.as_array(where, value, "True or False for each entry" if boolean else "numbers")
    if array.ndim not in ndim:
        raise DataError(where, f"got {_check.describe(value)}", _FORMS)
    if array.dtype.kind == "b" and not boolean:
        raise DataError(where, "holds booleans", "numbers", "write 0.0 and 1.0")
    return array


def read_labels(where: str, value: Any, size: int, why: str = "one label per reward") -> np.ndarray:
    """Return labels [size] as codes 0, 1, ... in order of appearance."""
    if hasattr(value, "__array__"):
        value = np.asarray(value)
    _check.entries(where, value, size, why)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.ndim == 1:
        _, first, sorted_codes = np.unique(value, return_index=True, return_inverse=True)
        rank = np.empty(first.size, np.int64)
        rank[np.argsort(first)] = np.arange(first.size)
        return rank[sorted_codes]
    listed = list_labels(value)
    known: dict[Hashable, int] = {}
    with contextlib.suppress(TypeError):  # of a label that is not hashable
        codes = [known.setdefault(label, len(known)) for label in listed]
        if all(map(_is_label, known)):
            return np.array(codes, np.int64)
    i = next(i for i, label in enumerate(listed) if not _is_label(label))
    raise DataError(f"{where}[{i}]", f"is {_check.describe(listed[i])}", "a label, such as a string or number")


def list_labels(value: Any) -> list[Hashable]:
    """Return labels as Python's own objects."""
    return list(np.asarray(value).tolist() if hasattr(value, "__array__") else value)


def _is_label(label: object) -> bool:
    """Return whether it is hashable and equals itself; NaN would form another group every time."""
    try:
        hash(label)
    except TypeError:
        return False
    return label is not None and label == label  # noqa: PLR0124


def fill_missing(x: np.ndarray) -> np.ndarray:
    """Return ``x`` with 0 for NaN."""
    return np.where(np.isnan(x), 0.0, x)


def whiten(x: np.ndarray, ddof: int, eps: float, times: np.ndarray | None = None) -> np.ndarray:
    """Return (x - mean) / (standard deviation + eps) over all of ``x`` [N]; exactly 0 where all are equal."""
    return Rows("", x, np.array([x.size]), "row").standardize(x, ddof, eps, times)


def check_settings(*, ddof: int = 1, eps: float = 0.0, singleton: str = "zero") -> None:
    """Check the settings that many estimators share."""
    _check.integer("ddof", ddof, low=0, high=1, why="1 for the unbiased deviation, 0 for the biased one")
    _check.real("eps", eps, low=0.0)
    _check.choice("singleton", singleton, ("zero", "raw", "error"))


def warn_alone(rows: Rows) -> None:
    """Warn, once for each line of a program, where there are several groups and all have one member."""
    if rows.form != "row" and rows.lengths.size > 1 and (rows.lengths == 1).all():
        warn(
            "rewards: every group has one member, which leaves nothing to compare it with; a group is a row, so give "
            "rewards as [prompts, samples], or transpose a column"
        )


def log_ratios(
    trainer_logprobs: RowsLike, sampling_logprobs: RowsLike, *, some: bool = True
) -> tuple[Rows, np.ndarray]:
    """Return the rows of logprobs, and trainer - sampling for each token [N]; ``some`` requires at least one token."""
    rows = read_logprobs("trainer_logprobs", trainer_logprobs, some=some)
    sampling = rows.read_like("sampling_logprobs", sampling_logprobs)
    rows.check_logprobs("sampling_logprobs", sampling)
    return rows, rows.flat - sampling


def read_logprobs(where: str, value: RowsLike, *, some: bool = True) -> Rows:
    """Read logprobs of tokens: one sequence or several, maybe empty; ``some`` requires at least one token."""
    rows = Rows.read(where, value, empty=True)
    if some and rows.flat.size == 0:
        raise DataError(where, "holds no tokens", "at least one")
    rows.check_logprobs(where, rows.flat)
    return rows


def bound(log_ratio: np.ndarray) -> np.ndarray:
    """Return log-ratios whose exponentials and their squares stay finite."""
    return np.asarray(np.minimum(log_ratio, LARGEST_RATIO))


def ratios(log_ratio: np.ndarray) -> np.ndarray:
    """Return the finite exponentials of log-ratios."""
    return np.asarray(np.exp(bound(log_ratio)))


def check_bounds(low: float, high: float) -> tuple[float, float]:
    """Check bounds on a ratio: 0 <= low <= 1 <= high, so that an unchanged policy lies within.

    Raises:
        ConfigError: they are not, such as the distances from 1 that other libraries take.
    """
    why = "it bounds the ratio: for a clip of 0.2 write 1 - 0.2 and 1 + 0.2"
    low = _check.real("clip_low_threshold", low, low=0.0, high=1.0, why=why)
    return low, _check.real("clip_high_threshold", high, low=1.0, why=why)
