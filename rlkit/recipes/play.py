"""Playing a step's episodes: groups of tasks, greedy baselines, and more of them where too few teach anything."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rlkit.backends.protocol import Sampler
from rlkit.envs import Task, TaskSource
from rlkit.filters import zero_variance
from rlkit.recipes.method import Method
from rlkit.rollouts import Plan, Rollouts, rollout
from rlkit.trajectory import Group

__all__ = ["play"]

_ROUNDS = 4


async def play(
    method: Method, source: TaskSource, plan: Plan, sampler: Sampler, tasks: Sequence[Task], step: int
) -> Rollouts:
    """Play the groups of a step, one for each of ``tasks``.

    Groups whose rewards do not differ by more than the method's threshold are left out. With ``select="informative"``
    further tasks of ``source`` are then played in their place, in four rounds at most; what is missing after that is
    missing. The metrics are those of the first round, and how many groups were left out in all.
    """
    refill = method.recipe.select == "informative"
    threshold = method.threshold if method.threshold is not None or not refill else 0.0
    size, groups_of_step, dropped = len(tasks), list[Group](), 0
    metrics: dict[str, float] = {}
    for turn in range(_ROUNDS if refill else 1):
        seed = plan.seed + turn  # another order of the tasks, and other samples
        batch = source.batch(step, size - len(groups_of_step), seed=seed) if turn else tasks
        groups = await rollout(sampler, batch, step=step, plan=attrs.evolve(plan, seed=seed))
        metrics = metrics or groups.metrics
        played = await _with_baseline(sampler, batch, groups, step, plan) if "greedy" in method.recipe.needs else groups
        if threshold is not None:
            keep = zero_variance([group.rewards for group in played], threshold=threshold).keep
            dropped += int((~keep).sum())
            played = [group for group, good in zip(played, keep, strict=True) if good]
        groups_of_step += played
        if len(groups_of_step) >= size:
            break
    if threshold is not None:
        metrics["filter/zero_variance"] = float(dropped)
    return Rollouts([attrs.evolve(group, number=i) for i, group in enumerate(groups_of_step)], metrics)


async def _with_baseline(
    sampler: Sampler, batch: Sequence[Task], groups: Sequence[Group], step: int, plan: Plan
) -> list[Group]:
    """Tag each trajectory with the reward of its task's greedy episode; leave out groups whose baseline failed."""
    greedy = [attrs.evolve(t, settings=attrs.evolve(t.settings, n=1, min_n=1, temperature=0.0)) for t in batch]
    baselines = {group.number: group.rewards[0] for group in await rollout(sampler, greedy, step=step, plan=plan)}
    tagged = []
    for group in groups:
        if group.number in baselines:
            tag = {"greedy": float(baselines[group.number])}
            members = [attrs.evolve(t, tags={**t.tags, **tag}) for t in group.trajectories]
            tagged.append(attrs.evolve(group, trajectories=members))
    return tagged
