"""An algorithm with a run's settings in it: names translated, arguments checked, the loss composed. No work is done."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlkit import _check, advantages, schedules
from rlkit.errors import ConfigError
from rlkit.recipes import algorithms
from rlkit.recipes.algorithms import Recipe
from rlkit.recipes.learning import Algorithm

__all__ = ["Method", "resolved"]

ESTIMATORS = {"reinforceplusplus": "reinforce_pp", "on_policy_distill": "on_policy_distillation", "ppo": "gae"}
LOSSES = {"sft": "cross_entropy", "mix_chord": "mix", "vanilla": "reinforce"}
KL = {"low_var_kl": "clamped", "corrected_k3": "ratio_corrected"}
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


@attrs.frozen(eq=False)
class Method:
    """What a loop does at each step.

    Attributes:
        recipe: the algorithm's row, settings applied.
        loss: a name or a function; with a KL or entropy term where one is on.
        loss_args: its settings.
        estimator: the function behind ``recipe.advantage``; where there is none, it is not called.
        kl_loss, kl_penalty, entropy: coefficients; 0 is off.
        penalty: estimator of the KL penalty.
        threshold: groups whose rewards' deviation is not above it do not train; None: all do.
        old_logprobs: whether the policy scores the batch before its first update.
        expert_ratio: share of demonstrations in a mixed batch.
        mu: step -> the share of the supervised term; None where the loss has none.
        inputs: names of what the loss reads.
    """

    recipe: Recipe
    loss: Any
    loss_args: Mapping[str, Any]
    estimator: Callable[..., Any]
    kl_loss: float
    kl_penalty: float
    penalty: str
    entropy: float
    threshold: float | None
    old_logprobs: bool
    expert_ratio: float
    mu: Callable[[int], float] | None
    inputs: Sequence[str]

    @property
    def wants_reference(self) -> bool:
        """Whether logprobs of a reference policy are needed."""
        return self.kl_penalty > 0 or "reference_logprobs" in self.inputs


def resolved(settings: Algorithm) -> Method:
    """The method that these settings describe.

    Raises:
        UnknownNameError: no algorithm, estimator, loss or KL estimator has that name.
        ConfigError: an argument is unknown, out of range, or contradicts the algorithm.

    >>> found = resolved(Algorithm(algorithm_type="grpo", policy_loss_fn_args={"clip_range_high": 0.28}))
    >>> found.loss, dict(found.loss_args), found.wants_reference
    ('ppo', {'clip_high_threshold': 1.28}, False)
    """
    from rlkit import losses

    recipe = algorithms.registry[settings.algorithm_type]
    own: dict[str, Any] = {"repeat_times": settings.repeat_times, "weights": settings.loss_agg_mode}
    own |= {"advantage": ESTIMATORS.get(settings.advantage_fn or "", settings.advantage_fn)}
    own |= {"loss": LOSSES.get(settings.policy_loss_fn or "", settings.policy_loss_fn)}
    if own["advantage"] not in (None, recipe.advantage):
        own |= {"advantage_args": {}, "level": _level(own["advantage"])}
        if recipe.advantage is None:
            raise _contradiction("advantage_fn", settings.advantage_fn, f"{settings.algorithm_type} has no advantages")
    if own["loss"] not in (None, recipe.loss):
        own |= {"loss_args": {}}
    recipe = attrs.evolve(recipe, **{name: value for name, value in own.items() if value is not None})
    loss_args = dict(settings.policy_loss_fn_args or {})
    mode, schedule = loss_args.pop("loss_agg_mode", None), _schedule(settings.algorithm_type, loss_args)
    if mode is not None:
        if settings.loss_agg_mode not in (None, mode):
            raise _contradiction("policy_loss_fn_args.loss_agg_mode", mode, f"loss_agg_mode={settings.loss_agg_mode}")
        recipe = attrs.evolve(recipe, weights=mode)
    _weights(recipe)
    estimator = None if recipe.advantage is None else advantages.registry.resolve(recipe.advantage)
    given, threshold = _estimator_args(settings, estimator)
    kl, penalty, entropy = _coefficients(settings, recipe)
    loss, extra = _composed(losses, settings, recipe, kl, entropy)
    args = {**recipe.loss_args, **_loss_args(loss_args)}
    _settings("algorithm.policy_loss_fn_args", losses.registry.resolve(recipe.loss), args)
    prepared = losses.prepare(loss, {**args, **extra})
    _fits(settings, recipe, prepared)
    alone = recipe.repeat_times == 1 and "singleton" in _keywords(estimator or _none)
    if alone and {**recipe.advantage_args, **given}.get("singleton", "zero") == "zero":
        raise _contradiction("repeat_times", 1, "a group of one has no baseline, and its advantages are 0")
    sampled = entropy if settings.entropy_loss_fn != "exact" else 0.0
    if not settings.bypass_old_logprobs and recipe.loss != "ppo":
        raise _contradiction("bypass_old_logprobs", value=False, why=f"the loss is {recipe.loss}, not ppo")
    return Method(
        recipe=attrs.evolve(recipe, advantage_args={**recipe.advantage_args, **given}),
        loss=loss,
        loss_args={**args, **extra},
        estimator=estimator or _none,
        kl_loss=kl,
        kl_penalty=penalty,
        penalty=settings.kl_penalty_fn or "k1",
        entropy=sampled,
        threshold=threshold,
        old_logprobs=not settings.bypass_old_logprobs,
        expert_ratio=_expert_ratio(settings),
        mu=schedule if recipe.loss == "mix" else None,
        inputs=tuple(prepared.inputs),
    )


def _none(*_: Any, **__: Any) -> Any:
    raise ConfigError("this algorithm has no advantages")


def _level(advantage: Any) -> str:
    """What an estimator that is named by itself is given."""
    rows = [row for row in algorithms.registry.values() if row.advantage == advantage]
    if rows:
        return str(rows[0].level)
    first = next(iter(inspect.signature(advantages.registry.resolve(advantage)).parameters.values()))
    return "token" if first.kind is first.KEYWORD_ONLY else "group"


def _weights(recipe: Recipe) -> None:
    """Raises where the mode is unknown."""
    extra: dict[str, Any] = {"constant": 1.0} if recipe.weights.endswith("-norm") else {}
    extra |= {"groups": [0]} if recipe.weights == "prompt-mean" else {}
    advantages.token_weights([1], recipe.weights, **extra)


def _estimator_args(settings: Algorithm, function: Callable[..., Any] | None) -> tuple[dict[str, Any], float | None]:
    """The estimator's settings, and the threshold of groups that train."""
    given = dict(settings.advantage_fn_args or {})
    threshold = given.pop("std_threshold", None)
    if threshold is not None:
        threshold = _check.real("algorithm.advantage_fn_args.std_threshold", threshold, low=0.0)
    if function is None:
        if given:
            raise _contradiction("advantage_fn_args", given, f"{settings.algorithm_type} has no advantages")
        return {}, threshold
    known = _keywords(function)
    found = {name if name in known else _RENAMED.get(name, name): value for name, value in given.items()}
    if "fnorm" in given:
        found["scale"] = {"none": "none", "std": "group"}.get(str(given["fnorm"]), given["fnorm"])
    _settings("algorithm.advantage_fn_args", function, found)
    return found, threshold


def _loss_args(given: Mapping[str, Any]) -> dict[str, Any]:
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


def _schedule(name: str, given: dict[str, Any]) -> Callable[[int], float]:
    """The share of the supervised term by step; takes its arguments out of ``given``."""
    fixed = given.pop("mu", None)
    spans = {key.removeprefix("mu_"): given.pop(key) for key in _MU if key in given}
    if name in ("chord", "mix_chord") or spans:
        if fixed is not None:
            raise _contradiction("policy_loss_fn_args.mu", fixed, "mu has a schedule")
        spans = {"warmup_steps": 0, "decay_steps": 100, **spans}
        schedules.chord_schedule(0, **spans)
        return lambda step: schedules.chord_schedule(step, **spans)
    share = _check.real("algorithm.policy_loss_fn_args.mu", 0.1 if fixed is None else fixed, low=0.0, high=1.0)
    return lambda step: share  # it is a constant schedule


def _coefficients(settings: Algorithm, recipe: Recipe) -> tuple[float, float, float]:
    """Of the KL loss, the KL penalty, and the entropy bonus."""
    found = []
    for part, key in (("kl_loss_fn", "kl_coef"), ("kl_penalty_fn", "kl_coef"), ("entropy_loss_fn", "entropy_coef")):
        args = dict(getattr(settings, f"{part}_args") or {})
        value = _check.real(f"algorithm.{part}_args.{key}", args.pop(key, 0.0), low=0.0)
        if args.pop("adaptive", False):
            raise _contradiction(f"{part}_args.adaptive", value=True, why="a loop of your own can use losses.kl")
        if args:
            name = next(iter(args))
            raise ConfigError(f"algorithm.{part}_args.{name}: there is no such setting; There is: {key}")
        if value and getattr(settings, part) == "none":
            raise _contradiction(f"{part}_args.{key}", value, f"{part} is none")
        found.append(value)
    if settings.kl_penalty_fn not in (None, "none"):
        _check.choice("algorithm.kl_penalty_fn", settings.kl_penalty_fn, ("k1", "k2", "k3", "abs"))
    if settings.entropy_loss_fn not in (None, "none", "mix"):
        _check.choice("algorithm.entropy_loss_fn", settings.entropy_loss_fn, ("default", "exact", "mix", "none"))
    if found[1] and (not recipe.rolls_out or "rewards" not in _inputs_of(recipe)):
        raise _contradiction("kl_penalty_fn_args.kl_coef", found[1], f"{settings.algorithm_type} has no rewards")
    return found[0], found[1], found[2]


def _inputs_of(recipe: Recipe) -> list[str]:
    if recipe.advantage is None:
        return []
    return list(inspect.signature(advantages.registry.resolve(recipe.advantage)).parameters)


def _composed(
    losses: Any, settings: Algorithm, recipe: Recipe, kl: float, entropy: float
) -> tuple[Any, dict[str, Any]]:
    """The loss with its terms, and the terms' coefficients."""
    loss: Any = "decoupled_ppo" if not settings.bypass_old_logprobs and recipe.loss == "ppo" else recipe.loss
    losses.registry.resolve(loss)
    estimator = KL.get(settings.kl_loss_fn or "k2", settings.kl_loss_fn or "k2")
    if estimator != "none":
        losses.kl.registry.resolve(estimator)
    extra: dict[str, Any] = {}
    if kl > 0:
        loss, extra = losses.with_kl(loss, kl, estimator), {"kl_coef": kl}
    if entropy > 0 and settings.entropy_loss_fn == "exact":
        loss, extra = losses.with_entropy(loss, entropy), {**extra, "entropy_coef": entropy}
    return loss, extra


def _fits(settings: Algorithm, recipe: Recipe, prepared: Any) -> None:
    """Raises where the loss wants what there is not, or the estimator does."""
    where, name = "policy_loss_fn", settings.policy_loss_fn or recipe.loss
    if ("advantages" in prepared.inputs) != (recipe.advantage is not None):
        what = "needs advantages" if "advantages" in prepared.inputs else "takes no advantages"
        raise _contradiction(where, name, f"the loss {what}")
    if (prepared.level == "pair") != (recipe.data == "pairs") or prepared.driver != "logprobs":
        raise _contradiction(where, name, f"the loss is one of {prepared.level}s, over {prepared.driver}")
    there = {"advantages", "reference_logprobs"} | ({"sampling_logprobs"} if recipe.rolls_out else set())
    there |= ({"expert"} if recipe.data == "mixed" else set()) | (
        set() if settings.bypass_old_logprobs else {"old_logprobs"}
    )
    for missing in sorted(set(prepared.inputs) - there):
        raise _contradiction(where, name, f"the loss needs {missing!r}, which there is not")
    if recipe.advantage is None:
        if settings.entropy_loss_fn_args and settings.entropy_loss_fn != "exact":
            raise _contradiction("entropy_loss_fn", settings.entropy_loss_fn, "the sampled bonus is part of advantages")
        return
    named = list(inspect.signature(advantages.registry.resolve(recipe.advantage)).parameters.values())
    given = {"group": ("lengths",), "turn": ()}.get(recipe.level, _TOKENWISE)
    skipped = {"group": 1, "turn": 2}.get(recipe.level, 0)
    wanted = [p.name for p in named[skipped:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for missing in sorted({*wanted} - {*given, *(settings.advantage_fn_args or {}), *recipe.advantage_args}):
        raise _contradiction("advantage_fn", recipe.advantage, f"it needs {missing!r}, which there is not")


_TOKENWISE = ("rewards", "values", "baseline", "teacher_logprobs", "sampling_logprobs", "reference_logprobs")


def _expert_ratio(settings: Algorithm) -> float:
    args = dict(settings.sample_strategy_args or {})
    ratio = args.pop("expert_data_ratio", 0.5)
    if args:
        name = next(iter(args))
        raise ConfigError(
            f"algorithm.sample_strategy_args.{name}: there is no such setting; There is: expert_data_ratio"
        )
    return _check.real("algorithm.sample_strategy_args.expert_data_ratio", ratio, above=0.0, below=1.0)


def _keywords(function: Callable[..., Any]) -> list[str]:
    """The settings: what has a default and is not given by the loop."""
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in _GIVEN]


_GIVEN = ("mask", "kl", "kl_coef", "rng", "bootstrap_value")


def _settings(where: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises for a setting that the function does not have."""
    known = _keywords(function)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(
                f"{where}.{name}: there is no such setting; {hint}There are: {', '.join(known) or 'none'}"
            )


def _contradiction(name: str, value: Any, why: str) -> ConfigError:
    return ConfigError(_check.problem(f"algorithm.{name}", f"is {value!r}", "a setting that fits the others", why))
