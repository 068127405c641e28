"""The registry of losses, and the marks that say how a loss function is to be called."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

import attrs

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Level", "Marks", "loss", "marks", "register", "registry"]

F = TypeVar("F", bound=Callable[..., object])
Level = Literal["datum", "pair", "batch"]
Weights: TypeAlias = "Tensor | float"  # [n], [n, K], or one for all

_AS_LOSSES = {
    "dapo": "DAPO is 'ppo' with clip_high_threshold=1.28, and weights of token_weights(mode='token-mean')",
    "bnpo": "it is 'ppo' with weights of rlkit.advantages.token_weights(mode='token-mean')",
    "sft": "it is 'cross_entropy'",
    "nll": "it is 'cross_entropy'",
    "kl": "rlkit.losses.with_kl(loss, coef=...) adds one to a loss",
}


def _elsewhere(name: str) -> str:
    from rlkit.advantages import registry as estimators

    if name.lower() in estimators:
        estimator = name.lower()
        return (
            f"{estimator} is an estimator (rlkit.advantages.{estimator}); give its advantages to the loss 'ppo', or to "
            "another policy loss"
        )
    return _AS_LOSSES.get(name.lower(), "")


registry = Registry("loss", entry_point_group="rlkit.losses", elsewhere=_elsewhere)
register = registry.register


@attrs.frozen
class Marks:
    """How a loss is called: its level, and whether it acts on each token by itself."""

    level: Level = "datum"
    elementwise: bool = False


def loss(*, level: Level = "datum", elementwise: bool = False) -> Callable[[F], F]:
    """Mark how a loss function wants its datums; does not register it.

    Args:
        level: "datum": called once per datum with tensors [n]. "pair": called once per two consecutive datums
            (chosen, rejected), every argument a tuple of two. "batch": called once with everything, every argument
            a list with one tensor per datum.
        elementwise: the loss is a sum over tokens of a function of that token alone, so that one call on the
            concatenated tokens of many datums gives the same; only at level "datum".

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
