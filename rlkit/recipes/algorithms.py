"""The table of algorithms: their estimator, loss, token weights, and further requirements.

An algorithm is just such a row. ``register`` adds one; settings change single entries of a row.

Trinity-RFT's names of estimators, losses and their arguments, translated to rlkit's.

``DEFAULTS`` of losses and ``OF_ESTIMATORS`` are Trinity's defaults where rlkit's own functions have others: a name
from there has the same numbers as there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check, advantages, losses, schedules
from rlkit.errors import ConfigError
from rlkit.recipes.settings import TABLE, Algorithm
from rlkit.registry import Registry

__all__ = ["Recipe", "best_of_group", "register", "registry"]

Named: TypeAlias = str | Callable[..., object]  # of a registry, or its implementation
Level: TypeAlias = Literal["group", "turn", "token"]
ESTIMATORS: Mapping[str, str] = TABLE["names"]["estimators"]
LOSSES: Mapping[str, str] = TABLE["names"]["losses"]
KL: Mapping[str, str] = TABLE["names"]["kl"]
OF_ESTIMATORS: Mapping[str, Mapping[str, object]] = TABLE["defaults"]["estimators"]
DEFAULTS: Mapping[str, Mapping[str, object]] = TABLE["defaults"]["losses"]
_ARGUMENTS = TABLE["arguments"]


def contradiction(name: str, value: object, why: str) -> ConfigError:
    """Return the error for a setting that contradicts others."""
    return ConfigError(f"algorithm.{name}", f"is {value!r}", "a setting that fits the others", why)


def loss_names(loss: Named, given: Mapping[str, object]) -> tuple[Named, dict[str, object], dict[str, str], list[str]]:
    """Return the loss with these arguments, its settings, rlkit's name -> the given one, and those without effect.

    Bounds are on the ratio itself.
    """
    where, given = "policy_loss_fn_args", dict(given)
    settings: dict[str, object] = {}
    names: dict[str, str] = {}
    unused: list[str] = []
    if loss == "ppo" and given.pop("enable_sequence_masking", False):
        loss = "opsm"
    elif loss == "ppo" and "delta_sequence_masking" in given:
        del given["delta_sequence_masking"]
        unused.append(f"algorithm.{where}.delta_sequence_masking (enable_sequence_masking is off)")
    if loss in ("ppo", "opsm") and given.pop("fallback_to_policy_gradient", False):
        # the ratio is exp(lp - sg[lp]) = 1, so that no bound is ever met
        return "reinforce", {}, {}, [f"algorithm.{where}.{name} (no ratio is taken)" for name in given]
    _mask_bounds(given)
    for name, value in given.items():
        made = _bounds(f"algorithm.{where}.{name}", name, value)
        if made is None:
            made = _other_argument(loss, name, value, unused)
        settings |= made
        names |= dict.fromkeys(made, name)
    if loss == "rec" and settings.get("clip_mode") == "ring":  # its bounds once any argument is given
        settings = {"ring_low_threshold": 0.6, "ring_high_threshold": 1.4, **settings}
    return loss, settings, names, unused


def _passed(where: str, name: str, value: object, unused: list[str]) -> bool:
    """Return whether an argument may be present without being passed on: it has no effect, or requests nothing."""
    if name in _ARGUMENTS["unused"]:
        unused.append(f"algorithm.{where}.{name} ({_ARGUMENTS['unused'][name]})")
        return True
    if name not in _ARGUMENTS["neutral"]:
        return False
    neutral, why = _ARGUMENTS["neutral"][name].get("value"), _ARGUMENTS["neutral"][name]["why"]
    if value != neutral:
        raise ConfigError(f"algorithm.{where}.{name}", f"is {value!r}", f"{neutral!r}", why)
    return True


def _other_argument(loss: Named, name: str, value: object, unused: list[str]) -> dict[str, object]:
    """Return an argument that is no bound by rlkit's name; none where it is without effect."""
    known = name in keywords(losses.registry.resolve(loss))
    if not known and _passed("policy_loss_fn_args", name, value, unused):
        return {}
    if str(value).startswith("gspo"):
        raise contradiction(f"policy_loss_fn_args.{name}", value, "the loss gspo has one ratio per sequence")
    return {name if known else _ARGUMENTS["losses"].get(name, name): value}


_RANGES = {"clip_range": "both", "epsilon": "inverse", "clip_range_low": "low", "epsilon_low": "low"}
_RANGES |= {"clip_range_high": "high", "epsilon_high": "high"}
_RINGS = {"epsilon_low_prime": ("ring_low_threshold", -1), "epsilon_high_prime": ("ring_high_threshold", 1)}


def _bounds(where: str, name: str, value: object) -> dict[str, object] | None:
    """Return bounds on the ratio from a distance to 1; None where it is not a number."""
    if name in _RINGS:
        key, sign = _RINGS[name]
        return {key: 1 + sign * _check.real(where, value, low=0.0)}
    kind = _RANGES.get(name)
    if kind is None or value is None:
        return None if kind is None else {}
    number = _check.real(where, value, low=0.0)
    low = 1 / (1 + number) if kind == "inverse" else max(0.0, 1 - number)
    bounds: dict[str, object] = {} if kind == "high" else {"clip_low_threshold": low}
    return bounds if kind == "low" else {**bounds, "clip_high_threshold": 1 + number}


def _mask_bounds(given: dict[str, object]) -> None:
    """Take out the bounds of CISPO's mask, which here are those of its ratio."""
    for side, default in (("low", 1.0), ("high", 0.28)):
        name = f"mask_clip_range_{side}"
        value, bound = given.pop(name, None), given.get(f"clip_range_{side}", default)
        masked = given.get("enable_mask_clip", False)
        if masked and (default if value is None else value) != bound:
            raise contradiction(f"policy_loss_fn_args.{name}", value, f"the mask uses the bound clip_range_{side}")


_MU = ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
_CHORD_SPANS = {"mu_warmup_steps": 0, "mu_decay_steps": 100}
_GIVEN = ("mask", "kl", "kl_coef", "rng", "bootstrap_value")
_PENALTIES = ("k1", "k2", "k3", "abs", *KL)


def estimator_args(
    settings: Algorithm, function: Callable[..., object] | None
) -> tuple[dict[str, object], float | None, list[str]]:
    """Return the estimator's settings, the threshold of groups that train, and the arguments without effect."""
    args = dict(settings.advantage_fn_args or {})
    threshold = args.pop("std_threshold", None)
    threshold = _check.optional(_check.real, "algorithm.advantage_fn_args.std_threshold", threshold, low=0.0)
    if function is None:
        if args:
            raise contradiction("advantage_fn_args", args, f"{settings.algorithm_type} has no advantages")
        return {}, threshold, []
    translated: dict[str, object] = {}
    names: dict[str, str] = {}
    unused: list[str] = []
    known = keywords(function)
    for name, value in args.items():
        if name not in known and _passed("advantage_fn_args", name, value, unused):
            continue
        new = name if name in known else _ARGUMENTS["estimators"].get(name, name)
        if new in translated:
            raise contradiction(f"advantage_fn_args.{name}", value, f"{names[new]} sets the same")
        names[new] = name
        translated[new] = {"std": "group"}.get(value, value) if name == "fnorm" else value
    check_settings("algorithm.advantage_fn_args", function, translated, names)
    return translated, threshold, unused


def share(own: dict[str, Any], given: dict[str, Any]) -> Callable[[int], float]:
    """Return the share of the supervised term by step; its arguments are taken out of both mappings."""
    mine, theirs = ({key: args.pop(key) for key in ("mu", *_MU) if key in args} for args in (own, given))
    spans = {key: mine[key] for key in _MU if key in mine}
    if "mu" in theirs and (spans or len(theirs) > 1):
        raise contradiction("policy_loss_fn_args.mu", theirs["mu"], "mu already has a schedule")
    changed = {key: theirs[key] for key in _MU if key in theirs}
    if spans or changed:
        spans = {key.removeprefix("mu_"): value for key, value in {**(spans or _CHORD_SPANS), **changed}.items()}
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
            raise contradiction(f"{part}_args.adaptive", value=True, why="it needs your own loop, with losses.kl")
        for unset in ("target_kl", "horizon"):
            if args.get(unset) is None:
                args.pop(unset, None)
        if args:
            name = next(iter(args))
            raise ConfigError(f"algorithm.{part}_args.{name}: unknown setting{_check.suggest(name, [key])}")
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
        args.pop("max_staleness", None)  # compared with the section synchronizer, which is unknown here
    ratio = args.pop("expert_data_ratio", 0.5)
    name = args.pop("sft_dataset_name", None)
    if name is not None and not isinstance(name, str):
        where = "algorithm.sample_strategy_args.sft_dataset_name"
        raise ConfigError(where, f"is {name!r}", "a name in auxiliary_buffers")
    if args:
        unknown = next(iter(args))
        known = _check.suggest(unknown, ["expert_data_ratio"])
        raise ConfigError(f"algorithm.sample_strategy_args.{unknown}: unknown setting{known}")
    return _check.real("algorithm.sample_strategy_args.expert_data_ratio", ratio, above=0.0, below=1.0)


def keywords(function: Callable[..., object]) -> list[str]:
    """Return the settings: parameters with a default that the loop does not give."""
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
            raise ConfigError(f"{where}.{said}: unknown setting{_check.suggest(said, known)}")


_NEEDS = {"values": "critic", "teacher_logprobs": "teacher", "baseline": "greedy"}


def _read_only(value: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(value))


@attrs.frozen
class Recipe:
    """One algorithm.

    Attributes:
        source: of the algorithm, and its particulars here.
        data: the training data: "rollouts", "demonstrations", "texts" (all of their tokens), "pairs" (chosen,
            rejected), or "mixed" (rollouts and demonstrations).
        advantage: an estimator: a name of ``rlkit.advantages.registry`` or a function; None where the loss has none.
        level: the estimator's input: "group": ``rewards``, one array per group, and ``lengths`` where it names
            them. "turn": per group the rewards of each trajectory's turns, and ``states`` or ``steps``. "token":
            by keyword those of ``rewards``, ``values``, ``baseline``, ``teacher_logprobs`` and ``sampling_logprobs``
            that it names, one array per trajectory.
        advantage_args: its settings.
        loss: a name of ``rlkit.losses.registry`` or a function.
        loss_args: its settings.
        weights: a mode of ``rlkit.advantages.token_weights``, taken over each optimizer step.
        repeat_times: episodes per task.
        select: which episodes train: "all", the "best" of each group, or "informative" groups, in which rewards
            differ; these are played until the step has as many as were asked for, four times at most.
        needs: what the estimator needs besides rewards: a "critic" (it names ``values``), a "teacher"
            (``teacher_logprobs``), or a "greedy" episode of each task (``baseline``).
        hint: "": a teacher is another model. "peer": it is the policy itself, which has been told a right answer of the
            same group before it scores one; a sample without such an answer is not trained.
    """

    source: str
    data: Literal["rollouts", "demonstrations", "texts", "pairs", "mixed"] = "rollouts"
    advantage: Named | None = "grpo"
    level: Level = "group"
    advantage_args: Mapping[str, object] = attrs.field(factory=dict, converter=_read_only)
    loss: Named = "ppo"
    loss_args: Mapping[str, object] = attrs.field(factory=dict, converter=_read_only)
    weights: str = "token-mean"
    repeat_times: int = 8
    select: Literal["all", "best", "informative"] = "all"
    hint: Literal["", "peer"] = ""

    def __attrs_post_init__(self) -> None:
        _check.choice("Recipe.data", self.data, ("rollouts", "demonstrations", "texts", "pairs", "mixed"))
        _check.choice("Recipe.level", self.level, ("group", "turn", "token"))
        _check.choice("Recipe.select", self.select, ("all", "best", "informative"))
        _check.integer("Recipe.repeat_times", self.repeat_times, low=1)
        _check.choice("Recipe.hint", self.hint, ("", "peer"))

    @property
    def needs(self) -> tuple[str, ...]:
        if self.advantage is None or self.level != "token":
            return ()
        named = inspect.signature(advantages.registry.resolve(self.advantage)).parameters
        needs = tuple(need for name, need in _NEEDS.items() if name in named)
        return tuple("itself" if need == "teacher" and self.hint else need for need in needs)

    @property
    def rolls_out(self) -> bool:
        """Whether the recipe plays episodes."""
        return self.data in ("rollouts", "mixed")


def best_of_group(rewards: Iterable[ArrayLike]) -> list[np.ndarray]:
    """Return 1 for the best sample of each group, the first of several, and 0 for the others.

    >>> best_of_group([[0.1, 0.7, 0.7], [0.0, 0.0]])
    [array([0., 1., 0.]), array([1., 0.])]

    Source: RAFT, arXiv:2304.06767, which fine-tunes on the best of K.
    """
    chosen = []
    for group in rewards:
        scored = np.where(np.isnan(group), -np.inf, group)
        one = np.zeros(len(scored))
        if np.isfinite(scored).any():
            one[int(np.argmax(scored))] = 1.0
        chosen.append(one)
    return chosen


registry = Registry("algorithm")
"""Name -> ``Recipe``."""


def register(name: str, recipe: Recipe) -> Recipe:
    """Add an algorithm.

    >>> register("grpo_of_mine", Recipe("mine", advantage="maxrl", weights="seq-mean-token-sum")).loss
    'ppo'
    >>> del registry["grpo_of_mine"]

    Raises:
        ConfigError: the name is taken.
    """
    return registry.register(name)(recipe)  # type: ignore[type-var]


_SUM_NORM = "seq-mean-token-sum-norm"
_CHORD = {"mu_warmup_steps": 0, "mu_decay_steps": 100, "mu_peak": 0.9, "mu_valley": 0.05}
_ROWS = {
    "grpo": Recipe("arXiv:2402.03300"),
    "dr_grpo": Recipe("arXiv:2503.20783", advantage="dr_grpo", weights=_SUM_NORM),
    "dapo": Recipe("arXiv:2503.14476", loss_args={"clip_high_threshold": 1.28}, select="informative"),
    "rloo": Recipe("arXiv:2402.14740", advantage="rloo"),
    "reinforceplusplus": Recipe(
        "arXiv:2501.03262", advantage="reinforce_pp", level="token", advantage_args=OF_ESTIMATORS["reinforce_pp"]
    ),
    "remax": Recipe("arXiv:2310.10505", advantage="remax", level="token"),
    "opmd": Recipe("arXiv:2501.12599", advantage="opmd", loss="opmd"),
    "asymre": Recipe("arXiv:2506.20520, half the gradient", advantage="asymre", loss="opmd"),
    "topr": Recipe("arXiv:2503.14286", advantage="reinforce", loss="topr"),
    "cispo": Recipe("arXiv:2506.13585", loss="cispo", loss_args=DEFAULTS["cispo"]),
    "gspo": Recipe("arXiv:2507.18071", loss="gspo", weights="seq-mean-token-mean"),
    "sapo": Recipe("arXiv:2511.20347, the gate a constant", loss="sapo", loss_args=DEFAULTS["sapo"]),
    "sppo": Recipe("arXiv:2108.05828", advantage="opmd", loss="sppo"),
    "rec": Recipe("arXiv:2509.24203", advantage="rec", loss="rec"),
    "gigpo": Recipe("arXiv:2505.10978", advantage="gigpo", level="turn", advantage_args=OF_ESTIMATORS["gigpo"]),
    "multi_step_grpo": Recipe("GRPO's advantage at every turn", advantage="step_wise_grpo", level="turn"),
    "ppo": Recipe("arXiv:1707.06347", advantage="gae", level="token", advantage_args=OF_ESTIMATORS["gae"]),
    "on_policy_distill": Recipe("arXiv:2306.13649", advantage="on_policy_distillation", level="token"),
    "jsd": Recipe("arXiv:2306.13649", advantage="jsd_gradient", level="token"),
    "sdpo": Recipe(
        "arXiv:2601.20802, sampled tokens, a right answer of the group as the hint",
        advantage="on_policy_distillation",
        level="token",
        loss="importance_sampling",
        hint="peer",
    ),
    "sft": Recipe("likelihood", data="demonstrations", advantage=None, loss="cross_entropy"),
    "cpt": Recipe("likelihood", data="texts", advantage=None, loss="cross_entropy"),
    "raft": Recipe("arXiv:2304.06767", advantage=best_of_group, loss="reinforce", select="best"),
    "dpo": Recipe("arXiv:2305.18290", data="pairs", advantage=None, loss="dpo"),
    "mix": Recipe("arXiv:2508.11408, with a fixed mu", data="mixed", loss="mix", loss_args=DEFAULTS["mix"]),
    "chord": Recipe("arXiv:2508.11408, with its schedule of mu", data="mixed", loss="mix", loss_args=_CHORD),
    "mix_chord": Recipe("arXiv:2508.11408, with phi", data="mixed", loss="mix", loss_args=DEFAULTS["mix_chord"]),
}
registry.update(_ROWS)
registry["grpo_verl"] = registry["grpo"]
