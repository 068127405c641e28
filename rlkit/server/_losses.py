"""The API's losses by name: sums over tokens of functions of the logprobs at a datum's targets.

Arrays are shaped like the targets. q is the input ``logprobs`` (those of sampling), A the input ``advantages``, lp the
policy's own, r = exp(lp - q), sg stops the gradient.

================== ==========================================================================================
cross_entropy      -sum w lp; targets and ``weights`` [N] or [N, K]
importance_sampling -sum r A
ppo                -sum min(r A, clamp(r, low, high) A)
cispo              -sum sg[clamp(r, low, high)] lp A
dro                -sum (lp A - beta/2 (lp - q)^2), at every position: there is no mask
gspo               ppo with r_t = exp(sg[mean over sequence_ratio_mask of (lp - q)] + lp - sg[lp]);
                   without that mask over the positions whose advantage is not 0
================== ==========================================================================================
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from rlkit.errors import BackendError, DataError, UnknownNameError, UnsupportedError

__all__ = ["UNPUBLISHED", "Loss", "hosted"]

UNPUBLISHED = (
    "is not published; only the hosted service has it; use loss_fn='importance_sampling', and samplers without "
    "record_stability_info (in tinker-cookbook, whose default it is: loss_fn=importance_sampling)"
)


@attrs.frozen(eq=False)
class Loss:
    """A loss with its settings bound.

    Attributes:
        name: for messages.
        function: (logprobs [N] or [N, K], inputs by name) -> its terms; the loss is their sum. Its keyword-only
            arguments are the API's settings, with their defaults; of gspo and dro rlkit's, since the API has none.
        inputs: the inputs that every datum must have.
        optional: inputs with a default: a number, or a function of the array of advantages that gives an array.
        matrix: targets may be [N, K].
        elementwise: each term depends on its own token alone, so that datums may be concatenated.
    """

    name: str
    function: Callable[..., Tensor]
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    optional: Mapping[str, float | Callable[[np.ndarray], np.ndarray]] = {}
    matrix: bool = False
    elementwise: bool = True

    def evaluate(
        self, logprobs: Sequence[np.ndarray], inputs: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Return a call's answer: for each datum its logprobs and terms, and the metrics.

        Raises:
            BackendError: the loss of a datum is not finite.
        """
        arrays, total = [], 0.0
        for i, (lp, columns) in enumerate(zip(logprobs, inputs, strict=True)):
            terms = self.function(torch.tensor(lp), {name: torch.tensor(array) for name, array in columns.items()})
            value = float(terms.sum())
            if not math.isfinite(value):
                raise BackendError(f"the loss {self.name!r} is not finite at data[{i}]")
            total += value
            arrays.append({"logprobs": lp, "elementwise_loss": terms.numpy()})
        return arrays, {"loss:sum": total}


def _cross_entropy(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -(x["weights"] * lp)


def _ratio(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    """Return r, and 1 where the advantage is 0: 0 times a ratio without a bound would be NaN."""
    return (lp - x["logprobs"]).where(x["advantages"] != 0, 0.0).exp()


def _importance_sampling(lp: Tensor, x: Mapping[str, Tensor]) -> Tensor:
    return -(_ratio(lp, x) * x["advantages"])


def _clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)


def _ppo(
    lp: Tensor, x: Mapping[str, Tensor], *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> Tensor:
    return _clip(_ratio(lp, x), x["advantages"], clip_low_threshold, clip_high_threshold)


def _cispo(
    lp: Tensor, x: Mapping[str, Tensor], *, clip_low_threshold: float = 0.0, clip_high_threshold: float = 4.0
) -> Tensor:
    return -(_ratio(lp, x).detach().clamp(clip_low_threshold, clip_high_threshold) * x["advantages"] * lp)


def _dro(lp: Tensor, x: Mapping[str, Tensor], *, beta: float = 0.05) -> Tensor:
    return -(x["advantages"] * lp - beta / 2 * (lp - x["logprobs"]).square())


def _gspo(
    lp: Tensor, x: Mapping[str, Tensor], *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> Tensor:
    mask = x["sequence_ratio_mask"]
    log_ratio = (mask * (lp.detach() - x["logprobs"])).sum() / mask.sum()
    return _clip((log_ratio + lp - lp.detach()).exp(), x["advantages"], clip_low_threshold, clip_high_threshold)


def _where_advantages(advantages: np.ndarray) -> np.ndarray:
    """Return 1 where the advantage is not 0; where all of them are, at the last position, since a mean needs one."""
    mask: np.ndarray = (advantages != 0).astype(np.float32)
    mask[-1:] = mask[-1:] if mask.any() else 1.0
    return mask


_LOSSES = (
    Loss("cross_entropy", _cross_entropy, (), {"weights": 1.0}, matrix=True),
    Loss("importance_sampling", _importance_sampling),
    Loss("ppo", _ppo),
    Loss("cispo", _cispo),
    Loss("dro", _dro),
    Loss("gspo", _gspo, optional={"sequence_ratio_mask": _where_advantages}, elementwise=False),
)
_TABLE = {loss.name: loss for loss in _LOSSES}


def hosted(name: str, config: Mapping[str, float | str]) -> Loss:
    """Return the loss of that name with these settings.

    Raises:
        RlkitError: there is no such loss, or a setting is unknown or not a number.
    """
    if name == "stable_reinforce":
        raise UnsupportedError(f"loss_fn 'stable_reinforce' {UNPUBLISHED}")
    if name not in _TABLE:
        raise UnknownNameError(f"loss_fn {name!r} is unknown; there are: {', '.join(_TABLE)}")
    function = _TABLE[name].function
    settings = inspect.signature(function).parameters.keys() - {"lp", "x"}
    for key, value in config.items():
        if key not in settings:
            there = ", ".join(sorted(settings)) or "none"
            raise DataError(f"loss_fn_config[{key!r}]: {name} has no such setting; it has: {there}")
        if isinstance(value, str) or not math.isfinite(value):
            raise DataError(f"loss_fn_config[{key!r}] is {value!r}; expected a finite number")
    return attrs.evolve(_TABLE[name], function=functools.partial(function, **config))
