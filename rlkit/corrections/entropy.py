"""Masks of 1 and 0 per token that keep the tokens that matter for the policy's entropy.

Backends that have the full distribution give the entropies: ``policy.forward(data, want=("entropy",))``. Give a mask to
a datum as ``weights``, times its token weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlkit import _check, _ratios, _rows
from rlkit._calls import answered
from rlkit._forms import RowsLike

__all__ = ["clip_b", "clip_v", "top_entropy"]

_FLAT = 1e-12  # a deviation below it is rounding; peers use the same number


@answered
def top_entropy(*, entropy: RowsLike, fraction: float = 0.2) -> Any:
    """1 for the given fraction of the batch's tokens that have the highest entropy, 0 for the others.

    Kept is what is at or above the (1 - fraction) quantile of all entropies, interpolated linearly.

    Args:
        entropy: of the policy at its own tokens, in nats: [n], [B, n] or a list of [n_i], >= 0; a sequence may be
            empty. All sequences together make the batch.
        fraction: in (0, 1]; 1 keeps every token.

    Returns:
        float64 in the form of ``entropy``.

    Raises:
        DataError: an entropy is negative, not finite or no number.
        ConfigError: the fraction is out of range.

    >>> top_entropy(entropy=[[0.1, 2.0, 0.3], [0.2, 1.5]], fraction=0.4)
    [array([0., 1., 0.]), array([0., 1.])]

    Source: "Beyond the 80/20 rule", arXiv:2506.01939, equation 5. Peers: TRL's top_entropy_quantile, over the batch of
    all processes as here; 0.2 is the paper's choice, TRL's default of 1 keeps every token.
    """
    fraction = _check.real("fraction", fraction, above=0.0, high=1.0)
    rows = _entropies(entropy)
    if rows.flat.size == 0:
        return rows.restore(rows.flat)
    return rows.restore((rows.flat >= np.quantile(rows.flat, 1.0 - fraction)).astype(np.float64))


@answered
def clip_b(*, entropy: RowsLike, logprobs: RowsLike, advantages: RowsLike, mu: float = 2.5) -> Any:
    """0 for tokens with a negative advantage that would change the entropy most, by their score within the batch.

    The score is S = p (H + log p), and dropped is A < 0 with S < mean(S) - mu std(S) over the batch.

    Args:
        entropy: H of the policy at its own tokens: [n], [B, n] or a list of [n_i], >= 0, in nats.
        logprobs: log p of those tokens, by the same policy, shaped like ``entropy``.
        advantages: shaped like ``entropy``.
        mu: >= 0, in standard deviations (biased).

    Returns:
        float64 in the form of ``entropy``; 1 everywhere where the scores do not vary.

    Raises:
        DataError: shapes differ, an entropy is negative, a logprob positive, or a number not finite.
        ConfigError: mu is out of range.

    >>> import math
    >>> lp = [math.log(0.5), math.log(0.5), math.log(0.05)]
    >>> clip_b(entropy=[0.7, 0.7, 2.0], logprobs=lp, advantages=[-1.0, -1.0, -1.0], mu=1.0)  # S: 0.003 0.003 -0.050
    array([1., 1., 0.])

    Source: arXiv:2602.03392, Clip_B. Peers: Trinity-RFT's clipb, with the same mu.
    """
    mu = _check.real("mu", mu, low=0.0)
    rows, score, a = _scores(entropy, logprobs, advantages)
    if rows.flat.size == 0 or score.std() < _FLAT:
        return rows.restore(np.ones_like(score))
    return rows.restore(1.0 - ((a < 0) & (score - score.mean() < -mu * score.std())))


@answered
def clip_v(
    *,
    entropy: RowsLike,
    logprobs: RowsLike,
    advantages: RowsLike,
    sum_p2: RowsLike,
    sum_p2_logp: RowsLike,
    mu: float = 8.5,
    max_fraction: float = 1e-4,
) -> Any:
    """0 for tokens with a negative advantage whose score lies far below the one expected over the vocabulary.

    D = sum over v of p_v S_v - S with S = p (H + log p); dropped is A < 0 with D > mu std(D), and of those at most
    max(1, max_fraction of the batch's tokens), the ones with the largest D.

    Args:
        entropy, logprobs, advantages: as for ``clip_b``.
        sum_p2, sum_p2_logp: the sums over the vocabulary of p^2 and of p^2 log p, shaped like ``entropy``;
            ``policy.forward(data, want=("entropy", "sum_p2", "sum_p2_logp"))`` gives them.
        mu: >= 0, in standard deviations (biased) over the batch.
        max_fraction: in [0, 1], of the batch's tokens.

    Returns:
        float64 in the form of ``entropy``; 1 everywhere where D does not vary.

    Raises:
        DataError: as for ``clip_b``; sum_p2 is not in (0, 1], or sum_p2_logp positive.
        ConfigError: a setting is out of range.

    >>> import math
    >>> lp, a = [math.log(0.5), math.log(0.5), math.log(0.05)], [-1.0, -1.0, -1.0]
    >>> clip_v(entropy=[0.7, 0.7, 2.0], logprobs=lp, advantages=a, sum_p2=[0.5, 0.5, 0.3],
    ...     sum_p2_logp=[-0.35, -0.35, -0.4], mu=1.0)  # D: -0.003 -0.003 0.250
    array([1., 1., 0.])

    Source: arXiv:2602.03392, Clip_V. Peers: Trinity-RFT's clipv, which drops tokens with A = 0 too while few are
    dropped.
    """
    mu = _check.real("mu", mu, low=0.0)
    max_fraction = _check.real("max_fraction", max_fraction, low=0.0, high=1.0)
    rows, score, a = _scores(entropy, logprobs, advantages)
    p2, p2_logp = rows.like("sum_p2", sum_p2), rows.like("sum_p2_logp", sum_p2_logp)
    rows.require("sum_p2", p2, (p2 > 0) & (p2 <= 1 + 1e-4), "in (0, 1]")
    rows.require("sum_p2_logp", p2_logp, (p2_logp <= 1e-4) & (p2_logp >= -_rows.LARGEST), "at most 0")
    far = rows.flat * p2 + p2_logp - score
    if far.size == 0 or far.std() < _FLAT:
        return rows.restore(np.ones_like(far))
    dropped = np.flatnonzero((a < 0) & (far > mu * far.std()))
    most = max(1, int(max_fraction * far.size))
    keep = np.ones_like(far)
    keep[dropped[np.argsort(-far[dropped], kind="stable")[:most]]] = 0.0
    return rows.restore(keep)


def _entropies(entropy: RowsLike) -> _rows.Rows:
    rows = _rows.parse("entropy", entropy, empty=True)
    rows.require("entropy", rows.flat, (rows.flat >= -1e-4) & (rows.flat <= _rows.LARGEST), "a number >= 0, in nats")
    return rows


def _scores(entropy: RowsLike, logprobs: RowsLike, advantages: RowsLike) -> tuple[_rows.Rows, np.ndarray, np.ndarray]:
    """Return the rows of the entropies, S = p (H + log p) of each token [N], and the advantages [N]."""
    rows = _entropies(entropy)
    lp, a = rows.like("logprobs", logprobs), rows.like("advantages", advantages)
    _ratios.check(rows, lp, "logprobs")
    rows.check_finite(a, where="advantages")
    return rows, np.exp(lp) * (rows.flat + lp), a
