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

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from rlkit.errors import BackendError
from rlkit.server.requests import ApiError

__all__ = ["HOSTED", "UNKNOWN", "Loss", "LossGradient", "hosted"]

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
    function: Callable[..., tuple[Tensor, Mapping[str, Any]]]
    inputs: tuple[str, ...] = ()
    optional: Mapping[str, float] = {}
    matrix: bool = False
    elementwise: bool = True
    ranks: Mapping[str, int] | None = None
    gates: tuple[str, ...] | None = None

    def gradient(self, logprobs: Sequence[np.ndarray], inputs: Sequence[Mapping[str, np.ndarray]]) -> LossGradient:
        """Value and gradient, datum by datum.

        Raises:
            BackendError: a term or the gradient is not finite, naming the datum.
        """
        calls = self._calls(logprobs)
        total, gradients = 0.0, [np.zeros(0)] * len(logprobs)
        terms: list[np.ndarray | None] = [None] * len(logprobs)
        metrics: dict[str, float] = {}
        for call in calls:
            leaf = torch.from_numpy(np.concatenate([logprobs[i] for i in call])).requires_grad_()
            names = inputs[call[0]].keys()
            given = {
                name: torch.from_numpy(np.concatenate([np.atleast_1d(inputs[i][name]) for i in call])) for name in names
            }
            given = {name: x[0] if inputs[call[0]][name].ndim == 0 else x for name, x in given.items()}
            found, reported = self.function(leaf, given)
            value = found.sum()
            gradient = torch.zeros_like(leaf)
            if value.requires_grad:
                gradient = torch.autograd.grad(value, leaf, allow_unused=True)[0]
                gradient = torch.zeros_like(leaf) if gradient is None else gradient
            total += float(value.detach())
            for key, number in reported.items():
                metrics[key] = metrics.get(key, 0.0) + float(number)
            ends = np.cumsum([len(logprobs[i]) for i in call])[:-1]
            for i, part in zip(call, np.split(gradient.numpy(), ends), strict=True):
                gradients[i] = part
            if found.shape == leaf.shape:
                for i, part in zip(call, np.split(found.detach().numpy(), ends), strict=True):
                    terms[i] = part
        for i, gradient in enumerate(gradients):
            if not np.isfinite(gradient).all():
                raise BackendError(f"the loss {self.name!r} has a non-finite gradient at data[{i}]")
        metrics = {k: v / len(logprobs) if k.endswith(":mean") else v for k, v in metrics.items()}
        return LossGradient({"loss:sum": total, **metrics}, gradients, terms)

    def _calls(self, logprobs: Sequence[np.ndarray]) -> list[list[int]]:
        """Which datums go into one call: neighbours of one shape where tokens are independent."""
        if not self.elementwise:
            return [[i] for i in range(len(logprobs))]
        calls: list[list[int]] = []
        for i, array in enumerate(logprobs):
            if calls and logprobs[calls[-1][0]].shape[1:] == array.shape[1:]:
                calls[-1].append(i)
            else:
                calls.append([i])
        return calls


@attrs.frozen(eq=False)
class LossGradient:
    """Metrics, the gradient with respect to each datum's logprobs, and each token's term where tokens have one."""

    metrics: Mapping[str, float]
    logprobs: Sequence[np.ndarray]
    terms: Sequence[np.ndarray | None]

    def arrays(self, logprobs: Sequence[np.ndarray]) -> list[dict[str, np.ndarray]]:
        """What a call returns for each datum: the logprobs, and the terms."""
        return [
            {"logprobs": lp} if terms is None else {"logprobs": lp, "elementwise_loss": terms}
            for lp, terms in zip(logprobs, self.terms, strict=True)
        ]


def _cross_entropy(lp: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
    return -(x["weights"] * lp), {}


def _importance_sampling(lp: Tensor, x: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
    return -((lp - x["logprobs"]).exp() * x["advantages"]), {}


def _clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -(ratio * advantages).minimum(ratio.clamp(low, high) * advantages)


def _ppo(lp: Tensor, x: Mapping[str, Tensor], *, low: float, high: float) -> tuple[Tensor, Mapping[str, Any]]:
    return _clipped((lp - x["logprobs"]).exp(), x["advantages"], low, high), {}


def _cispo(lp: Tensor, x: Mapping[str, Tensor], *, low: float, high: float) -> tuple[Tensor, Mapping[str, Any]]:
    weight = (lp - x["logprobs"]).exp().detach().clamp(low, high)
    return -(weight * x["advantages"] * lp), {}


def _dro(lp: Tensor, x: Mapping[str, Tensor], *, beta: float) -> tuple[Tensor, Mapping[str, Any]]:
    distance = lp - x["logprobs"]
    return -(x["advantages"] * lp - beta / 2 * distance * distance), {}


def _gspo(lp: Tensor, x: Mapping[str, Tensor], *, low: float, high: float) -> tuple[Tensor, Mapping[str, Any]]:
    mask = x["sequence_ratio_mask"]
    log_ratio = (mask * (lp.detach() - x["logprobs"])).sum() / mask.sum()
    return _clipped((log_ratio + lp - lp.detach()).exp(), x["advantages"], low, high), {}


@attrs.frozen
class _Hosted:
    function: Callable[..., tuple[Tensor, Mapping[str, Any]]]
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
    """The loss of that name with these settings.

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

    def function(lp: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Any]]:
        return entry.function(lp, inputs, **arguments)

    return Loss(name, function, entry.inputs, entry.optional, entry.matrix, entry.elementwise, gates=entry.gates)
