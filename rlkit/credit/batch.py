"""What trains in a step: items, their weights, and minibatches of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit._shuffle import epoch_order
from rlkit.advantages import token_weights
from rlkit.errors import DataError
from rlkit.trajectory import Trajectory
from rlkit.types import Datum

__all__ = ["Batch", "Item", "minibatches", "weigh"]


@answered
@attrs.frozen(eq=False)
class Item:
    """What minibatches never part: a trajectory, a preference pair, or a demonstration.

    Args:
        data: its datums.
        group: which group, pair or row it is; the mode "prompt-mean" weighs by it.
        trajectory: what it was made from, or None.
    """

    data: Sequence[Datum]
    group: int = 0
    trajectory: Trajectory | None = None

    @property
    def length(self) -> int:
        """Tokens that train."""
        return sum(int(datum.mask.sum()) for datum in self.data)


@answered
@attrs.frozen(eq=False)
class Batch:
    """What ``rlkit.credit.assign`` returns.

    Args:
        items: one per trajectory that trains.
        advantages: float64 [token_count] per trajectory, in the order of the groups; 0 where one is left out.
        metrics: "train/advantage_std"; "train/with_signal", the share of trajectories whose advantages are not all 0;
            "train/kl_reference" and "train/kl_teacher" (k1, nats per token) where there is such a model.
        weights: as given to ``assign``, per trajectory or the name of a mode.
        constant: of the modes that end in "-norm".
    """

    items: Sequence[Item]
    advantages: Sequence[np.ndarray]
    metrics: Mapping[str, float]
    weights: str | None = None
    constant: float | None = None

    @property
    def data(self) -> list[Datum]:
        """The datums of one optimizer step on all items, weighted."""
        return weigh(self.items, self.weights, constant=self.constant)

    def minibatches(self, size: int, *, epochs: int = 1, seed: int | Sequence[int] = (0,)) -> Iterator[list[Datum]]:
        """Yield the datums of each optimizer step, weighted over that step; see ``rlkit.credit.minibatches``."""
        for items in minibatches(self.items, size, epochs=epochs, seed=seed):
            yield weigh(items, self.weights, constant=self.constant)


@answered
def weigh(items: Sequence[Item], mode: str | None = "token-mean", *, constant: float | None = None) -> list[Datum]:
    """Return the datums of one optimizer step, with the weights that make the sum of their losses the wanted mean.

    Args:
        items: those of the step.
        mode: of ``rlkit.advantages.token_weights``, an item being a sequence; None: the datums as they are. Weights
            that a datum has, such as those of its turns, are multiplied.
        constant: > 0, for the modes that end in "-norm".

    Raises:
        ConfigError: there is no such mode, or constant does not fit it.

    >>> import rlkit
    >>> pair = [Item([rlkit.Datum([1, 2], [0, 1])]), Item([rlkit.Datum([1, 2, 3, 4], [0, 1, 1, 1])])]
    >>> [float(datum.inputs["weights"]) for datum in weigh(pair)], weigh(pair, "token-sum")[0].inputs["weights"]
    ([0.25, 0.25], array(1., dtype=float32))

    Source: rule R3, docs/explanation.md.
    """
    if mode is None or not items:
        return [datum for item in items for datum in item.data]
    groups = [item.group for item in items] if mode == "prompt-mean" else None
    weights = token_weights([item.length for item in items], mode, constant=constant, groups=groups)
    return [multiply_weights(d, weight) for item, weight in zip(items, weights, strict=True) for d in item.data]


def multiply_weights(datum: Datum, weight: float | np.ndarray) -> Datum:
    """Return the datum with its weights, 1 where it has none, times a number or [n]."""
    own = datum.inputs.get("weights")
    if own is None:
        return datum.with_inputs(weights=weight)
    return datum.with_inputs(weights=weight * (own if own.ndim == 0 else datum.select(own)))


@answered
def minibatches(
    items: Sequence[Item], size: int, *, epochs: int = 1, seed: int | Sequence[int] = (0,)
) -> Iterator[list[Item]]:
    """Yield the items of each optimizer step, epoch by epoch; shuffled where there are several steps in an epoch.

    Args:
        items: of a step of the loop.
        size: items per optimizer step, at most; 0: all in one. The parts are as equal as can be.
        epochs: >= 1, passes over the items.
        seed: a number >= 0, or several, such as the run's seed and the step.

    Raises:
        ConfigError: a number is out of range.

    >>> import rlkit
    >>> five = [Item([rlkit.Datum([1, 2], [0, 1])], group=i) for i in range(5)]
    >>> [[item.group for item in part] for part in minibatches(five, 2, seed=(3, 0))]
    [[3, 4], [2, 1], [0]]
    """
    _check.integer("minibatches(size)", size, low=0)
    _check.integer("minibatches(epochs)", epochs, low=1)
    numbers = [_check.integer("minibatches(seed)", number, low=0, error=DataError) for number in _seeds(seed)]
    count = -(-len(items) // (size or max(len(items), 1)))
    for epoch in range(epochs if items else 0):
        order = epoch_order(len(items), tuple(numbers), epoch, "minibatches") if count > 1 else np.arange(len(items))
        yield from ([items[i] for i in part] for part in np.array_split(order, count))


def _seeds(seed: int | Sequence[int]) -> Sequence[int]:
    return (seed,) if isinstance(seed, (int, np.integer)) else seed
