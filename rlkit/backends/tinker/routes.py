"""Which way a loss takes to the service, and what each hosted call of it is sent.

A hosted loss has neither a mask nor weights. Masked positions are sent with q = 0, A = 0 and weight 0, which adds
exactly nothing to the losses used here, and weights are folded into the advantages where the loss allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit.types import Datum

__all__ = ["HOSTED", "Part", "plan", "without_weights"]

Arrays: TypeAlias = Mapping[str, np.ndarray]
Settings: TypeAlias = Mapping[str, Any]


@attrs.frozen(eq=False)
class Part:
    """One hosted call.

    Attributes:
        loss: the service's name.
        config: its settings, always all of them: servers differ in their defaults.
        arrays: per datum the loss's inputs, float32 [n] each by the service's names; None where the datum is not sent.
    """

    loss: str
    config: Mapping[str, float]
    arrays: Sequence[Arrays | None]


def plan(name: str, settings: Settings, data: Sequence[Datum]) -> tuple[Sequence[Part], str]:
    """Return the hosted calls that together are exactly the loss ``name``; none, and the reason, where there are none.

    Args:
        name: of ``rlkit.losses.registry``.
        settings: of the loss, bound.
        data: the datums.
    """
    make = HOSTED.get(name)
    if make is None:
        return (), f"the service has no loss that is {name!r}"
    used = [datum if datum.mask.any() else None for datum in data]
    parts = make(settings, used)
    return (parts, "") if not isinstance(parts, str) else ((), parts)


def without_weights(part: Part) -> Part:
    """Return the same loss for a service whose cross entropy divides by the sum of the weights.

    With its ratio clipped to [1, 1] cispo is -sum A lp, whatever the logprobs of sampling are. Weights of 0 and 1 alone
    are a mask, which every service takes for what it is.
    """
    per_part = [arrays["weights"] for arrays in part.arrays if arrays is not None and "weights" in arrays]
    plain = all(weights.ndim == 1 and bool(np.isin(weights, (0.0, 1.0)).all()) for weights in per_part)
    if part.loss != "cross_entropy" or plain or any(weights.ndim != 1 for weights in per_part):
        return part

    def arrays_of(arrays: Arrays | None) -> Arrays | None:
        if arrays is None:
            return None
        return {"logprobs": np.zeros_like(arrays["weights"]), "advantages": arrays["weights"]}

    bounds = {"clip_low_threshold": 1.0, "clip_high_threshold": 1.0}
    return Part("cispo", bounds, [arrays_of(arrays) for arrays in part.arrays])


def _input(datum: Datum, name: str, default: float | None = None) -> np.ndarray:
    """Return float32 [n]: an input of the policy's own tokens."""
    n = int(datum.mask.sum())
    array = datum.inputs[name] if default is None or name in datum.inputs else np.float32(default)
    array = np.asarray(array, np.float32)
    values: np.ndarray = np.full(n, array, np.float32) if array.ndim == 0 else array[datum.mask]
    return values


def _weights(datum: Datum) -> np.ndarray:
    return _input(datum, "weights", 1.0)


def _negative(data: Sequence[Datum | None]) -> bool:
    return any(datum is not None and bool((_weights(datum) < 0).any()) for datum in data)


def _each(data: Sequence[Datum | None], arrays: Callable[[Datum], Arrays | None]) -> list[Arrays | None]:
    return [None if datum is None else arrays(datum) for datum in data]


def _weighted(
    data: Sequence[Datum | None], weights: Callable[[Datum], np.ndarray], config: Mapping[str, float] | None = None
) -> list[Part]:
    """Return cross_entropy with these weights: -sum w lp."""
    return [Part("cross_entropy", config or {}, _each(data, lambda d: {"weights": weights(d)}))]


def _ratio(
    loss: str,
    data: Sequence[Datum | None],
    config: Mapping[str, float],
    advantages: Callable[[Datum], np.ndarray],
    behaviour: str = "sampling_logprobs",
) -> list[Part]:
    return [Part(loss, config, _each(data, lambda d: {"logprobs": _input(d, behaviour), "advantages": advantages(d)}))]


def _folded(datum: Datum) -> np.ndarray:
    folded: np.ndarray = _weights(datum) * _input(datum, "advantages")
    return folded


def _clip(settings: Settings) -> dict[str, float]:
    return {key: float(settings[key]) for key in ("clip_low_threshold", "clip_high_threshold")}


def _cross_entropy(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    del settings
    return _weighted(data, _weights)


def _reinforce(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    del settings
    return _weighted(data, _folded)


def _opmd(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    scale = np.float32(1.0 / (1.0 + settings["tau"]))
    return _weighted(data, lambda d: _folded(d) * scale)


def _importance_sampling(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    del settings
    return _ratio("importance_sampling", data, {}, _folded)


def _ppo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if settings["dual_clip"] is not None:
        return "the hosted ppo has no dual clip"
    if _negative(data):
        return "a minimum does not let negative weights through"
    return _ratio("ppo", data, _clip(settings), _folded)


def _cispo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if settings["unified_mask"]:
        return "the hosted cispo has no unified mask"
    return _ratio("cispo", data, _clip(settings), _folded)


def _decoupled_ppo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if _negative(data):
        return "a minimum does not let negative weights through"
    cap = settings["behaviour_cap"]

    def advantages(datum: Datum) -> np.ndarray:
        behaviour = np.exp(_input(datum, "old_logprobs") - _input(datum, "sampling_logprobs"))
        capped: np.ndarray = behaviour if cap is None else np.minimum(behaviour, np.float32(cap))
        weighted: np.ndarray = _folded(datum) * capped
        return weighted

    return _ratio("ppo", data, _clip(settings), advantages, "old_logprobs")


def _gspo_token(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    if _negative(data):
        return "a minimum does not let negative weights through"

    def arrays(datum: Datum) -> Arrays:
        ones = np.ones(int(datum.mask.sum()), np.float32)
        q = _input(datum, "sampling_logprobs")
        return {"logprobs": q, "advantages": _folded(datum), "sequence_ratio_mask": ones}

    return [Part("gspo", _clip(settings), _each(data, arrays))]


def _gspo(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    for datum in data:
        if datum is not None and np.ptp(_folded(datum)) > 0:
            return "the hosted gspo is the token form, another loss where advantages differ within a datum"
    return _gspo_token(settings, data)


def _topr(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    """Clip the ratio to [0, 1], but above the threshold it has no say. A token counts in one call."""
    threshold = np.float32(settings["threshold"])

    def positive(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "advantages") > threshold
        return {"weights": np.where(chosen, _folded(datum), np.float32(0))} if chosen.any() else None

    def other(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "advantages") <= threshold
        if not chosen.any():
            return None
        advantages = np.where(chosen, _folded(datum), np.float32(0))
        return {"logprobs": _input(datum, "sampling_logprobs"), "advantages": advantages}

    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.0}
    parts = [Part("cross_entropy", {}, _each(data, positive)), Part("cispo", bounds, _each(data, other))]
    return [part for part in parts if any(x is not None for x in part.arrays)]


def _mix(settings: Settings, data: Sequence[Datum | None]) -> list[Part] | str:
    """Send the expert's tokens as cross entropy with weights w mu, the policy's as ppo with A := w (1 - mu) A."""
    if settings["phi"]:
        return "its weights depend on the policy's own probabilities"
    if settings["dual_clip"] is not None:
        return "the hosted ppo has no dual clip"
    if _negative(data):
        return "a minimum does not let negative weights through"

    def expert(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "expert") != 0
        weights = _weights(datum) * _input(datum, "mu", 0.1)
        return {"weights": np.where(chosen, weights, np.float32(0))} if chosen.any() else None

    def own(datum: Datum) -> Arrays | None:
        chosen = _input(datum, "expert") == 0
        if not chosen.any():
            return None
        zero = np.float32(0)
        advantages = np.where(chosen, _folded(datum) * (1 - _input(datum, "mu", 0.1)), zero)
        return {"logprobs": np.where(chosen, _input(datum, "sampling_logprobs"), zero), "advantages": advantages}

    parts = [Part("cross_entropy", {}, _each(data, expert)), Part("ppo", _clip(settings), _each(data, own))]
    return [part for part in parts if any(x is not None for x in part.arrays)]


HOSTED: Mapping[str, Callable[[Settings, Sequence[Datum | None]], list[Part] | str]] = {
    "cispo": _cispo,
    "cross_entropy": _cross_entropy,
    "decoupled_ppo": _decoupled_ppo,
    "gspo": _gspo,
    "gspo_token": _gspo_token,
    "importance_sampling": _importance_sampling,
    "luspo": _gspo,
    "mix": _mix,
    "opmd": _opmd,
    "ppo": _ppo,
    "reinforce": _reinforce,
    "topr": _topr,
}
