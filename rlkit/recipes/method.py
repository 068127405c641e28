"""An algorithm with a run's settings in it: names translated, arguments checked, the loss composed. It does no work.

It also lists where rlkit's defaults of an algorithm differ from Trinity-RFT's of the same name, as log lines of a run.

Explicit settings are never listed: their values are used as given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import attrs
import numpy as np

from rlkit import _check, advantages, corrections, credit, losses
from rlkit.backends.protocol import Sampler
from rlkit.credit import Batch, Item, multiply_weights
from rlkit.critics import Critic
from rlkit.errors import ConfigError
from rlkit.losses.prepare import marks
from rlkit.recipes import algorithms
from rlkit.recipes.algorithms import KL, LOSSES, Level, Named, Recipe, contradiction, keywords
from rlkit.recipes.settings import TABLE, Algorithm, Operator
from rlkit.trajectory import Group, Trajectory
from rlkit.types import Datum

__all__ = ["CORRECTIONS", "NAMES", "Method", "Operators", "assign_credit", "differences", "notes", "resolve"]

CORRECTIONS: Mapping[str, Callable[..., Sequence[np.ndarray]]] = {
    each.__name__: each
    for each in (
        corrections.token_tis,
        corrections.sequence_tis,
        corrections.icepop,
        corrections.batch_normalized,
        corrections.token_mask,
        corrections.sequence_mask,
        corrections.geometric_sequence_mask,
        corrections.outlier_veto,
    )
}


def correction_of(name: str, method: Method, *, elsewhere: bool) -> str | None:
    """Return the correction of a run.

    Args:
        name: of ``CORRECTIONS``, "none" or "auto".
        method: of the run.
        elsewhere: whether another engine than the backend's own samples; the backend's own has the trainer's numbers.

    Returns:
        None for no correction. "auto" is ``token_tis`` where another engine samples and the loss does not correct by
        itself. Losses
        with a ratio to the sampler's logprobs do: ppo, gspo, cispo, decoupled_ppo and their like.
    """
    if name != "auto":
        return None if name == "none" else name
    recipe = method.recipe
    corrects = "sampling_logprobs" in method.inputs and method.old_logprobs != "sampling_logprobs"
    learns = recipe.rolls_out and recipe.advantage is not None and recipe.select != "best"  # which imitates
    return "token_tis" if elsewhere and learns and not corrects else None


def correct(
    name: str, items: Sequence[Item], trainer_logprobs: Sequence[np.ndarray]
) -> tuple[list[Item], dict[str, float]]:
    """Multiply the weights of samples by a correction.

    Args:
        name: of ``CORRECTIONS``.
        items: of a step; demonstrations among them are unchanged.
        trainer_logprobs: float32 [n] of each datum, of the policy before it is updated.

    Returns:
        the items; "train/correction/mean", "train/correction/min" and "train/correction/max" over the tokens.
    """
    rest = iter(trainer_logprobs)
    pairs = [(item, datum, next(rest)) for item in items for datum in item.data]
    sampled = [(datum, now) for item, datum, now in pairs if item.trajectory is not None]
    then = [datum.select(datum.inputs["sampling_logprobs"]) for datum, _ in sampled]
    weights = CORRECTIONS[name](trainer_logprobs=[now for _, now in sampled], sampling_logprobs=then)
    weighted = iter([multiply_weights(datum, weight) for (datum, _), weight in zip(sampled, weights, strict=True)])
    corrected = [
        item if item.trajectory is None else attrs.evolve(item, data=[next(weighted) for _ in item.data])
        for item in items
    ]
    flat = np.concatenate([np.zeros(0), *weights])
    if not flat.size:
        return corrected, {}
    statistics = {"mean": flat.mean(), "min": flat.min(), "max": flat.max()}
    return corrected, {f"train/correction/{which}": float(value) for which, value in statistics.items()}


def assign_credit(
    method: Method,
    groups: Sequence[Group],
    reference: Sampler | None = None,
    teacher: Sampler | None = None,
    critic: Critic | None = None,
    *,
    prefixes: Sequence[np.ndarray | None] | None = None,
    seed: Sequence[int] = (0,),
) -> Batch:
    """Return the items that train these groups, without weights; see ``rlkit.credit.assign``."""
    config = dict(method.recipe.advantage_args)
    if config.get("drop") is not None:
        config["rng"] = np.random.default_rng(np.random.SeedSequence(seed))
    everyone = [trajectory for group in groups for trajectory in group.trajectories]
    batch = credit.assign(
        groups,
        method.estimator,
        level=method.recipe.level,
        config=config,
        weights=None,
        baseline=[float(t.tags["greedy"]) for t in everyone] if "greedy" in method.recipe.needs else None,
        reference=reference,
        kl_coef=method.kl_penalty,
        kl_estimator=method.penalty,
        entropy_coef=method.entropy,
        teacher=teacher,
        prefixes=prefixes,
        critic=critic,
        split="allow" if marks(losses.registry.resolve(method.loss)).elementwise else "raise",
    )
    if method.recipe.select != "best":
        return batch
    return attrs.evolve(batch, items=[i for i in batch.items if any(d.inputs["advantages"].any() for d in i.data)])


def weigh(method: Method, items: Sequence[Item], *, constant: float, mu: float | None) -> list[Datum]:
    """Return the datums of one optimizer step, with the weights that make their sum the wanted mean.

    In a mixed batch the rollouts and the demonstrations are each a mean over their own.
    """
    if method.recipe.data == "pairs":
        return [d.with_inputs(weights=1.0 / len(items)) for item in items for d in item.data]
    data: list[Datum] = []
    shown = [method.recipe.data == "mixed" and bool(item.data[0].inputs["expert"].any()) for item in items]
    for expert, mode in ((False, method.recipe.weights), (True, method.expert_weights)):
        part = [item for item, each in zip(items, shown, strict=True) if each == expert]
        data += credit.weigh(part, mode, constant=constant if mode.endswith("-norm") else None)
    return data if mu is None else [datum.with_inputs(mu=mu) for datum in data]


def experts(rows: Sequence[Sequence[Datum]]) -> list[Item]:
    """Return the items of demonstrations in a mixed batch."""
    blank = {"sampling_logprobs": 0.0, "advantages": 0.0, "expert": 1.0}
    return [Item([_fill(d, blank) for d in data], group) for group, data in enumerate(rows)]


def _fill(datum: Datum, numbers: dict[str, float]) -> Datum:
    return datum.with_inputs(**{name: np.full(int(datum.mask.sum()), value) for name, value in numbers.items()})


_REFUSED: Mapping[str, str] = TABLE["operators"]["refused"]
_UNUSED: Mapping[str, str] = TABLE["operators"]["unused"]


@attrs.frozen(eq=False)
class Operators:
    """The operators of a run, in their order.

    Attributes:
        filters: functions of a group that return the trajectories to keep.
        masks: whether answers that were cut are not trained on; they stay in their group's baseline.
        unused: operators without effect, with the reason.
    """

    filters: Sequence[Filter] = ()
    masks: bool = False
    unused: Sequence[str] = ()

    @classmethod
    def of(cls, given: Sequence[Operator]) -> Operators:
        """Return the operators that settings name.

        Raises:
            ConfigError: one is unknown, is not supported here, or has another argument.
        """
        filters, masks, unused = list[Filter](), False, list[str]()
        for i, operator in enumerate(given):
            where = f"data_processor.experience_pipeline.operators[{i}]"
            name = operator.name
            if name in _REFUSED:
                raise ConfigError(f"{where}.name", f"is {name!r}", "another operator", _REFUSED[name])
            if name in _UNUSED:
                unused.append(f"{where} ({_UNUSED[name]})")
                continue
            if name == "mask_response_truncated":
                _settings(where, operator.args, ())
                masks = True
                continue
            if name not in _FILTERS:
                near = _check.suggest(name, [*_FILTERS, "mask_response_truncated", *_UNUSED])
                raise ConfigError(f"{where}.name: unknown operator {name!r}{near}")
            known = keywords(_FILTERS[name])
            filters.append(functools.partial(_FILTERS[name], **_settings(where, operator.args, known)))
        return cls(filters, masks, unused)

    def apply(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """Return the groups with the kept trajectories, and how many were dropped."""
        before = sum(len(group) for group in groups)
        left = list(groups)
        for keep in self.filters:
            pairs = [(group, list(keep(group))) for group in left]
            left = [attrs.evolve(group, trajectories=mine) for group, mine in pairs if mine]
        numbers = {"filter/operators": float(before - sum(map(len, left)))} if self.filters else {}
        return left, numbers


def was_cut(trajectory: Trajectory) -> bool:
    """Return whether its last answer was cut by a limit of tokens."""
    return bool(trajectory.turns) and trajectory.turns[-1].sample.stop_reason == "length"


def _settings(where: str, given: Mapping[str, object], known: Sequence[str]) -> dict[str, object]:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}.args.{name}: unknown setting{_check.suggest(name, known)}")
    return {
        name: value if name == "metric_key" else _check.real(f"{where}.args.{name}", value)
        for name, value in given.items()
    }


Filter: TypeAlias = Callable[..., Sequence[Trajectory]]  # of a group, and settings


def _reward_filter(group: Group, *, threshold: float = 0.0) -> Sequence[Trajectory]:
    """Keep episodes of at least so much reward."""
    return [t for t in group.trajectories if t.reward >= threshold]


def _std_filter(group: Group, *, threshold: float = 0.0) -> Sequence[Trajectory]:
    """Keep groups of two or more whose rewards deviate by more."""
    return group.trajectories if len(group) > 1 and np.std(group.rewards) > threshold else []


def _dynamic_sampling(
    group: Group, *, metric_key: str = "accuracy", correct_threshold: float = 0.0
) -> Sequence[Trajectory]:
    """Keep groups in which some are right, and not all: above the threshold."""
    right = sum(t.metrics.get(metric_key, t.reward) > correct_threshold for t in group.trajectories)
    return group.trajectories if 0 < right < len(group) else []


_FILTERS: Mapping[str, Filter] = {
    "reward_filter": _reward_filter,
    "reward_std_filter": _std_filter,
    "dapo_dynamic_sampling": _dynamic_sampling,
}


@attrs.frozen(eq=False)
class Method:
    """The settings of a training step.

    Attributes:
        recipe: the algorithm's row, settings applied.
        loss: a name or a function; with a KL or entropy term where one is on.
        loss_args: its settings.
        estimator: the function of ``recipe.advantage``; not called if that is None.
        kl_loss, kl_penalty, entropy: coefficients; 0 is off.
        penalty: estimator of the KL penalty.
        threshold: groups whose rewards' deviation is not above it do not train; None: all do.
        old_logprobs: the input name for the policy's own logprobs before its first update; None: they are not
            computed.
        expert_ratio: share of demonstrations in a mixed batch.
        expert_weights: the mode of token weights of demonstrations in a mixed batch.
        mu: step -> the share of the supervised term; None where the loss has none.
        inputs: names of what the loss reads.
        unused: arguments that have no effect, with the reason.
    """

    recipe: Recipe
    loss: Named
    loss_args: Mapping[str, object]
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
    recipe, asked, weights = _row(settings)
    if recipe.hint and "{answer}" not in settings.hint:
        what = f"is {settings.hint!r}"
        raise ConfigError(f"algorithm.hint: {what}; expected a text with {{answer}}, where a correct answer goes")
    schedule = None
    if recipe.loss == "mix":
        row_args = dict(recipe.loss_args)
        schedule = algorithms.share(row_args, asked)
        recipe = attrs.evolve(recipe, loss_args=row_args)
    loss, translated, names, more = algorithms.loss_names(recipe.loss, asked)
    recipe = attrs.evolve(recipe, loss=loss, loss_args=recipe.loss_args if loss == recipe.loss else {})
    _check_weights(recipe.weights)
    estimator = None if recipe.advantage is None else advantages.registry.resolve(recipe.advantage)
    estimator_settings, threshold, idle = algorithms.estimator_args(settings, estimator)
    kl, penalty, entropy = algorithms.coefficients(settings, recipe)
    function = losses.registry.resolve(recipe.loss)
    algorithms.check_settings("algorithm.policy_loss_fn_args", function, translated, names)
    args = {**recipe.loss_args, **translated}
    composed, extra = _composed(settings, recipe.loss, kl, entropy)
    prepared = losses.prepare(composed, {**args, **extra})
    _fits(settings, recipe, prepared)
    all_settings = {**recipe.advantage_args, **estimator_settings}
    compared = recipe.advantage in ("gigpo", "step_wise_grpo") or (
        "singleton" in keywords(estimator or _none) and all_settings.get("singleton", "zero") == "zero"
    )
    if recipe.repeat_times == 1 and compared and recipe.advantage != "reinforce":
        raise contradiction("repeat_times", 1, "a group of one has no baseline, so its advantages are 0")
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
        old_logprobs=_old(settings, prepared.inputs),
        expert_ratio=algorithms.expert_ratio(settings),
        expert_weights=weights,
        mu=schedule,
        inputs=tuple(prepared.inputs),
        unused=(*more, *idle),
    )


def _row(settings: Algorithm) -> tuple[Recipe, dict[str, object], str]:
    """Return the algorithm's row with the settings in it, the loss's arguments, and the weights of experts."""
    recipe = _replaced(settings)
    loss_args = dict(settings.policy_loss_fn_args or {})
    weights = expert = _pop_mode(loss_args, settings.loss_agg_mode) or recipe.weights
    if recipe.loss == "mix":
        weights = loss_args.pop("grpo_loss_agg_mode", None) or weights
        expert = loss_args.pop("sft_loss_agg_mode", None) or expert
    _check_weights(expert)
    return attrs.evolve(recipe, weights=weights), loss_args, expert


def _replaced(settings: Algorithm) -> Recipe:
    """Return the algorithm's row with the estimator, the loss and the group size of the settings."""
    recipe: Recipe = algorithms.registry[settings.algorithm_type]
    named, estimator = settings.policy_loss_fn or "", settings.advantage_fn or ""
    _refuse_mask(estimator)
    advantage = algorithms.ESTIMATORS.get(estimator, estimator)
    if settings.advantage_fn is not None and advantage != recipe.advantage:
        level, arguments = _level(advantage), algorithms.OF_ESTIMATORS.get(advantage, {})
        if recipe.advantage is None:
            raise contradiction("advantage_fn", estimator, f"{settings.algorithm_type} has no advantages")
        recipe = attrs.evolve(recipe, advantage=advantage, advantage_args=arguments, level=level)
    loss = recipe.loss if settings.policy_loss_fn is None else LOSSES.get(named, named)
    if loss != recipe.loss or (named in algorithms.DEFAULTS and named != "mix"):
        recipe = attrs.evolve(recipe, loss=loss, loss_args=algorithms.DEFAULTS.get(named, {}))
    if settings.repeat_times is not None:
        recipe = attrs.evolve(recipe, repeat_times=settings.repeat_times)
    return recipe


def _refuse_mask(estimator: str) -> None:
    mask = {"clipb": "clip_b", "clipv": "clip_v"}.get(estimator)
    if mask is not None:
        why = f"it masks by entropy; write your own loop, which multiplies rlkit.corrections.{mask} into the weights"
        raise contradiction("advantage_fn", estimator, why)


def _pop_mode(loss_args: dict[str, Any], mode: str | None) -> str | None:
    """Return the mode of the weights, which may be among the loss's arguments; remove it from them."""
    own: str | None = loss_args.pop("loss_agg_mode", None)
    if own is not None and mode not in (None, own):
        raise contradiction("policy_loss_fn_args.loss_agg_mode", own, f"loss_agg_mode={mode}")
    return mode if own is None else own


def _penalty(name: str | None) -> str:
    """Return the estimator of the KL penalty; without an older policy it cannot be corrected, so it is k3."""
    return {"corrected_k3": "k3", "none": "k1"}.get(name or "k1", KL.get(name or "k1", name or "k1"))


def _old(settings: Algorithm, inputs: Sequence[str]) -> str | None:
    """Return which input the policy's logprobs before its first update become."""
    if settings.bypass_old_logprobs:
        return None
    for name in ("old_logprobs", "sampling_logprobs"):
        if name in inputs:
            return name
    raise contradiction("bypass_old_logprobs", value=False, why="the loss does not use a ratio")


def _none(*_: object, **__: object) -> NoReturn:
    raise ConfigError("this algorithm has no advantages")


def _level(advantage: str) -> Level:
    """Return the level of an estimator that is given by name alone."""
    rows = [row for row in algorithms.registry.values() if row.advantage == advantage]
    if rows:
        level: Level = rows[0].level
        return level
    first = next(iter(inspect.signature(advantages.registry.resolve(advantage)).parameters.values()))
    return "token" if first.kind is first.KEYWORD_ONLY else "group"


def _check_weights(mode: str) -> None:
    """Raise where the mode is unknown."""
    constant, groups = 1.0 if mode.endswith("-norm") else None, [0] if mode == "prompt-mean" else None
    advantages.token_weights([1], mode, constant=constant, groups=groups)


def _composed(settings: Algorithm, loss: Named, kl: float, entropy: float) -> tuple[Named, dict[str, float]]:
    """Return the loss with its terms, and the terms' coefficients."""
    estimator = KL.get(settings.kl_loss_fn or "k2", settings.kl_loss_fn or "k2")
    if estimator != "none":
        losses.kl.registry.resolve(estimator)
    extra: dict[str, float] = {}
    if kl > 0:
        loss, extra = losses.with_kl(loss, kl, estimator), {"kl_coef": kl}
    if entropy > 0 and settings.entropy_loss_fn == "exact":
        loss, extra = losses.with_entropy(loss, entropy), {**extra, "entropy_coef": entropy}
    return loss, extra


def _fits(settings: Algorithm, recipe: Recipe, prepared: losses.PreparedLoss) -> None:
    """Raise where the loss or the estimator needs an input that this run does not provide."""
    where, name = "policy_loss_fn", settings.policy_loss_fn or recipe.loss
    if ("advantages" in prepared.inputs) != (recipe.advantage is not None):
        what = "needs advantages" if "advantages" in prepared.inputs else "takes no advantages"
        raise contradiction(where, name, f"the loss {what}")
    if (prepared.level == "pair") != (recipe.data == "pairs") or prepared.driver != "logprobs":
        raise contradiction(where, name, f"the loss is over {prepared.level}s and driven by {prepared.driver}")
    there = {
        "advantages": True,
        "reference_logprobs": True,
        "sampling_logprobs": recipe.rolls_out,
        "expert": recipe.data == "mixed",
        "old_logprobs": not settings.bypass_old_logprobs,
    }
    for missing in sorted(name for name in prepared.inputs if not there.get(name)):
        raise contradiction(where, name, f"the loss needs {missing!r}, which this run does not provide")
    if recipe.advantage is not None:
        _check_estimator(settings, recipe, recipe.advantage)
    elif settings.entropy_loss_fn_args and settings.entropy_loss_fn != "exact":
        why = f"the sampled bonus is added to advantages, which {settings.algorithm_type} does not have"
        raise contradiction("entropy_loss_fn", settings.entropy_loss_fn, why)


def _check_estimator(settings: Algorithm, recipe: Recipe, name: str | Callable[..., object]) -> None:
    """Raise where the estimator needs an input that this run does not provide."""
    named = list(inspect.signature(advantages.registry.resolve(name)).parameters.values())
    passed = {"group": ("lengths",), "turn": ()}.get(recipe.level, _TOKENWISE)
    skipped = {"group": 1, "turn": 2}.get(recipe.level, 0)
    wanted = [p.name for p in named[skipped:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    for missing in sorted({*wanted} - {*passed, *(settings.advantage_fn_args or {}), *recipe.advantage_args}):
        raise contradiction("advantage_fn", name, f"it needs {missing!r}, which this run does not provide")


_TOKENWISE = ("rewards", "values", "baseline", "teacher_logprobs", "sampling_logprobs", "reference_logprobs")

VERSION = "0.6.0"
NAMES: Mapping[str, str] = TABLE["differences"]["kl"]
"""Trinity's algorithms -> the default KL loss of each."""
_CLIPS = ("clip_range", "clip_range_high", "clip_high_threshold")
_NOTES, _KL_NOTES = TABLE["differences"]["notes"], TABLE["differences"]["kl_notes"]


def differences(settings: Algorithm, method: Method) -> dict[str, tuple[object, object]]:
    """Return keys of the section algorithm that are not set -> (rlkit's value, Trinity's value)."""
    name, row = settings.algorithm_type, method.recipe
    if name not in NAMES:
        return {}
    differing: dict[str, tuple[object, object]] = {}
    if settings.repeat_times is None and row.rolls_out:
        differing["repeat_times"] = (row.repeat_times, 1)
    for part, kind in (("kl_loss_fn", settings.kl_loss_fn or NAMES[name]), ("kl_penalty_fn", settings.kl_penalty_fn)):
        if kind not in (None, "none") and "kl_coef" not in (getattr(settings, f"{part}_args") or {}):
            differing[f"{part}_args.kl_coef"] = (0.0, 0.001)
    if settings.advantage_fn is None and name == "jsd":
        differing["advantage_fn"] = ("jsd_gradient", "jsd")
    if settings.loss_agg_mode is None and name == "gspo" and settings.policy_loss_fn_args is None:
        differing["loss_agg_mode"] = (row.weights, "token-mean")
    return differing | dict(_of_loss(settings, row))


def _of_loss(settings: Algorithm, row: Recipe) -> Iterator[tuple[str, tuple[object, object]]]:
    where, loss, given = "policy_loss_fn_args.", row.loss, settings.policy_loss_fn_args or {}
    same_loss = LOSSES.get(settings.policy_loss_fn or "", settings.policy_loss_fn) in (None, loss)
    if settings.algorithm_type == "dapo" and same_loss and not any(key in given for key in _CLIPS):
        yield f"{where}clip_range_high", (0.28, 0.2)
    if loss in ("ppo", "mix", "opsm") and not {"clip_ratio_c", "dual_clip"} & {*given, *row.loss_args}:
        yield f"{where}clip_ratio_c", (None, 3.0)
    if "loss_agg_mode" in given and settings.loss_agg_mode is None and given["loss_agg_mode"] != "token-mean":
        yield "loss_agg_mode", (f"the value of {where[:-1]}, {given['loss_agg_mode']}", "token-mean")


def notes(settings: Algorithm, method: Method) -> list[str]:
    """Return all differences, a line each."""
    lines = [
        f"algorithm.{key} is not set: rlkit uses {_said(ours)}, Trinity-RFT {VERSION} uses {_said(theirs)}"
        for key, (ours, theirs) in differences(settings, method).items()
    ]
    return lines + [f"differs from Trinity-RFT {VERSION}: {text}" for text in fixed_differences(settings, method)]


def fixed_differences(settings: Algorithm, method: Method) -> list[str]:
    """Return the differences from Trinity-RFT that no setting removes."""
    name = settings.algorithm_type
    told = [_NOTES[name]] if name in _NOTES else []
    told += [_KL_NOTES[name]] if method.kl_loss > 0 and name in _KL_NOTES else []
    if method.recipe.weights.endswith("-norm") and name in NAMES:
        told.append(
            "sums are divided by model.max_response_tokens and the number of episodes, not by the batch's width"
        )
    return told


def _said(value: object) -> str:
    return "off" if value is None else str(value)
