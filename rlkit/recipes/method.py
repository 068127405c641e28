"""An algorithm with a run's settings in it: names translated, arguments checked, the loss composed. No work is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rlkit import advantages
from rlkit.errors import ConfigError
from rlkit.recipes import algorithms
from rlkit.recipes.algorithms import Recipe
from rlkit.recipes.arguments import check_settings, coefficients, estimator_args, expert_ratio, keywords, share
from rlkit.recipes.learning import Algorithm
from rlkit.recipes.names import DEFAULTS, ESTIMATORS, KL, LOSSES, OF_ESTIMATORS, contradiction, loss_names

__all__ = ["Method", "resolve"]


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
        old_logprobs: the input that the policy's own logprobs before its first update become; None: they are not
            asked for.
        expert_ratio: share of demonstrations in a mixed batch.
        expert_weights: the mode of token weights of demonstrations in a mixed batch.
        mu: step -> the share of the supervised term; None where the loss has none.
        inputs: names of what the loss reads.
        unused: arguments that have no effect, with the reason.
    """

    recipe: Recipe
    loss: Any
    loss_args: Mapping[str, Any]
    estimator: Callable[..., object]
    kl_loss: float
    kl_penalty: float
    penalty: str
    entropy: float
    threshold: float | None
    old_logprobs: str | None
    expert_ratio: float
    expert_weights: str
    mu: Callable[[int], float] | None
    inputs: Sequence[str]
    unused: Sequence[str]

    @property
    def wants_reference(self) -> bool:
        """Whether logprobs of a reference policy are needed."""
        return self.kl_penalty > 0 or "reference_logprobs" in self.inputs


def resolve(settings: Algorithm) -> Method:
    """Return the method that these settings describe.

    Raises:
        UnknownNameError: no algorithm, estimator, loss or KL estimator has that name.
        ConfigError: an argument is unknown, out of range, or contradicts the algorithm.

    >>> found = resolve(Algorithm(algorithm_type="grpo", policy_loss_fn_args={"clip_range_high": 0.28}))
    >>> found.loss, dict(found.loss_args), found.wants_reference
    ('ppo', {'clip_high_threshold': 1.28}, False)
    """
    from rlkit import losses

    recipe, asked, weights = _row(settings)
    if recipe.hint and "{answer}" not in settings.hint:
        what = f"is {settings.hint!r}"
        raise ConfigError(f"algorithm.hint: {what}; expected a text with {{answer}}, which stands for a right answer")
    schedule = None
    if recipe.loss == "mix":
        row_args = dict(recipe.loss_args)
        schedule = share(row_args, asked)
        recipe = attrs.evolve(recipe, loss_args=row_args)
    loss, translated, names, more = loss_names(recipe.loss, asked, lambda name: keywords(losses.registry.resolve(name)))
    recipe = attrs.evolve(recipe, loss=loss, loss_args=recipe.loss_args if loss == recipe.loss else {})
    _weights(recipe)
    estimator = None if recipe.advantage is None else advantages.registry.resolve(recipe.advantage)
    estimator_settings, threshold, idle = estimator_args(settings, estimator)
    kl, penalty, entropy = coefficients(settings, recipe)
    function = losses.registry.resolve(recipe.loss)
    check_settings("algorithm.policy_loss_fn_args", function, translated, names)
    args = {**recipe.loss_args, **translated}
    composed, extra = _composed(losses, settings, recipe, kl, entropy)
    prepared = losses.prepare(composed, {**args, **extra})
    _fits(settings, recipe, prepared)
    all_settings = {**recipe.advantage_args, **estimator_settings}
    compared = recipe.advantage in ("gigpo", "step_wise_grpo") or (
        "singleton" in keywords(estimator or _none) and all_settings.get("singleton", "zero") == "zero"
    )
    if recipe.repeat_times == 1 and compared and recipe.advantage != "reinforce":
        raise contradiction("repeat_times", 1, "a group of one has no baseline, and its advantages are 0")
    return Method(
        recipe=attrs.evolve(recipe, advantage_args=all_settings),
        loss=composed,
        loss_args={**args, **extra},
        estimator=estimator or _none,
        kl_loss=kl,
        kl_penalty=penalty,
        penalty=_penalty(settings.kl_penalty_fn),
        entropy=entropy if settings.entropy_loss_fn != "exact" else 0.0,
        threshold=threshold,
        old_logprobs=_old(settings, prepared),
        expert_ratio=expert_ratio(settings),
        expert_weights=weights,
        mu=schedule,
        inputs=tuple(prepared.inputs),
        unused=(*more, *idle),
    )


def _row(settings: Algorithm) -> tuple[Recipe, dict[str, Any], str]:
    """Return the algorithm's row with the settings in it, the loss's arguments, and the weights of experts."""
    recipe = algorithms.registry[settings.algorithm_type]
    changes: dict[str, Any] = {"repeat_times": settings.repeat_times}
    changes |= {"advantage": ESTIMATORS.get(settings.advantage_fn or "", settings.advantage_fn)}
    if settings.advantage_fn in ("clipb", "clipv"):
        why = "a loop of your own can use rlkit.corrections.clip_b and clip_v"
        raise contradiction("advantage_fn", settings.advantage_fn, why)
    changes |= {"loss": LOSSES.get(settings.policy_loss_fn or "", settings.policy_loss_fn)}
    if changes["advantage"] not in (None, recipe.advantage):
        changes |= {
            "advantage_args": OF_ESTIMATORS.get(changes["advantage"], {}),
            "level": _level(changes["advantage"]),
        }
        if recipe.advantage is None:
            raise contradiction("advantage_fn", settings.advantage_fn, f"{settings.algorithm_type} has no advantages")
    named = settings.policy_loss_fn or ""
    if changes["loss"] not in (None, recipe.loss) or (named in DEFAULTS and named != "mix"):
        changes |= {"loss_args": DEFAULTS.get(named, {})}
    loss_args = dict(settings.policy_loss_fn_args or {})
    mode = settings.loss_agg_mode
    if loss_args.get("loss_agg_mode") is not None:
        if mode not in (None, loss_args["loss_agg_mode"]):
            raise contradiction(
                "policy_loss_fn_args.loss_agg_mode", loss_args["loss_agg_mode"], f"loss_agg_mode={mode}"
            )
        mode = loss_args["loss_agg_mode"]
    loss_args.pop("loss_agg_mode", None)
    mixed = (changes["loss"] or recipe.loss) == "mix"
    parts = [(loss_args.pop(f"{part}_loss_agg_mode", None) if mixed else None) or mode for part in ("grpo", "sft")]
    changes |= {"weights": parts[0]}
    expert = parts[1] or recipe.weights
    recipe = attrs.evolve(recipe, **{name: value for name, value in changes.items() if value is not None})
    _weights(attrs.evolve(recipe, weights=expert))
    return recipe, loss_args, expert


def _penalty(name: str | None) -> str:
    """Return the estimator of the KL penalty; of an older policy there is nothing to correct by, so it is k3."""
    return {"corrected_k3": "k3", "none": "k1"}.get(name or "k1", KL.get(name or "k1", name or "k1"))


def _old(settings: Algorithm, prepared: Any) -> str | None:
    """Return which input the policy's logprobs before its first update become."""
    if settings.bypass_old_logprobs:
        return None
    for name in ("old_logprobs", "sampling_logprobs"):
        if name in prepared.inputs:
            return name
    raise contradiction("bypass_old_logprobs", value=False, why="the loss takes no ratio")


def _none(*_: Any, **__: Any) -> Any:
    raise ConfigError("this algorithm has no advantages")


def _level(advantage: Any) -> str:
    """Return what an estimator that is named by itself is given."""
    rows = [row for row in algorithms.registry.values() if row.advantage == advantage]
    if rows:
        return str(rows[0].level)
    first = next(iter(inspect.signature(advantages.registry.resolve(advantage)).parameters.values()))
    return "token" if first.kind is first.KEYWORD_ONLY else "group"


def _weights(recipe: Recipe) -> None:
    """Raise where the mode is unknown."""
    extra: dict[str, Any] = {"constant": 1.0} if recipe.weights.endswith("-norm") else {}
    extra |= {"groups": [0]} if recipe.weights == "prompt-mean" else {}
    advantages.token_weights([1], recipe.weights, **extra)


def _composed(
    losses: Any, settings: Algorithm, recipe: Recipe, kl: float, entropy: float
) -> tuple[Any, dict[str, Any]]:
    """Return the loss with its terms, and the terms' coefficients."""
    loss: Any = recipe.loss
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
    """Raise where the loss wants what there is not, or the estimator does."""
    where, name = "policy_loss_fn", settings.policy_loss_fn or recipe.loss
    if ("advantages" in prepared.inputs) != (recipe.advantage is not None):
        what = "needs advantages" if "advantages" in prepared.inputs else "takes no advantages"
        raise contradiction(where, name, f"the loss {what}")
    if (prepared.level == "pair") != (recipe.data == "pairs") or prepared.driver != "logprobs":
        raise contradiction(where, name, f"the loss is one of {prepared.level}s, over {prepared.driver}")
    there = {"advantages", "reference_logprobs"} | ({"sampling_logprobs"} if recipe.rolls_out else set())
    there |= ({"expert"} if recipe.data == "mixed" else set()) | (
        set() if settings.bypass_old_logprobs else {"old_logprobs"}
    )
    for missing in sorted(set(prepared.inputs) - there):
        raise contradiction(where, name, f"the loss needs {missing!r}, which there is not")
    if recipe.advantage is None:
        if settings.entropy_loss_fn_args and settings.entropy_loss_fn != "exact":
            raise contradiction("entropy_loss_fn", settings.entropy_loss_fn, "the sampled bonus is part of advantages")
        return
    named = list(inspect.signature(advantages.registry.resolve(recipe.advantage)).parameters.values())
    passed = {"group": ("lengths",), "turn": ()}.get(recipe.level, _TOKENWISE)
    skipped = {"group": 1, "turn": 2}.get(recipe.level, 0)
    wanted = [p.name for p in named[skipped:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for missing in sorted({*wanted} - {*passed, *(settings.advantage_fn_args or {}), *recipe.advantage_args}):
        raise contradiction("advantage_fn", recipe.advantage, f"it needs {missing!r}, which there is not")


_TOKENWISE = ("rewards", "values", "baseline", "teacher_logprobs", "sampling_logprobs", "reference_logprobs")
