"""The API's losses by name: sums over tokens of functions of the logprobs at a datum's targets.

Arrays are shaped like the targets. q is the input ``logprobs`` (those of sampling), A the input ``advantages``, lp the
policy's own, r = exp(lp - q), sg stops the gradient.

================== ==========================================================================================
cross_entropy      -sum w lp; targets and ``weights`` [N] or [N, K]
importance_sampling -sum r A
ppo                -sum min(r A, clamp(r, low, high) A)
cispo              -sum sg[clamp(r, low, high)] lp A
dro                -sum (lp A - beta/2 (lp - q)^2), at every position: there is no mask
gspo               ppo with r_t = exp(sg[mean over sequence_ratio_mask of (lp - q)] + lp - sg[lp])
custom             a traced graph, see ``rlkit.server.graph``
================== ==========================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
import numpy as np
import torch
from torch import Tensor

from rlkit.errors import BackendError
from rlkit.server.requests import ApiError

__all__ = ["HOSTED", "UNKNOWN", "Loss", "hosted"]

Terms: TypeAlias = tuple[Tensor, Mapping[str, Tensor | float]]  # a loss's terms, and its metrics
UNKNOWN = (
    "is not published, and only the hosted service has it; use loss_fn='importance_sampling', and samplers without "
    "record_stability_info (in tinker-cookbook, whose default it is: loss_fn=importance_sampling)"
)


@attrs.frozen(eq=False)
class Loss:
    """A loss with its settings bound.

    Attributes:
        name: for messages.
        function: (logprobs [N] or [N, K], inputs by name) -> (terms, metrics): the loss is the sum of ``terms``.
        inputs: the inputs that every datum must have.
        optional: inputs with a default.
        matrix: targets may be [N, K].
        elementwise: each term depends on its own token alone, so that datums may be concatenated.
        ranks: where the loss declares them, the rank of each input ("logprobs": of the targets).
        gates: inputs that together say where the loss is: where all of them are 0 it has neither value nor gradient,
            whatever the logprobs are. None where there are no such.
    """

    name: str
    function: Callable[..., Terms]
    inputs: tuple[str, ...] = ()
    optional: Mapping[str, float] = {}
    matrix: bool = False
    elementwise: bool = True
    ranks: Mapping[str, int] | None = None
    gates: tuple[str, ...] | None = None

    def evaluate(
        self, logprobs: Sequence[np.ndarray], inputs: Sequence[Mapping[str, np.ndarray]]
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Return what a call answers: for each datum its logprobs and terms, and the metrics.

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
            for key, number in reported.items():
                metrics[key] = metrics.get(key, 0.0) + float(number)
            arrays.append({"logprobs": lp} | ({"elementwise_loss": terms.numpy()} if terms.shape == lp.shape else {}))
        return arrays, {k: v / len(logprobs) if k.endswith(":mean") else v for k, v in metrics.items()}


def _cross_entropy(lp: Tensor, x: Mapping[str, Tensor]) -> Terms:
    return -(x["weights"] * lp), {}


def _importance_sampling(lp: Tensor, x: Mapping[str, Tensor]) -> Terms:
    return -((lp - x["logprobs"]).exp() * x["advantages"]), {}


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)


def _ppo(lp: Tensor, x: Mapping[str, Tensor], *, low: float, high: float) -> Terms:
    return _clipped((lp - x["logprobs"]).exp(), x["advantages"], low, high), {}


def _cispo(lp: Tensor, x: Mapping[str, Tensor], *, low: float, high: float) -> Terms:
    weight = (lp - x["logprobs"]).exp().detach().clamp(low, high)
    return -(weight * x["advantages"] * lp), {}


def _dro(lp: Tensor, x: Mapping[str, Tensor], *, beta: float) -> Terms:
    distance = lp - x["logprobs"]
    return -(x["advantages"] * lp - beta / 2 * distance * distance), {}


def _gspo(lp: Tensor, x: Mapping[str, Tensor], *, low: float, high: float) -> Terms:
    mask = x["sequence_ratio_mask"]
    log_ratio = (mask * (lp.detach() - x["logprobs"])).sum() / mask.sum()
    return _clipped((log_ratio + lp - lp.detach()).exp(), x["advantages"], low, high), {}


@attrs.frozen
class _Hosted:
    function: Callable[..., Terms]
    settings: Mapping[str, float] = {}  # the API's name -> default
    inputs: tuple[str, ...] = ("logprobs", "advantages")
    optional: Mapping[str, float] = {}
    matrix: bool = False
    elementwise: bool = True
    gates: tuple[str, ...] | None = ("advantages",)


_ARGUMENT = {"clip_low_threshold": "low", "clip_high_threshold": "high", "beta": "beta"}
_TABLE = {
    "cross_entropy": _Hosted(_cross_entropy, inputs=(), optional={"weights": 1.0}, matrix=True, gates=("weights",)),
    "importance_sampling": _Hosted(_importance_sampling),
    "ppo": _Hosted(_ppo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
    "cispo": _Hosted(_cispo, {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}),
    "dro": _Hosted(_dro, {"beta": 0.05}, gates=None),  # rlkit's; the API documents none
    "gspo": _Hosted(
        _gspo,
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},  # ppo's; the API documents none
        inputs=("logprobs", "advantages", "sequence_ratio_mask"),
        elementwise=False,
        gates=("advantages", "sequence_ratio_mask"),
    ),
}
HOSTED = tuple(_TABLE)


def hosted(name: str, config: Mapping[str, float | str]) -> Loss:
    """Return the loss of that name with these settings.

    Raises:
        ApiError: 400, there is no such loss, or a setting is unknown or no number.
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
    arguments = {_ARGUMENT[key]: value for key, value in settings.items()}

    def function(lp: Tensor, inputs: Mapping[str, Tensor]) -> Terms:
        return entry.function(lp, inputs, **arguments)

    return Loss(name, function, entry.inputs, entry.optional, entry.matrix, entry.elementwise, gates=entry.gates)
