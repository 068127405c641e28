"""Playing a step's episodes: groups of tasks, greedy baselines, and more of them where too few teach anything."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rlkit.backends.protocol import Sampler
from rlkit.envs import Task, TaskSource
from rlkit.filters import zero_variance
from rlkit.recipes.method import Method
from rlkit.rollouts import Plan, Rollouts, rollout_sync
from rlkit.trajectory import Group

__all__ = ["played"]

_ROUNDS = 4


def played(method: Method, tasks: TaskSource, size: int, plan: Plan, sampler: Sampler, step: int) -> Rollouts:
    """The groups of a step.

    Groups whose rewards do not differ by more than the method's threshold are left out. With ``select="informative"``
    further tasks are then played in their place, in four rounds at most; what is missing after that is missing. The
    metrics are those of the first round, and how many groups were left out in all.
    """
    refill = method.recipe.select == "informative"
    threshold = method.threshold if method.threshold is not None or not refill else 0.0
    kept: list[Group] = []
    metrics: dict[str, float] = {}
    dropped = 0
    for turn in range(_ROUNDS if refill else 1):
        seed = plan.seed + turn  # another order of the tasks, and other samples
        batch = tasks.batch(step, size - len(kept), seed=seed)
        groups = rollout_sync(sampler, batch, step=step, plan=attrs.evolve(plan, seed=seed))
        metrics = metrics or groups.metrics
        found = _with_baseline(sampler, batch, groups, step, plan) if "greedy" in method.recipe.needs else list(groups)
        if threshold is not None:
            keep = zero_variance([group.rewards for group in found], threshold=threshold).keep
            dropped += int((~keep).sum())
            found = [group for group, good in zip(found, keep, strict=True) if good]
        kept += found
        if len(kept) >= size:
            break
    if threshold is not None:
        metrics["filter/zero_variance"] = float(dropped)
    return Rollouts([attrs.evolve(group, number=i) for i, group in enumerate(kept)], metrics)


def _with_baseline(
    sampler: Sampler, batch: Sequence[Task], groups: Sequence[Group], step: int, plan: Plan
) -> list[Group]:
    """The groups, each trajectory tagged with the reward of its task's greedy episode; without those that failed."""
    greedy = [attrs.evolve(t, settings=attrs.evolve(t.settings, n=1, min_n=1, temperature=0.0)) for t in batch]
    baselines = {group.number: group.rewards[0] for group in rollout_sync(sampler, greedy, step=step, plan=plan)}
    return [
        attrs.evolve(
            group,
            trajectories=[
                attrs.evolve(t, tags={**t.tags, "greedy": float(baselines[group.number])}) for t in group.trajectories
            ],
        )
        for group in groups
        if group.number in baselines
    ]
