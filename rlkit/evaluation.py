"""Score a policy on held-out tasks, with confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._check import read_only
from rlkit.backends.protocol import Sampler
from rlkit.errors import ConfigError
from rlkit.metrics import pass_at_k
from rlkit.rollouts import Plan, Rollouts, rollout
from rlkit.rollouts.api import read_plan, read_tasks, run_in_thread

__all__ = ["Evaluation", "Score", "evaluate", "evaluate_sync", "interval", "score"]


@attrs.frozen
class Score:
    """The result on one environment.

    Attributes:
        mean: the mean reward of each task, averaged over tasks.
        low, high: ends of the confidence interval of the mean.
        success: the share of each task's episodes that reach the threshold, averaged over tasks; in [0, 1].
        pass_at_k: k -> the estimated chance of at least one success among k episodes, averaged over tasks.
        tasks, episodes: how many were scored.
        failed: how many episodes could not be completed; they are not scored.
    """

    mean: float
    low: float
    high: float
    success: float
    pass_at_k: Mapping[int, float] = attrs.field(converter=read_only)
    tasks: int
    episodes: int
    failed: int


@attrs.frozen(eq=False)
class Evaluation:
    """The result of ``evaluate``.

    Attributes:
        scores: environment -> its ``Score``.
        rollouts: the groups, to inspect or to store.
    """

    scores: Mapping[str, Score] = attrs.field(converter=read_only)
    rollouts: Rollouts = attrs.field(repr=False)

    @property
    def mean(self) -> float:
        """The mean of the environments' means."""
        return float(np.mean([score.mean for score in self.scores.values()]))

    @property
    def metrics(self) -> dict[str, float]:
        """The scores as "eval/<environment>/<field>", with "pass@<k>", and the mean as "eval/mean"."""
        numbers = {"eval/mean": self.mean}
        for name, score in self.scores.items():
            for field in ("mean", "low", "high", "success", "episodes", "failed"):
                numbers[f"eval/{name}/{field}"] = float(getattr(score, field))
            numbers |= {f"eval/{name}/pass@{k}": value for k, value in score.pass_at_k.items()}
        return numbers


async def evaluate(
    sampler: Sampler,
    tasks: object,
    *,
    n: int = 1,
    k: int | Sequence[int] = (),
    greedy: bool = False,
    success: float = 1.0,
    level: float = 0.95,
    step: int = 0,
    plan: Plan | None = None,
    **options: object,
) -> Evaluation:
    """Play ``n`` episodes of each task and score them, per environment.

    Args:
        sampler: the policy.
        tasks: held-out tasks, as for ``rollout``; their number must be finite.
        n: episodes per task, >= 1; overrides the setting of a task.
        k: one or several numbers of tries in [1, n], for which to estimate the chance of a success.
        greedy: sample at temperature 0, which overrides the setting of a task; n must be 1.
        success: the smallest reward of a successful episode.
        level: the level of the confidence interval, in (0, 1).
        step, plan, options: as for ``rollout``. The same seed and step give the same episodes, so you can compare
            two policies task by task.

    Returns:
        Scores with intervals, as ``interval`` gives them: 10 000 draws, seeded by the plan, where it is a bootstrap.

    Raises:
        DataError, ConfigError, BackendError: as for ``rollout``.
    """
    n = _check.integer("n", n, low=1)
    numbers = k if isinstance(k, (list, tuple, range)) else [k]
    tries = [_check.integer("k", each, low=1, high=n, why="at most n episodes of a task") for each in numbers]
    if _check.flag("greedy", greedy) and n > 1:
        raise ConfigError("n", f"is {n}", "1", "greedy episodes of one task are identical")
    _check.real("success", success)
    _check.real("level", level, above=0.0, below=1.0)
    plan = read_plan(plan, options, evaluate).with_options(n=n, min_n=1)
    changes: dict[str, Any] = {"n": n, "min_n": 1} | ({"temperature": 0.0} if greedy else {})
    tasks = [attrs.evolve(task, settings=attrs.evolve(task.settings, **changes)) for task in read_tasks(tasks)]
    groups = await rollout(sampler, tasks, step=step, plan=plan)
    scores = {}
    for name in dict.fromkeys(task.name for task in tasks):
        rewards = [group.rewards for group in groups if group.env == name]
        failed = int(groups.metrics.get(f"env/{name}/failed", 0))
        scores[name] = score(rewards, k=tries, success=success, level=level, seed=plan.seed, failed=failed)
    return Evaluation(scores, groups)


def evaluate_sync(sampler: Sampler, tasks: object, **options: Any) -> Evaluation:
    """Call ``evaluate`` from code that does not ``await``, also inside a running event loop."""
    return run_in_thread(evaluate(sampler, tasks, **options))


def score(
    rewards: Iterable[ArrayLike],
    *,
    k: Sequence[int] = (),
    success: float = 1.0,
    level: float = 0.95,
    seed: int = 0,
    failed: int = 0,
) -> Score:
    """Return the score of one environment.

    Args:
        rewards: for each task the rewards of its episodes; NaN marks an unscored episode, which does not count.
        k, success, level: as for ``evaluate``. Tasks with fewer than k scored episodes do not count for k.
        seed: seed of the bootstrap.
        failed: how many more episodes failed; only copied into the result.

    >>> found = score([[1.0, 0.0], [1.0, 1.0]], k=[1, 2])
    >>> found.mean, dict(found.pass_at_k)
    (0.75, {1: 0.75, 2: 1.0})
    """
    rows = [_check.as_array(f"rewards[{i}]", row, "numbers").astype(np.float64) for i, row in enumerate(rewards)]
    rows = [scored for row in rows if (scored := row[~np.isnan(row)]).size]
    if not rows:
        return Score(math.nan, math.nan, math.nan, math.nan, dict.fromkeys(k, math.nan), 0, 0, failed)
    means = np.array([row.mean() for row in rows])
    low, high = interval(rows, level=level, seed=seed)
    right = [(row.size, int((row >= success).sum())) for row in rows]
    tries = {}
    for number in k:
        estimates = [pass_at_k(size, count, number) for size, count in right if size >= number]
        tries[number] = float(np.mean(estimates)) if estimates else math.nan
    share = float(np.mean([count / size for size, count in right]))
    return Score(float(means.mean()), low, high, share, tries, len(rows), sum(size for size, _ in right), failed)


def interval(rows: Sequence[np.ndarray], *, level: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Return the confidence interval of the mean over tasks.

    Args:
        rows: for each task a float array of at least one reward.
        level: the level of the interval, in (0, 1).
        seed: seed of the bootstrap.

    Returns:
        Wilson's interval where the rewards are all 0 or 1, and each task has one, or all tasks the same mean; else the
        percentile bootstrap over tasks. NaN for other rewards where all tasks have the same mean, as one task has:
        nothing tells how far tasks differ.

    >>> interval([np.array([1.0])] * 8 + [np.array([0.0])] * 2)  # 8 of 10
    (0.4901..., 0.9433...)

    Source: E. B. Wilson, JASA 22 (1927), 209-212; B. Efron, Annals of Statistics 7 (1979), 1-26.
    """
    means = np.array([row.mean() for row in rows])
    equal = bool((means == means[0]).all())  # so that a bootstrap has the width 0, however few tasks there are
    if (equal or all(row.size == 1 for row in rows)) and all(np.isin(row, (0.0, 1.0)).all() for row in rows):
        return _wilson(float(means.sum()), means.size, level)
    if equal:
        return math.nan, math.nan
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(means.size,)))
    draws = np.concatenate([means[rng.integers(0, means.size, (100, means.size))].mean(1) for _ in range(100)])
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _wilson(right: float, count: int, level: float) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, scale = right / count, 1 + z * z / count
    centre = (share + z * z / (2 * count)) / scale
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / scale
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))  # the ends 0 and 1 are exact
