"""Diagnostics: the distance between trainer and sampler, and the signal in a batch of rewards.

Functions of the distance take ``trainer_logprobs`` and ``sampling_logprobs`` of the sampled tokens: one sequence [n],
or a list of sequences [n_i], as ``ForwardBackwardOutput.selected`` and ``Sample.logprobs`` hold them. Means are over
all tokens of the batch unless said otherwise. The ratio of a token is exp(trainer - sampling).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from rlkit import _check, _rows
from rlkit._check import ArrayLike
from rlkit._rows import Rows, RowsLike, is_count
from rlkit.errors import ConfigError, DataError

__all__ = [
    "chi2",
    "clip_fraction",
    "effective_sample_size",
    "entropy_estimate",
    "group_informativeness",
    "kl_k3",
    "kl_v1",
    "kl_v2",
    "pass_at_k",
    "perplexity_difference",
    "ratio_statistics",
    "token_lag",
]


def kl_v1(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> float:
    """Return the mean of sampling - trainer: the unbiased estimate of KL(sampler || trainer), which may be negative.

    Args:
        trainer_logprobs, sampling_logprobs: [n] or a list of [n_i], of one shape, finite and at most 0, but for
            rounding up to 0.1.

    Raises:
        DataError: shapes differ, an entry is not a logprob, or no token is given.

    >>> kl_v1(trainer_logprobs=[-0.5, -2.0], sampling_logprobs=[-1.0, -1.0])  # (-0.5 + 1) / 2
    0.25

    Source: Schulman, "Approximating KL divergence" (2020), k1. Peers: verl's rollout_corr/kl,
    tinker-cookbook's kl_sample_train_v1.
    """
    return float(-_rows.log_ratios(trainer_logprobs, sampling_logprobs)[1].mean())


def kl_v2(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> float:
    """Return half the mean square of the log-ratio: a biased estimate of the KL with a small variance, never negative.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``.

    Raises:
        DataError: as for ``kl_v1``.

    >>> kl_v2(trainer_logprobs=[-0.5, -2.0], sampling_logprobs=[-1.0, -1.0])  # (0.25 + 1) / 4
    0.3125

    Source: Schulman (2020), k2. Peers: tinker-cookbook's kl_sample_train_v2.
    """
    d = _rows.log_ratios(trainer_logprobs, sampling_logprobs)[1]
    return float(0.5 * (d * d).mean())


def kl_k3(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> float:
    """Return the mean of r - 1 - log r: unbiased for KL(sampler || trainer), never negative.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``; log-ratios count as at most 300, to stay finite.

    Raises:
        DataError: as for ``kl_v1``.

    >>> import math
    >>> round(kl_k3(trainer_logprobs=[math.log(0.5)], sampling_logprobs=[math.log(0.25)]), 6)  # 2 - 1 - log 2
    0.306853

    Source: Schulman (2020), k3. Peers: verl, SkyRL and OpenRLHF clamp it at 10, where it matters most.
    """
    d = _rows.log_ratios(trainer_logprobs, sampling_logprobs)[1]
    return float((np.expm1(_rows.bound(d)) - d).mean())


def entropy_estimate(*, sampling_logprobs: RowsLike) -> float:
    """Return the mean of -log q over the sampled tokens: an unbiased estimate of the entropy per token, in nats.

    Args:
        sampling_logprobs: as for ``kl_v1``.

    Raises:
        DataError: as for ``kl_v1``.

    >>> entropy_estimate(sampling_logprobs=[[-1.0, -3.0], [-2.0]])
    2.0

    Source: H = -E[log q]. Peers: Trinity multiplies by the probability once more, which estimates something else.
    """
    rows = _rows.read_logprobs("sampling_logprobs", sampling_logprobs)
    return float(-rows.flat.mean())


def clip_fraction(
    *,
    trainer_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
) -> dict[str, float]:
    """Return the fractions of tokens whose ratio lies below the low and above the high bound.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``.
        clip_low_threshold: in [0, 1], a bound on the ratio itself: 1 - epsilon.
        clip_high_threshold: >= 1: 1 + epsilon.

    Raises:
        DataError: as for ``kl_v1``.
        ConfigError: the bounds are out of range or cross.

    >>> clip_fraction(trainer_logprobs=[-0.5, -2.0, -1.0, -1.0], sampling_logprobs=[-1.0] * 4)
    {'low': 0.25, 'high': 0.25}

    Source: PPO, arXiv:1707.06347. Peers count only tokens whose gradient the clip removes, which needs advantages.
    """
    low, high = _rows.check_bounds(clip_low_threshold, clip_high_threshold)
    ratios = _rows.ratios(_rows.log_ratios(trainer_logprobs, sampling_logprobs)[1])
    return {"low": float((ratios < low).mean()), "high": float((ratios > high).mean())}


def effective_sample_size(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> float:
    """Return 1 / mean((w / mean w)^2) over tokens: the effective fraction of the batch, in (0, 1].

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``.

    Raises:
        DataError: as for ``kl_v1``.

    >>> import math
    >>> round(effective_sample_size(trainer_logprobs=[math.log(0.6), -1.0], sampling_logprobs=[math.log(0.2), -1.0]), 6)
    0.8

    Weights 3 and 1: (3 + 1)^2 / (2 (9 + 1)) = 0.8.

    Source: Kish (1965). Peers: verl's rollout_is_eff_sample_size.
    """
    d = _rows.log_ratios(trainer_logprobs, sampling_logprobs)[1]
    w = np.exp(d - d.max())  # the size does not depend on a common factor
    return float(w.sum() ** 2 / (w.size * (w @ w)))


def chi2(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike, level: str = "token") -> float:
    """Return the mean of w^2, less 1: the chi-squared divergence of the trainer from the sampler.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``; log-ratios count as at most 300, to stay finite.
        level: "token": w is a token's ratio, the mean over tokens. "sequence": w is the product of a sequence's
            ratios, the mean over sequences that have tokens.

    Raises:
        DataError: as for ``kl_v1``.
        ConfigError: the level is unknown.

    >>> import math
    >>> p, q = [math.log(0.5), -1.0], [math.log(0.25), -1.0]
    >>> round(chi2(trainer_logprobs=p, sampling_logprobs=q), 6)  # (4 + 1) / 2 - 1
    1.5
    >>> round(chi2(trainer_logprobs=p, sampling_logprobs=q, level="sequence"), 6)  # 4 - 1
    3.0

    Source: Pearson's divergence. Peers: verl's chi2_token and chi2_seq.
    """
    _check.choice("level", level, ("token", "sequence"))
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs)
    if level == "sequence":
        d = rows.sum(d)[rows.lengths > 0]
    return float(np.exp(2.0 * _rows.bound(d)).mean() - 1.0)


def ratio_statistics(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> dict[str, float]:
    """Return the smallest, largest, mean and unbiased standard deviation of the tokens' ratios.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``; log-ratios count as at most 300, to stay finite.

    Returns:
        {"min", "max", "mean", "std"}; std is 0 for a single token.

    Raises:
        DataError: as for ``kl_v1``.

    >>> ratio_statistics(trainer_logprobs=[0.0, 0.0], sampling_logprobs=[0.0, 0.0])
    {'min': 1.0, 'max': 1.0, 'mean': 1.0, 'std': 0.0}

    Source: none needed. Peers: verl reports the same with other names.
    """
    w = _rows.ratios(_rows.log_ratios(trainer_logprobs, sampling_logprobs)[1])
    std = float(w.std(ddof=1)) if w.size > 1 and w.min() != w.max() else 0.0
    return {"min": float(w.min()), "max": float(w.max()), "mean": float(w.mean()), "std": std}


def perplexity_difference(*, trainer_logprobs: RowsLike, sampling_logprobs: RowsLike) -> float:
    """Return the log perplexity under the trainer less that under the sampler, the mean over sequences.

    mean over sequences of (mean over their tokens of sampling - trainer); a sequence without tokens does not count.

    Args:
        trainer_logprobs, sampling_logprobs: as for ``kl_v1``.

    Raises:
        DataError: as for ``kl_v1``.

    >>> perplexity_difference(trainer_logprobs=[[-2.0, -2.0], [-1.0]], sampling_logprobs=[[-1.0, -1.0], [-1.0]])
    0.5

    Source: perplexity = exp(-mean logprob). Peers: verl's log_ppl_diff.
    """
    rows, d = _rows.log_ratios(trainer_logprobs, sampling_logprobs)
    filled = rows.lengths > 0
    return float(-(rows.sum(d)[filled] / rows.lengths[filled]).mean())


def token_lag(*, versions: RowsLike, current: int) -> dict[str, float]:
    """Return how old tokens are: the optimizer steps between the policy that drew them and the current one.

    Args:
        versions: of the sampled tokens, as ``Sample.token_versions``: integers [n], or a list of sequences [n_i], which
            may be empty.
        current: >= 0, the current version of the trainer.

    Returns:
        "mean" and "max" over all tokens, and "mixed": the share of sequences that several policies drew.

    Raises:
        DataError: no token is given, or a version is negative, not an integer, or newer than ``current``.

    >>> token_lag(versions=[[3, 3, 4], [4, 4]], current=5)
    {'mean': 1.4, 'max': 2.0, 'mixed': 0.5}

    Source: staleness as AReaL bounds it, arXiv:2505.24298, for each token, as PipelineRL's are, arXiv:2509.19128.
    """
    current = _check.integer("current", current, low=0)
    rows = Rows.parse("versions", versions, empty=True)
    if rows.flat.size == 0:
        raise DataError("versions", "holds no tokens", "at least one")
    rows.require(
        "versions", rows.flat, is_count(rows.flat, high=current + 1), f"an integer in 0..{current}, the version now"
    )
    lag = current - rows.flat
    mixed = rows.reduce(np.maximum, lag, -1.0) != rows.reduce(np.minimum, lag, -1.0)
    return {"mean": float(lag.mean()), "max": float(lag.max()), "mixed": float(mixed[rows.lengths > 0].mean())}


def group_informativeness(rewards: RowsLike, *, low: float = 0.0, high: float = 1.0) -> dict[str, float]:
    """Return the fractions of groups that teach nothing: constant, all right, all wrong.

    Args:
        rewards: one group [G], [B, G] or a list of [G_i]; finite, or NaN for unscored, which do not count; groups
            without a scored reward do not count either.
        low: a reward <= low is wrong.
        high: a reward >= high is right; low < high.

    Returns:
        {"zero": all scored rewards equal, "too_easy": all right, "too_hard": all wrong}.

    Raises:
        DataError: rewards are empty, infinite or no numbers, or none is scored.
        ConfigError: the bounds are out of range or cross.

    >>> group_informativeness([[1, 1, 1], [0, 0, 0], [0, 1, 0], [0, 0, 0]])
    {'zero': 0.75, 'too_easy': 0.25, 'too_hard': 0.5}

    Source: DAPO, arXiv:2503.14476, section 3.2, which groups to leave out. Peers: prime-rl logs solve_none, solve_all.
    """
    low, high = _check.real("low", low), _check.real("high", high)
    if low >= high:
        raise ConfigError("low", f"is {low}", f"less than high={high}")
    rows = Rows.parse("rewards", rewards, nan=True)
    _rows.warn_alone(rows)
    lowest, highest = rows.reduce(np.fmin, rows.flat), rows.reduce(np.fmax, rows.flat)
    some = ~np.isnan(lowest)
    if not some.any():
        raise DataError("rewards", "has no scored reward", "at least one")
    parts = {"zero": lowest == highest, "too_easy": lowest >= high, "too_hard": highest <= low}
    return {name: float(part[some].mean()) for name, part in parts.items()}


@overload
def pass_at_k(n: int, c: int, k: int) -> float: ...


@overload
def pass_at_k(n: Sequence[int] | ArrayLike, c: Sequence[int] | ArrayLike, k: int) -> np.ndarray: ...


def pass_at_k(n: object, c: object, k: int) -> float | np.ndarray:
    """Return the probability that at least one of k samples is right, estimated from n samples of which c are.

    1 - C(n - c, k) / C(n, k)

    Args:
        n: samples, an integer >= k, or an array of them (one per problem).
        c: how many of them are right, in [0, n]; shaped like n.
        k: >= 1.

    Returns:
        A float, or float64 shaped like n and c. The mean over problems is the benchmark's number.

    Raises:
        DataError: n or c are not integers or out of range.
        ConfigError: k is out of range.

    >>> pass_at_k(4, 1, 2)  # 3 of the 6 pairs hold the right one
    0.5
    >>> pass_at_k([4, 4], [0, 3], 2)
    array([0., 1.])

    Source: Codex, arXiv:2107.03374, equation 1. Peers: 1 - (1 - c / n)^k, seen in places, is biased.
    """
    k = _check.integer("k", k, low=1)
    if _rows.is_one(n) and _rows.is_one(c):
        n = _check.integer("n", n, low=k, why="at least k samples", error=DataError)
        c = _check.integer("c", c, low=0, high=n, error=DataError)
        return 1.0 - float(np.prod([(n - c - i) / (n - i) for i in range(k)])) if n - c >= k else 1.0
    samples = Rows.vector("n", n)  # type: ignore[arg-type]
    right = Rows.vector("c", c, samples.flat.size, why="shaped like n")  # type: ignore[arg-type]
    for rows, low, high in ((samples, k, 2**53), (right, 0, samples.flat + 1)):
        good = is_count(rows.flat, low, high)
        rows.require(rows.where, rows.flat, good, "integers, 0 <= c <= n, k <= n")
    sizes = samples.flat
    left = np.maximum(sizes - right.flat, 0.0)
    miss = np.ones(sizes.size)
    for i in range(k):
        miss *= np.maximum(left - i, 0.0) / (sizes - i)
    return np.asarray(1.0 - miss)
