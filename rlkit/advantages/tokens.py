"""Advantages and weights per token: from logprobs, normalised over tokens, or with a baseline for each token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlkit import _check, _rows
from rlkit._rows import SINGLETON, Arrays, Groups, Labels, RowsLike, check, row_wise
from rlkit.advantages._registry import register
from rlkit.advantages._returns import Steps, reverse_scan
from rlkit.errors import ConfigError, DataError

__all__ = [
    "entropy_bonus",
    "jsd",
    "jsd_gradient",
    "kl_penalty",
    "on_policy_distillation",
    "optimal_token_baseline",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "token_weights",
]

_LARGEST_LOG_RATIO = 300.0  # beyond it exp() leaves what can be added up; such a token is broken anyway
_LARGEST_DISTANCE = 1e75  # beyond it coef d^2 could overflow


@register("on_policy_distillation")
def on_policy_distillation(
    *,
    teacher_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    coef: float = 1.0,
    clip: float | None = None,
    gamma: float = 0.0,
    mask: RowsLike | None = None,
) -> Any:
    """Return how much likelier each sampled token is to the teacher: the sampled reverse KL as an advantage.

    a_t = clip(coef (teacher - sampling), -clip, clip), and A_t = a_t + gamma A_{t+1}

    Args:
        teacher_logprobs, sampling_logprobs: of the sampled tokens: [n], [B, n] or a list of [n_i]; finite and at
            most 0, but for rounding up to 0.1.
        coef: in [0, 1e150].
        clip: > 0, or None for no clipping.
        gamma: in [0, 1]; 0 looks at each token alone.
        mask: shaped alike; masked tokens get 0 and are passed over.

    Returns:
        float64 in the form of the logprobs.

    Raises:
        DataError: shapes differ, or an entry that counts is not a logprob.
        ConfigError: a setting is out of range.

    >>> on_policy_distillation(teacher_logprobs=[-1.0, -4.0], sampling_logprobs=[-2.0, -1.0], clip=2.0, gamma=0.5)
    array([ 0., -2.])

    Source: Thinking Machines Lab, "On-policy distillation" (2025); arXiv:2306.13649. Peers: tinker-cookbook the same;
    Trinity clips to [-5, 5]; slime subtracts it from another advantage.
    """
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps, teacher, sampling = _pair("teacher_logprobs", teacher_logprobs, sampling_logprobs, mask)
    a = coef * (teacher - sampling)
    if clip is not None:
        clip = _check.real("clip", clip, above=0.0)
        a = np.clip(a, -clip, clip)
    return steps.restore(reverse_scan(a, steps.factors(gamma), steps.starts))


@register("jsd")
def jsd(
    *,
    teacher_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    beta: float = 0.5,
    coef: float = 1.0,
    mask: RowsLike | None = None,
) -> Any:
    """Return the sampled Jensen-Shannon term of each token, negated.

    A_t = -coef (beta (teacher - M) + (1 - beta) (sampling - M)), M = log(beta e^teacher + (1 - beta) e^sampling)

    Args:
        teacher_logprobs, sampling_logprobs: as for ``on_policy_distillation``.
        beta: in [0, 1], the teacher's share.
        coef: in [0, 1e150].
        mask: as for ``on_policy_distillation``.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> import math
    >>> a = jsd(teacher_logprobs=[math.log(0.5)], sampling_logprobs=[math.log(0.125)])
    >>> a.round(6)  # M = log 0.3125; the mean of log 1.6 and log 0.4, negated
    array([0.223144])

    Source: generalised JSD, arXiv:2306.13649, equation 3. Peers: Trinity's JSD advantage. It is the value of the
    divergence's terms, the same for a token that the teacher finds likelier and for one that it finds as much less
    likely: its policy gradient is not that of the divergence, which ``jsd_gradient`` has.
    """
    beta = _check.real("beta", beta, low=0.0, high=1.0)
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    steps, teacher, sampling = _pair("teacher_logprobs", teacher_logprobs, sampling_logprobs, mask)
    if beta in {0.0, 1.0}:
        return steps.restore(np.zeros(teacher.size))
    mixture = np.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + sampling)
    return steps.restore(-coef * (beta * (teacher - mixture) + (1.0 - beta) * (sampling - mixture)))


@register("jsd_gradient")
def jsd_gradient(
    *,
    teacher_logprobs: RowsLike,
    sampling_logprobs: RowsLike,
    beta: float = 0.5,
    coef: float = 1.0,
    mask: RowsLike | None = None,
) -> Any:
    """Return advantages with the policy gradient of the Jensen-Shannon divergence from a teacher, per token.

    A_t = -coef (1 - beta) (sampling - M), M = log(beta e^teacher + (1 - beta) e^sampling)

    D = beta KL(t || m) + (1 - beta) KL(s || m) with m = beta t + (1 - beta) s has the derivative
    (1 - beta) log(s / m) with respect to s, since what m contributes cancels.

    Args:
        teacher_logprobs, sampling_logprobs: as for ``on_policy_distillation``.
        beta: in (0, 1), the teacher's share; towards 0 the gradient becomes beta times that of KL(s || t).
        coef: in [0, 1e150].
        mask: as for ``on_policy_distillation``.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> import numpy as np
    >>> a = jsd_gradient(teacher_logprobs=np.log([0.5, 0.125]), sampling_logprobs=np.log([0.125, 0.5]))
    >>> a.round(3)  # half of log 2.5, half of log 0.625
    array([ 0.458, -0.235])

    Source: generalised JSD, arXiv:2306.13649, equation 3, differentiated. Peers: Trinity's is ``jsd``. Over the whole
    distribution rather than the sampled token the loss topk_jsd has it.
    """
    beta = _check.real("beta", beta, above=0.0, below=1.0)
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    steps, teacher, sampling = _pair("teacher_logprobs", teacher_logprobs, sampling_logprobs, mask)
    mixture = np.logaddexp(math.log(beta) + teacher, math.log1p(-beta) + sampling)
    return steps.restore(-coef * (1.0 - beta) * (sampling - mixture))


@register("kl_penalty")
def kl_penalty(
    *,
    sampling_logprobs: RowsLike,
    reference_logprobs: RowsLike,
    coef: float = 0.01,
    estimator: str = "k1",
    center: bool = False,
    mask: RowsLike | None = None,
) -> Any:
    """Return a penalty for leaving a reference policy, to be added to per-token rewards or advantages.

    -coef kl_t with d = sampling - reference and kl = d ("k1"), d^2 / 2 ("k2"), e^-d - 1 + d ("k3"), |d| ("abs"), or k3
    of d clipped to +-20, at most 10 ("clamped")

    Args:
        sampling_logprobs, reference_logprobs: of the sampled tokens: [n], [B, n] or a list of [n_i]; finite and at
            most 0, but for rounding up to 0.1.
        coef: in [0, 1e150].
        estimator: as above.
        center: whether to subtract the mean over the batch's tokens, so that the penalty moves no sum.
        mask: shaped alike; masked tokens get 0 and do not count.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> kl_penalty(sampling_logprobs=[-1.0, -2.0], reference_logprobs=[-2.0, -2.0], coef=0.5)
    array([-0.5, -0. ])
    >>> kl_penalty(sampling_logprobs=[-1.0, -2.0], reference_logprobs=[-2.0, -2.0], coef=0.5, center=True)
    array([-0.25,  0.25])

    Source: arXiv:1909.08593 (KL in the reward); Schulman, "Approximating KL divergence" (2020). Peers:
    tinker-cookbook centres over the batch; "clamped" is low_var_kl in verl and Trinity.
    """
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    _check.choice("estimator", estimator, ("k1", "k2", "k3", "abs", "clamped"))
    center = _check.flag("center", center)
    steps, reference, sampling = _pair("reference_logprobs", reference_logprobs, sampling_logprobs, mask)
    d = sampling - reference
    if estimator == "k1":
        kl = d
    elif estimator == "k2":
        kl = 0.5 * np.square(np.clip(d, -_LARGEST_DISTANCE, _LARGEST_DISTANCE))
    elif estimator == "k3":
        kl = np.expm1(np.minimum(-d, _LARGEST_LOG_RATIO)) + d
    elif estimator == "clamped":
        near = np.clip(d, -20.0, 20.0)
        kl = np.minimum(np.expm1(-near) + near, 10.0)
    else:
        kl = np.abs(d)
    penalty = -coef * kl
    if center and penalty.size:
        penalty = penalty - penalty.mean()
    return steps.restore(penalty)


@register("entropy_bonus")
def entropy_bonus(*, sampling_logprobs: RowsLike, coef: float = 0.01, mask: RowsLike | None = None) -> Any:
    """Return a bonus that keeps the policy's entropy up, to be added to per-token advantages.

    -coef log q: on-policy, its policy gradient is coef times the gradient of the entropy of each token

    Args:
        sampling_logprobs: of the sampled tokens: [n], [B, n] or a list of [n_i]; finite and at
            most 0, but for rounding up to 0.1.
        coef: in [0, 1e150].
        mask: shaped alike; masked tokens get 0.

    Raises:
        DataError, ConfigError: as for ``on_policy_distillation``.

    >>> entropy_bonus(sampling_logprobs=[-1.0, -3.0], coef=0.5)
    array([0.5, 1.5])

    Source: E[-log q grad log q] = grad H. Peers: Trinity on Tinker uses -q (1 + log q), which is a different quantity.
    """
    coef = _check.real("coef", coef, low=0.0, high=_rows.LARGEST)
    steps = _tokens(sampling_logprobs, mask)
    return steps.restore(-coef * steps.rewards)


def _pair(
    name: str, other: RowsLike, sampling: RowsLike, mask: RowsLike | None
) -> tuple[Steps, np.ndarray, np.ndarray]:
    """Return the tokens that count, and both policies' logprobs of them [n]."""
    steps = _tokens(sampling, mask)
    flat = steps.rows.like(name, other)
    check(steps.rows, flat, name, steps.mask)
    return steps, flat if steps.mask is None else flat[steps.mask], steps.rewards


def _tokens(sampling: RowsLike, mask: RowsLike | None) -> Steps:
    """Return the sampled tokens that count, and their logprobs."""
    steps = Steps.parse(sampling, mask=mask, where="sampling_logprobs", empty=True)
    check(steps.rows, steps.rows.flat, "sampling_logprobs", steps.mask)
    return steps


@register("reinforce_pp")
@row_wise
def reinforce_pp(
    rewards: RowsLike,
    *,
    kl: RowsLike | None = None,
    kl_coef: float = 0.0,
    gamma: float = 1.0,
    mask: RowsLike | None = None,
    ddof: int = 1,
    eps: float = 1e-6,
) -> Arrays:
    """Return discounted returns of per-token rewards less a KL penalty, normalised over the tokens (REINFORCE++).

    G_t = r_t - kl_coef kl_t + gamma G_{t+1}, and A_t = (G_t - mean) / (standard deviation + eps) over all tokens

    Args:
        rewards: per token: one sequence [T], [B, T] or a list of [T_i]; usually 0 but at the last token.
        kl: shaped like ``rewards``: the KL estimate of each token, needed where kl_coef is not 0.
        kl_coef: >= 0.
        gamma: in [0, 1].
        mask: shaped like ``rewards``; masked tokens do not count and get 0, and the recursion skips them.
        ddof, eps: of the normalisation.

    Raises:
        DataError: as for ``discounted_returns``.
        ConfigError: a setting is out of range, or kl is missing.

    >>> reinforce_pp([[0.0, 1.0], [0.0, -1.0]], eps=0.0, ddof=0)
    array([[ 1.,  1.],
           [-1., -1.]])

    Source: arXiv:2501.03262. Peers: verl carries the return across masked tokens as here, SkyRL starts again there,
    Trinity ignores the mask; OpenRLHF and NeMo use the biased deviation.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    kl_coef = _check.real("kl_coef", kl_coef, low=0.0)
    _rows.settings(ddof=ddof, eps=eps)
    steps = Steps.parse(rewards, mask=mask)
    x = steps.rewards.copy()
    if kl is not None:
        x -= kl_coef * steps.select("kl", kl)
    elif kl_coef != 0:
        raise ConfigError("kl", "is missing", f"one estimate per token with kl_coef={kl_coef}")
    returns = reverse_scan(x, steps.factors(gamma), steps.starts)
    return steps.restore(_rows.whiten(returns, ddof, eps))


@register("reinforce_pp_baseline")
@row_wise
def reinforce_pp_baseline(
    rewards: RowsLike, *, lengths: RowsLike, ddof: int = 1, eps: float = 1e-6, singleton: str = "zero"
) -> Arrays:
    """Return rewards centred within their group, then normalised over the batch's tokens (REINFORCE++ baseline).

    B_i = R_i - mean of the group, and A_i = (B_i - mean) / (standard deviation + eps), in which B_i counts n_i times

    Args:
        rewards: as for ``grpo``.
        lengths: shaped like ``rewards``: tokens of each sample, integers >= 0.
        ddof, eps: of the normalisation over tokens.
        singleton: as for ``grpo``, for B.

    Returns:
        float64 in the form of ``rewards``. Since the mean over tokens is subtracted, a constant group among others
        does not get 0; a batch of constant groups does.

    Raises:
        DataError: as for ``grpo``, or lengths are not integers >= 0 or shaped differently.
        ConfigError: a setting is out of range.

    >>> reinforce_pp_baseline([1.0, 0.0], lengths=[1, 3], ddof=0, eps=0.0).round(6)  # 0.5 once, -0.5 three times
    array([ 1.732051, -0.57735 ])

    Source: arXiv:2501.03262. Peers: verl and OpenRLHF weigh by tokens as here, rllm whitens over sequences.
    """
    _rows.settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    counts = np.where(groups.scored, _rows.lengths_like(groups, lengths), 0.0)
    centred = groups.apply_singleton(groups.deviations, singleton)
    return groups.rows.restore(groups.where_scored(_rows.whiten(centred, ddof, eps, counts=counts)))


@register("remax")
@row_wise
def remax(rewards: RowsLike, *, baseline: RowsLike, gamma: float = 1.0, mask: RowsLike | None = None) -> Arrays:
    """Return the discounted return of each token less the reward of the greedy completion (ReMax).

    A_t = G_t - baseline, with G_t = r_t + gamma G_{t+1}

    Args:
        rewards: per token: one sequence [T], [B, T] or a list of [T_i].
        baseline: the reward of the greedy completion of the same prompt: one number, or one per sequence [B].
        gamma: in [0, 1].
        mask: shaped like ``rewards``; masked tokens get 0 and the recursion skips them.

    Raises:
        DataError: as for ``discounted_returns``; baselines are not as many, or not finite.
        ConfigError: gamma is out of range.

    >>> remax([[0.0, 1.0], [0.0, 0.5]], baseline=[0.25, 0.5])
    array([[0.75, 0.75],
           [0.  , 0.  ]])

    Source: arXiv:2310.10505. Peers: verl, Trinity.
    """
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    steps = Steps.parse(rewards, mask=mask)
    baselines = np.repeat(steps.per_trajectory("baseline", baseline), steps.lengths)
    returns = reverse_scan(steps.rewards.copy(), steps.factors(gamma), steps.starts)
    return steps.restore(returns - baselines)


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
            answer is at its last token.
        logprobs: log p of the sampled tokens, shaped like ``rewards``.
        sum_p2: the sum over the vocabulary of p^2, shaped like ``rewards``, in (0, 1];
            ``policy.forward(data, want=("sum_p2",))`` gives it.
        importance: w, shaped like ``rewards``, >= 0: truncated importance weights of off-policy samples, such as
            those of ``rlkit.corrections.token_tis``. None: 1.
        groups: one label per sample [B], where the samples belong to several prompts.
        singleton: the result of a token at which only one sample of its group is left: "raw", its return; "zero", 0;
            "error" raises.

    Returns:
        float64 in the form of ``rewards``; exactly 0 where all returns of a place are equal.

    Raises:
        DataError: rewards are not finite, shapes differ, an entry is not a logprob, sum_p2 not in (0, 1], a weight
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
    _check.choice("singleton", singleton, SINGLETON)
    steps = Steps.parse(rewards, empty=True)
    rows = steps.rows
    lp, p2 = rows.like("logprobs", logprobs), rows.like("sum_p2", sum_p2)
    check(rows, lp, "logprobs")
    rows.require("sum_p2", p2, (p2 > 0) & (p2 <= 1 + 1e-4), "in (0, 1]")
    energy = np.maximum(1.0 - 2.0 * np.exp(lp) + p2, 0.0)
    if importance is not None:
        w = rows.like("importance", importance)
        rows.require("importance", w, (w >= 0) & (w <= _rows.LARGEST), "a finite number >= 0")
        energy = energy * w**2
    returns = reverse_scan(rows.flat.copy(), steps.factors(1.0), steps.starts)
    weight = _so_far(steps, energy)
    labels = [0] * rows.lengths.size if groups is None else groups
    codes, _ = _rows.labels("groups", labels, rows.lengths.size, why="one label per sample")
    place = np.arange(rows.flat.size) - rows.spread(rows.starts)
    cell = rows.spread(codes) * (int(rows.lengths.max(initial=0)) + 1) + place  # the tokens that share a baseline
    _, cells, counts = np.unique(cell, return_inverse=True, return_counts=True)
    alone = counts[cells] == 1
    if singleton == "error" and alone.any():
        name = rows.name(int(np.argmax(alone)))
        raise DataError(name, "is the only token of its group at this position", "at least two samples")
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
    return reverse_scan(values[::-1].copy(), factors[::-1].copy(), starts)[::-1]


MODES = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
)


@register("token_weights")
def token_weights(
    lengths: RowsLike, mode: str = "token-mean", *, constant: float | None = None, groups: Labels | None = None
) -> Arrays:
    """Return the weight of each token of a sequence, so that a plain sum over tokens is the wanted mean over the batch.

    With n_i tokens in sequence i, S sequences that have any, and P prompts:

    - "token-mean": 1 / sum of n; every token counts alike.
    - "token-sum": 1.
    - "seq-mean-token-sum": 1 / S.
    - "seq-mean-token-mean": 1 / (S n_i); every sequence counts alike.
    - "seq-mean-token-sum-norm": 1 / (S constant); a fixed length instead of the sequence's own (Dr. GRPO).
    - "prompt-mean": 1 / (P sum of n over the prompt's sequences); every prompt counts alike.

    Args:
        lengths: [S] integers >= 0: trained tokens of each sequence; a sequence is a whole trajectory, whose datums
            all get its weight. Empty sequences get 0 and are not counted.
        mode: one of the above, "token-mean" by default.
        constant: > 0, for "seq-mean-token-sum-norm" and only there.
        groups: [S] labels that say which prompt a sequence belongs to, for "prompt-mean" and only there.

    Returns:
        float64 [S]. Give it to the datums of the whole batch; micro-batches then add up exactly.

    Raises:
        DataError: lengths are not integers >= 0, or labels are not as many.
        ConfigError: the mode is unknown, or constant or groups are missing or not asked for.

    >>> token_weights([1, 3])
    array([0.25, 0.25])
    >>> token_weights([1, 3, 0], "seq-mean-token-mean")
    array([0.5       , 0.16666667, 0.        ])
    >>> token_weights([1, 3, 4], "prompt-mean", groups=["a", "a", "b"])
    array([0.125, 0.125, 0.125])

    Source: arXiv:2503.14476 (token mean), arXiv:2503.20783 (constant length). Peers: verl agrees in all modes; TRL
    calls them grpo (seq-mean-token-mean), dapo (token-mean), dr_grpo (constant length); ROLL and Trinity divide by
    the constant alone.
    """
    _check.choice("mode", mode, MODES)
    _extra("constant", constant, mode, "seq-mean-token-sum-norm")
    _extra("groups", groups, mode, "prompt-mean")
    n = _lengths(lengths)
    filled = n > 0
    if mode == "token-mean":
        share = n.sum()
    elif mode == "token-sum":
        share = 1.0
    elif mode == "seq-mean-token-sum":
        share = filled.sum()
    elif mode == "seq-mean-token-mean":
        share = filled.sum() * n
    elif mode == "seq-mean-token-sum-norm":
        share = filled.sum() * _check.real("constant", constant, above=0.0)
    else:
        codes, _ = _rows.labels("groups", groups, n.size, "one label per sequence")
        per_prompt = np.bincount(codes, n)
        share = np.count_nonzero(per_prompt) * per_prompt[codes]
    with np.errstate(divide="ignore"):  # by 0 where there is no token
        return np.where(filled, 1.0 / share, 0.0)


def _extra(name: str, value: object, mode: str, owner: str) -> None:
    if (value is None) == (mode == owner):
        what = "is missing" if value is None else f"was given with mode={mode!r}"
        raise ConfigError(name, what, f'a value only with mode="{owner}"')


def _lengths(lengths: RowsLike) -> np.ndarray:
    n = _rows.vector("lengths", lengths)
    if n.size == 0:
        raise DataError("lengths", "is empty", "at least one sequence")
    _rows.require("lengths", n, (n >= 0) & (n == np.floor(n)) & (n < 2**53), "an integer >= 0")
    return n
