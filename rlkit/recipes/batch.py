"""From what was played, or read, to the datums of a step: scores of other models, advantages, inputs of the loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlkit import metrics
from rlkit.advantages import token_weights
from rlkit.backends import reference_logprobs
from rlkit.backends.protocol import Sampler
from rlkit.losses.base import marks
from rlkit.losses.base import registry as losses
from rlkit.recipes.credit import credited
from rlkit.recipes.method import Method
from rlkit.trajectory import Group, Trajectory, datums
from rlkit.types import Datum

__all__ = ["Item", "demonstrated", "scored", "trajectories_of", "weighted"]


@attrs.frozen(eq=False)
class Item:
    """What is never parted by minibatches: a trajectory, a pair, or a demonstration.

    Attributes:
        data: its datums.
        group: which group or row it is of.
        expert: whether it is a demonstration.
    """

    data: Sequence[Datum]
    group: int = 0
    expert: bool = False

    @property
    def length(self) -> int:
        """Tokens of the policy's, or to be learnt."""
        return sum(int(datum.mask.sum()) for datum in self.data)


def scored(sampler: Sampler, data: Sequence[Datum]) -> list[np.ndarray]:
    """float32 [n] per datum: what a frozen model gives its tokens, at their temperature. All requests are in flight."""
    return reference_logprobs(sampler, data).result()


def trajectories_of(
    method: Method,
    groups: Sequence[Group],
    *,
    reference: Sampler | None = None,
    teacher: Sampler | None = None,
    critic: Any = None,
    hint: Callable[[Sequence[Group]], list[np.ndarray | None]] | None = None,
    seed: Sequence[int] = (0,),
    skip: Callable[[Trajectory], bool] = lambda trajectory: False,
) -> tuple[list[Item], dict[str, float], list[np.ndarray]]:
    """The items that train these groups, numbers about them, and the advantages of each trajectory's tokens.

    Args:
        method: the algorithm.
        groups: as they were played.
        reference, teacher, critic: those that the method needs.
        hint: groups -> for each trajectory the tokens that the teacher reads first, None where it has nothing to say.
        seed: of estimators that draw.
        skip: which trajectories are in their group's baseline and do not train.
    """
    unscored = method.recipe.level == "group"  # such estimators leave them out themselves, and give them 0
    kept = [[t for t in g.trajectories if t.token_count and (unscored or math.isfinite(t.reward))] for g in groups]
    groups = [attrs.evolve(group, trajectories=mine) for group, mine in zip(groups, kept, strict=True) if mine]
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        return [], {}, []
    split = "allow" if marks(losses.resolve(method.loss)).elementwise else "raise"
    parts = [datums(t, split=split) for t in trajectories]
    flat = [datum for each in parts for datum in each]
    found: dict[str, Any] = {
        "sampling_logprobs": _joined(parts, [d.select(d.inputs["sampling_logprobs"]) for d in flat])
    }
    if reference is not None:
        found["reference_logprobs"] = _joined(parts, scored(reference, flat))
    if teacher is not None:
        own = found["sampling_logprobs"]
        taught = _joined(parts, scored(teacher, flat)) if hint is None else _taught(teacher, parts, hint(groups), own)
        found["teacher_logprobs"] = taught
    if "greedy" in method.recipe.needs:
        found["baseline"] = [float(t.tags["greedy"]) for t in trajectories]
    if critic is not None:
        values = critic.values(flat).result()
        found["values"] = _joined(parts, [d.select(v) for d, v in zip(flat, values, strict=True)])
    advantages, returns = credited(method, groups, found, seed=seed)
    more: dict[str, Any] = {}
    if returns is not None:
        more = {"returns": returns, "old_values": found["values"]}
    if reference is not None:
        more["reference_logprobs"] = found["reference_logprobs"]
    items, labels = [], np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    for i, each in enumerate(parts):
        if skip(trajectories[i]) or (method.recipe.select == "best" and not advantages[i].any()):
            continue
        cut = {name: _cut(each, value[i]) for name, value in {"advantages": advantages, **more}.items()}
        data = [d.with_inputs(**{name: value[j] for name, value in cut.items()}) for j, d in enumerate(each)]
        items.append(Item(data, int(labels[i])))
    return items, _numbers(found, advantages), advantages


def _taught(
    teacher: Sampler, parts: Sequence[Sequence[Datum]], heads: Sequence[np.ndarray | None], own: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The teacher's logprobs of each trajectory, behind its head; the policy's own where there is none to ask."""
    asked = [i for i, head in enumerate(heads) if head is not None]
    flat = [datum for i in asked for datum in parts[i]]
    prefixes = [heads[i] for i in asked for _ in parts[i]]
    scores = reference_logprobs(teacher, flat, prefixes=prefixes).result()
    answered = iter(_joined([parts[i] for i in asked], scores))
    return [own[i] if head is None else next(answered) for i, head in enumerate(heads)]


def weighted(method: Method, items: Sequence[Item], *, constant: float, mu: float | None) -> list[Datum]:
    """The datums of one optimizer step, with the weights that make their sum the wanted mean.

    In a mixed batch the rollouts and the demonstrations are each a mean over their own.
    """
    if method.recipe.data == "pairs":
        return [d.with_inputs(weights=1.0 / len(items)) for item in items for d in item.data]
    found = np.zeros(len(items))
    for expert in (False, True):
        places = [i for i, item in enumerate(items) if item.expert == expert]
        if places:
            mode = method.expert_weights if expert else method.recipe.weights
            extra: dict[str, Any] = {"constant": constant} if mode.endswith("-norm") else {}
            extra |= {"groups": [items[i].group for i in places]} if mode == "prompt-mean" else {}
            found[places] = token_weights([items[i].length for i in places], mode, **extra)
    share = {} if mu is None else {"mu": mu}
    return [
        datum.with_inputs(weights=weight, **share)
        for item, weight in zip(items, found, strict=True)
        for datum in item.data
    ]


def demonstrated(rows: Sequence[Sequence[Datum]]) -> list[Item]:
    """The items of demonstrations in a mixed batch."""
    blank = {"sampling_logprobs": 0.0, "advantages": 0.0, "expert": 1.0}
    return [Item([_filled(d, blank) for d in data], i, expert=True) for i, data in enumerate(rows)]


def _filled(datum: Datum, numbers: Mapping[str, float]) -> Datum:
    n = int(datum.mask.sum())
    return datum.with_inputs(**{name: np.full(n, value) for name, value in numbers.items()})


def _joined(parts: Sequence[Sequence[Datum]], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """One array per datum -> one per trajectory."""
    rest = iter(arrays)
    return [np.concatenate([next(rest) for _ in each]).astype(np.float64) for each in parts]


def _cut(data: Sequence[Datum], flat: np.ndarray) -> list[np.ndarray]:
    """One array of a trajectory -> one per datum."""
    return np.split(np.asarray(flat), np.cumsum([int(d.mask.sum()) for d in data])[:-1])


def _numbers(found: Mapping[str, Any], advantages: Sequence[np.ndarray]) -> dict[str, float]:
    """How far the sampling policy is from the models beside it."""
    flat = np.concatenate(advantages)
    numbers = {
        "train/advantage_std": float(flat.std()),
        "train/with_signal": float(np.mean([a.any() for a in advantages])),
    }
    for name in ("reference", "teacher"):
        if f"{name}_logprobs" in found:
            two = {"trainer_logprobs": found[f"{name}_logprobs"], "sampling_logprobs": found["sampling_logprobs"]}
            numbers[f"train/kl_{name}"] = metrics.kl_v1(**two)
    return numbers
