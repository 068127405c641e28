"""Weights per token that correct for sampling with another policy than is trained.

The ratio of a token is w = exp(trainer - sampling). Give the result to a datum as ``weights``, times its token weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check, _ratios
from rlkit._calls import answered
from rlkit._forms import RowsLike

__all__ = ["batch_normalized", "clamp", "icepop", "sequence_tis", "token_tis"]


@answered
def token_tis(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 2.0,
) -> Any:
    """Return truncated importance weights: w clipped to [clip_low_threshold, clip_high_threshold] for each token.

    Args:
        trainer_logprobs, sampling_logprobs: of the policy's own tokens: [n], [B, n] or a list of [n_i], of one shape,
            finite and at most 0, but for rounding up to 0.1; a sequence may be empty.
        clip_low_threshold, clip_high_threshold: >= 0, bounds on the ratio itself that do not cross.

    Returns:
        float64 in the form of the logprobs.

    Raises:
        DataError: shapes differ, or an entry is no logprob.
        ConfigError: a bound is out of range, or 1 is not between them.

    >>> import math
    >>> p, q = [math.log(0.05), math.log(0.6)], [math.log(0.2), math.log(0.2)]  # ratios 0.25 and 3
    >>> token_tis(trainer_logprobs=p, sampling_logprobs=q).round(6)
    array([0.25, 2.  ])
    >>> token_tis(trainer_logprobs=p, sampling_logprobs=q, clip_low_threshold=0.5).round(6)
    array([0.5, 2. ])

    Source: IMPALA, arXiv:1802.01561; "Your efficient RL framework secretly brings you off-policy RL training" (2025).
    Peers: the upper bound is 2 in verl, 3 in TRL; TRL and slime have a lower bound too, off by default as here.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(np.clip(_ratios.ratios(d), low, high))


@answered
def sequence_tis(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 2.0,
) -> Any:
    """Return truncated importance weights of sequences: the product of w, clipped, at each of a sequence's tokens.

    Args:
        trainer_logprobs, sampling_logprobs, clip_low_threshold, clip_high_threshold: as for ``token_tis``.

    Raises:
        DataError, ConfigError: as for ``token_tis``.

    >>> import math
    >>> p, q = [math.log(0.1), math.log(0.1)], [math.log(0.2), math.log(0.2)]
    >>> sequence_tis(trainer_logprobs=p, sampling_logprobs=q).round(6)
    array([0.25, 0.25])

    Source: as for ``token_tis``. Peers: verl's sequence level.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(rows.spread(np.clip(_ratios.ratios(rows.sum(d)), low, high)))


@answered
def icepop(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 5.0,
) -> Any:
    """Return importance weights of the tokens whose ratio lies within bounds, 0 for the others.

    w where clip_low_threshold <= w <= clip_high_threshold, else 0

    Args:
        trainer_logprobs, sampling_logprobs: as for ``token_tis``.
        clip_low_threshold, clip_high_threshold: >= 0, bounds on the ratio itself, with 1 between them.

    Raises:
        DataError, ConfigError: as for ``token_tis``; 1 is not between the bounds.

    >>> import math
    >>> p, q = [math.log(0.05), math.log(0.6)], [math.log(0.2), math.log(0.2)]
    >>> icepop(trainer_logprobs=p, sampling_logprobs=q).round(6)
    array([0., 3.])

    Source: Ring-1T, arXiv:2510.18855; bounds as in INTELLECT-3, arXiv:2512.16144, equation 1. Peers: verl's token
    level with both bounds.
    """
    low, high = _ratios.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    w = _ratios.ratios(d)
    return rows.restore(np.where((w >= low) & (w <= high), w, 0.0))


@answered
def batch_normalized(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> Any:
    """Return importance weights divided by their mean over the batch's tokens, so that they average 1.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``token_tis``.

    Raises:
        DataError: as for ``token_tis``.

    >>> import math
    >>> batch_normalized(trainer_logprobs=[math.log(0.6), -1.0], sampling_logprobs=[math.log(0.2), -1.0]).round(6)
    array([1.5, 0.5])

    Source: self-normalised importance sampling. Peers: verl's rollout_is_batch_normalize.
    """
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    if d.size == 0:
        return rows.restore(d)
    w = np.exp(d - d.max())  # a common factor does not matter
    return rows.restore(w / w.mean())


@answered
def clamp(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike, bound: float = 20.0) -> Any:
    """Return importance weights whose log-ratio is clamped: exp(clip(trainer - sampling, -bound, bound)).

    Args:
        trainer_logprobs, sampling_logprobs: as for ``token_tis``.
        bound: in (0, 300], on the log-ratio.

    Raises:
        DataError, ConfigError: as for ``token_tis``.

    >>> clamp(trainer_logprobs=[-1.0, -9.0], sampling_logprobs=[-1.0, -1.0], bound=0.5).round(6)
    array([1.      , 0.606531])

    Source: none needed. Peers: verl, SkyRL, OpenRLHF and Trinity clamp at 20.
    """
    bound = _check.real("bound", bound, above=0.0, high=_ratios.LARGEST)
    rows, d = _ratios.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(np.exp(np.clip(d, -bound, bound)))
