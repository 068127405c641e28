"""The items of a step: what was played, by the algorithm's estimator, and demonstrations beside it; their weights."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rlkit import credit
from rlkit.backends.protocol import Sampler
from rlkit.credit import Batch, Item
from rlkit.critics import Critic
from rlkit.losses.base import marks
from rlkit.losses.base import registry as losses
from rlkit.recipes.method import Method
from rlkit.trajectory import Group
from rlkit.types import Datum

__all__ = ["assign_credit", "experts", "weigh"]


def assign_credit(
    method: Method,
    groups: Sequence[Group],
    *,
    reference: Sampler | None = None,
    teacher: Sampler | None = None,
    critic: Critic | None = None,
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
        split="allow" if marks(losses.resolve(method.loss)).elementwise else "raise",
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
