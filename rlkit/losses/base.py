"""The registry of losses, the marks that say how a loss is called, and the checks that losses share."""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NoReturn, TypeAlias, TypeGuard, TypeVar, cast

import attrs
import numpy as np

from rlkit import _check
from rlkit._rows import check_bounds
from rlkit.errors import ConfigError, DataError
from rlkit.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Level",
    "Marks",
    "Range",
    "Reached",
    "Untouched",
    "bounds",
    "builtin",
    "check_shapes",
    "counted",
    "loss",
    "marks",
    "one_weight",
    "ranges",
    "register",
    "registry",
    "shaped",
    "surrogate",
]


class Reached(Exception):
    """The signal that a loss has begun to compute."""


class Untouched:
    """A placeholder for a tensor; any operation on it ends the call."""

    def __getattr__(self, name: str) -> NoReturn:
        raise Reached

    def _reached(self, *_: object) -> NoReturn:
        raise Reached

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _reached
    __gt__ = __lt__ = __ge__ = __le__ = _reached


def bounds(low: float, high: float, *, above_zero: bool = False) -> None:
    """Raise ConfigError unless 0 <= low <= 1 <= high (0 < low with ``above_zero``)."""
    check_bounds(low, high)
    if above_zero:
        _check.real("clip_low_threshold", low, above=0.0, why="its logarithm is taken")


def counted(weights: Weights, x: Tensor, other: float = 0.0) -> Tensor:
    """Return ``x``, but ``other`` where the weight is 0: 0 times an overflow would be NaN, in the gradient too."""
    if isinstance(weights, (int, float)):
        if weights != 0:
            return x
        weights = x.new_tensor(weights)
    return x.where(weights != 0, other)


def one_weight(weights: Weights | tuple[Weights, ...] | list[Weights]) -> Weights:
    """Return one weight for a whole sequence or pair: a number, or the mean over tokens; of a pair the chosen's."""
    first = weights[0] if isinstance(weights, (tuple, list)) else weights
    return first if isinstance(first, (int, float)) else first.mean()


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """min(r A, clip(r, low, high) A), and with ``dual_clip`` c not below c A where A < 0."""
    clipped = (ratio * advantages).minimum(ratio.clamp(low, high) * advantages)
    if dual_clip is None:
        return clipped
    _check.real("dual_clip", dual_clip, above=1.0, why="a bound on the ratio where the advantage is negative")
    return clipped.maximum(dual_clip * advantages).where(advantages < 0, clipped)


F = TypeVar("F", bound=Callable[..., object])
Level = Literal["datum", "pair", "batch"]
Weights: TypeAlias = "Tensor | float"  # [n], or one for all

registry = Registry("loss", entry_point_group="rlkit.losses")
register = registry.register


@attrs.frozen
class Marks:
    """The call convention of a loss: its level, and whether it acts on each token by itself."""

    level: Level = "datum"
    elementwise: bool = False


def loss(*, level: Level = "datum", elementwise: bool = False) -> Callable[[F], F]:
    """Mark how a loss function takes its datums; does not register it.

    Args:
        level: "datum": called once per datum with tensors [n]. "pair": called once per two consecutive datums
            (chosen, rejected), every argument a tuple of two. "batch": called once with everything, every argument
            a list with one tensor per datum.
        elementwise: the loss is a sum over tokens of a function of that token alone, so that one call on the
            concatenated tokens of many datums gives the same; only at level "datum". Tokens whose ``weights`` are 0
            are left out of that call, so that their results, however large, have no effect.

    >>> @loss(elementwise=True)
    ... def likelihood(logprobs, weights=1.0):
    ...     return -(weights * logprobs).sum()
    >>> marks(likelihood)
    Marks(level='datum', elementwise=True)
    """
    _check.choice("loss(level)", level, ("datum", "pair", "batch"))
    _check.flag("loss(elementwise)", elementwise)
    if elementwise and level != "datum":
        raise ConfigError(f"loss(elementwise=True) needs level 'datum'; got {level!r}")

    def mark(function: F) -> F:
        function.__rlkit_loss__ = Marks(level, elementwise)  # type: ignore[attr-defined]
        return function

    return mark


def marks(function: Callable[..., object]) -> Marks:
    """Return the marks of a loss function; those of ``loss()`` without arguments where it has none."""
    marked = getattr(function, "__rlkit_loss__", None) or getattr(
        getattr(function, "func", None), "__rlkit_loss__", None
    )
    return marked if isinstance(marked, Marks) else Marks()


@attrs.frozen
class Range:
    """The values that an input may have: [low, high], only integers where ``whole``, one per datum where ``single``."""

    low: float = 0.0
    high: float = math.inf
    whole: bool = False
    single: bool = False

    def check(self, where: str, array: np.ndarray) -> None:
        """Raise DataError for an array with another value, or another shape."""
        if self.single and array.ndim:
            raise DataError(where, f"has shape {array.shape}", "()", "one number for the whole sequence")
        wrong = np.argwhere((array < self.low) | (array > self.high) | (self.whole & (array % 1 != 0)))
        if len(wrong):
            kind = "an integer" if self.whole else "a number"
            expected = f"{kind} in [{self.low:g}, {self.high:g}]" if self.high < math.inf else f"{kind} >= {self.low:g}"
            index = "".join(f"[{i}]" for i in wrong[0])
            raise DataError(where + index, f"is {array[tuple(wrong[0])]}", expected)


def ranges(function: Callable[..., object]) -> Mapping[str, Range]:
    """Return what inputs of a loss may be, by name, where that is less than any finite number."""
    function = getattr(function, "func", function)  # of a functools.partial
    found: Mapping[str, Range] = getattr(function, "__rlkit_ranges__", {})
    return found


def builtin(
    name: str,
    *,
    level: Level = "datum",
    elementwise: bool = False,
    per_token: bool = False,
    ranges: Mapping[str, Range] | None = None,
) -> Callable[[F], F]:
    """Register and mark a loss of rlkit's own; called directly it refuses shapes that would broadcast.

    An elementwise one leaves tokens of weight 0 out then, too. Other levels do so in their formulas, since what the
    tokens of a sequence or batch have in common counts all of them. ``per_token``: a pair's margin is between means.
    ``ranges``: of inputs that are settings.
    """

    def add(function: F) -> F:
        called = shaped(_without_weightless(function) if elementwise else function)
        called.__rlkit_per_token__ = per_token  # type: ignore[attr-defined]
        called.__rlkit_ranges__ = ranges or {}  # type: ignore[attr-defined]
        return register(name)(loss(level=level, elementwise=elementwise)(called))

    return add


def shaped(function: F) -> F:
    """Decorate a loss or estimator: tensors of another shape than ``check_shapes`` allows are a DataError."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        check_shapes(function.__name__, signature.bind(*args, **kwargs).arguments)
        return function(*args, **kwargs)

    return cast("F", call)


def check_shapes(title: str, given: Mapping[str, object]) -> None:
    """Raise DataError for a tensor that is neither () nor shaped like the first argument; logprobs are never ().

    Of targets [n, K] other logprobs and ids are [n, K], all else is [n]. What torch.fx traces has no shape, and passes.
    """
    driver, like = next(iter(given.items()))
    if isinstance(like, (list, tuple)):
        for k, each in enumerate(like):
            part = {n: v[k] if isinstance(v, (list, tuple)) and k < len(v) else v for n, v in given.items()}
            check_shapes(title, part | {driver: each})
    elif _is_tensor(like):
        for name, value in given.items():
            shape = tuple(getattr(value, "shape", ()))
            logprobs = name.endswith("logprobs")
            wide = driver == "target_logprobs" and not (logprobs or name == "target_tokens")
            expected = tuple(like.shape[:-1] if wide else like.shape)
            scalar = not (logprobs and _is_tensor(value))
            if shape != expected and not (scalar and shape == ()):
                allowed = "() or " * scalar + f"{expected}"
                raise DataError(f"{title}({name})", f"has shape {shape}", allowed, _check.squeeze(shape))


def _is_tensor(value: object) -> TypeGuard[Tensor]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _without_weightless(function: F) -> F:
    """Decorate an elementwise loss: inputs of tokens with weight 0 are replaced before the computation."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs).arguments
        weights = given.get("weights", 1.0)
        if isinstance(weights, (int, float)) and weights != 0:
            return function(**given)
        if "target_logprobs" in given and not isinstance(weights, (int, float, Untouched)):
            weights = weights.unsqueeze(-1)
        for name, value in given.items():
            if not isinstance(value, (int, float, Untouched)):
                if name.endswith("logprobs"):
                    given[name] = counted(weights, value, -1.0)
                elif name in ("advantages", "values", "old_values", "returns"):
                    given[name] = counted(weights, value)
        return function(**given)

    return cast("F", call)
