"""The baseline of each token that makes the policy gradient's variance least."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check, _groups, _ratios, _rows
from rlkit._forms import Arrays, Labels, RowsLike, row_wise
from rlkit.advantages import _scan
from rlkit.advantages._registry import register
from rlkit.advantages._steps import Steps
from rlkit.errors import DataError

__all__ = ["optimal_token_baseline"]


@register("optimal_token_baseline")
@row_wise
def optimal_token_baseline(
    rewards: RowsLike,
    *,
    logprobs: RowsLike,
    sum_p2: RowsLike,
    importance: Any = None,
    groups: Labels | None = None,
    singleton: str = "raw",
) -> Arrays:
    """Subtract from the returns, at each token, their mean over the group weighted by the gradient's energy so far.

    A_it = G_it - sum over j of W_jt G_jt / sum over j of W_jt, with G_it the rewards from token t on and W_it the sum
    up to t of w^2 (1 - 2 p + sum over the vocabulary of p^2): the squared norm of the score with respect to the logits.

    Args:
        rewards: per token, all samples of one prompt: a list of [n_i], or [B, n]; finite. A reward for the whole
            answer stands at its last token.
        logprobs: log p of the sampled tokens, shaped like ``rewards``.
        sum_p2: the sum over the vocabulary of p^2, shaped like ``rewards``, in (0, 1];
            ``policy.forward(data, want=("sum_p2",))`` gives it.
        importance: w, shaped like ``rewards``, >= 0: truncated importance weights of off-policy samples, such as
            those of ``rlkit.corrections.token_tis``. None: 1.
        groups: one label per sample [B], where the samples belong to several prompts.
        singleton: what a token gets at which only one sample of its group is left: "raw", its return; "zero", 0;
            "error" raises.

    Returns:
        float64 in the form of ``rewards``; exactly 0 where all returns of a place are equal.

    Raises:
        DataError: rewards are not finite, shapes differ, an entry is no logprob, sum_p2 not in (0, 1], a weight
            negative; a lonely token with singleton="error".
        ConfigError: singleton is unknown.

    >>> import math
    >>> half = [[math.log(0.5)], [math.log(0.5)]]
    >>> optimal_token_baseline([[1.0], [0.0]], logprobs=half, sum_p2=[[0.5], [0.5]])  # equal energy: the mean
    array([[ 0.5],
           [-0.5]])
    >>> lp = [[math.log(0.9)], [math.log(0.1)]]  # energies 0.02 and 1.62: the rare token decides
    >>> optimal_token_baseline([[1.0], [0.0]], logprobs=lp, sum_p2=[[0.82], [0.82]]).round(4)
    array([[ 0.9878],
           [-0.0122]])

    Source: the optimal baseline of Greensmith et al. (JMLR 5, 2004), per token as in verl 0.9's
    optimal_token_baseline. Peers: verl adds 1e-8 to the denominator; its return stays where one sample is left, as
    with "raw".
    """
    _check.choice("singleton", singleton, _groups.SINGLETON)
    steps = Steps.parse(rewards, empty=True)
    rows = steps.rows
    lp, p2 = rows.like("logprobs", logprobs), rows.like("sum_p2", sum_p2)
    _ratios.check(rows, lp, "logprobs")
    rows.require("sum_p2", p2, (p2 > 0) & (p2 <= 1 + 1e-4), "in (0, 1]")
    energy = np.maximum(1.0 - 2.0 * np.exp(lp) + p2, 0.0)
    if importance is not None:
        w = rows.like("importance", importance)
        rows.require("importance", w, (w >= 0) & (w <= _rows.LARGEST), "a finite number >= 0")
        energy = energy * w**2
    returns = _scan.reverse_scan(rows.flat.copy(), steps.factors(1.0), steps.starts)
    weight = _so_far(steps, energy)
    labels = [0] * rows.lengths.size if groups is None else groups
    codes, _ = _rows.labels("groups", labels, rows.lengths.size, why="one label per sample")
    place = np.arange(rows.flat.size) - rows.spread(rows.starts)
    cell = rows.spread(codes) * (int(rows.lengths.max(initial=0)) + 1) + place  # the tokens that share a baseline
    _, cells, counts = np.unique(cell, return_inverse=True, return_counts=True)
    alone = counts[cells] == 1
    if singleton == "error" and alone.any():
        name = rows.name(int(np.argmax(alone)))
        raise DataError(name, "is the only one of its group at this place", "at least two samples")
    lowest, highest = np.full(counts.size, np.inf), np.full(counts.size, -np.inf)
    np.minimum.at(lowest, cells, returns)
    np.maximum.at(highest, cells, returns)
    total = np.bincount(cells, weight, counts.size)
    share = np.where(total[cells] > 0, weight, 1.0)  # no energy at all: the plain mean
    mean = np.bincount(cells, share * returns, counts.size) / np.bincount(cells, share, counts.size)
    advantages = np.where((lowest == highest)[cells], 0.0, returns - mean[cells])
    return rows.restore(np.where(alone, returns if singleton == "raw" else 0.0, advantages))


def _so_far(steps: Steps, values: np.ndarray) -> np.ndarray:
    """Return the running sum of each row [n]: the recursion of returns, on the rows read backwards."""
    factors = np.ones(values.size)
    factors[steps.starts] = 0.0
    starts = (values.size - 1 - steps.last)[::-1]
    return _scan.reverse_scan(values[::-1].copy(), factors[::-1].copy(), starts)[::-1]
