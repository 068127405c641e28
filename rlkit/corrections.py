"""Weights and masks of tokens: off-policy corrections from two policies' logprobs, and masks from entropies.

The ratio of a token is w = exp(trainer - sampling). Weights hold a function of w; masks hold 1 for tokens near enough
to the sampler to be trained on, else 0, and are not multiplied by w. The masks of entropies keep the tokens that matter
for the policy's entropy; backends with the full distribution give it: ``policy.forward(data, want=("entropy",))``.

Give the result to a datum as ``weights``, times its token weight.
"""

from __future__ import annotations

import numpy as np

from rlkit import _check, _rows
from rlkit._rows import Arrays, Rows, RowsLike

__all__ = [
    "batch_normalized",
    "clamp",
    "clip_b",
    "clip_v",
    "divergence_rejection",
    "geometric_sequence_mask",
    "icepop",
    "outlier_veto",
    "sequence_mask",
    "sequence_tis",
    "token_mask",
    "token_tis",
    "top_entropy",
]


def token_tis(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 2.0,
) -> Arrays:
    """Return truncated importance weights: w clipped to [clip_low_threshold, clip_high_threshold] for each token.

    Args:
        trainer_logprobs, sampling_logprobs: of the policy's own tokens: [n], [B, n] or a list of [n_i], of one shape,
            finite and at most 0, but for rounding up to 0.1; a sequence may be empty.
        clip_low_threshold, clip_high_threshold: >= 0, bounds on the ratio itself that do not cross.

    Returns:
        float64 in the form of the logprobs.

    Raises:
        DataError: shapes differ, or an entry is not a logprob.
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
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(np.clip(_rows.ratios(d), low, high))


def sequence_tis(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.0,
    clip_high_threshold: float = 2.0,
) -> Arrays:
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
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    # The product is a sum of logarithms, bounded before it is exponentiated: a long sequence would overflow.
    return rows.restore(rows.repeat(np.clip(_rows.ratios(rows.sum(d)), low, high)))


def icepop(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 5.0,
) -> Arrays:
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
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    w = _rows.ratios(d)
    return rows.restore(np.where((w >= low) & (w <= high), w, 0.0))


def batch_normalized(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> Arrays:
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
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    if d.size == 0:
        return rows.restore(d)
    w = np.exp(d - d.max())  # a common factor does not matter, and so none overflows
    return rows.restore(w / w.mean())


def clamp(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike, bound: float = 20.0) -> Arrays:
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
    bound = _check.real("bound", bound, above=0.0, high=_rows.LARGEST_RATIO)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(np.exp(np.clip(d, -bound, bound)))


def token_mask(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 2.0,
) -> Arrays:
    """Return 1 for tokens whose ratio lies within the bounds, ends included, else 0.

    Args:
        trainer_logprobs, sampling_logprobs: of the policy's own tokens: [n], [B, n] or a list of [n_i], of one shape,
            finite and at most 0, but for rounding up to 0.1; a sequence may be empty.
        clip_low_threshold, clip_high_threshold: >= 0, bounds on the ratio itself, with 1 between them.

    Returns:
        float64 in the form of the logprobs.

    Raises:
        DataError: shapes differ, or an entry is not a logprob.
        ConfigError: a bound is out of range, or 1 is not between them.

    >>> import math
    >>> token_mask(trainer_logprobs=[-1.0, math.log(0.3)], sampling_logprobs=[-1.0, math.log(0.1)])  # 1 and 3
    array([1., 0.])

    Source: the mask of IcePop, arXiv:2510.18855. Peers: verl 0.9 bounds the inverse ratio; TRL's
    token_mask gives the ratio where this gives 1, as ``icepop`` does.
    """
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(_within(d, low, high))


def sequence_mask(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.5,
    clip_high_threshold: float = 2.0,
) -> Arrays:
    """Return 1 for all tokens of the sequences whose product of ratios lies within the bounds.

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
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(rows.repeat(_within(rows.sum(d), low, high)))


def geometric_sequence_mask(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.999,
    clip_high_threshold: float = 1.002,
) -> Arrays:
    """Return 1 for all tokens of the sequences whose geometric mean of ratios lies within the bounds.

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
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    return rows.restore(rows.repeat(_within(rows.sum(d) / np.maximum(rows.lengths, 1), low, high)))


def outlier_veto(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 1e-4,
    clip_high_threshold: float = 100.0,
) -> Arrays:
    """Return 1 for all tokens of the sequences whose ratios all lie within the bounds.

    Args:
        trainer_logprobs, sampling_logprobs, clip_low_threshold, clip_high_threshold: as for ``token_mask``.

    Raises:
        DataError, ConfigError: as for ``token_mask``.

    >>> outlier_veto(trainer_logprobs=[[-1.0, -12.0], [-1.0, -2.0]], sampling_logprobs=[[-1.0, -1.0], [-1.0, -1.0]])
    array([[0., 0.],
           [1., 1.]])

    Source: no paper. Peers: SkyRL's outlier_token_is_threshold_low and _high; verl's veto has only the lower
    bound.
    """
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    # The smallest of ones and zeros is 1 where all are.
    return rows.restore(rows.repeat(rows.reduce(np.minimum, _within(d, low, high), empty=1.0)))


def divergence_rejection(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    threshold: float,
    level: str = "token",
    estimator: str = "k3",
) -> Arrays:
    """Return 1 where an estimate of the divergence of trainer and sampler is at most the threshold.

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
    _check.choice("level", level, ("token", "sequence-sum", "sequence-mean", "sequence-max"))
    _check.choice("estimator", estimator, ("k2", "k3"))
    threshold = _check.real("threshold", threshold, low=0.0)
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs, some=False)
    # Only what is exponentiated is bounded: e^300 is above any threshold that a user means.
    divergence = 0.5 * d * d if estimator == "k2" else np.expm1(_rows.bound(d)) - d
    if level != "token":
        divergence = rows.reduce(np.maximum if level == "sequence-max" else np.add, divergence)
    if level == "sequence-mean":
        divergence = divergence / np.maximum(rows.lengths, 1)
    near = (divergence <= threshold).astype(np.float64)
    return rows.restore(near if level == "token" else rows.repeat(near))


def _within(log_ratio: np.ndarray, low: float, high: float) -> np.ndarray:
    w = _rows.ratios(log_ratio)
    return ((w >= low) & (w <= high)).astype(np.float64)


_FLAT = 1e-12  # a deviation below it is rounding; peers use the same number


def top_entropy(*, entropy: RowsLike, fraction: float = 0.2) -> Arrays:
    """Return 1 for the given fraction of the batch's tokens that have the highest entropy, 0 for the others.

    Tokens at or above the (1 - fraction) quantile of all entropies are kept, interpolated linearly.

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
    rows = _read_entropies(entropy)
    if rows.flat.size == 0:
        return rows.restore(rows.flat)
    # Of equal entropies at the quantile all are kept, so that no order of tokens decides.
    return rows.restore((rows.flat >= np.quantile(rows.flat, 1.0 - fraction)).astype(np.float64))


def clip_b(*, entropy: RowsLike, logprobs: RowsLike, advantages: RowsLike, mu: float = 2.5) -> Arrays:
    """Return 0 for tokens with a negative advantage that would change the entropy most, by their score in the batch.

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
    rows, score, a = _compute_scores(entropy, logprobs, advantages)
    if rows.flat.size == 0 or score.std() < _FLAT:
        return rows.restore(np.ones_like(score))
    return rows.restore(1.0 - ((a < 0) & (score - score.mean() < -mu * score.std())))


def clip_v(
    *,
    entropy: RowsLike,
    logprobs: RowsLike,
    advantages: RowsLike,
    sum_p2: RowsLike,
    sum_p2_logp: RowsLike,
    mu: float = 8.5,
    max_fraction: float = 1e-4,
) -> Arrays:
    """Return 0 for tokens with a negative advantage whose score lies far below its expectation over the vocabulary.

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
    rows, score, a = _compute_scores(entropy, logprobs, advantages)
    p2, p2_logp = rows.read_like("sum_p2", sum_p2), rows.read_like("sum_p2_logp", sum_p2_logp)
    rows.require("sum_p2", p2, (p2 > 0) & (p2 <= 1 + 1e-4), "in (0, 1]")  # but for the rounding of a float32 sum
    rows.require("sum_p2_logp", p2_logp, (p2_logp <= 1e-4) & (p2_logp >= -_rows.LARGEST), "at most 0")
    # sum of p_v S_v = sum of p_v^2 (H + log p_v) = H sum of p_v^2 + sum of p_v^2 log p_v
    far = rows.flat * p2 + p2_logp - score
    keep = np.ones_like(far)
    if far.size and far.std() >= _FLAT:
        dropped = np.flatnonzero((a < 0) & (far > mu * far.std()))
        most = max(1, int(max_fraction * far.size))
        keep[dropped[np.argsort(-far[dropped], kind="stable")[:most]]] = 0.0
    return rows.restore(keep)


def _read_entropies(entropy: RowsLike) -> Rows:
    rows = Rows.parse("entropy", entropy, empty=True)
    rows.require("entropy", rows.flat, rows.flat >= -1e-4, "a number >= 0, in nats")
    return rows


def _compute_scores(entropy: RowsLike, logprobs: RowsLike, advantages: RowsLike) -> tuple[Rows, np.ndarray, np.ndarray]:
    """Return the rows of the entropies, S = p (H + log p) of each token [N], and the advantages [N]."""
    rows = _read_entropies(entropy)
    lp, a = rows.read_like("logprobs", logprobs), rows.read_like("advantages", advantages)
    rows.check_logprobs("logprobs", lp)
    rows.check_finite("advantages", a)
    return rows, np.exp(lp) * (rows.flat + lp), a
