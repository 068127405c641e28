"""Masks of 1 and 0 per token: which tokens are near enough to the sampler to be trained on.

They are not multiplied by the ratio w = exp(trainer - sampling). Give them to a datum as ``weights``, times its token
weight and, on demand, times importance weights.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check, _ratios
from rlkit._calls import answered
from rlkit._forms import RowsLike

__all__ = ["divergence_rejection", "geometric_sequence_mask", "outlier_veto", "sequence_mask", "token_mask"]

_LEVELS = ("token", "sequence-sum", "sequence-mean", "sequence-max")


@answered
def token_mask(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 2.0,
) -> Any:
    """1 for tokens whose ratio lies within the bounds, ends included.

    Args:
        trainer_logprobs, sampling_logprobs: of the policy's own tokens: [n], [B, n] or a list of [n_i], of one shape,
            finite and at most 0, but for rounding up to 0.1; a sequence may be empty.
        clip_low_threshold, clip_high_threshold: >= 0, bounds on the ratio itself, with 1 between them.

    Returns:
        float64 in the form of the logprobs.

    Raises:
        DataError: shapes differ, or an entry is no logprob.
        ConfigError: a bound is out of range, or 1 is not between them.

    >>> import math
    >>> token_mask(trainer_logprobs=[-1.0, math.log(0.3)], sampling_logprobs=[-1.0, math.log(0.1)])  # 1 and 3
    array([1., 0.])

    Source: none of its own; the mask of IcePop, arXiv:2510.18855. Peers: verl 0.9 bounds the inverse ratio.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(_within(d, low, high))


@answered
def sequence_mask(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 2.0,
) -> Any:
    """1 for all tokens of the sequences whose product of ratios lies within the bounds.

    Args:
        trainer_logprobs, sampling_logprobs, clip_low_threshold, clip_high_threshold: as for ``token_mask``.

    Raises:
        DataError, ConfigError: as for ``token_mask``.

    >>> import math
    >>> a, b = math.log(0.1), math.log(0.3)
    >>> sequence_mask(trainer_logprobs=[[b, math.log(0.15)], [b]], sampling_logprobs=[[a, b], [a]])  # 1.5 and 3
    [array([1., 1.]), array([0.])]

    Source: "When speed kills stability" (2025), masked importance sampling. Peers: TRL's sequence_mask has only the
    upper bound, 3.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(rows.spread(_within(rows.sum(d), low, high)))


@answered
def geometric_sequence_mask(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.999,
    clip_high_threshold: float = 1.002,
) -> Any:
    """1 for all tokens of the sequences whose geometric mean of ratios lies within the bounds.

    Args:
        trainer_logprobs, sampling_logprobs, clip_low_threshold, clip_high_threshold: as for ``token_mask``.

    Raises:
        DataError, ConfigError: as for ``token_mask``.

    >>> import math
    >>> geometric_sequence_mask(trainer_logprobs=[[math.log(0.4), -1.0], [-1.0, -1.0]],
    ...     sampling_logprobs=[[math.log(0.1), -1.0], [-1.0, -1.0]])  # geometric means 2 and 1
    array([[0., 0.],
           [1., 1.]])

    Source: "When speed kills stability" (2025), geometric masking. Peers: NeMo's and OpenRLHF's seq-mask-tis have the
    same bounds.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    means = rows.sum(d) / np.maximum(rows.lengths, 1)
    return rows.restore(rows.spread(_within(means, low, high)))


@answered
def outlier_veto(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 1e-4,
    clip_high_threshold: float = 100.0,
) -> Any:
    """1 for all tokens of the sequences none of whose ratios lies outside the bounds.

    Args:
        trainer_logprobs, sampling_logprobs, clip_low_threshold, clip_high_threshold: as for ``token_mask``.

    Raises:
        DataError, ConfigError: as for ``token_mask``.

    >>> outlier_veto(trainer_logprobs=[[-1.0, -12.0], [-1.0, -2.0]], sampling_logprobs=[[-1.0, -1.0], [-1.0, -1.0]])
    array([[0., 0.],
           [1., 1.]])

    Source: none of its own. Peers: SkyRL's outlier_token_is_threshold_low and _high; verl's veto has only the lower
    bound.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(rows.spread(rows.reduce(np.minimum, _within(d, low, high), empty=1.0)))


@answered
def divergence_rejection(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    threshold: float,
    level: str = "token",
    estimator: str = "k3",
) -> Any:
    """1 where an estimate of the divergence of trainer and sampler is at most the threshold.

    k2 = d^2 / 2 and k3 = e^d - 1 - d with d = trainer - sampling, per token or put together over the sequence

    Args:
        trainer_logprobs, sampling_logprobs: as for ``token_mask``.
        threshold: >= 0.
        level: "token", or for all tokens of a sequence at once "sequence-sum", "sequence-mean" or "sequence-max".
        estimator: "k2" or "k3".

    Raises:
        DataError, ConfigError: as for ``token_mask``; level or estimator is unknown.

    >>> divergence_rejection(trainer_logprobs=[[-1.0, -3.0], [-1.0, -1.5]], sampling_logprobs=[[-1.0, -1.0]] * 2,
    ...     threshold=0.5, level="sequence-max", estimator="k2")  # the largest are 2 and 0.125
    array([[0., 0.],
           [1., 1.]])

    Source: Schulman, "Approximating KL divergence" (2020). Peers: verl's rollout_rs token_k2, seq_sum_k3, ...
    """
    _check.choice("level", level, _LEVELS)
    _check.choice("estimator", estimator, ("k2", "k3"))
    threshold = _check.real("threshold", threshold, low=0.0)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    divergence = 0.5 * d * d if estimator == "k2" else np.expm1(_ratios.bounded(d)) - d
    if level == "token":
        return rows.restore((divergence <= threshold).astype(np.float64))
    if level == "sequence-max":
        of_sequence = rows.reduce(np.maximum, divergence)
    else:
        of_sequence = rows.sum(divergence)
        if level == "sequence-mean":
            of_sequence = of_sequence / np.maximum(rows.lengths, 1)
    return rows.restore(rows.spread((of_sequence <= threshold).astype(np.float64)))


def _within(log_ratio: np.ndarray, low: float, high: float) -> np.ndarray:
    w = _ratios.ratios(log_ratio)
    return ((w >= low) & (w <= high)).astype(np.float64)
