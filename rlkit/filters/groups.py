"""Which groups train."""

from __future__ import annotations

import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit._forms import RowsLike
from rlkit._groups import Groups
from rlkit.errors import ConfigError
from rlkit.filters.selection import Selection, select

__all__ = ["difficulty_band", "dynamic_sampling", "zero_variance"]


@answered
def zero_variance(rewards: RowsLike, *, threshold: float = 0.0) -> Selection:
    """Drop groups whose rewards do not differ, since they teach a relative estimator nothing.

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count.
        threshold: >= 0; groups are kept whose unbiased standard deviation is larger. At 0 the test is max > min, which
            no rounding can pass.

    Returns:
        A selection of groups [B]. ``refilled()`` repeats kept groups until the batch has its size again.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: threshold is out of range.

    >>> zero_variance([[1.0, 0.0], [0.1, 0.1, 0.1]]).keep
    array([ True, False])

    Source: DAPO, arXiv:2503.14476, section 3.2; refilling: Polaris (2025). Peers: slime's threshold is 1e-6.
    """
    threshold = _check.real("threshold", threshold, low=0.0)
    groups = Groups.parse(rewards)
    keep = ~groups.constant
    if threshold > 0:
        keep &= groups.deviation(1) > threshold
    return select("zero_variance", keep)


@answered
def dynamic_sampling(
    rewards: RowsLike, *, correct: float = 1.0, needed: int | None = None, keep_when_insufficient: bool = False
) -> Selection:
    """Keep groups of which some but not all samples are right.

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count.
        correct: a reward of at least this is right.
        needed: how many groups the batch needs: the first so many are kept; None keeps all.
        keep_when_insufficient: whether, if there are fewer than ``needed``, the first of the other groups fill up.

    Returns:
        A selection of groups [B]; ``needed - selection.kept`` groups are still to be sampled.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: a setting is out of range, or keep_when_insufficient stands without needed.

    >>> dynamic_sampling([[1, 1], [1, 0], [0, 0], [0, 1]], needed=1).keep
    array([False,  True, False, False])

    Source: DAPO, arXiv:2503.14476, section 3.2. Peers: verl's filter_groups.
    """
    correct = _check.real("correct", correct)
    fill = _check.flag("keep_when_insufficient", keep_when_insufficient)
    if needed is not None:
        needed = _check.integer("needed", needed, low=1)
    elif fill:
        raise ConfigError("needed", "is None", "a number with keep_when_insufficient=True")
    groups = Groups.parse(rewards)
    keep = (groups.highest >= correct) & (groups.lowest < correct) & (groups.sizes > 0)
    if needed is not None:
        mixed = int(keep.sum())
        keep &= np.cumsum(keep) <= needed
        if fill and mixed < needed:
            keep |= np.cumsum(~keep) <= needed - mixed
    return select("dynamic_sampling", keep)


@answered
def difficulty_band(rewards: RowsLike, *, low: float = 0.1, high: float = 0.95) -> Selection:
    """Keep groups whose mean reward lies in [low, high].

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count; a group
            without a scored reward is dropped.
        low, high: bounds that do not cross.

    Raises:
        DataError: rewards are empty, infinite or no numbers.
        ConfigError: the bounds are not finite, or cross.

    >>> difficulty_band([[1, 1], [1, 0], [0, 0]]).keep
    array([False,  True, False])

    Source: none of its own. Peers: prime-rl's and rllm's easy and hard thresholds.
    """
    low, high = _check.real("low", low), _check.real("high", high)
    if low > high:
        raise ConfigError("low", f"is {low}, above high={high}", "bounds that do not cross")
    groups = Groups.parse(rewards)
    return select("difficulty_band", (groups.mean >= low) & (groups.mean <= high) & (groups.sizes > 0))
