"""The table of algorithms, Trinity-RFT's names for their parts, and what a run's settings make of a row.

Each row is a composition: an estimator of advantages, a loss, the weights of tokens, and the data that it trains on.
``register`` adds a row; the section ``algorithm`` of a run changes single entries of one (``resolve``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check, advantages, losses, schedules
from rlkit._check import read_only
from rlkit.advantages.tokens import MODES
from rlkit.errors import ConfigError
from rlkit.recipes.settings import Algorithm
from rlkit.registry import Registry

__all__ = ["Method", "Recipe", "best_of_group", "register", "registry", "resolve"]

Named: TypeAlias = str | Callable[..., Any]  # a name of a registry, or a function
Level: TypeAlias = Literal["group", "turn", "token"]


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
    advantage_args: Mapping[str, Any] = attrs.field(factory=dict, converter=read_only)
    loss_args: Mapping[str, Any] = attrs.field(factory=dict, converter=read_only)
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


# The weights are token-mean unless a row names others. Settings of rows are Trinity-RFT's defaults where those of
# rlkit's functions differ: a name has its numbers there.
# fmt: off
registry.update({
    "grpo": Recipe("arXiv:2402.03300", data="rollouts", advantage="grpo", level="group", loss="ppo"),
    "dr_grpo": Recipe("arXiv:2503.20783", data="rollouts", advantage="dr_grpo", level="group", loss="ppo",
                      weights="seq-mean-token-sum-norm"),
    "dapo": Recipe("arXiv:2503.14476", data="rollouts", advantage="grpo", level="group", loss="ppo",
                   loss_args={"clip_high_threshold": 1.28}, select="informative"),
    "rloo": Recipe("arXiv:2402.14740", data="rollouts", advantage="rloo", level="group", loss="ppo"),
    "reinforceplusplus": Recipe("arXiv:2501.03262", data="rollouts", advantage="reinforce_pp", level="token",
                                advantage_args={"eps": 1e-8}, loss="ppo"),
    "opmd": Recipe("arXiv:2501.12599", data="rollouts", advantage="opmd", level="group", loss="opmd"),
    "asymre": Recipe("arXiv:2506.20520, half the gradient", data="rollouts", advantage="asymre", level="group",
                     loss="opmd"),
    "topr": Recipe("arXiv:2503.14286", data="rollouts", advantage="reinforce", level="group", loss="topr"),
    "cispo": Recipe("arXiv:2506.13585", data="rollouts", advantage="grpo", level="group", loss="cispo",
                    loss_args={"clip_low_threshold": 0.0, "clip_high_threshold": 1.28}),
    "gspo": Recipe("arXiv:2507.18071", data="rollouts", advantage="grpo", level="group", loss="gspo",
                   weights="seq-mean-token-mean"),
    "sapo": Recipe("arXiv:2511.20347, the gate a constant", data="rollouts", advantage="grpo", level="group",
                   loss="sapo", loss_args={"detached": True}),
    "sppo": Recipe("arXiv:2108.05828", data="rollouts", advantage="opmd", level="group", loss="sppo"),
    "rec": Recipe("arXiv:2509.24203", data="rollouts", advantage="rec", level="group", loss="rec"),
    "gigpo": Recipe("arXiv:2505.10978", data="rollouts", advantage="gigpo", level="turn",
                    advantage_args={"scale": "none"}, loss="ppo"),
    "multi_step_grpo": Recipe("GRPO's advantage at every turn", data="rollouts", advantage="step_wise_grpo",
                              level="turn", loss="ppo"),
    "ppo": Recipe("arXiv:1707.06347", data="rollouts", advantage="gae", level="token", advantage_args={"lam": 1.0},
                  loss="ppo"),
    "on_policy_distill": Recipe("arXiv:2306.13649", data="rollouts", advantage="on_policy_distillation",
                                level="token", loss="ppo"),
    "jsd": Recipe("arXiv:2306.13649", data="rollouts", advantage="jsd_gradient", level="token", loss="ppo"),
    "raft": Recipe("arXiv:2304.06767", data="rollouts", advantage=best_of_group, level="group", loss="reinforce",
                   select="best"),
    "sft": Recipe("likelihood", data="demonstrations", advantage=None, loss="cross_entropy"),
    "cpt": Recipe("likelihood", data="texts", advantage=None, loss="cross_entropy"),
    "dpo": Recipe("arXiv:2305.18290", data="pairs", advantage=None, loss="dpo"),
    "mix": Recipe("arXiv:2508.11408, with a fixed mu", data="mixed", advantage="grpo", level="group", loss="mix",
                  loss_args={"mu": 0.1}),
    "mix_chord": Recipe("arXiv:2508.11408, with phi", data="mixed", advantage="grpo", level="group", loss="mix",
                        loss_args={"phi": True, "dual_clip": 3.0, "mu_warmup_steps": 0, "mu_decay_steps": 0,
                                   "mu_peak": 0.1, "mu_valley": 0.1}),
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
KL_LOSSES = {"none": "k2", "low_var_kl": "clamped", "corrected_k3": "ratio_corrected"}
KL_PENALTIES = {  # without an older policy the ratio of corrected_k3 cannot be corrected
    "none": "k1", "k1": "k1", "k2": "k2", "k3": "k3", "abs": "abs", "low_var_kl": "clamped", "corrected_k3": "k3",
}
ESTIMATOR_ARGS = {
    "epsilon": "eps", "std_cal_level": "scale", "std_normalize": "normalize", "fnorm": "scale", "kl_coef": "coef",
    "opmd_baseline": "baseline", "baseline_shift": "shift", "lambda_coef": "beta", "enable_step_norm": "step_norm",
}
LOSS_ARGS = {
    "clip_ratio_c": "dual_clip", "temp": "temperature", "enable_phi_function": "phi",
    "enable_mask_clip": "unified_mask", "advantage_threshold": "threshold", "delta_sequence_masking": "delta",
}
_LOW: Mapping[str, Callable[[float], float]] = {"clip_low_threshold": lambda distance: max(0.0, 1 - distance)}
_HIGH: Mapping[str, Callable[[float], float]] = {"clip_high_threshold": lambda distance: 1 + distance}
BOUNDS = {  # distances to 1, as bounds on the ratio itself
    "clip_range": {**_LOW, **_HIGH},  # first: those of one side replace it
    "clip_range_low": _LOW, "epsilon_low": _LOW, "clip_range_high": _HIGH, "epsilon_high": _HIGH,
    "epsilon": {"clip_low_threshold": lambda distance: 1 / (1 + distance), **_HIGH},
    "epsilon_low_prime": {"ring_low_threshold": lambda distance: 1 - distance},
    "epsilon_high_prime": {"ring_high_threshold": lambda distance: 1 + distance},
}
IGNORED_ARGS = {  # sizes of micro-batches and names of fields, on which the weights of tokens here do not depend
    "use_dynamic_bsz", "ppo_mini_batch_size", "ppo_micro_batch_size_per_gpu", "ngpus_trainer", "chunk_size",
    "train_batch_size_usual", "train_batch_size_expert", "step_reward_key", "env_state_hash_key",
}
NEUTRAL_ARGS = {  # other values would change training
    "rank_penalty": None, "duplicate_experiences": False, "temperature": 1.0, "cutoff_prob": 1.0,
    "fallback_to_policy_gradient": False, "enable_sequence_masking": False,
    "adaptive": False, "target_kl": None, "horizon": None,  # of the KL coefficient
}
# fmt: on
_MU = ("mu", "mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley")
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
        kl_penalty, entropy: coefficients; 0 is off.
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
    row, unused = _replace_parts(settings), list[str]()
    given = dict(settings.policy_loss_fn_args or {})  # each function takes its arguments out; the last one all others
    row, expert_weights = _replace_weights(row, given, settings.loss_agg_mode)
    row, mu = _take_mu(row, given)
    row = _replace_ppo(row, given, unused)
    row = _add_loss_args(row, given, unused)
    row, threshold, mask_args = _add_advantage_args(row, settings, unused)
    kl, penalty, entropy = (_read_coefficient(settings, part) for part in ("kl_loss", "kl_penalty", "entropy_loss"))
    kinds = ("default", "exact", "mix", "none")
    exact = _check.optional(_check.choice, "algorithm.entropy_loss_fn", settings.entropy_loss_fn, kinds) == "exact"
    kl_name = KL_LOSSES.get(settings.kl_loss_fn or "k2", settings.kl_loss_fn or "k2")
    losses.kl.registry.resolve(kl_name)
    penalty_name = _check.choice("algorithm.kl_penalty_fn", settings.kl_penalty_fn or "none", tuple(KL_PENALTIES))
    loss, loss_args = row.loss, dict(row.loss_args)
    if kl > 0:
        loss, loss_args = losses.with_kl(loss, kl, kl_name), {**loss_args, "kl_coef": kl}
    if entropy > 0 and exact:
        loss, loss_args = losses.with_entropy(loss, entropy), {**loss_args, "entropy_coef": entropy}
    prepared = losses.prepare(loss, loss_args)
    _check_loss(settings, row, prepared)
    ratio = "old_logprobs" if "old_logprobs" in prepared.inputs else "sampling_logprobs"
    if not settings.bypass_old_logprobs and ratio not in prepared.inputs:
        raise _refuse("bypass_old_logprobs", value=False, why="the loss does not use a ratio")
    method = Method(
        recipe=row,
        loss=loss,
        loss_args=loss_args,
        estimator=None if row.advantage is None else advantages.registry.resolve(row.advantage),
        kl_penalty=penalty,
        penalty=KL_PENALTIES[penalty_name],
        entropy=0.0 if exact else entropy,
        threshold=threshold,
        old_logprobs=None if settings.bypass_old_logprobs else ratio,
        expert_ratio=_read_expert_ratio(settings),
        expert_weights=expert_weights,
        mu=mu,
        inputs=prepared.inputs,
        entropy_mask=MASKS.get(settings.advantage_fn or ""),
        entropy_mask_args=mask_args,
        unused=unused,
    )
    _check_estimator(settings, method)
    return method


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
        named = registry.get(name, row)
        row = attrs.evolve(row, loss=loss, loss_args=named.loss_args if named.loss == loss else {})
    return row if settings.repeat_times is None else attrs.evolve(row, repeat_times=settings.repeat_times)


def _guess_level(advantage: str) -> Level:
    first = next(iter(inspect.signature(advantages.registry.resolve(advantage)).parameters.values()))
    return "token" if first.kind is first.KEYWORD_ONLY else "group"


def _replace_weights(row: Recipe, given: dict[str, Any], mode: str | None) -> tuple[Recipe, str]:
    """Return the row with its mode of weights, and that of demonstrations."""
    inner = given.pop("loss_agg_mode", None)
    if inner is not None and mode not in (None, inner):
        raise _refuse("policy_loss_fn_args.loss_agg_mode", inner, f"loss_agg_mode={mode}")
    weights = expert = inner or mode or row.weights
    if row.loss == "mix":
        weights = given.pop("grpo_loss_agg_mode", None) or weights
        expert = given.pop("sft_loss_agg_mode", None) or expert
    for each in (expert, weights):
        _check.choice("algorithm.loss_agg_mode", each, MODES)
    return attrs.evolve(row, weights=weights), expert


def _take_mu(row: Recipe, given: dict[str, Any]) -> tuple[Recipe, Callable[[int], float] | None]:
    """Return the row without the settings of the supervised term's share, and that share by step."""
    if row.loss != "mix":
        return row, None
    asked = {key: given.pop(key) for key in _MU if key in given}
    args: dict[str, Any] = {"mu": 0.1, **row.loss_args, **asked}
    fixed, spans = args.pop("mu"), {key.removeprefix("mu_"): args.pop(key) for key in _MU if key in args}
    row = attrs.evolve(row, loss_args=args)
    if not spans:
        share = _check.real("algorithm.policy_loss_fn_args.mu", fixed, low=0.0, high=1.0)
        return row, lambda _: share
    if "mu" in asked:
        raise _refuse("policy_loss_fn_args.mu", fixed, "mu already has a schedule")
    spans = {"warmup_steps": 0, "decay_steps": 100, **spans}
    schedules.chord_schedule(0, **spans)  # raises if a setting is out of range
    return row, lambda step: schedules.chord_schedule(step, **spans)


def _replace_ppo(row: Recipe, given: dict[str, Any], unused: list[str]) -> Recipe:
    """Return the row with the loss that two switches of Trinity's PPO select."""
    if row.loss == "ppo" and given.pop("enable_sequence_masking", False):
        row = attrs.evolve(row, loss="opsm", loss_args={})
    elif row.loss == "ppo" and given.pop("delta_sequence_masking", None) is not None:
        unused.append("algorithm.policy_loss_fn_args.delta_sequence_masking")
    if row.loss in ("ppo", "opsm") and given.pop("fallback_to_policy_gradient", False):
        unused += [f"algorithm.policy_loss_fn_args.{name}" for name in given]  # the ratio is 1: no bound is met
        given.clear()
        row = attrs.evolve(row, loss="reinforce", loss_args={})
    return row


def _add_loss_args(row: Recipe, given: dict[str, Any], unused: list[str]) -> Recipe:
    """Return the row with these arguments of its loss, by rlkit's names."""
    where, known, made = "policy_loss_fn_args", _list_settings(losses.registry.resolve(row.loss)), dict[str, Any]()
    for side, default in (("low", 1.0), ("high", 0.28)):  # the mask of CISPO, whose bounds are the ratio's here
        name, bound = f"mask_clip_range_{side}", given.get(f"clip_range_{side}", default)
        mask = given.pop(name, None)
        if given.get("enable_mask_clip", False) and (default if mask is None else mask) != bound:
            raise _refuse(f"{where}.{name}", mask, f"the mask uses the bound clip_range_{side}")
    for name, bounds in BOUNDS.items():
        if name in given and (given[name] is None or bounds.keys() <= {*known}):
            distance = _check.optional(_check.real, f"algorithm.{where}.{name}", given.pop(name), low=0.0)
            made |= {} if distance is None else {key: compute(distance) for key, compute in bounds.items()}
    if str(given.get("clip_mode")).startswith("gspo"):
        raise _refuse(f"{where}.clip_mode", given["clip_mode"], "the loss gspo has one ratio per sequence")
    made |= _rename(where, given, LOSS_ARGS, known, unused)
    if made.get("clip_mode") == "ring":
        made = {"ring_low_threshold": 0.6, "ring_high_threshold": 1.4, **made}
    return attrs.evolve(row, loss_args={**row.loss_args, **made})


def _rename(
    where: str, given: Mapping[str, Any], names: Mapping[str, str], known: Sequence[str], unused: list[str]
) -> dict[str, Any]:
    """Return arguments by rlkit's names, without those that have no effect. Raises ConfigError: one is unknown."""
    made = dict[str, Any]()
    for name, value in given.items():
        key, new = f"algorithm.{where}.{name}", name if name in known else names.get(name, name)
        if new in made:
            raise _refuse(f"{where}.{name}", value, "another argument sets the same")
        if new in known:
            made[new] = "group" if (name, value) == ("fnorm", "std") else value
        elif name in IGNORED_ARGS:
            unused.append(key)
        elif name not in NEUTRAL_ARGS:
            raise ConfigError(f"{key}: unknown setting{_check.suggest(name, known)}")
        elif value is not None and value != NEUTRAL_ARGS[name]:
            own = "it needs your own loop, with losses.kl"
            why = own if name == "adaptive" else "rlkit does not have what it switches on"
            raise ConfigError(key, f"is {value!r}", f"{NEUTRAL_ARGS[name]!r}", why)
    return made


def _list_settings(function: Callable[..., Any]) -> list[str]:
    """Return the names of settings: parameters with a default that the loop does not give."""
    named = inspect.signature(function).parameters.values()
    return [p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in _OF_LOOP]


def _add_advantage_args(
    row: Recipe, settings: Algorithm, unused: list[str]
) -> tuple[Recipe, float | None, dict[str, Any]]:
    """Return the row with the estimator's arguments, the threshold of groups that train, and the mask's arguments."""
    where, given = "advantage_fn_args", dict(settings.advantage_fn_args or {})
    threshold = given.pop("std_threshold", None)
    threshold = _check.optional(_check.real, f"algorithm.{where}.std_threshold", threshold, low=0.0)
    if row.advantage is None:
        if given:
            raise _refuse(where, given, f"{settings.algorithm_type} has no advantages")
        return row, threshold, {}
    masking = settings.advantage_fn in MASKS
    mask_args: dict[str, Any] = {name: given.pop(name) for name in ("mu", "max_fraction") if masking and name in given}
    known = _list_settings(advantages.registry.resolve(row.advantage))
    made = _rename(where, given, ESTIMATOR_ARGS, known, unused)
    return attrs.evolve(row, advantage_args={**row.advantage_args, **made}), threshold, mask_args


def _read_coefficient(settings: Algorithm, part: str) -> float:
    """Return the coefficient of the KL loss, the KL penalty, or the entropy bonus."""
    where, key = f"{part}_fn_args", "entropy_coef" if part == "entropy_loss" else "kl_coef"
    given = _rename(where, getattr(settings, where) or {}, {}, [key], [])
    value = _check.real(f"algorithm.{where}.{key}", given.get(key, 0.0), low=0.0)
    if value and getattr(settings, f"{part}_fn") == "none":
        raise _refuse(f"{where}.{key}", value, f"{part}_fn is none")
    return value


def _read_expert_ratio(settings: Algorithm) -> float:
    """Return the share of demonstrations in a mixed batch."""
    where, known = "sample_strategy_args", ("expert_data_ratio", "sft_dataset_name")
    ratio = _rename(where, settings.sample_strategy_args or {}, {}, known, []).get("expert_data_ratio", 0.5)
    return _check.real(f"algorithm.{where}.expert_data_ratio", ratio, above=0.0, below=1.0)


def _check_loss(settings: Algorithm, row: Recipe, prepared: losses.PreparedLoss) -> None:
    """Raise where the loss does not fit the data, or needs an input that this run does not provide."""
    where, name = "policy_loss_fn", settings.policy_loss_fn or row.loss
    if row.advantage is not None and "advantages" not in prepared.inputs:
        raise _refuse(where, name, "the loss takes no advantages")
    if (prepared.level == "pair") != (row.data == "pairs") or prepared.driver != "logprobs":
        raise _refuse(where, name, f"the loss is over {prepared.level}s and driven by {prepared.driver}")
    provided = {
        "advantages": row.advantage is not None,
        "expert": row.data == "mixed",
        "old_logprobs": not settings.bypass_old_logprobs,
        "reference_logprobs": True,
        "sampling_logprobs": row.rolls_out,
    }
    for each in sorted(prepared.inputs):
        if not provided.get(each):
            raise _refuse(where, name, f"the loss needs {each!r}, which this run does not provide")


def _check_estimator(settings: Algorithm, method: Method) -> None:
    """Raise where the estimator needs an input that this run does not provide, or its terms have no effect."""
    row, kind = method.recipe, settings.algorithm_type
    named = {} if method.estimator is None else dict(inspect.signature(method.estimator).parameters)
    if method.kl_penalty and "rewards" not in named:
        raise _refuse("kl_penalty_fn_args.kl_coef", method.kl_penalty, f"{kind} has no rewards")
    if method.estimator is None:
        if method.entropy:
            why = f"the sampled bonus is added to advantages, which {kind} does not have"
            raise _refuse("entropy_loss_fn", settings.entropy_loss_fn, why)
        return
    skipped, passed = {"group": (1, ("lengths",)), "turn": (2, ()), "token": (0, _TOKENWISE)}[row.level]
    required = [p for p in list(named.values())[skipped:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for missing in sorted({p.name for p in required} - {*passed, *row.advantage_args}):
        raise _refuse("advantage_fn", row.advantage, f"it needs {missing!r}, which this run does not provide")
    compared = row.advantage in ("gigpo", "step_wise_grpo") or (
        "singleton" in _list_settings(method.estimator) and row.advantage_args.get("singleton", "zero") == "zero"
    )
    if row.repeat_times == 1 and compared and row.advantage != "reinforce":
        raise _refuse("repeat_times", 1, "a group of one has no baseline, so its advantages are 0")
