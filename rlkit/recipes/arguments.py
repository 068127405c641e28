"""Arguments of an algorithm's parts, by rlkit's names or by Trinity's, checked and translated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rlkit import _check, advantages, schedules
from rlkit.errors import ConfigError
from rlkit.recipes.algorithms import Recipe
from rlkit.recipes.learning import Algorithm
from rlkit.recipes.names import KL, contradiction, estimator_names

__all__ = ["check_settings", "coefficients", "estimator_args", "expert_ratio", "keywords", "share"]

_MU = ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
_CHORD = {"mu_warmup_steps": 0, "mu_decay_steps": 100}
_GIVEN = ("mask", "kl", "kl_coef", "rng", "bootstrap_value")
_PENALTIES = ("k1", "k2", "k3", "abs", *KL)


def estimator_args(
    settings: Algorithm, function: Callable[..., object] | None
) -> tuple[dict[str, object], float | None, list[str]]:
    """Return the estimator's settings, the threshold of groups that train, and what has no effect."""
    args = dict(settings.advantage_fn_args or {})
    threshold = args.pop("std_threshold", None)
    threshold = _check.optional(_check.real, "algorithm.advantage_fn_args.std_threshold", threshold, low=0.0)
    if function is None:
        if args:
            raise contradiction("advantage_fn_args", args, f"{settings.algorithm_type} has no advantages")
        return {}, threshold, []
    translated, names, unused = estimator_names(args, keywords(function))
    check_settings("algorithm.advantage_fn_args", function, translated, names)
    return translated, threshold, unused


def share(own: dict[str, Any], given: dict[str, Any]) -> Callable[[int], float]:
    """Return the share of the supervised term by step; its arguments are taken out of both mappings."""
    mine, theirs = ({key: args.pop(key) for key in ("mu", *_MU) if key in args} for args in (own, given))
    spans = {key: mine[key] for key in _MU if key in mine}
    if "mu" in theirs and (spans or len(theirs) > 1):
        raise contradiction("policy_loss_fn_args.mu", theirs["mu"], "mu has a schedule")
    if spans or any(key in theirs for key in _MU):
        spans = {**(spans or _CHORD), **{key: theirs[key] for key in _MU if key in theirs}}
        spans = {key.removeprefix("mu_"): value for key, value in spans.items()}
        schedules.chord_schedule(0, **spans)
        return lambda step: schedules.chord_schedule(step, **spans)
    fixed = theirs.get("mu", mine.get("mu", 0.1))
    share = _check.real("algorithm.policy_loss_fn_args.mu", fixed, low=0.0, high=1.0)
    return lambda step: share  # it is a constant schedule


def coefficients(settings: Algorithm, recipe: Recipe) -> tuple[float, float, float]:
    """Return the coefficients of the KL loss, the KL penalty, and the entropy bonus."""
    values = []
    for part, key in (("kl_loss_fn", "kl_coef"), ("kl_penalty_fn", "kl_coef"), ("entropy_loss_fn", "entropy_coef")):
        args = dict(getattr(settings, f"{part}_args") or {})
        value = _check.real(f"algorithm.{part}_args.{key}", args.pop(key, 0.0), low=0.0)
        if args.pop("adaptive", False):
            raise contradiction(f"{part}_args.adaptive", value=True, why="a loop of your own can use losses.kl")
        for unset in ("target_kl", "horizon"):
            if args.get(unset) is None:
                args.pop(unset, None)
        if args:
            name = next(iter(args))
            raise ConfigError(f"algorithm.{part}_args.{name}: there is no such setting{_check.near(name, [key])}")
        if value and getattr(settings, part) == "none":
            raise contradiction(f"{part}_args.{key}", value, f"{part} is none")
        values.append(value)
    if settings.kl_penalty_fn not in (None, "none"):
        _check.choice("algorithm.kl_penalty_fn", settings.kl_penalty_fn, _PENALTIES)
    if settings.entropy_loss_fn not in (None, "none", "mix"):
        _check.choice("algorithm.entropy_loss_fn", settings.entropy_loss_fn, ("default", "exact", "mix", "none"))
    if values[1] and (not recipe.rolls_out or "rewards" not in _inputs_of(recipe)):
        raise contradiction("kl_penalty_fn_args.kl_coef", values[1], f"{settings.algorithm_type} has no rewards")
    return values[0], values[1], values[2]


def _inputs_of(recipe: Recipe) -> list[str]:
    if recipe.advantage is None:
        return []
    return list(inspect.signature(advantages.registry.resolve(recipe.advantage)).parameters)


def expert_ratio(settings: Algorithm) -> float:
    """Return the share of demonstrations in a mixed batch."""
    args = dict(settings.sample_strategy_args or {})
    if settings.sample_strategy == "staleness_control":
        args.pop("max_staleness", None)  # compared with the section synchronizer, which is not known here
    ratio = args.pop("expert_data_ratio", 0.5)
    name = args.pop("sft_dataset_name", None)
    if name is not None and not isinstance(name, str):
        where = "algorithm.sample_strategy_args.sft_dataset_name"
        raise ConfigError(where, f"is {name!r}", "a name in auxiliary_buffers")
    if args:
        unknown = next(iter(args))
        known = _check.near(unknown, ["expert_data_ratio"])
        raise ConfigError(f"algorithm.sample_strategy_args.{unknown}: there is no such setting{known}")
    return _check.real("algorithm.sample_strategy_args.expert_data_ratio", ratio, above=0.0, below=1.0)


def keywords(function: Callable[..., object]) -> list[str]:
    """Return the settings: what has a default and is not given by the loop."""
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in _GIVEN]


def check_settings(
    where: str, function: Callable[..., object], given: Mapping[str, object], names: Mapping[str, str] | None = None
) -> None:
    """Raise for a setting that the function does not have, by the name under which it was given."""
    known = keywords(function)
    for name in given:
        if name not in known:
            said = (names or {}).get(name, name)
            raise ConfigError(f"{where}.{said}: there is no such setting{_check.near(said, known)}")
