"""The table of algorithms, Trinity-RFT's names for their parts, and what a run's settings make of a row.

Each row is a composition: an estimator of advantages, a loss, the weights of tokens, and the data that it trains on.
``register`` adds a row; the section ``algorithm`` of a run changes single entries of one (``resolve``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check, advantages, losses, schedules
from rlkit.errors import ConfigError
from rlkit.recipes.settings import Algorithm
from rlkit.registry import Registry

__all__ = ["Method", "Recipe", "best_of_group", "register", "registry", "resolve"]

Named: TypeAlias = str | Callable[..., Any]  # a name of a registry, or a function
Level: TypeAlias = Literal["group", "turn", "token"]


def _read_only(value: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(value))


@attrs.frozen
class Recipe:
    """One algorithm.

    Attributes:
        source: the paper, and what is particular here.
        data: the training data: "rollouts", "demonstrations", "texts" (all of their tokens), "pairs" (chosen,
            rejected), or "mixed" (rollouts and demonstrations).
        advantage: an estimator: a name of ``rlkit.advantages.registry`` or a function; None where the loss has none.
        loss: a name of ``rlkit.losses.registry`` or a function.
        level: the estimator's input: "group": ``rewards``, one array per group, and ``lengths`` where it names
            them. "turn": per group the rewards of each trajectory's turns, and ``states`` or ``steps``. "token":
            by keyword those of ``rewards``, ``values``, ``teacher_logprobs``, ``sampling_logprobs`` and
            ``reference_logprobs`` that it names, one array per trajectory.
        advantage_args, loss_args: settings of the estimator and of the loss.
        weights: a mode of ``rlkit.advantages.token_weights``, applied to each optimizer step.
        repeat_times: episodes per task.
        select: which episodes train: "all", the "best" of each group, or "informative" groups, in which rewards
            differ; these are played until the step has as many as were asked for, four times at most.
    """

    source: str
    data: Literal["rollouts", "demonstrations", "texts", "pairs", "mixed"]
    advantage: Named | None
    loss: Named
    level: Level = "group"
    advantage_args: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only)
    loss_args: Mapping[str, Any] = attrs.field(factory=dict, converter=_read_only)
    weights: str = "token-mean"
    repeat_times: int = 8
    select: Literal["all", "best", "informative"] = "all"

    def __attrs_post_init__(self) -> None:
        _check.choice("Recipe.data", self.data, ("rollouts", "demonstrations", "texts", "pairs", "mixed"))
        _check.choice("Recipe.level", self.level, ("group", "turn", "token"))
        _check.choice("Recipe.select", self.select, ("all", "best", "informative"))
        _check.integer("Recipe.repeat_times", self.repeat_times, low=1)

    @property
    def needs(self) -> tuple[str, ...]:
        """The estimator's requirements besides rewards: a "critic" (for ``values``), a "teacher"."""
        if self.advantage is None or self.level != "token":
            return ()
        named = inspect.signature(advantages.registry.resolve(self.advantage)).parameters
        return tuple(need for name, need in (("values", "critic"), ("teacher_logprobs", "teacher")) if name in named)

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

    >>> row = Recipe("mine", data="rollouts", advantage="maxrl", loss="ppo", weights="seq-mean-token-sum")
    >>> register("grpo_of_mine", row).repeat_times
    8
    >>> del registry["grpo_of_mine"]

    Raises:
        ConfigError: the name is taken.
    """
    return registry.register(name)(recipe)  # type: ignore[type-var]


_MEAN, _BY_SEQUENCE, _SUM_NORM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"
_WIDE = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.28}
_PHI = {"phi": True, "dual_clip": 3.0, "mu_warmup_steps": 0, "mu_decay_steps": 0, "mu_peak": 0.1, "mu_valley": 0.1}

# Settings of rows are Trinity-RFT's defaults where those of rlkit's functions are others: a name has its numbers there.
# fmt: off
registry.update({
    "grpo": Recipe("arXiv:2402.03300", "rollouts", "grpo", "ppo", "group", weights=_MEAN),
    "dr_grpo": Recipe("arXiv:2503.20783", "rollouts", "dr_grpo", "ppo", "group", weights=_SUM_NORM),
    "dapo": Recipe("arXiv:2503.14476", "rollouts", "grpo", "ppo", "group", loss_args={"clip_high_threshold": 1.28},
                   weights=_MEAN, select="informative"),
    "rloo": Recipe("arXiv:2402.14740", "rollouts", "rloo", "ppo", "group", weights=_MEAN),
    "reinforceplusplus": Recipe("arXiv:2501.03262", "rollouts", "reinforce_pp", "ppo", "token",
                                advantage_args={"eps": 1e-8}, weights=_MEAN),
    "opmd": Recipe("arXiv:2501.12599", "rollouts", "opmd", "opmd", "group", weights=_MEAN),
    "asymre": Recipe("arXiv:2506.20520, half the gradient", "rollouts", "asymre", "opmd", "group", weights=_MEAN),
    "topr": Recipe("arXiv:2503.14286", "rollouts", "reinforce", "topr", "group", weights=_MEAN),
    "cispo": Recipe("arXiv:2506.13585", "rollouts", "grpo", "cispo", "group", loss_args=_WIDE, weights=_MEAN),
    "gspo": Recipe("arXiv:2507.18071", "rollouts", "grpo", "gspo", "group", weights=_BY_SEQUENCE),
    "sapo": Recipe("arXiv:2511.20347, the gate a constant", "rollouts", "grpo", "sapo", "group",
                   loss_args={"detached": True}, weights=_MEAN),
    "sppo": Recipe("arXiv:2108.05828", "rollouts", "opmd", "sppo", "group", weights=_MEAN),
    "rec": Recipe("arXiv:2509.24203", "rollouts", "rec", "rec", "group", weights=_MEAN),
    "gigpo": Recipe("arXiv:2505.10978", "rollouts", "gigpo", "ppo", "turn", advantage_args={"scale": "none"},
                    weights=_MEAN),
    "multi_step_grpo": Recipe("GRPO's advantage at every turn", "rollouts", "step_wise_grpo", "ppo", "turn",
                              weights=_MEAN),
    "ppo": Recipe("arXiv:1707.06347", "rollouts", "gae", "ppo", "token", advantage_args={"lam": 1.0}, weights=_MEAN),
    "on_policy_distill": Recipe("arXiv:2306.13649", "rollouts", "on_policy_distillation", "ppo", "token",
                                weights=_MEAN),
    "jsd": Recipe("arXiv:2306.13649", "rollouts", "jsd_gradient", "ppo", "token", weights=_MEAN),
    "raft": Recipe("arXiv:2304.06767", "rollouts", best_of_group, "reinforce", "group", weights=_MEAN, select="best"),
    "sft": Recipe("likelihood", "demonstrations", None, "cross_entropy", weights=_MEAN),
    "cpt": Recipe("likelihood", "texts", None, "cross_entropy", weights=_MEAN),
    "dpo": Recipe("arXiv:2305.18290", "pairs", None, "dpo"),
    "mix": Recipe("arXiv:2508.11408, with a fixed mu", "mixed", "grpo", "mix", "group", loss_args={"mu": 0.1},
                  weights=_MEAN),
    "mix_chord": Recipe("arXiv:2508.11408, with phi", "mixed", "grpo", "mix", "group", loss_args=_PHI, weights=_MEAN),
})
# fmt: on
registry["grpo_verl"] = registry["grpo"]

# Trinity-RFT's name -> rlkit's.
# fmt: off
ESTIMATORS = {
    "reinforceplusplus": "reinforce_pp", "on_policy_distill": "on_policy_distillation", "ppo": "gae",
    "grpo_verl": "grpo", "opmd_verl": "opmd", "asymre_verl": "asymre", "clipb": "grpo", "clipv": "grpo",
}
MASKS = {"clipb": "clip_b", "clipv": "clip_v"}
LOSSES = {"sft": "cross_entropy", "mix_chord": "mix", "vanilla": "reinforce"}
KL = {"low_var_kl": "clamped", "corrected_k3": "ratio_corrected"}
ESTIMATOR_ARGS = {
    "epsilon": "eps", "std_cal_level": "scale", "std_normalize": "normalize", "fnorm": "scale", "kl_coef": "coef",
    "opmd_baseline": "baseline", "baseline_shift": "shift", "lambda_coef": "beta", "enable_step_norm": "step_norm",
}
LOSS_ARGS = {
    "clip_ratio_c": "dual_clip", "temp": "temperature", "enable_phi_function": "phi",
    "enable_mask_clip": "unified_mask", "advantage_threshold": "threshold", "delta_sequence_masking": "delta",
}
BOUNDS = {  # distances to 1, as bounds on the ratio itself
    "clip_range": ("low", "high"), "clip_range_low": ("low",), "epsilon_low": ("low",),
    "clip_range_high": ("high",), "epsilon_high": ("high",),
}
IGNORED_ARGS = {  # sizes of micro-batches and names of fields, on which the weights of tokens here do not depend
    "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer", "chunk_size",
    "train_batch_size_usual", "train_batch_size_expert", "step_reward_key", "env_state_hash_key",
}
NEUTRAL_ARGS = {  # other values would change training
    "rank_penalty": None, "duplicate_experiences": False, "temperature": 1.0, "cutoff_prob": 1.0,
    "fallback_to_policy_gradient": False, "enable_sequence_masking": False,
}
# fmt: on
_PENALTIES = ("k1", "k2", "k3", "abs", *KL)
_MU = ("mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
_TOKENWISE = ("rewards", "values", "teacher_logprobs", "sampling_logprobs", "reference_logprobs")
_OF_LOOP = ("mask", "kl", "kl_coef", "rng", "bootstrap_value")  # settings of estimators that the loop gives


@attrs.frozen(eq=False)
class Method:
    """A row with a run's settings in it: names translated, arguments checked, the loss composed.

    Attributes:
        recipe: the algorithm's row, settings applied.
        loss: a name or a function; with a KL or entropy term where one is on.
        loss_args: its settings.
        estimator: the function of ``recipe.advantage``, or None.
        kl_loss, kl_penalty, entropy: coefficients; 0 is off.
        penalty: estimator of the KL penalty.
        threshold: groups whose rewards' deviation is not above it do not train; None: all do.
        old_logprobs: the input name for the policy's own logprobs before its first update; None: they are not
            computed.
        expert_ratio: share of demonstrations in a mixed batch.
        expert_weights: the mode of token weights of demonstrations in a mixed batch.
        mu: step -> the share of the supervised term; None where the loss has none.
        inputs: names of what the loss reads.
        entropy_mask: "clip_b" or "clip_v" of ``rlkit.corrections``, which drops tokens by entropy; None: none.
        entropy_mask_args: its settings.
        unused: keys of arguments that have no effect.
    """

    recipe: Recipe
    loss: Named
    loss_args: Mapping[str, Any]
    estimator: Callable[..., Any] | None
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
    entropy_mask: str | None
    entropy_mask_args: Mapping[str, float]
    unused: Sequence[str]

    @property
    def wants_reference(self) -> bool:
        """Whether logprobs of a reference policy are needed."""
        return self.kl_penalty > 0 or "reference_logprobs" in self.inputs


def resolve(settings: Algorithm) -> Method:
    """Return the method that the section ``algorithm`` describes.

    Raises:
        UnknownNameError: no algorithm, estimator, loss or KL estimator has that name.
        ConfigError: an argument is unknown, out of range, or contradicts the algorithm.

    >>> found = resolve(Algorithm(algorithm_type="grpo", policy_loss_fn_args={"clip_range_high": 0.28}))
    >>> found.loss, dict(found.loss_args), found.wants_reference
    ('ppo', {'clip_high_threshold': 1.28}, False)
    """
    unused: list[str] = []
    row, given = _replace_parts(settings), dict(settings.policy_loss_fn_args or {})
    row, expert_weights = _replace_weights(row, given, settings.loss_agg_mode)
    row, mu = _take_mu(row, given)
    row, given = _replace_ppo(row, given, unused)
    row = _add_loss_args(row, given, unused)
    row, threshold, mask_args = _add_advantage_args(row, settings, unused)
    kl, penalty, entropy = _read_coefficients(settings, row)
    loss, loss_args = row.loss, dict(row.loss_args)
    kl_name = KL.get(settings.kl_loss_fn or "k2", settings.kl_loss_fn or "k2")
    if kl_name != "none":
        losses.kl.registry.resolve(kl_name)
    if kl > 0:
        loss, loss_args = losses.with_kl(loss, kl, kl_name), {**loss_args, "kl_coef": kl}
    exact = settings.entropy_loss_fn == "exact"
    if entropy > 0 and exact:
        loss, loss_args = losses.with_entropy(loss, entropy), {**loss_args, "entropy_coef": entropy}
    prepared = losses.prepare(loss, loss_args)
    _check_fit(settings, row, prepared)
    return Method(
        recipe=row,
        loss=loss,
        loss_args=loss_args,
        estimator=None if row.advantage is None else advantages.registry.resolve(row.advantage),
        kl_loss=kl,
        kl_penalty=penalty,
        # without an older policy the penalty's ratio cannot be corrected
        penalty={"corrected_k3": "k3", "none": "k1"}.get(
            settings.kl_penalty_fn or "k1", KL.get(settings.kl_penalty_fn or "k1", settings.kl_penalty_fn or "k1")
        ),
        entropy=0.0 if exact else entropy,
        threshold=threshold,
        old_logprobs=_choose_old_logprobs(settings, prepared.inputs),
        expert_ratio=_read_expert_ratio(settings),
        expert_weights=expert_weights,
        mu=mu,
        inputs=tuple(prepared.inputs),
        entropy_mask=MASKS.get(settings.advantage_fn or ""),
        entropy_mask_args=mask_args,
        unused=unused,
    )


def _refuse(name: str, value: object, why: str) -> ConfigError:
    """Return the error for a setting that contradicts others."""
    return ConfigError(f"algorithm.{name}", f"is {value!r}", "a setting that fits the others", why)


def _replace_parts(settings: Algorithm) -> Recipe:
    """Return the algorithm's row with the estimator, the loss and the group size of the settings.

    Another estimator or loss comes with the settings of the first row that has it.
    """
    row: Recipe = registry[settings.algorithm_type]
    estimator, name = settings.advantage_fn or "", settings.policy_loss_fn or ""
    advantage, loss = ESTIMATORS.get(estimator, estimator), LOSSES.get(name, name)
    if settings.advantage_fn is not None and advantage != row.advantage:
        if row.advantage is None:
            raise _refuse("advantage_fn", estimator, f"{settings.algorithm_type} has no advantages")
        first = next((each for each in registry.values() if each.advantage == advantage), None)
        args, level = ({}, _guess_level(advantage)) if first is None else (first.advantage_args, first.level)
        row = attrs.evolve(row, advantage=advantage, advantage_args=args, level=level)
    if settings.policy_loss_fn is not None and (loss != row.loss or name == "mix_chord"):  # two rows have the loss mix
        named = registry.get(name)
        same = named is not None and named.loss == loss
        row = attrs.evolve(row, loss=loss, loss_args=named.loss_args if named is not None and same else {})
    return row if settings.repeat_times is None else attrs.evolve(row, repeat_times=settings.repeat_times)


def _guess_level(advantage: str) -> Level:
    first = next(iter(inspect.signature(advantages.registry.resolve(advantage)).parameters.values()))
    return "token" if first.kind is first.KEYWORD_ONLY else "group"


def _replace_weights(row: Recipe, given: dict[str, Any], mode: str | None) -> tuple[Recipe, str]:
    """Return the row with its mode of weights, and that of demonstrations; both are taken out of ``given``."""
    inner = given.pop("loss_agg_mode", None)
    if inner is not None and mode not in (None, inner):
        raise _refuse("policy_loss_fn_args.loss_agg_mode", inner, f"loss_agg_mode={mode}")
    weights = expert = inner or mode or row.weights
    if row.loss == "mix":
        weights = given.pop("grpo_loss_agg_mode", None) or weights
        expert = given.pop("sft_loss_agg_mode", None) or expert
    for each in (expert, weights):  # raises if the mode is unknown
        constant, groups = 1.0 if each.endswith("-norm") else None, [0] if each == "prompt-mean" else None
        advantages.token_weights([1], each, constant=constant, groups=groups)
    return attrs.evolve(row, weights=weights), expert


def _take_mu(row: Recipe, given: dict[str, Any]) -> tuple[Recipe, Callable[[int], float] | None]:
    """Return the row without the settings of the supervised term's share, and that share by step."""
    if row.loss != "mix":
        return row, None
    args = dict(row.loss_args)
    default, asked = ({key: x.pop(key) for key in ("mu", *_MU) if key in x} for x in (args, given))
    row = attrs.evolve(row, loss_args=args)
    spans = {key: value for key, value in {**default, **asked}.items() if key != "mu"}
    if "mu" in asked and spans:
        raise _refuse("policy_loss_fn_args.mu", asked["mu"], "mu already has a schedule")
    if spans:
        spans = {
            key.removeprefix("mu_"): x for key, x in {"mu_warmup_steps": 0, "mu_decay_steps": 100, **spans}.items()
        }
        schedules.chord_schedule(0, **spans)
        return row, lambda step: schedules.chord_schedule(step, **spans)
    fixed = asked.get("mu", default.get("mu", 0.1))
    share = _check.real("algorithm.policy_loss_fn_args.mu", fixed, low=0.0, high=1.0)
    return row, lambda _: share


def _replace_ppo(row: Recipe, given: dict[str, Any], unused: list[str]) -> tuple[Recipe, dict[str, Any]]:
    """Return the row and the loss's arguments; two switches of Trinity's PPO are losses with their own names here."""
    where = "algorithm.policy_loss_fn_args."
    if row.loss == "ppo" and given.pop("enable_sequence_masking", False):
        row = attrs.evolve(row, loss="opsm", loss_args={})
    elif row.loss == "ppo" and given.pop("delta_sequence_masking", None) is not None:
        unused.append(f"{where}delta_sequence_masking")
    if row.loss in ("ppo", "opsm") and given.pop("fallback_to_policy_gradient", False):
        unused += [where + name for name in given]  # the ratio is 1 there, so that no bound is ever met
        return attrs.evolve(row, loss="reinforce", loss_args={}), {}
    for side, default in (("low", 1.0), ("high", 0.28)):  # the mask of CISPO, whose bounds are the ratio's here
        name, bound = f"mask_clip_range_{side}", given.get(f"clip_range_{side}", default)
        value = given.pop(name, None)
        if given.get("enable_mask_clip", False) and (default if value is None else value) != bound:
            raise _refuse(f"policy_loss_fn_args.{name}", value, f"the mask uses the bound clip_range_{side}")
    return row, given


def _add_loss_args(row: Recipe, given: Mapping[str, Any], unused: list[str]) -> Recipe:
    """Return the row with these arguments of its loss, by rlkit's names."""
    where, made, known = "policy_loss_fn_args", dict[str, Any](), _list_settings(losses.registry.resolve(row.loss))
    for name, value in given.items():
        bounds = _read_bounds(f"algorithm.{where}.{name}", name, value)
        if bounds is not None:
            if not {*bounds} <= {*known}:
                raise ConfigError(f"algorithm.{where}.{name}: unknown setting{_check.suggest(name, known)}")
            made |= bounds
        elif str(value).startswith("gspo"):
            raise _refuse(f"{where}.{name}", value, "the loss gspo has one ratio per sequence")
        else:
            made |= _rename(where, name, value, LOSS_ARGS, known, unused)
    if row.loss == "rec" and made.get("clip_mode") == "ring":
        made = {"ring_low_threshold": 0.6, "ring_high_threshold": 1.4, **made}
    return attrs.evolve(row, loss_args={**row.loss_args, **made})


def _read_bounds(where: str, name: str, value: object) -> dict[str, float] | None:
    """Return bounds on the ratio from a distance to 1: {} for no distance; None if the argument is something else."""
    if name in ("epsilon_low_prime", "epsilon_high_prime"):
        side = name.split("_")[1]
        return {f"ring_{side}_threshold": 1 + (-1 if side == "low" else 1) * _check.real(where, value, low=0.0)}
    if name not in (*BOUNDS, "epsilon"):
        return None
    if value is None:
        return {}
    distance = _check.real(where, value, low=0.0)
    if name == "epsilon":
        return {"clip_low_threshold": 1 / (1 + distance), "clip_high_threshold": 1 + distance}
    bounds = {"low": max(0.0, 1 - distance), "high": 1 + distance}
    return {f"clip_{side}_threshold": bounds[side] for side in BOUNDS[name]}


def _rename(
    where: str, name: str, value: object, names: Mapping[str, str], known: Sequence[str], unused: list[str]
) -> dict[str, Any]:
    """Return an argument by rlkit's name; {} for one that has no effect. Raises ConfigError: it is unknown."""
    key = f"algorithm.{where}.{name}"
    new = name if name in known else names.get(name, name)
    if new in known:
        return {new: value}
    if name in IGNORED_ARGS:
        unused.append(key)
    elif name not in NEUTRAL_ARGS:
        raise ConfigError(f"{key}: unknown setting{_check.suggest(name, known)}")
    elif value != NEUTRAL_ARGS[name]:
        raise ConfigError(key, f"is {value!r}", f"{NEUTRAL_ARGS[name]!r}", "rlkit does not have what it switches on")
    return {}


def _list_settings(function: Callable[..., Any]) -> list[str]:
    """Return the names of settings: parameters with a default that the loop does not give."""
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in _OF_LOOP]


def _add_advantage_args(
    row: Recipe, settings: Algorithm, unused: list[str]
) -> tuple[Recipe, float | None, dict[str, Any]]:
    """Return the row with the estimator's arguments, the threshold of groups that train, and the mask's arguments."""
    where, given, made = "advantage_fn_args", dict(settings.advantage_fn_args or {}), dict[str, Any]()
    threshold = given.pop("std_threshold", None)
    threshold = _check.optional(_check.real, f"algorithm.{where}.std_threshold", threshold, low=0.0)
    if row.advantage is None:
        if given:
            raise _refuse(where, given, f"{settings.algorithm_type} has no advantages")
        return row, threshold, {}
    masking = settings.advantage_fn in MASKS
    mask_args: dict[str, Any] = {name: given.pop(name) for name in ("mu", "max_fraction") if masking and name in given}
    known = _list_settings(advantages.registry.resolve(row.advantage))
    for name, value in given.items():
        found = _rename(where, name, value, ESTIMATOR_ARGS, known, unused)
        if found.keys() & made.keys():
            raise _refuse(f"{where}.{name}", value, "another argument sets the same")
        made |= found
    if "fnorm" in given:
        made["scale"] = {"std": "group"}.get(given["fnorm"], given["fnorm"])
    return attrs.evolve(row, advantage_args={**row.advantage_args, **made}), threshold, mask_args


def _read_coefficients(settings: Algorithm, row: Recipe) -> tuple[float, float, float]:
    """Return the coefficients of the KL loss, the KL penalty, and the entropy bonus."""
    values = []
    for part, key in (("kl_loss_fn", "kl_coef"), ("kl_penalty_fn", "kl_coef"), ("entropy_loss_fn", "entropy_coef")):
        args = dict(getattr(settings, f"{part}_args") or {})
        value = _check.real(f"algorithm.{part}_args.{key}", args.pop(key, 0.0), low=0.0)
        if args.pop("adaptive", False):
            raise _refuse(f"{part}_args.adaptive", value=True, why="it needs your own loop, with losses.kl")
        unknown = [name for name, x in args.items() if x is not None or name not in ("target_kl", "horizon")]
        if unknown:
            text = f"algorithm.{part}_args.{unknown[0]}: unknown setting{_check.suggest(unknown[0], [key])}"
            raise ConfigError(text)
        if value and getattr(settings, part) == "none":
            raise _refuse(f"{part}_args.{key}", value, f"{part} is none")
        values.append(value)
    if settings.kl_penalty_fn not in (None, "none"):
        _check.choice("algorithm.kl_penalty_fn", settings.kl_penalty_fn, _PENALTIES)
    if settings.entropy_loss_fn not in (None, "none", "mix"):
        _check.choice("algorithm.entropy_loss_fn", settings.entropy_loss_fn, ("default", "exact", "mix", "none"))
    takes = [] if row.advantage is None else inspect.signature(advantages.registry.resolve(row.advantage)).parameters
    if values[1] and (not row.rolls_out or "rewards" not in takes):
        raise _refuse("kl_penalty_fn_args.kl_coef", values[1], f"{settings.algorithm_type} has no rewards")
    return values[0], values[1], values[2]


def _read_expert_ratio(settings: Algorithm) -> float:
    """Return the share of demonstrations in a mixed batch."""
    where, args = "algorithm.sample_strategy_args.", dict(settings.sample_strategy_args or {})
    ratio, name = args.pop("expert_data_ratio", 0.5), args.pop("sft_dataset_name", None)
    if name is not None and not isinstance(name, str):
        raise ConfigError(f"{where}sft_dataset_name", f"is {name!r}", "a name in auxiliary_buffers")
    for unknown in args:
        raise ConfigError(f"{where}{unknown}: unknown setting{_check.suggest(unknown, ['expert_data_ratio'])}")
    return _check.real(f"{where}expert_data_ratio", ratio, above=0.0, below=1.0)


def _choose_old_logprobs(settings: Algorithm, inputs: Sequence[str]) -> str | None:
    """Return which input the policy's logprobs before its first update become."""
    if settings.bypass_old_logprobs:
        return None
    for name in ("old_logprobs", "sampling_logprobs"):
        if name in inputs:
            return name
    raise _refuse("bypass_old_logprobs", value=False, why="the loss does not use a ratio")


def _check_fit(settings: Algorithm, row: Recipe, prepared: losses.PreparedLoss) -> None:
    """Raise where the loss or the estimator needs an input that this run does not provide."""
    where, name = "policy_loss_fn", settings.policy_loss_fn or row.loss
    if ("advantages" in prepared.inputs) != (row.advantage is not None):
        what = "needs advantages" if "advantages" in prepared.inputs else "takes no advantages"
        raise _refuse(where, name, f"the loss {what}")
    if (prepared.level == "pair") != (row.data == "pairs") or prepared.driver != "logprobs":
        raise _refuse(where, name, f"the loss is over {prepared.level}s and driven by {prepared.driver}")
    provided = {"advantages", "reference_logprobs"} | ({"sampling_logprobs"} if row.rolls_out else set())
    provided |= ({"expert"} if row.data == "mixed" else set()) | (
        set() if settings.bypass_old_logprobs else {"old_logprobs"}
    )
    for missing in sorted({*prepared.inputs} - provided):
        raise _refuse(where, name, f"the loss needs {missing!r}, which this run does not provide")
    if row.advantage is None:
        if settings.entropy_loss_fn_args and settings.entropy_loss_fn != "exact":
            why = f"the sampled bonus is added to advantages, which {settings.algorithm_type} does not have"
            raise _refuse("entropy_loss_fn", settings.entropy_loss_fn, why)
        return
    estimator = advantages.registry.resolve(row.advantage)
    named = list(inspect.signature(estimator).parameters.values())
    passed = {"group": ("lengths",), "turn": ()}.get(row.level, _TOKENWISE)
    skipped = {"group": 1, "turn": 2}.get(row.level, 0)
    wanted = {p.name for p in named[skipped:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    for missing in sorted(wanted - {*passed, *row.advantage_args}):
        raise _refuse("advantage_fn", row.advantage, f"it needs {missing!r}, which this run does not provide")
    compared = row.advantage in ("gigpo", "step_wise_grpo") or (
        "singleton" in _list_settings(estimator) and row.advantage_args.get("singleton", "zero") == "zero"
    )
    if row.repeat_times == 1 and compared and row.advantage != "reinforce":
        raise _refuse("repeat_times", 1, "a group of one has no baseline, so its advantages are 0")
