"""Arguments of an algorithm's parts, by rlkit's names or by Trinity's, checked and translated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlkit import _check, advantages, schedules
from rlkit.errors import ConfigError
from rlkit.recipes.algorithms import Recipe
from rlkit.recipes.learning import Algorithm

__all__ = [
    "check_settings",
    "coefficients",
    "contradiction",
    "estimator_args",
    "expert_ratio",
    "keywords",
    "loss_args",
    "share",
]

_RENAMED = {
    "epsilon": "eps",
    "std_cal_level": "scale",
    "fnorm": "scale",
    "opmd_baseline": "baseline",
    "baseline_shift": "shift",
    "kl_coef": "coef",
    "lambda_coef": "beta",
    "enable_step_norm": "step_norm",
}
_MU = ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
_GIVEN = ("mask", "kl", "kl_coef", "rng", "bootstrap_value")


def estimator_args(settings: Algorithm, function: Callable[..., Any] | None) -> tuple[dict[str, Any], float | None]:
    """The estimator's settings, and the threshold of groups that train."""
    given = dict(settings.advantage_fn_args or {})
    threshold = given.pop("std_threshold", None)
    if threshold is not None:
        threshold = _check.real("algorithm.advantage_fn_args.std_threshold", threshold, low=0.0)
    if function is None:
        if given:
            raise contradiction("advantage_fn_args", given, f"{settings.algorithm_type} has no advantages")
        return {}, threshold
    known = keywords(function)
    found = {name if name in known else _RENAMED.get(name, name): value for name, value in given.items()}
    if "fnorm" in given:
        found["scale"] = {"none": "none", "std": "group"}.get(str(given["fnorm"]), given["fnorm"])
    check_settings("algorithm.advantage_fn_args", function, found)
    return found, threshold


def loss_args(given: Mapping[str, Any]) -> dict[str, Any]:
    """Trinity's names of a loss's settings as rlkit's: bounds are on the ratio itself."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        where = f"algorithm.policy_loss_fn_args.{name}"
        bound = {"clip_range": "both", "epsilon": "inverse", "clip_range_low": "low", "epsilon_low": "low"}.get(name)
        bound = bound or {"clip_range_high": "high", "epsilon_high": "high"}.get(name)
        ring = {"epsilon_low_prime": ("ring_low_threshold", -1), "epsilon_high_prime": ("ring_high_threshold", 1)}
        if bound is not None and value is not None:
            number = _check.real(where, value, low=0.0)
            low = 1 / (1 + number) if bound == "inverse" else max(0.0, 1 - number)
            found |= {} if bound == "high" else {"clip_low_threshold": low}
            found |= {} if bound == "low" else {"clip_high_threshold": 1 + number}
        elif name in ring:
            key, sign = ring[name]
            found[key] = 1 + sign * _check.real(where, value, low=0.0)
        elif bound is None:
            renamed = {"clip_ratio_c": "dual_clip", "temp": "temperature", "enable_phi_function": "phi"}
            found[renamed.get(name, name)] = value
    return found


def share(name: str, given: dict[str, Any]) -> Callable[[int], float]:
    """The share of the supervised term by step; takes its arguments out of ``given``."""
    fixed = given.pop("mu", None)
    spans = {key.removeprefix("mu_"): given.pop(key) for key in _MU if key in given}
    if name in ("chord", "mix_chord") or spans:
        if fixed is not None:
            raise contradiction("policy_loss_fn_args.mu", fixed, "mu has a schedule")
        spans = {"warmup_steps": 0, "decay_steps": 100, **spans}
        schedules.chord_schedule(0, **spans)
        return lambda step: schedules.chord_schedule(step, **spans)
    share = _check.real("algorithm.policy_loss_fn_args.mu", 0.1 if fixed is None else fixed, low=0.0, high=1.0)
    return lambda step: share  # it is a constant schedule


def coefficients(settings: Algorithm, recipe: Recipe) -> tuple[float, float, float]:
    """Of the KL loss, the KL penalty, and the entropy bonus."""
    found = []
    for part, key in (("kl_loss_fn", "kl_coef"), ("kl_penalty_fn", "kl_coef"), ("entropy_loss_fn", "entropy_coef")):
        args = dict(getattr(settings, f"{part}_args") or {})
        value = _check.real(f"algorithm.{part}_args.{key}", args.pop(key, 0.0), low=0.0)
        if args.pop("adaptive", False):
            raise contradiction(f"{part}_args.adaptive", value=True, why="a loop of your own can use losses.kl")
        if args:
            name = next(iter(args))
            raise ConfigError(f"algorithm.{part}_args.{name}: there is no such setting{_check.near(name, [key])}")
        if value and getattr(settings, part) == "none":
            raise contradiction(f"{part}_args.{key}", value, f"{part} is none")
        found.append(value)
    if settings.kl_penalty_fn not in (None, "none"):
        _check.choice("algorithm.kl_penalty_fn", settings.kl_penalty_fn, ("k1", "k2", "k3", "abs"))
    if settings.entropy_loss_fn not in (None, "none", "mix"):
        _check.choice("algorithm.entropy_loss_fn", settings.entropy_loss_fn, ("default", "exact", "mix", "none"))
    if found[1] and (not recipe.rolls_out or "rewards" not in _inputs_of(recipe)):
        raise contradiction("kl_penalty_fn_args.kl_coef", found[1], f"{settings.algorithm_type} has no rewards")
    return found[0], found[1], found[2]


def _inputs_of(recipe: Recipe) -> list[str]:
    if recipe.advantage is None:
        return []
    return list(inspect.signature(advantages.registry.resolve(recipe.advantage)).parameters)


def expert_ratio(settings: Algorithm) -> float:
    """The share of demonstrations in a mixed batch."""
    args = dict(settings.sample_strategy_args or {})
    ratio = args.pop("expert_data_ratio", 0.5)
    if args:
        name = next(iter(args))
        known = _check.near(name, ["expert_data_ratio"])
        raise ConfigError(f"algorithm.sample_strategy_args.{name}: there is no such setting{known}")
    return _check.real("algorithm.sample_strategy_args.expert_data_ratio", ratio, above=0.0, below=1.0)


def keywords(function: Callable[..., Any]) -> list[str]:
    """The settings: what has a default and is not given by the loop."""
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in _GIVEN]


def check_settings(where: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises for a setting that the function does not have."""
    known = keywords(function)
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}.{name}: there is no such setting{_check.near(name, known)}")


def contradiction(name: str, value: Any, why: str) -> ConfigError:
    """The error for a setting that contradicts others."""
    return ConfigError(_check.problem(f"algorithm.{name}", f"is {value!r}", "a setting that fits the others", why))
