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
custom             a traced graph, see ``rlkit.server._graph``
================== ==========================================================================================
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch
from torch import Tensor

from rlkit.errors import BackendError
from rlkit.metrics import names
from rlkit.server._wire import ApiError

__all__ = ["HOSTED", "UNKNOWN", "Loss", "hosted"]

Terms: TypeAlias = tuple[Tensor, Mapping[str, Tensor | float]]  # a loss's terms, and its metrics
Default: TypeAlias = float | Callable[[np.ndarray], np.ndarray]
UNKNOWN = (
    "is not published; only the hosted service has it; use loss_fn='importance_sampling', and samplers without "
    "record_stability_info (in tinker-cookbook, whose default it is: loss_fn=importance_sampling)"
)


@attrs.frozen(eq=False)
class Loss:
    """A loss with its settings bound.

    Attributes:
        name: for messages.
        function: (logprobs [N] or [N, K], inputs by name) -> (terms, metrics): the loss is the sum of ``terms``.
        inputs: the inputs that every datum must have.
        optional: inputs with a default: a number, or a function of the array of advantages that gives an array.
        matrix: targets may be [N, K].
        elementwise: each term depends on its own token alone, so that datums may be concatenated.
        ranks: where the loss declares them, the rank of each input ("logprobs": of the targets).
        gates: inputs that switch the loss off: where all of them are 0 it has neither value nor gradient, independent
            of the logprobs. None if there are no such inputs.
        settings: the API's name of each setting, and its default.
    """

    name: str
    function: Callable[..., Terms]
    inputs: tuple[str, ...] = ()
    optional: Mapping[str, Default] = {}
    matrix: bool = False
    elementwise: bool = True
    ranks: Mapping[str, int] | None = None
    gates: tuple[str, ...] | None = None
    settings: Mapping[str, float] = {}

    def evaluate(
        self, logprobs: Sequence[np.ndarray], inputs: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Return a call's answer: for each datum its logprobs and terms, and the metrics.

        Raises:
            BackendError: the loss of a datum is not finite.
        """
        arrays: list[dict[str, np.ndarray]] = []
        metrics = {"loss:sum": 0.0}
        for i, (lp, columns) in enumerate(zip(logprobs, inputs, strict=True)):
            with torch.no_grad():
                tensors = {name: torch.tensor(array) for name, array in columns.items()}
                terms, reported = self.function(torch.tensor(lp), tensors)
            value = float(terms.sum())
            if not math.isfinite(value):
                raise BackendError(f"the loss {self.name!r} is not finite at data[{i}]")
            metrics["loss:sum"] += value
            names.add(metrics, {key: float(number) for key, number in reported.items()})
            arrays.append({"logprobs": lp} | ({"elementwise_loss": terms.numpy()} if terms.shape == lp.shape else {}))
        return arrays, names.averaged(metrics, len(logprobs))


def _cross_entropy(lp: Tensor, x: Mapping[str, Tensor]) -> Terms:
    return -(x["weights"] * lp), {}


def _importance_sampling(lp: Tensor, x: Mapping[str, Tensor]) -> Terms:
    return -((lp - x["logprobs"]).exp() * x["advantages"]), {}


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)


def _ppo(lp: Tensor, x: Mapping[str, Tensor], *, clip_low_threshold: float, clip_high_threshold: float) -> Terms:
    return _clipped((lp - x["logprobs"]).exp(), x["advantages"], clip_low_threshold, clip_high_threshold), {}


def _cispo(lp: Tensor, x: Mapping[str, Tensor], *, clip_low_threshold: float, clip_high_threshold: float) -> Terms:
    weight = (lp - x["logprobs"]).exp().detach().clamp(clip_low_threshold, clip_high_threshold)
    return -(weight * x["advantages"] * lp), {}


def _dro(lp: Tensor, x: Mapping[str, Tensor], *, beta: float) -> Terms:
    distance = lp - x["logprobs"]
    return -(x["advantages"] * lp - beta / 2 * distance * distance), {}


def _gspo(lp: Tensor, x: Mapping[str, Tensor], *, clip_low_threshold: float, clip_high_threshold: float) -> Terms:
    mask = x["sequence_ratio_mask"]
    log_ratio = (mask * (lp.detach() - x["logprobs"])).sum() / mask.sum()
    ratio = (log_ratio + lp - lp.detach()).exp()
    return _clipped(ratio, x["advantages"], clip_low_threshold, clip_high_threshold), {}


def _with_advantage(advantages: np.ndarray) -> np.ndarray:
    """Return 1 where the advantage is not 0; where all of them are, at the last position, since a mean needs one."""
    mask: np.ndarray = (advantages != 0).astype(np.float32)
    mask[-1:] = mask[-1:] if mask.any() else 1.0
    return mask


_OfRatio = functools.partial(Loss, inputs=("logprobs", "advantages"), gates=("advantages",))
_PPO = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_LOSSES = (
    Loss("cross_entropy", _cross_entropy, optional={"weights": 1.0}, matrix=True, gates=("weights",)),
    _OfRatio("importance_sampling", _importance_sampling),
    _OfRatio("ppo", _ppo, settings=_PPO),
    _OfRatio("cispo", _cispo, settings={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    _OfRatio("dro", _dro, settings={"beta": 0.05}, gates=None),  # rlkit's; the API documents none
    _OfRatio(
        "gspo",
        _gspo,
        settings=_PPO,  # the API documents none
        optional={"sequence_ratio_mask": _with_advantage},
        elementwise=False,
        gates=("advantages", "sequence_ratio_mask"),
    ),
)
_TABLE = {loss.name: loss for loss in _LOSSES}
HOSTED = tuple(_TABLE)


def hosted(name: str, config: Mapping[str, float | str]) -> Loss:
    """Return the loss of that name with these settings.

    Raises:
        ApiError: 400, there is no such loss, or a setting is unknown or not a number.
    """
    if name == "stable_reinforce":
        raise ApiError(400, f"loss_fn 'stable_reinforce' {UNKNOWN}")
    if name not in _TABLE:
        raise ApiError(400, f"loss_fn {name!r} is unknown; there are: {', '.join(_TABLE)}")
    entry = _TABLE[name]
    settings = dict(entry.settings)
    for key, value in config.items():
        if key not in settings:
            there = ", ".join(settings) or "none"
            raise ApiError(400, f"loss_fn_config[{key!r}]: {name} has no such setting; it has: {there}")
        if isinstance(value, str) or not np.isfinite(value):
            raise ApiError(400, f"loss_fn_config[{key!r}] is {value!r}; expected a finite number")
        settings[key] = value

    def function(lp: Tensor, inputs: Mapping[str, Tensor]) -> Terms:
        if entry.elementwise and entry.gates is not None:  # 0 times a ratio without a bound would be NaN
            on = torch.stack([inputs[name] != 0 for name in entry.gates]).any(0)
            lp, inputs = lp.where(on, 0.0), {name: x.where(on, 0.0) for name, x in inputs.items()}
        return entry.function(lp, inputs, **settings)

    return attrs.evolve(entry, function=function)
