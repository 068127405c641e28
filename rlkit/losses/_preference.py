"""Losses over pairs (chosen, rejected), and KTO over single sequences.

At level "pair" every argument is a tuple (chosen, rejected), and the weight of a pair is the chosen one's. A backend is
given ``data`` as chosen, rejected, chosen, rejected, ...: both of a pair answer the same prompt. It reports
``margin:mean``, by how much the chosen one's logprob (less the reference's, where the loss has one) is above the
rejected one's, summed or, where the loss does so, averaged over tokens, and ``accuracy:mean``, how often it is.
"""

from __future__ import annotations

from typing import TypeAlias

from torch import Tensor
from torch.nn.functional import logsigmoid

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.losses.prepare import Range, Weights, define

Pair: TypeAlias = tuple[Tensor, Tensor]
_FORMS = ("sigmoid", "hinge", "ipo", "robust", "apo_zero", "apo_down")
_NEAREST = -1e-7  # the mean logprob nearest to 0 whose odds are finite in float32


def average_weight(weights: Weights | tuple[Weights, ...] | list[Weights]) -> Weights:
    """Return one weight for a whole sequence or pair: a number, or the mean over tokens; of a pair the chosen's."""
    first = weights[0] if isinstance(weights, (tuple, list)) else weights
    return first if isinstance(first, (int, float)) else first.mean()


@define("dpo", level="pair", score=lambda x: (x["logprobs"] - x["reference_logprobs"]).sum())
def dpo(
    logprobs: Pair,
    reference_logprobs: Pair,
    weights: Weights = 1.0,
    *,
    form: str = "sigmoid",
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-w log sigmoid(beta (c - r)), c and r = sum(lp - ref) of chosen and rejected; other forms of it by ``form``.

    ``data`` of a training call is chosen, rejected, chosen, rejected, ...; both of a pair answer the same prompt.

    - "sigmoid": -(1 - e) log sigmoid(beta (c - r)) - e log sigmoid(-beta (c - r)), e = label_smoothing
    - "robust": (-(1 - e) log sigmoid(beta (c - r)) + e log sigmoid(-beta (c - r))) / (1 - 2 e)
    - "hinge": max(0, 1 - beta (c - r))
    - "ipo": (mean of c - mean of r - 1 / (2 beta))^2, the means over tokens
    - "apo_zero": 1 - sigmoid(beta c) + sigmoid(beta r)
    - "apo_down": sigmoid(beta c) + 1 - sigmoid(beta (c - r))

    Args:
        logprobs, reference_logprobs: (chosen, rejected), [n] each.
        weights: of the chosen, () or [n] (then its mean), multiplies the pair.
        beta: > 0, strength of the pull towards the reference.
        label_smoothing: in [0, 0.5), the share of pairs thought to be swapped; "sigmoid" and "robust" only.

    Raises:
        ConfigError: an unknown form, or a number out of range.

    >>> import torch
    >>> lp, ref = (torch.tensor([-1.0]), torch.tensor([-3.0])), (torch.tensor([-2.0]), torch.tensor([-2.0]))
    >>> dpo(lp, ref, beta=0.5).item()  # ln(1 + 1 / e)
    0.3132...
    >>> dpo(lp, ref, beta=0.5, form="ipo")  # (2 - 1)^2
    tensor(1.)

    Source: arXiv:2305.18290; hinge arXiv:2305.10425, ipo arXiv:2310.12036, robust arXiv:2403.00409, apo
    arXiv:2408.06266. Peers: TRL takes the same forms and means over pairs; OpenRLHF's ipo does not divide by lengths.
    """
    _check.choice("form", form, _FORMS)
    _check.real("beta", beta, above=0.0)
    _check.real("label_smoothing", label_smoothing, low=0.0, below=0.5)
    if label_smoothing and form not in ("sigmoid", "robust"):
        raise ConfigError("label_smoothing applies only to the forms 'sigmoid' and 'robust'")
    chosen, rejected = (lp - ref for lp, ref in zip(logprobs, reference_logprobs, strict=True))
    margin = beta * (chosen.sum() - rejected.sum())
    if form == "sigmoid":
        value = _smooth(margin, label_smoothing)
    elif form == "robust":
        value = -(1 - label_smoothing) * logsigmoid(margin) + label_smoothing * logsigmoid(-margin)
        value = value / (1 - 2 * label_smoothing)
    elif form == "hinge":
        value = (1 - margin).relu()
    elif form == "ipo":
        value = (chosen.mean() - rejected.mean() - 1 / (2 * beta)).square()
    elif form == "apo_zero":  # 1 - sigmoid(x) is sigmoid(-x), without a difference of nearly equal numbers
        value = (-beta * chosen.sum()).sigmoid() + (beta * rejected.sum()).sigmoid()
    else:
        value = (beta * chosen.sum()).sigmoid() + (-margin).sigmoid()
    return average_weight(weights) * value


@define("kto", ranges={"desirable": Range(high=1.0, whole=True, single=True)})
def kto(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    desirable: Tensor,
    weights: Weights = 1.0,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    kl: float = 0.0,
) -> Tensor:
    """Return w v (1 - sigmoid(z)), which saturates: z = beta (x - kl) where desirable, else -z; x = sum(lp - ref).

    v is desirable_weight or undesirable_weight; each sequence counts by itself, not in pairs.

    Args:
        logprobs, reference_logprobs: [n].
        desirable: (), 1 or 0: whether this sequence was liked.
        weights: () or [n] (then its mean), multiplies the sequence.
        beta: > 0, strength of the pull towards the reference.
        desirable_weight, undesirable_weight: >= 0.
        kl: >= 0, the batch's estimate of the KL divergence from the reference, a constant: the mean of x over
            completions that were paired with other prompts, and not below 0.

    Raises:
        ConfigError: a setting is out of range.

    >>> import torch
    >>> kto(torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor(1), beta=1.0, kl=1.0)  # 1 - sigmoid(1 - 1)
    tensor(0.5000)

    Source: arXiv:2402.01306 eq. 8. Peers: TRL estimates ``kl`` itself, over the batch of each process.
    """
    _check.real("beta", beta, above=0.0)
    _check.real("desirable_weight", desirable_weight, low=0.0)
    _check.real("undesirable_weight", undesirable_weight, low=0.0)
    _check.real("kl", kl, low=0.0)
    margin = beta * ((logprobs - reference_logprobs).sum() - kl)  # 1 - sigmoid(z) is sigmoid(-z), for either sign
    liked, disliked = desirable_weight * (-margin).sigmoid(), undesirable_weight * margin.sigmoid()
    return average_weight(weights) * liked.where(desirable != 0, disliked)


@define("orpo", level="pair", score=lambda x: x["logprobs"].mean())
def orpo(logprobs: Pair, weights: Weights = 1.0, *, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """Likelihood and odds, w (-alpha c - beta log sigmoid(log odds(c) - log odds(r))), c and r = mean lp of each.

    odds(x) = e^x / (1 - e^x).

    Args:
        logprobs: (chosen, rejected), [n] each.
        weights: of the chosen, () or [n] (then its mean), multiplies the pair.
        beta: >= 0, weight of the odds ratio.
        alpha: >= 0, weight of the likelihood of the chosen.

    Raises:
        ConfigError: a setting is negative or not finite.

    >>> import torch
    >>> half = torch.tensor([0.5]).log()
    >>> orpo((half, half)).item()  # ln 2 + 0.1 ln 2
    0.7624...

    Source: arXiv:2403.07691 eq. 6-7, whose lambda is ``beta``. Peers: TRL has no guard against a mean logprob of 0,
    here odds stop at that of -1e-7.
    """
    _check.real("beta", beta, low=0.0)
    _check.real("alpha", alpha, low=0.0)
    chosen, rejected = (lp.mean() for lp in logprobs)
    odds = _compute_log_odds(chosen) - _compute_log_odds(rejected)
    return average_weight(weights) * (-alpha * chosen - beta * logsigmoid(odds))


@define("cpo", level="pair", score=lambda x: x["logprobs"].sum())
def cpo(
    logprobs: Pair, weights: Weights = 1.0, *, beta: float = 0.1, alpha: float = 1.0, label_smoothing: float = 0.0
) -> Tensor:
    """DPO without a reference: w (-log sigmoid(beta (c - r)) - alpha mean lp of the chosen), c and r = sum lp of each.

    Args:
        logprobs: (chosen, rejected), [n] each.
        weights: of the chosen, () or [n] (then its mean), multiplies the pair.
        beta: > 0.
        alpha: >= 0, weight of the likelihood of the chosen.
        label_smoothing: in [0, 0.5), as in ``dpo``.

    Raises:
        ConfigError: a setting is out of range.

    >>> import torch
    >>> cpo((torch.tensor([-1.0, -1.0]), torch.tensor([-2.0]))).item()  # ln 2 + 1
    1.6931...

    Source: arXiv:2401.08417. Peers: TRL means over pairs, and the likelihood over all tokens of the batch.
    """
    _check.real("beta", beta, above=0.0)
    _check.real("alpha", alpha, low=0.0)
    _check.real("label_smoothing", label_smoothing, low=0.0, below=0.5)
    chosen, rejected = logprobs
    value = _smooth(beta * (chosen.sum() - rejected.sum()), label_smoothing)
    return average_weight(weights) * (value - alpha * chosen.mean())


@define("simpo", level="pair", score=lambda x: x["logprobs"].mean())
def simpo(logprobs: Pair, weights: Weights = 1.0, *, beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    """-w log sigmoid(beta (c - r) - gamma), c and r = mean lp: a margin between likelihoods per token.

    Args:
        logprobs: (chosen, rejected), [n] each.
        weights: of the chosen, () or [n] (then its mean), multiplies the pair.
        beta: > 0.
        gamma: >= 0, the margin, taken off after beta.

    Raises:
        ConfigError: a setting is out of range.

    >>> import torch
    >>> simpo((torch.tensor([-1.0, -1.0]), torch.tensor([-1.25]))).item()  # beta / 4 - gamma = 0: ln 2
    0.6931...

    Source: arXiv:2405.14734 eq. 6. Peers: some give the margin as gamma / beta.
    """
    _check.real("beta", beta, above=0.0)
    _check.real("gamma", gamma, low=0.0)
    chosen, rejected = (lp.mean() for lp in logprobs)
    return -average_weight(weights) * logsigmoid(beta * (chosen - rejected) - gamma)


def _smooth(margin: Tensor, share: float) -> Tensor:
    return -(1 - share) * logsigmoid(margin) - share * logsigmoid(-margin)


def _compute_log_odds(mean: Tensor) -> Tensor:
    near = mean.clamp(max=_NEAREST)
    return near - (-near.expm1()).log()  # log e^x - log(1 - e^x)
