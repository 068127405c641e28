"""From groups of trajectories to a batch: other models are asked, and an estimator says what each token is worth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check, advantages, metrics
from rlkit._calls import answered
from rlkit.backends import reference_logprobs
from rlkit.backends.protocol import Sampler
from rlkit.credit.batch import Batch, Item, multiply_weights
from rlkit.credit.levels import LEVELS, Arrays, Estimator, Known, Played
from rlkit.errors import ConfigError, DataError
from rlkit.trajectory import Group, Trajectory, datums
from rlkit.trajectory.turns import token_rewards
from rlkit.trajectory.types import checked_groups
from rlkit.types import Datum

if TYPE_CHECKING:
    from rlkit.critics.protocol import Critic

__all__ = ["assign"]

Parts: TypeAlias = Sequence[Sequence[Datum]]


@answered
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
        groups: what a rollout returned; ``Group.of_samples`` makes one from samples and rewards.
        estimator: a name of ``rlkit.advantages.registry``, or a function.
        level: what the estimator is given, and gives back:

            - "group": the rewards, an array [G] per group, and ``lengths`` if it names them; one advantage per
              trajectory.
            - "turn": the rewards, an array [turns] per trajectory; one advantage per turn. If it names ``states``, it
              is called group by group with what each turn was told; if it names ``steps``, it gets sums of rewards and
              numbers of turns, an array [G] each per group.
            - "token": by keyword what it names of ``rewards``, ``values``, ``baseline``, ``teacher_logprobs``,
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
        prefixes: token ids that the teacher reads first, per trajectory. Where it is None the teacher is not asked and
            the policy's own logprobs are taken.
        critic: asked for values; ``returns`` and ``old_values``, of its loss, become inputs.
        normalize: whether a critic's advantages get mean 0 and deviation 1 over all tokens
            (``rlkit.advantages.rebn``).
        split: as for ``rlkit.trajectory.datums``.

    Raises:
        DataError: something is no group, or does not fit the trajectories.
        ConfigError, UnknownNameError: the estimator is unknown, or names what was not given.

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
    groups = checked_groups(groups)
    _check.choice("level", level, tuple(LEVELS))
    function: Estimator = advantages.registry.resolve(estimator)
    _check.real("kl_coef", kl_coef, low=0.0)
    _check.real("entropy_coef", entropy_coef, low=0.0)
    if kl_coef > 0 and reference is None:
        raise ConfigError("kl_coef", f"is {kl_coef}", "reference=", "the policy that the KL is to")
    everyone = [t for group in groups for t in group.trajectories]
    for name, given in (("rewards", rewards), ("baseline", baseline), ("prefixes", prefixes), ("weights", weights)):
        if given is not None and not isinstance(given, str) and len(given) != len(everyone):
            raise DataError(name, f"has {len(given)} entries", f"{len(everyone)}", "one per trajectory")
    per_token = [token_rewards(t) for t in everyone] if rewards is None else _own_rewards(rewards, everyone)
    scored = [level == "group" or bool(np.isfinite(r).all()) for r in per_token]
    used = [i for i, t in enumerate(everyone) if t.token_count and scored[i]]
    mode, own_weights = (weights, None) if isinstance(weights, str) else (None, weights)
    if not used:
        return Batch([], [np.zeros(t.token_count) for t in everyone], {}, mode, constant)

    parts = [datums(everyone[i], split=split) for i in used]
    known = _ask(parts, reference, teacher, None if prefixes is None else [prefixes[i] for i in used], critic)
    if baseline is not None:
        known["baseline"] = [np.asarray(baseline[i], float) for i in used]
    penalty = [np.zeros(everyone[i].token_count) for i in used]
    if kl_coef > 0:
        sampled, theirs = known["sampling_logprobs"], known["reference_logprobs"]
        penalty = advantages.kl_penalty(
            sampling_logprobs=sampled, reference_logprobs=theirs, coef=kl_coef, estimator=kl_estimator
        )
    totals = [everyone[i].reward if rewards is None else per_token[i].sum() for i in used]
    labels = np.repeat(np.arange(len(groups)), [len(group) for group in groups])[used]
    played = Played(
        trajectories=[everyone[i] for i in used],
        sizes=np.unique(labels, return_counts=True)[1].tolist(),
        totals=np.array([total + p.sum() for total, p in zip(totals, penalty, strict=True)]),
        rewards=[per_token[i] + p for i, p in zip(used, penalty, strict=True)],
        known=known,
    )
    estimate = LEVELS[level](function, config or {}, played)

    inputs = {"reference_logprobs": known["reference_logprobs"]} if reference is not None else {}
    if isinstance(estimate, tuple):
        if critic is None:
            why = "the estimator gives returns, which a critic is to predict"
            raise ConfigError("critic", "is None", "a critic, or another estimator", why)
        inputs |= {"returns": estimate[1], "old_values": known["values"]}
        estimate = advantages.rebn(estimate[0]) if normalize else estimate[0]
    if entropy_coef > 0:
        bonus = advantages.entropy_bonus(sampling_logprobs=known["sampling_logprobs"], coef=entropy_coef)
        estimate = [a + b for a, b in zip(estimate, bonus, strict=True)]
    inputs["advantages"] = estimate
    items = [
        Item(_with(part, {name: arrays[k] for name, arrays in inputs.items()}), int(labels[k]), everyone[i])
        for k, (i, part) in enumerate(zip(used, parts, strict=True))
    ]
    if own_weights is not None:
        items = [_weighted(item, f"weights[{i}]", own_weights[i]) for i, item in zip(used, items, strict=True)]
    given_to = dict(zip(used, estimate, strict=True))
    whole = [np.asarray(given_to.get(i, np.zeros(t.token_count)), float) for i, t in enumerate(everyone)]
    return Batch(items, whole, _numbers(known, estimate), mode, constant)


def _own_rewards(rewards: Sequence[ArrayLike] | np.ndarray, trajectories: Sequence[Trajectory]) -> Arrays:
    arrays = []
    for i, (reward, trajectory) in enumerate(zip(rewards, trajectories, strict=True)):
        array = np.zeros(trajectory.token_count)
        amount = _per_token(f"rewards[{i}]", reward, trajectory.token_count)
        array[slice(-1, None) if amount.ndim == 0 else slice(None)] = amount
        arrays.append(array)
    return arrays


def _per_token(where: str, value: ArrayLike, count: int) -> np.ndarray:
    array = _check.as_array(where, value, "a number, or one per action token").astype(float)
    if array.shape not in ((), (count,)):
        raise DataError(where, f"has shape {array.shape}", f"({count},)", "one per action token")
    return array


def _ask(
    parts: Parts,
    reference: Sampler | None,
    teacher: Sampler | None,
    prefixes: Sequence[np.ndarray | None] | None,
    critic: Critic | None,
) -> Known:
    """Return what the models say of each trajectory's tokens; all requests to one model are in flight together."""
    flat = [datum for part in parts for datum in part]
    sampled = _joined(parts, [d.select(d.inputs["sampling_logprobs"]) for d in flat])
    known: Known = {"sampling_logprobs": sampled}
    if reference is not None:
        known["reference_logprobs"] = _joined(parts, reference_logprobs(reference, flat).result())
    if teacher is not None:
        nothing = np.zeros(0, np.int64)
        heads = [nothing] * len(parts) if prefixes is None else prefixes
        taught = [part for part, head in zip(parts, heads, strict=True) if head is not None]
        first = [head for part, head in zip(parts, heads, strict=True) if head is not None for _ in part]
        asked = reference_logprobs(teacher, [d for part in taught for d in part], prefixes=prefixes and first)
        answers = iter(_joined(taught, asked.result()))
        pairs = zip(heads, sampled, strict=True)
        known["teacher_logprobs"] = [own if head is None else next(answers) for head, own in pairs]
    if critic is not None:
        values = critic.values(flat).result()
        known["values"] = _joined(parts, [d.select(v) for d, v in zip(flat, values, strict=True)])
    return known


def _joined(parts: Parts, arrays: Iterable[np.ndarray]) -> Arrays:
    """Turn one array per datum into one per trajectory."""
    rest = iter(arrays)
    return [np.concatenate([next(rest) for _ in part]).astype(np.float64) for part in parts]


def _with(part: Sequence[Datum], inputs: Mapping[str, np.ndarray]) -> list[Datum]:
    """Return the datums of one trajectory, with these arrays [token_count] cut among them."""
    cuts = np.cumsum([int(datum.mask.sum()) for datum in part])[:-1]
    pieces = {name: np.split(array, cuts) for name, array in inputs.items()}
    return [d.with_inputs(**{name: piece[j] for name, piece in pieces.items()}) for j, d in enumerate(part)]


def _weighted(item: Item, where: str, weight: ArrayLike) -> Item:
    array = _per_token(where, weight, item.length)
    cuts = np.cumsum([int(datum.mask.sum()) for datum in item.data])[:-1]
    pieces = np.split(array, cuts) if array.ndim else [array] * len(item.data)
    data = [multiply_weights(datum, piece) for datum, piece in zip(item.data, pieces, strict=True)]
    return attrs.evolve(item, data=data)


def _numbers(known: Known, estimate: Arrays) -> dict[str, float]:
    """Return the spread of the advantages, and how far the sampling policy is from the models beside it."""
    numbers = {
        "train/advantage_std": float(np.concatenate(estimate).std()),
        "train/with_signal": float(np.mean([a.any() for a in estimate])),
    }
    for name in ("reference", "teacher"):
        if f"{name}_logprobs" in known:
            pair = {"trainer_logprobs": known[f"{name}_logprobs"], "sampling_logprobs": known["sampling_logprobs"]}
            numbers[f"train/kl_{name}"] = metrics.kl_v1(**pair)
    return numbers
