"""Batches of rows, statistics of groups of rewards, and ratios of probabilities, for pure functions over arrays.

Batches of rows: one row, equally long rows, or rows of different lengths, held as one flat array.

All functions around the losses take a 1-D array (one row), a 2-D array (one row per line) or a list of 1-D arrays, and
return the same form. Flat storage makes one numpy call serve all rows, whatever their lengths.

Statistics of groups of rewards: used by every group estimator, with rules that all of them follow.

Unscored rewards (NaN) do not count, a constant group deviates by exactly 0, and no number is ever divided by 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeAlias, cast, overload

import attrs
import numpy as np

from rlkit import _check
from rlkit._warn import warn
from rlkit.errors import ConfigError, DataError

P = ParamSpec("P")
Number: TypeAlias = float | np.number[Any] | np.bool_
Row: TypeAlias = np.ndarray | Sequence[Number]


class ArrayLike(Protocol):
    """A numpy array, or an object that converts to one, such as a tensor or a column of a table."""

    def __array__(self) -> Any: ...


RowsLike: TypeAlias = Sequence[Row] | Sequence[Number] | ArrayLike  # one row, or several
Arrays: TypeAlias = np.ndarray | list[np.ndarray]  # an array for one row or for a matrix, a list for a list
Labels: TypeAlias = Sequence[Hashable] | ArrayLike
TokenIds: TypeAlias = Sequence[int] | Sequence[np.integer[Any]] | ArrayLike
Numbers: TypeAlias = Sequence[Number] | ArrayLike


class RowWise(Protocol[P]):
    """A function of rewards (or other rows), then of the parameters ``P``."""

    __name__: str

    @overload
    def __call__(self, rewards: Sequence[Row], *args: P.args, **kwargs: P.kwargs) -> list[np.ndarray]: ...

    @overload
    def __call__(self, rewards: Sequence[Number] | ArrayLike, *args: P.args, **kwargs: P.kwargs) -> np.ndarray: ...


class TwoRowWise(Protocol[P]):
    """A ``RowWise`` function with two results."""

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
    """Declare for type checkers that an array gives an array, and a list of rows a list.

    A list of numbers is a row, too, and gives an array.
    """
    return cast("RowWise[P]", function)


def two_row_wise(function: Callable[Concatenate[RowsLike, P], tuple[Arrays, Arrays]]) -> TwoRowWise[P]:
    """Do the same as ``row_wise`` for a function with two results."""
    return cast("TwoRowWise[P]", function)


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
        """The end of each row in ``flat`` [B]."""
        return np.cumsum(self.lengths)

    @cached_property
    def starts(self) -> np.ndarray:
        """The start of each row in ``flat`` [B]."""
        return np.asarray(self.ends - self.lengths)

    def reduce(self, ufunc: np.ufunc, values: np.ndarray, empty: float = 0.0) -> np.ndarray:
        """Reduce each row of ``values`` [N] -> [B] by ``ufunc``; a row without entries gives ``empty``.

        All forms are summed in the same way, so that a row gives the same bits alone, in a matrix and in a list.
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
        """Repeat one number per row [B] for each entry [N]."""
        return np.repeat(per_row, self.lengths)

    def restore(self, flat: np.ndarray) -> Arrays:
        """Return [N] in the form of the input rows."""
        if self.form in ("one", "flat"):
            return flat
        if self.form == "matrix":
            return flat.reshape(self.lengths.size, -1)
        return [flat[a:b] for a, b in itertools.pairwise([0, *self.ends.tolist()])]

    def row_name(self, row: int, where: str | None = None) -> str:
        """Return that row as a user writes it."""
        where = self.where if where is None else where
        return where if self.form == "one" else f"{where}[{row}]"

    def name(self, index: int, where: str | None = None) -> str:
        """Return the entry at ``index`` of ``flat`` as a user writes it."""
        row = int(np.searchsorted(self.ends, index, side="right"))
        return f"{self.row_name(row, where)}[{index - int(self.starts[row])}]"

    def check_finite(
        self, flat: np.ndarray, *, where: str | None = None, nan: bool = False, among: np.ndarray | None = None
    ) -> None:
        """Raise for the first entry (``among`` those that count) that is not a finite number; NaN may be allowed."""
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
        """Return ``value`` as a flat array, required to have the layout of these rows; its entries are not checked."""
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
    """Return ``value`` as rows of float64 (bool where ``boolean``); ``empty`` allows rows without entries.

    Raises:
        DataError: naming the row or entry that is not a number, but text, None, or (for numbers) a boolean.
    """
    if isinstance(value, Rows):
        return value
    if isinstance(value, (list, tuple)) and value:
        kinds = set(map(type, value))
        if kinds == {np.ndarray} and not boolean and _plain(value):
            return _join(where, list(value), boolean=boolean, empty=empty)
        if any(map(_may_hold, kinds)) and any(_may_hold(type(entry)) and not is_one(entry) for entry in value):
            return _join(where, _each(where, value, boolean), boolean=boolean, empty=empty)
    array = _numbers(where, value, boolean)
    _check.require(array.ndim in (1, 2), where, value, _FORMS, error=DataError)
    if array.ndim == 2:
        lengths = np.full(array.shape[0], array.shape[1])
        return _filled(Rows(where, array.reshape(-1), lengths, "matrix"), empty=empty)
    return _filled(Rows(where, array, np.array([array.size]), "one"), empty=empty)


def vector(where: str, value: object, length: int | None = None, *, boolean: bool = False, why: str = "") -> np.ndarray:
    """Return ``value`` as a 1-D float64 (or bool) array, of ``length`` entries where that is given."""
    array = _numbers(where, value, boolean)
    if array.ndim != 1 or (length is not None and array.size != length):
        raise DataError(where, f"has shape {array.shape}", "a 1-D array" if length is None else f"({length},)", why)
    return array


def require(where: str, array: np.ndarray, good: np.ndarray, expected: str) -> None:
    """Raise for the first entry of a 1-D argument that is not ``good``."""
    if not good.all():
        index = int(np.argmin(good))
        raise DataError(f"{where}[{index}]", f"is {array[index]}", expected)


def _may_hold(kind: type) -> bool:
    return issubclass(kind, (list, tuple)) or hasattr(kind, "__array__")


def is_one(value: Any) -> bool:
    """Return whether ``value`` is one entry, not a sequence; numpy's ``ndim`` would fail where lists are ragged."""
    return not isinstance(value, (list, tuple)) and np.ndim(value) == 0


def labels(where: str, value: Any, length: int, why: str = "one label per reward") -> tuple[np.ndarray, int]:
    """Return labels [length] as codes 0, 1, ... in order of appearance, and how many different ones there are."""
    several = (hasattr(value, "__len__") or hasattr(value, "__array__")) and getattr(value, "ndim", 1) != 0
    if isinstance(value, (str, bytes)) or not several:
        raise DataError(where, f"got {_check.shown(value)}", f"{length} labels", why)
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu" and value.shape == (length,) and length:
        quick = _integer_codes(value)
        if quick is not None:
            return quick
    listed = np.asarray(value).tolist() if hasattr(value, "__array__") else list(value)
    if len(listed) != length:
        raise DataError(where, f"has length {len(listed)}", f"{length}", why)
    return _codes(where, listed)


def _codes(where: str, listed: list[Hashable]) -> tuple[np.ndarray, int]:
    known: dict[Hashable, int] = {}
    try:
        codes = np.array([known.setdefault(label, len(known)) for label in listed], np.int64)
    except TypeError as error:
        bad = next(i for i, label in enumerate(listed) if not _hashable(label))
        what = f"is {_check.shown(listed[bad])}"
        raise DataError(f"{where}[{bad}]", what, "a hashable label, such as a string") from error
    for label in known:
        if label is None or label != label:  # noqa: PLR0124 - NaN, which would be its own group every time
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


def _plain(value: Sequence[np.ndarray]) -> bool:
    """Return whether all arrays are 1-D numbers; there may be 100,000 of them, so it runs no loop."""
    dtypes = set(map(attrgetter("dtype"), value))
    return set(map(attrgetter("ndim"), value)) == {1} and all(dtype.kind in "iuf" for dtype in dtypes)


def _hashable(label: object) -> bool:
    try:
        hash(label)
    except TypeError:
        return False
    return True


def _each(where: str, value: Iterable[object], boolean: bool) -> list[np.ndarray]:
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


def _numbers(where: str, value: object, boolean: bool) -> np.ndarray:
    """Return ``value`` as float64 of any dimension, or as bool where 0 and 1 are expected."""
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


def _check_entries(where: str, value: Sequence[object], boolean: bool) -> None:
    """Raise for an entry of a list that is text, None or a boolean, which numpy would convert."""
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


SINGLETON = ("zero", "raw", "error")
ALONE = (
    "rewards: every group has one member, so there is none to compare it with; a group is a row, so give rewards as "
    "[prompts, samples], or transpose a column"
)


@attrs.frozen(eq=False, slots=False)
class Groups:
    """Rewards by group. Flat arrays [N] have one entry per reward, arrays [B] one per group."""

    rows: Rows
    scored: np.ndarray  # bool [N]
    rewards: np.ndarray  # [N], 0 where unscored
    sizes: np.ndarray  # [B], scored rewards
    lowest: np.ndarray  # [B], NaN where nothing is scored

    @classmethod
    def parse(cls, rewards: RowsLike, where: str = "rewards") -> Groups:
        """Check and take apart what a user gave."""
        rows = parse(where, rewards)
        rows.check_finite(rows.flat, nan=True)
        return cls.of(rows)

    @classmethod
    def of(cls, rows: Rows) -> Groups:
        """Return the groups of checked rows, NaN where unscored."""
        scored = ~np.isnan(rows.flat)
        if scored.all():
            flat, sizes = rows.flat, rows.lengths
        else:
            flat, sizes = np.where(scored, rows.flat, 0.0), rows.sum(scored.astype(np.int64))
        return cls(rows, scored, flat, sizes, rows.reduce(np.fmin, rows.flat))

    @cached_property
    def highest(self) -> np.ndarray:
        """The largest reward of each group [B], NaN where nothing is scored."""
        return self.rows.reduce(np.fmax, self.rows.flat)

    @cached_property
    def constant(self) -> np.ndarray:
        """Whether all scored rewards of a group are the same number [B]."""
        return np.asarray(self._sum_above == 0)  # different numbers differ by more than 0, however near they are

    @cached_property
    def _above(self) -> np.ndarray:
        """Rewards less their group's lowest [N], 0 where unscored: exact zeros in constant groups."""
        above = self.rewards - self.rows.spread(self.lowest)
        return above if self.scored.all() else np.where(self.scored, above, 0.0)

    @cached_property
    def _sum_above(self) -> np.ndarray:
        return self.rows.sum(self._above)

    @cached_property
    def _mean_above(self) -> np.ndarray:
        return np.asarray(self._sum_above / np.maximum(self.sizes, 1))

    @cached_property
    def mean(self) -> np.ndarray:
        """The mean of each group's scored rewards [B], NaN where there are none."""
        return np.asarray(self.lowest + self._mean_above)

    @cached_property
    def deviations(self) -> np.ndarray:
        """Rewards minus their group's mean [N]; exactly 0 in constant groups and where unscored."""
        deviations = self._above - self.rows.spread(self._mean_above)
        return deviations if self.scored.all() else np.where(self.scored, deviations, 0.0)

    def _relative(self, ddof: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the largest deviation [B], and in units of it the deviations [N] and their standard deviation [B].

        In these units squares can neither overflow nor vanish.
        """
        unit = self.rows.reduce(np.maximum, np.abs(self.deviations))
        unit[self.constant] = 1.0
        relative = self.deviations / self.rows.spread(unit)
        squares = self.rows.sum(relative * relative)
        return unit, relative, np.sqrt(squares / np.maximum(self.sizes - ddof, 1))

    def deviation(self, ddof: int) -> np.ndarray:
        """Return the standard deviation of each group [B], 0 where constant."""
        unit, _, spread = self._relative(ddof)
        return np.asarray(unit * spread)

    def whitened(self, ddof: int, eps: float) -> np.ndarray:
        """Return deviations / (standard deviation of the group + eps) [N]."""
        unit, relative, spread = self._relative(ddof)
        with np.errstate(over="ignore"):
            denominator = spread + eps / unit
        denominator[self.constant] = 1.0
        return np.asarray(relative / self.rows.spread(denominator))

    def by_size(self, function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Apply ``function`` to the scored rewards [b, n] of all groups of a size n; flat [N], 0 where unscored."""
        result = np.zeros(self.rewards.size)
        positions = np.flatnonzero(self.scored)
        starts = np.cumsum(self.sizes) - self.sizes
        for size in np.unique(self.sizes).tolist():
            index = positions[starts[self.sizes == size][:, None] + np.arange(size)]
            result[index] = function(self.rewards[index])
        return result

    def apply_singleton(self, advantages: np.ndarray, singleton: str) -> np.ndarray:
        """Return advantages [N] with the rule for groups of one scored reward applied, and 0 where unscored."""
        advantages = self.where_scored(advantages)
        alone = self.sizes == 1
        if not alone.any():
            return advantages
        if singleton == "zero":
            self.warn_alone()
        if singleton == "error":
            why = 'singleton="error"; with "zero" its advantage is 0, with "raw" its reward'
            raise DataError(self.rows.row_name(int(np.argmax(alone))), "has one scored reward", "at least two", why)
        return np.where(self.rows.spread(alone), self.rewards if singleton == "raw" else 0.0, advantages)

    def warn_alone(self) -> None:
        """Warn, once for each line of a program, where there are several groups and all have one member."""
        if self.rows.form in ("matrix", "list") and self.rows.lengths.size > 1 and (self.rows.lengths == 1).all():
            warn(ALONE)

    def where_scored(self, advantages: np.ndarray) -> np.ndarray:
        """Return advantages [N], 0 where unscored."""
        return advantages if self.scored.all() else np.where(self.scored, advantages, 0.0)

    def finish(self, advantages: np.ndarray, singleton: str = "zero") -> Arrays:
        """Return advantages [N] in the form of the rewards."""
        return self.rows.restore(self.apply_singleton(advantages, singleton))


def whiten(
    values: np.ndarray, ddof: int, eps: float, *, counts: np.ndarray | None = None, centred: np.ndarray | None = None
) -> np.ndarray:
    """Return (values - mean) / (standard deviation + eps) over all of ``values`` [N]; exactly 0 where constant.

    ``counts`` [N] says how often each value counts in the population, once by default. Given ``centred`` [M], that
    is divided instead.
    """
    times = np.ones(values.size) if counts is None else counts
    used = slice(None) if counts is None else counts > 0
    lowest, highest = values[used].min(initial=np.inf), values[used].max(initial=-np.inf)
    if lowest >= highest:  # or there is none
        return np.zeros_like(values if centred is None else centred)
    deviations = values - lowest
    unit = deviations @ times / times.sum()  # how far the lowest lies below the mean, and no other N times farther
    if unit == 0.0:  # the smallest of all floats, halved
        return np.zeros_like(values if centred is None else centred)
    deviations -= unit
    with np.errstate(over="ignore"):  # of those that do not count, and of eps / unit
        deviations /= unit
        relative = deviations[used]
        spread = np.sqrt(relative * relative @ times[used] / (times.sum() - ddof))
        return np.asarray((deviations if centred is None else centred / unit) / (spread + eps / unit))


def settings(*, ddof: int = 1, eps: float = 0.0, singleton: str = "zero") -> None:
    """Check the settings common to many estimators."""
    _check.integer("ddof", ddof, low=0, high=1, why="1 for the unbiased deviation, 0 for the biased one")
    _check.real("eps", eps, low=0.0)
    _check.choice("singleton", singleton, SINGLETON)


def lengths_like(groups: Groups, lengths: RowsLike) -> np.ndarray:
    """Return the tokens of each sample [N], checked to be integers >= 0 in the layout of the rewards."""
    flat = groups.rows.like("lengths", lengths)
    with np.errstate(invalid="ignore"):
        good = (flat >= 0) & (flat == np.floor(flat)) & (flat < 2**53)
    if not good.all():
        index = int(np.argmin(good))
        raise DataError(groups.rows.name(index, "lengths"), f"is {flat[index]}", "an integer >= 0")
    return flat


HIGHEST = 0.1  # a log-sum-exp of 30, rounded to bfloat16, is off by up to 0.0625; beyond this it is not a logprob
LARGEST_RATIO = 300.0  # exp(2 * 300) is still finite; a token beyond it is broken, and its exact size does not matter


def logprobs(where: str, value: RowsLike, *, some: bool = True) -> Rows:
    """Return finite logprobs of tokens: one sequence or several, maybe empty; ``some`` requires at least one token."""
    rows = parse(where, value, empty=True)
    if some and rows.flat.size == 0:
        raise DataError(where, "holds no tokens", "at least one")
    check(rows, rows.flat, where)
    return rows


def check(rows: Rows, flat: np.ndarray, where: str, among: np.ndarray | None = None) -> None:
    """Raise for the first entry of ``flat`` [N] (``among`` those that count) that cannot be a logprob."""
    rows.check_finite(flat, where=where, among=among)
    high = flat > HIGHEST if among is None else among & (flat > HIGHEST)
    if high.any():
        index = int(np.argmax(high))
        why = f"a logprob is at most 0, plus rounding up to {HIGHEST}; is it a probability, or is its sign reversed?"
        raise DataError(rows.name(index, where), f"is {flat[index]}", "a logprob", why)


def log_ratios(
    trainer_logprobs: RowsLike, sampling_logprobs: RowsLike, *, some: bool = True
) -> tuple[Rows, np.ndarray]:
    """Return the rows, and trainer - sampling for each token [N]."""
    rows = logprobs("trainer_logprobs", trainer_logprobs, some=some)
    sampling = rows.like("sampling_logprobs", sampling_logprobs)
    check(rows, sampling, "sampling_logprobs")
    return rows, np.subtract(rows.flat, sampling)


def bounded(log_ratio: np.ndarray) -> np.ndarray:
    """Return log-ratios whose exponentials and their squares stay finite."""
    return np.asarray(np.minimum(log_ratio, LARGEST_RATIO))


def ratios(log_ratio: np.ndarray) -> np.ndarray:
    """Return the finite exponentials of log-ratios."""
    return np.asarray(np.exp(bounded(log_ratio)))


def check_bounds(low: float, high: float) -> tuple[float, float]:
    """Check bounds on a ratio: 0 <= low <= 1 <= high, so that an unchanged policy lies within.

    Raises:
        ConfigError: they are not, such as the distances from 1 that other libraries take.
    """
    low = _check.real("clip_low_threshold", low, low=0.0, why="a bound on the ratio, 1 - 0.2 for a clip of 0.2")
    high = _check.real("clip_high_threshold", high, low=0.0, why="a bound on the ratio, 1 + 0.2 for a clip of 0.2")
    if low > 1.0:
        raise ConfigError(_bound("clip_low_threshold", low, "at most 1"))
    if high < 1.0:
        raise ConfigError(_bound("clip_high_threshold", high, "at least 1"))
    return low, high


def _bound(name: str, value: float, expected: str) -> str:
    why = "it bounds the ratio: for a clip of 0.2 write 1 - 0.2 and 1 + 0.2"
    return _check.problem(name, f"is {value}", expected, why)
