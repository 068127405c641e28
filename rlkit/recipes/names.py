"""Trinity-RFT's names of estimators, losses and their arguments, as rlkit's.

``DEFAULTS`` of losses and ``OF_ESTIMATORS`` are Trinity's defaults where rlkit's own functions have others: what is
named as there has the numbers that it has there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.recipes.keys import TABLE

__all__ = ["DEFAULTS", "ESTIMATORS", "KL", "LOSSES", "OF_ESTIMATORS", "contradiction", "estimator_names", "loss_names"]

Loss: TypeAlias = str | Callable[..., object]
ESTIMATORS: Mapping[str, str] = TABLE["names"]["estimators"]
LOSSES: Mapping[str, str] = TABLE["names"]["losses"]
KL: Mapping[str, str] = TABLE["names"]["kl"]
OF_ESTIMATORS: Mapping[str, Mapping[str, object]] = TABLE["defaults"]["estimators"]
DEFAULTS: Mapping[str, Mapping[str, object]] = TABLE["defaults"]["losses"]
_ARGUMENTS = TABLE["arguments"]


def contradiction(name: str, value: object, why: str) -> ConfigError:
    """Return the error for a setting that contradicts others."""
    return ConfigError(_check.problem(f"algorithm.{name}", f"is {value!r}", "a setting that fits the others", why))


def estimator_names(given: Mapping[str, Any], known: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return an estimator's settings by rlkit's names, rlkit's name -> the given one, and what has no effect."""
    settings: dict[str, Any] = {}
    names: dict[str, str] = {}
    unused: list[str] = []
    for name, value in given.items():
        if name not in known and _passed("advantage_fn_args", name, value, unused):
            continue
        new = name if name in known else _ARGUMENTS["estimators"].get(name, name)
        if new in settings:
            raise contradiction(f"advantage_fn_args.{name}", value, f"{names[new]} says the same")
        names[new], settings[new] = (
            name,
            {"none": "none", "std": "group"}.get(value, value) if name == "fnorm" else value,
        )
    return settings, names, unused


def loss_names(
    loss: Loss, given: Mapping[str, object], known: Callable[[Loss], Sequence[str]]
) -> tuple[Loss, dict[str, object], dict[str, str], list[str]]:
    """Return the loss that these arguments make of it, and as ``estimator_names``. Bounds are on the ratio itself."""
    settings: dict[str, object] = {}
    names: dict[str, str] = {}
    unused: list[str] = []
    given = dict(given)
    if loss == "ppo" and given.pop("enable_sequence_masking", False):
        loss = "opsm"
    elif loss == "ppo" and "delta_sequence_masking" in given:
        del given["delta_sequence_masking"]
        unused.append("algorithm.policy_loss_fn_args.delta_sequence_masking (enable_sequence_masking is off)")
    if loss in ("ppo", "opsm") and given.pop("fallback_to_policy_gradient", False):
        # the ratio is exp(lp - sg[lp]) = 1, so that no bound is ever met
        return "reinforce", {}, {}, [f"algorithm.policy_loss_fn_args.{name} (no ratio is taken)" for name in given]
    _mask_bounds(given)
    for name, value in given.items():
        where = f"algorithm.policy_loss_fn_args.{name}"
        made = _bounds(where, name, value)
        if made is None:
            if name not in known(loss) and _passed("policy_loss_fn_args", name, value, unused):
                continue
            made = {name if name in known(loss) else _ARGUMENTS["losses"].get(name, name): value}
            if str(value).startswith("gspo"):
                raise contradiction(f"policy_loss_fn_args.{name}", value, "the loss gspo has one ratio for a sequence")
        settings |= made
        names |= dict.fromkeys(made, name)
    if loss == "rec" and settings.get("clip_mode") == "ring":
        settings = {
            "ring_low_threshold": 0.6,
            "ring_high_threshold": 1.4,
            **settings,
        }  # its bounds once any argument is given
    return loss, settings, names, unused


def _passed(where: str, name: str, value: object, unused: list[str]) -> bool:
    """Return whether an argument may be there without being passed on: it has no effect here, or asks for nothing."""
    if name in _ARGUMENTS["unused"]:
        unused.append(f"algorithm.{where}.{name} ({_ARGUMENTS['unused'][name]})")
        return True
    if name not in _ARGUMENTS["neutral"]:
        return False
    neutral, why = _ARGUMENTS["neutral"][name].get("value"), _ARGUMENTS["neutral"][name]["why"]
    if value != neutral:
        raise ConfigError(f"algorithm.{where}.{name}", f"is {value!r}", f"{neutral!r}", why)
    return True


def _bounds(where: str, name: str, value: object) -> dict[str, Any] | None:
    """Return bounds on the ratio from a distance to 1; None where it is none."""
    kind = {"clip_range": "both", "epsilon": "inverse", "clip_range_low": "low", "epsilon_low": "low"}.get(name)
    kind = kind or {"clip_range_high": "high", "epsilon_high": "high"}.get(name)
    ring = {"epsilon_low_prime": ("ring_low_threshold", -1), "epsilon_high_prime": ("ring_high_threshold", 1)}
    if name in ring:
        key, sign = ring[name]
        return {key: 1 + sign * _check.real(where, value, low=0.0)}
    if kind is None or value is None:
        return None if kind is None else {}
    number = _check.real(where, value, low=0.0)
    low = 1 / (1 + number) if kind == "inverse" else max(0.0, 1 - number)
    bounds = {} if kind == "high" else {"clip_low_threshold": low}
    return bounds if kind == "low" else {**bounds, "clip_high_threshold": 1 + number}


def _mask_bounds(given: dict[str, object]) -> None:
    """Take out the bounds of CISPO's mask, which here are those of its ratio."""
    for side, default in (("low", 1.0), ("high", 0.28)):
        name = f"mask_clip_range_{side}"
        value, bound = given.pop(name, None), given.get(f"clip_range_{side}", default)
        masked = given.get("enable_mask_clip", False)
        if masked and (default if value is None else value) != bound:
            raise contradiction(
                f"policy_loss_fn_args.{name}", value, f"the mask's bounds are those of clip_range_{side}"
            )
