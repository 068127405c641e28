"""Credit assignment: from groups of episodes to the datums that train the policy."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias, TypeVar, cast

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check, advantages, metrics
from rlkit._seeds import epoch_order
from rlkit.advantages import token_weights
from rlkit.advantages.tokens import KL_ESTIMATORS, MODES
from rlkit.backends import reference_logprobs
from rlkit.backends.protocol import Critic, Sampler
from rlkit.errors import ConfigError, DataError
from rlkit.trajectory import Group, Trajectory, checked_groups, datums, token_rewards, turn_states
from rlkit.types import Datum

__all__ = ["Batch", "Item", "assign", "minibatches", "weigh"]

Estimator: TypeAlias = Callable[..., Any]  # results are checked here, level by level
Arrays: TypeAlias = list[np.ndarray]
Estimate: TypeAlias = Arrays | tuple[Arrays, Arrays]  # advantages, or also returns
Config: TypeAlias = Mapping[str, object]  # an estimator's settings
Known: TypeAlias = dict[str, Arrays]
Rows = TypeVar("Rows", np.ndarray, list[Any])
_ARGUMENTS = {"values": "critic", "teacher_logprobs": "teacher", "reference_logprobs": "reference"}


@attrs.frozen(eq=False)
class Episodes:
    """Trajectories that train, in the order of their groups.

    Attributes:
        trajectories: each with tokens.
        labels: the number of each one's group.
        totals: float64 [trajectories], the reward of each, less the penalty.
        rewards: float64 [token_count] each, less the penalty.
        known: the inputs that estimators of tokens may name.
    """

    trajectories: Sequence[Trajectory]
    labels: Sequence[int]
    totals: np.ndarray
    rewards: Arrays
    known: Known = attrs.field(factory=dict)

    def by_group(self, entries: Rows) -> list[Rows]:
        """Cut one entry per trajectory into a row per group, none empty."""
        ends: list[int] = np.cumsum(list(Counter(self.labels).values())).tolist()
        return [entries[begin:end] for begin, end in pairwise([0, *ends])]


def _per_group(estimator: Estimator, config: Config, episodes: Episodes) -> Arrays:
    _refuse_tokens(estimator, config, "group")
    lengths = {}
    if "lengths" in inspect.signature(estimator).parameters:
        lengths["lengths"] = episodes.by_group(np.array([float(t.token_count) for t in episodes.trajectories]))
    flat = _flatten(_call(estimator, episodes.by_group(episodes.totals), **lengths, **config))
    if flat.shape == episodes.totals.shape:
        flat = np.where(np.isnan(episodes.totals), 0.0, flat)  # an unscored episode teaches nothing
    sizes = [t.token_count for t in episodes.trajectories]
    return np.split(
        np.repeat(_check_size(flat, len(sizes), "one advantage per trajectory"), sizes), np.cumsum(sizes)[:-1]
    )


def _per_turn(estimator: Estimator, config: Config, episodes: Episodes) -> Arrays:
    _refuse_tokens(estimator, config, "turn")
    pairs = zip(episodes.trajectories, episodes.rewards, strict=True)
    rewards = [np.array([part.sum() for part in t.per_turn(r)]) for t, r in pairs]
    per_turn = _call_per_turn(estimator, config, episodes, rewards)
    flat = _check_size(_flatten(per_turn), sum(r.size for r in rewards), "one advantage per turn")
    sizes = [turn.tokens.size for t in episodes.trajectories for turn in t.turns]
    return np.split(np.repeat(flat, sizes), np.cumsum([t.token_count for t in episodes.trajectories])[:-1])


def _call_per_turn(estimator: Estimator, config: Config, episodes: Episodes, rewards: Arrays) -> object:
    """Call the estimator on each turn's reward, in the form that its parameters ask for."""
    named = inspect.signature(estimator).parameters
    if "steps" in named:  # one call, since a deviation may be that of the whole batch
        sums, steps = np.array([r.sum() for r in rewards]), np.array([r.size for r in rewards])
        groups = estimator(episodes.by_group(sums), episodes.by_group(steps), **config)
        return [turns for group in groups for turns in group]
    if "states" in named:
        states = [turn_states(t) for t in episodes.trajectories]
        pairs = zip(episodes.by_group(rewards), episodes.by_group(states), strict=True)
        return [turns for pair in pairs for turns in estimator(*pair, **config)]
    _refuse_groups(estimator, "turn")
    return estimator(rewards, **config)


def _call_per_token(estimator: Estimator, config: Config, episodes: Episodes) -> Estimate:
    _refuse_groups(estimator, "token")
    known = {"rewards": episodes.rewards, **episodes.known}
    wanted = {}
    for name, parameter in inspect.signature(estimator).parameters.items():
        if name in known:
            wanted[name] = known[name]
        elif name not in config and _is_required(parameter):
            raise ConfigError("estimator", f"needs {name!r}", f"{_ARGUMENTS.get(name, name)}=")
    estimate = estimator(**wanted, **config)
    if not isinstance(estimate, tuple):
        return _check_sizes(estimate, episodes.trajectories)
    _check.entries("estimator", estimate, 2, "advantages and returns")
    return _check_sizes(estimate[0], episodes.trajectories), _check_sizes(estimate[1], episodes.trajectories)


LEVELS: Mapping[str, Callable[[Estimator, Config, Episodes], Estimate]] = {
    "group": _per_group,
    "turn": _per_turn,
    "token": _call_per_token,
}


def _call(estimator: Estimator, *groups: Arrays, **config: object) -> object:
    """Call an estimator of groups; its exceptions get a note on its arguments."""
    try:
        return estimator(*groups, **config)
    except (AttributeError, TypeError, ValueError) as error:
        error.add_note(_LISTS)
        raise


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD


def _refuse_groups(estimator: Estimator, level: str) -> None:
    """Raise for an estimator that compares a group's samples: turns and tokens of a trajectory are not such."""
    if "singleton" in inspect.signature(estimator).parameters:
        what = f"{getattr(estimator, '__name__', 'it')} compares the samples of a group"
        others = "step_wise_grpo, gigpo, discounted_returns" if level == "turn" else "gae, discounted_returns"
        raise ConfigError(f"level={level!r}", what, "level='group'", f"or an estimator such as {others}")


def _refuse_tokens(estimator: Estimator, config: Config, level: str) -> None:
    """Raise for an estimator that requires a model's numbers per token, which only the level "token" has."""
    for name, parameter in inspect.signature(estimator).parameters.items():
        if name in _ARGUMENTS and name not in config and _is_required(parameter):
            what = f"{getattr(estimator, '__name__', 'it')} needs {name!r}, which is per token"
            raise ConfigError(f"level={level!r}", what, "level='token'", f"and {_ARGUMENTS[name]}=")


def _flatten(arrays: object) -> np.ndarray:
    if isinstance(arrays, np.ndarray) and arrays.ndim == 2:
        return arrays.reshape(-1)
    if not isinstance(arrays, (list, tuple)):
        raise DataError("estimator", f"returned {_check.describe(arrays)}", "a list of arrays", _LISTS)
    rows = [_check.as_array(f"estimator: element {i} of its result", row, _LISTS) for i, row in enumerate(arrays)]
    for row in rows:
        if row.ndim != 1:
            raise DataError("estimator", f"returned an array of shape {row.shape}", "one array [G] per group", _LISTS)
    return np.concatenate(rows) if rows else np.zeros(0)


_LISTS = (
    "an estimator takes the rewards of all groups, a list of arrays, and returns such a list; "
    "rlkit.advantages.per_group converts a function of one group"
)


def _check_sizes(arrays: object, trajectories: Sequence[Trajectory]) -> Arrays:
    _check.entries("estimator", arrays, len(trajectories), "an array per trajectory")
    pairs = zip(cast("Sequence[object]", arrays), trajectories, strict=True)
    return [_check_size(array, trajectory.token_count, "one advantage per token") for array, trajectory in pairs]


def _check_size(value: object, count: int, why: str, where: str = "estimator") -> np.ndarray:
    array = _check.as_array(where, value, f"numbers of shape ({count},)")
    if array.shape != (count,):
        raise DataError(where, f"returned an array of shape {array.shape}", f"({count},)", why)
    for i in np.flatnonzero(~np.isfinite(array))[:1]:
        raise DataError(where, f"returned {array[i]} at [{i}]", "finite numbers", why)
    return array


@attrs.frozen(eq=False)
class Item:
    """A unit that minibatches never split: a trajectory, a preference pair, or a demonstration.

    Args:
        data: its datums.
        group: which group, pair or row it is; the mode "prompt-mean" weighs by it.
        trajectory: its source, or None.
    """

    data: Sequence[Datum]
    group: int = 0
    trajectory: Trajectory | None = None

    @property
    def length(self) -> int:
        """The number of tokens that train."""
        return sum(int(datum.mask.sum()) for datum in self.data)


@attrs.frozen(eq=False)
class Batch:
    """The result of ``rlkit.credit.assign``.

    Args:
        items: one per trajectory that trains.
        advantages: float64 [token_count] per trajectory, in the order of the groups; 0 where one is left out.
        metrics: "train/advantage_std"; "train/with_signal", the share of trajectories whose advantages are not all 0;
            "train/kl_reference" and "train/kl_teacher" (k1, nats per token) where there is such a model.
        weights: as given to ``assign``, per trajectory or the name of a mode.
        constant: of the modes that end in "-norm".
    """

    items: Sequence[Item]
    advantages: Sequence[np.ndarray]
    metrics: Mapping[str, float]
    weights: str | None = None
    constant: float | None = None

    @property
    def data(self) -> list[Datum]:
        """The datums of one optimizer step on all items, weighted."""
        return weigh(self.items, self.weights, constant=self.constant)

    def minibatches(self, size: int, *, epochs: int = 1, seed: int | Sequence[int] = (0,)) -> Iterator[list[Datum]]:
        """Yield the datums of each optimizer step, weighted over that step; see ``rlkit.credit.minibatches``."""
        for items in minibatches(self.items, size, epochs=epochs, seed=seed):
            yield weigh(items, self.weights, constant=self.constant)


def weigh(items: Sequence[Item], mode: str | None = "token-mean", *, constant: float | None = None) -> list[Datum]:
    """Return the datums of one optimizer step, with the weights that make the sum of their losses the wanted mean.

    Args:
        items: those of the step.
        mode: of ``rlkit.advantages.token_weights``, an item being a sequence; None: the datums as they are. Weights
            that a datum has, such as those of its turns, are multiplied.
        constant: > 0, for the modes that end in "-norm".

    Raises:
        ConfigError: the mode is unknown, or constant does not fit it.

    >>> import rlkit
    >>> pair = [Item([rlkit.Datum([1, 2], [0, 1])]), Item([rlkit.Datum([1, 2, 3, 4], [0, 1, 1, 1])])]
    >>> [float(datum.inputs["weights"]) for datum in weigh(pair)], weigh(pair, "token-sum")[0].inputs["weights"]
    ([0.25, 0.25], array(1., dtype=float32))

    Source: rule R3, docs/explanation.md.
    """
    if mode is None or not items:
        return [datum for item in items for datum in item.data]
    groups = [item.group for item in items] if mode == "prompt-mean" else None
    weights = token_weights([item.length for item in items], mode, constant=constant, groups=groups)
    return [multiply_weights(d, weight) for item, weight in zip(items, weights, strict=True) for d in item.data]


def multiply_weights(datum: Datum, weight: float | np.ndarray) -> Datum:
    """Return the datum with its weights, 1 where it has none, times a number or [n]."""
    own = datum.inputs.get("weights")
    if own is None:
        return datum.with_inputs(weights=weight)
    return datum.with_inputs(weights=weight * (own if own.ndim == 0 else datum.select(own)))


def minibatches(
    items: Sequence[Item], size: int, *, epochs: int = 1, seed: int | Sequence[int] = (0,)
) -> Iterator[list[Item]]:
    """Yield the items of each optimizer step, epoch by epoch; shuffled where there are several steps in an epoch.

    Args:
        items: of a step of the loop.
        size: items per optimizer step, at most; 0: all in one. The parts are as equal as can be.
        epochs: >= 1, passes over the items.
        seed: a number >= 0, or several, such as the run's seed and the step.

    Raises:
        ConfigError: a number is out of range.

    >>> import rlkit
    >>> five = [Item([rlkit.Datum([1, 2], [0, 1])], group=i) for i in range(5)]
    >>> [[item.group for item in part] for part in minibatches(five, 2, seed=(3, 0))]
    [[3, 4], [2, 1], [0]]
    """
    _check.integer("minibatches(size)", size, low=0)
    _check.integer("minibatches(epochs)", epochs, low=1)
    numbers = [_check.integer("minibatches(seed)", number, low=0, error=DataError) for number in _seeds(seed)]
    count = -(-len(items) // (size or max(len(items), 1)))
    for epoch in range(epochs if items else 0):
        order = epoch_order(len(items), tuple(numbers), epoch, "minibatches") if count > 1 else np.arange(len(items))
        yield from ([items[i] for i in part] for part in np.array_split(order, count))


def _seeds(seed: int | Sequence[int]) -> Sequence[int]:
    if isinstance(seed, (int, np.integer)):
        return (seed,)
    _check.entries("minibatches(seed)", seed)
    return seed


Parts: TypeAlias = Sequence[Sequence[Datum]]


def assign(
    groups: Sequence[Group],
    estimator: str | Estimator = "grpo",
    *,
    level: Literal["group", "turn", "token"] = "group",
    config: Mapping[str, object] | None = None,
    weights: str | Sequence[ArrayLike] | np.ndarray | None = "token-mean",
    constant: float | None = None,
    rewards: Sequence[ArrayLike] | np.ndarray | None = None,
    baseline: Sequence[float] | np.ndarray | None = None,
    reference: Sampler | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k1",
    entropy_coef: float = 0.0,
    teacher: Sampler | None = None,
    prefixes: Sequence[np.ndarray | None] | None = None,
    critic: Critic | None = None,
    normalize: bool = True,
    split: str = "raise",
) -> Batch:
    """Turn played groups into the datums that train the policy: every token gets an advantage, every datum a weight.

    Trajectories without tokens are left out. Unscored ones (NaN) are left out at the levels "turn" and "token"; at
    level "group" the estimator keeps them out of its baseline and gives them 0.

    Args:
        groups: the result of a rollout; ``Group.of_samples`` makes one from samples and rewards.
        estimator: a name of ``rlkit.advantages.registry``, or a function.
        level: the estimator's input and output:

            - "group": the rewards, an array [G] per group, and ``lengths`` if it names them; one advantage per
              trajectory.
            - "turn": the rewards, an array [turns] per trajectory; one advantage per turn. If it names ``states``, it
              is called group by group with each turn's observation; if it names ``steps``, it gets sums of rewards and
              numbers of turns, an array [G] each per group.
            - "token": by keyword those that it names of ``rewards``, ``values``, ``baseline``, ``teacher_logprobs``,
              ``reference_logprobs`` and ``sampling_logprobs``, an array [token_count] per trajectory; such a list, or
              with a critic a tuple (advantages, returns).
        config: the estimator's settings.
        weights: a mode of ``rlkit.advantages.token_weights`` over all trajectories that train; or per trajectory a
            number or [token_count]; or None: no weights, which is 1.
        constant: > 0, of the modes that end in "-norm".
        rewards: in place of the environment's: per trajectory a number, which its last token gets, or [token_count].
        baseline: the reward of a greedy episode of its task, per trajectory (ReMax).
        reference: the policy to stay close to; its logprobs become the input ``reference_logprobs``.
        kl_coef: >= 0; each token's KL to the reference, times this, is taken off its reward.
        kl_estimator: as for ``rlkit.advantages.kl_penalty``.
        entropy_coef: >= 0; -log q of each token, times this, is added to its advantage.
        teacher: the model to learn from; it scores the policy's tokens.
        prefixes: token ids that the teacher reads first, per trajectory. If one is None, the teacher is not called and
            the policy's own logprobs are used.
        critic: asked for values; ``returns`` and ``old_values``, of its loss, become inputs.
        normalize: whether a critic's advantages get mean 0 and deviation 1 over all tokens
            (``rlkit.advantages.rebn``).
        split: as for ``rlkit.trajectory.datums``.

    Raises:
        DataError: something is not a group, or does not fit the trajectories.
        ConfigError, UnknownNameError: the estimator is unknown, has no such setting, or names an input that was not
            given.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Group
    >>> samples = [Sample([5], [7, 8], [-0.5, -0.5]), Sample([5], [9, 4], [-1.0, -1.0])]
    >>> batch = assign([Group.of_samples(samples, [1.0, 0.0])], "dr_grpo")
    >>> batch.advantages
    [array([0.5, 0.5]), array([-0.5, -0.5])]
    >>> [float(datum.inputs["weights"]) for datum in batch.data]  # 1 / 4 tokens
    [0.25, 0.25]

    Source: those of the estimators; KL taken off rewards: arXiv:1909.08593; values and returns: arXiv:1506.02438.
    """
    groups, config = checked_groups(groups), config or {}
    function = _resolve(estimator, config, level)
    mode, own_weights = (weights, None) if isinstance(weights, str) else (None, weights)
    _check_numbers(mode, kl_coef, entropy_coef, reference)
    _check.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    _check_values(function, critic, baseline)
    everyone = [t for group in groups for t in group.trajectories]
    _check_counts(len(everyone), rewards=rewards, baseline=baseline, prefixes=prefixes, weights=own_weights)
    whole = [np.zeros(t.token_count) for t in everyone]
    episodes, used = _choose_scored(groups, everyone, *_reward(everyone, rewards), level)
    if not used:
        return Batch([], whole, {}, mode, constant)
    parts = [datums(t, split=split) for t in episodes.trajectories]
    known = ask_models(parts, reference, teacher, _pick(prefixes, used), critic)
    if baseline is not None:
        known["baseline"] = _read_baseline(_pick(baseline, used))
    episodes = penalize(episodes, known, kl_coef, kl_estimator)
    estimated, inputs = estimate(function, config, level, episodes, entropy_coef, normalize=normalize)
    data = collect(parts, inputs, _pick(own_weights, used), used)
    for i, array in zip(used, estimated, strict=True):
        whole[i] = np.asarray(array, float)
    items = list(map(Item, data, episodes.labels, episodes.trajectories))
    return Batch(items, whole, _measure(known, estimated), mode, constant)


def _resolve(estimator: str | Estimator, config: Config, level: str) -> Estimator:
    """Return the estimator, which takes these settings."""
    _check.choice("level", level, tuple(LEVELS))
    _check.require(isinstance(config, Mapping), "assign(config)", config, "a mapping of the estimator's settings")
    if "rewards" in config:
        raise ConfigError("assign(config)", "has 'rewards'", "settings", "rewards= replaces the environment's")
    function: Estimator = advantages.registry.resolve(estimator)
    _check.check_keywords("assign(config)", function, config)
    return function


def _check_numbers(mode: str | None, kl_coef: float, entropy_coef: float, reference: Sampler | None) -> None:
    _check.optional(_check.choice, "weights", mode, MODES)
    _check.real("kl_coef", kl_coef, low=0.0)
    _check.real("entropy_coef", entropy_coef, low=0.0)
    if kl_coef > 0 and reference is None:
        raise ConfigError("kl_coef", f"is {kl_coef}", "reference=", "the reference policy of the KL")


def _check_values(function: Estimator, critic: Critic | None, baseline: object) -> None:
    good = critic is None or callable(getattr(critic, "values", None))
    _check.require(good, "critic", critic, "a critic, which has values(data)")
    if baseline is not None and "baseline" not in inspect.signature(function).parameters:
        raise ConfigError("baseline", "is given", "an estimator that takes it, such as remax")


def _check_counts(count: int, **given: Sequence[object] | np.ndarray | None) -> None:
    for name, entries in given.items():
        if entries is not None:
            _check.entries(name, entries, count, "one per trajectory")


def _reward(
    trajectories: Sequence[Trajectory], rewards: Sequence[ArrayLike] | np.ndarray | None
) -> tuple[list[float], Arrays]:
    """Return the reward of each trajectory, and of each of its tokens."""
    if rewards is None:
        return [t.reward for t in trajectories], [token_rewards(t) for t in trajectories]
    arrays = [np.zeros(t.token_count) for t in trajectories]
    for i, (array, reward) in enumerate(zip(arrays, rewards, strict=True)):
        amount = _per_token(f"rewards[{i}]", reward, array.size)
        array[slice(-1, None) if amount.ndim == 0 else slice(None)] = amount
    return [array.sum() for array in arrays], arrays


def _choose_scored(
    groups: Sequence[Group], everyone: Sequence[Trajectory], totals: Sequence[float], rewards: Arrays, level: str
) -> tuple[Episodes, list[int]]:
    """Return the trajectories that train, and which they are: those with tokens and, but for "group", without NaN."""
    pairs = enumerate(zip(everyone, rewards, strict=True))
    used = [i for i, (t, r) in pairs if t.token_count and (level == "group" or bool(np.isfinite(r).all()))]
    labels = np.repeat(np.arange(len(groups)), list(map(len, groups)))[used].tolist()
    return Episodes(_pick(everyone, used), labels, np.array(_pick(totals, used)), _pick(rewards, used)), used


def _pick(given: Any, used: Sequence[int]) -> Any:
    """Return the entries of the trajectories that train, or None."""
    return None if given is None else [given[i] for i in used]


def penalize(episodes: Episodes, known: Known, coef: float, estimator: str) -> Episodes:
    """Return them with the KL of each token to the reference subtracted from its reward."""
    sampled, penalty = known["sampling_logprobs"], [np.zeros(array.size) for array in known["sampling_logprobs"]]
    if coef:
        theirs = known["reference_logprobs"]
        penalty = advantages.kl_penalty(
            sampling_logprobs=sampled, reference_logprobs=theirs, coef=coef, estimator=estimator
        )
    totals = np.array([total + p.sum() for total, p in zip(episodes.totals, penalty, strict=True)])
    return attrs.evolve(episodes, totals=totals, rewards=list(map(np.add, episodes.rewards, penalty)), known=known)


def estimate(
    function: Estimator, config: Config, level: str, episodes: Episodes, entropy_coef: float, *, normalize: bool
) -> tuple[Arrays, Known]:
    """Return the advantages, and the inputs of the policy's and of a critic's losses, all [token_count] each."""
    known = episodes.known
    inputs = {name: known[name] for name in ("reference_logprobs",) if name in known}
    found = LEVELS[level](function, config, episodes)
    if isinstance(found, tuple):
        if "values" not in known:
            why = "the estimator gives returns, which train a critic"
            raise ConfigError("critic", "is None", "a critic, or an estimator without returns", why)
        found, returns = found
        inputs |= {"returns": returns, "old_values": known["values"]}
        found = advantages.rebn(found) if normalize else found
    if entropy_coef:
        bonus = advantages.entropy_bonus(sampling_logprobs=known["sampling_logprobs"], coef=entropy_coef)
        found = list(map(np.add, found, bonus))
    return found, {**inputs, "advantages": found}


def _per_token(where: str, value: ArrayLike, count: int) -> np.ndarray:
    array = _check.as_array(where, value, "a number, or one per action token").astype(float)
    if array.shape not in ((), (count,)):
        raise DataError(where, f"has shape {array.shape}", f"({count},)", "one per action token")
    return array


def ask_models(
    parts: Parts,
    reference: Sampler | None,
    teacher: Sampler | None,
    prefixes: Sequence[np.ndarray | None] | None,
    critic: Critic | None,
) -> Known:
    """Return the inputs that an estimator of tokens may name; requests to one model run together."""
    flat = [datum for part in parts for datum in part]
    sampled = _join(parts, [d.select(d.inputs["sampling_logprobs"]) for d in flat])
    known: Known = {"sampling_logprobs": sampled}
    if reference is not None:
        known["reference_logprobs"] = _join(parts, reference_logprobs(reference, flat).result())
    if teacher is not None:
        known["teacher_logprobs"] = _ask_teacher(parts, teacher, prefixes, sampled)
    if critic is not None:
        values = critic.values(flat).result()
        _check.entries("critic.values(data)", values, len(flat), "one array per datum")
        known["values"] = _join(
            parts, [_select_values(i, *pair) for i, pair in enumerate(zip(flat, values, strict=True))]
        )
    return known


def _read_baseline(baseline: Sequence[float]) -> Arrays:
    return [np.asarray(_check.real(f"baseline[{i}]", x, error=DataError)) for i, x in enumerate(baseline)]


def _select_values(i: int, datum: Datum, values: np.ndarray) -> np.ndarray:
    return datum.select(_check_size(values, len(datum), "one value per token", f"critic.values(data)[{i}]"))


def _ask_teacher(
    parts: Parts, teacher: Sampler, prefixes: Sequence[np.ndarray | None] | None, sampled: Arrays
) -> Arrays:
    if prefixes is None:
        flat = [datum for part in parts for datum in part]
        return _join(parts, reference_logprobs(teacher, flat).result())
    taught = [(part, prefix) for part, prefix in zip(parts, prefixes, strict=True) if prefix is not None]
    first = [prefix for part, prefix in taught for _ in part]
    asked = reference_logprobs(teacher, [d for part, _ in taught for d in part], prefixes=first)
    answers = iter(_join([part for part, _ in taught], asked.result()))
    return [own if prefix is None else next(answers) for prefix, own in zip(prefixes, sampled, strict=True)]


def _join(parts: Parts, arrays: Iterable[np.ndarray]) -> Arrays:
    """Turn one array per datum into one per trajectory."""
    rest = iter(arrays)
    return [np.concatenate([next(rest) for _ in part]).astype(np.float64) for part in parts]


def collect(parts: Parts, inputs: Known, weights: Sequence[ArrayLike] | None, used: Sequence[int]) -> list[list[Datum]]:
    """Return the datums of each trajectory with its inputs, cut among them, and the caller's weights if there are any.

    Args:
        parts: the datums of each trajectory.
        inputs: an array [token_count] per trajectory, by name.
        weights: a number or [token_count] per trajectory.
        used: the number of each trajectory among the caller's, for errors.
    """
    data = []
    for k, (part, *row) in enumerate(zip(parts, *inputs.values(), strict=True)):
        pieces = {name: _cut(part, array) for name, array in zip(inputs, row, strict=True)}
        made = [d.with_inputs(**{name: piece[j] for name, piece in pieces.items()}) for j, d in enumerate(part)]
        if weights is not None:
            array = _per_token(f"weights[{used[k]}]", weights[k], sum(int(datum.mask.sum()) for datum in part))
            shares = _cut(part, array) if array.ndim else [array] * len(part)
            made = list(map(multiply_weights, made, shares))
        data.append(made)
    return data


def _cut(part: Sequence[Datum], array: np.ndarray) -> Arrays:
    """Cut one entry per token that trains into an array per datum."""
    return np.split(array, np.cumsum([int(datum.mask.sum()) for datum in part])[:-1])


def _measure(known: Known, estimate: Arrays) -> dict[str, float]:
    """Return the spread of the advantages, and the distance of the sampler from the reference and the teacher."""
    numbers = {
        "train/advantage_std": float(np.concatenate(estimate).std()),
        "train/with_signal": float(np.mean([a.any() for a in estimate])),
    }
    for name in ("reference", "teacher"):
        if f"{name}_logprobs" in known:
            pair = {"trainer_logprobs": known[f"{name}_logprobs"], "sampling_logprobs": known["sampling_logprobs"]}
            numbers[f"train/kl_{name}"] = metrics.kl_v1(**pair)
    return numbers
