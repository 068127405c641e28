"""Scores and their intervals."""

from __future__ import annotations

import asyncio
import itertools
import math

import numpy as np
import pytest

from rlkit import BackendError, ConfigError, SamplingParams
from rlkit.envs import StepResult, Task, Tasks, TaskSettings
from rlkit.evaluation import evaluate, evaluate_sync, interval, score
from tests.each import for_each
from tests.rollouts.parts import Counted, RandomSampler


class Coin(Counted):
    def step(self, action):
        return StepResult("", float(action.tokens.size % 2 == 0), terminated=True)


class Broken(Counted):
    def reset(self, seed):
        raise OSError("gone")


TASKS = Tasks(lambda index: Coin(), 12, name="coin", split="test")
PARAMS = SamplingParams(max_tokens=9)


def run(tasks=TASKS, **options):
    return asyncio.run(evaluate(RandomSampler(), tasks, params=PARAMS, **options))


def test_mean_success_and_pass_at_k():
    """pass@k is the share of subsets of size k with a success."""
    found = run(n=6, k=[1, 3])
    rows = [group.rewards for group in found.rollouts]
    result = found.scores["coin"]
    assert result.mean == pytest.approx(np.mean([row.mean() for row in rows]))
    assert result.success == pytest.approx(result.mean)
    for k in (1, 3):
        shares = [np.mean([max(subset) >= 1 for subset in itertools.combinations(row, k)]) for row in rows]
        assert result.pass_at_k[k] == pytest.approx(np.mean(shares))
    assert (result.tasks, result.episodes, result.failed) == (12, 72, 0)
    assert result.low <= result.mean <= result.high
    assert found.metrics["eval/coin/pass@3"] == result.pass_at_k[3]
    assert found.metrics["eval/mean"] == found.mean == result.mean


def test_the_same_seed_gives_the_same_scores():
    one, two, other = run(n=4, seed=3), run(n=4, seed=3, concurrency=1), run(n=4, seed=4)
    assert one.metrics == two.metrics
    assert one.metrics != other.metrics
    assert evaluate_sync(RandomSampler(), TASKS, params=PARAMS, n=4, seed=3).metrics == one.metrics


def test_greedy_has_temperature_0():
    """Whatever a task's own settings are, and once per task."""
    sampler = RandomSampler()
    own = Tasks(lambda index: Coin(), 3, name="coin", settings=TaskSettings(n=5, min_n=2, temperature=0.7))
    found = asyncio.run(evaluate(sampler, own, greedy=True, params=PARAMS))
    assert {params.temperature for _, params, *_ in sampler.requests} == {0.0}
    assert found.scores["coin"].episodes == 3


def test_several_environments_and_failures():
    """The mean is over environments, not tasks; failed episodes are counted and not scored."""
    found = run([*TASKS, Task(Counted, "counted")], n=2)
    assert found.mean == (found.scores["coin"].mean + found.scores["counted"].mean) / 2
    found = run([*TASKS, Task(Broken, "coin"), Task(Broken, "broken")], n=2)
    assert (found.scores["coin"].failed, found.scores["coin"].tasks) == (2, 12)
    assert (found.scores["broken"].failed, math.isnan(found.scores["broken"].mean)) == (2, True)
    with pytest.raises(BackendError, match="no group is left"):
        run([Task(Broken, "broken")])


def test_wilson():
    """Published values; the ends 0 and 1 are exact."""
    for right, count, low, high in ((8, 10, 0.4902, 0.9433), (1, 1, 0.2065, 1.0), (50, 100, 0.4038, 0.5962)):
        rows = [np.array([1.0])] * right + [np.array([0.0])] * (count - right)
        assert interval(rows) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))
    for count in range(1, 200):
        for right in {0, 1, count // 2, count - 1, count}:
            low, high = interval([np.array([1.0])] * right + [np.array([0.0])] * (count - right))
            assert low <= right / count <= high
            assert (low == 0.0, high == 1.0) == (right == 0, right == count)


def test_equal_tasks_leave_doubt():
    """A bootstrap of them has the width 0, however few they are."""
    once = [np.array([0.0])] * 4
    assert interval([np.array([0.0, 0.0])] * 4) == interval(once) == (0.0, pytest.approx(0.4899, abs=5e-5))
    low, high = interval([np.array([1.0, 0.0])])  # one task: half of one success
    assert (low + high, high - low > 0.8) == (pytest.approx(1.0), True)
    assert np.isnan(interval([np.array([0.3, 0.7])])).all()
    assert np.isnan(interval([np.array([0.3, 0.7]), np.array([0.5])])).all()


def test_bootstrap_is_the_normal_interval_of_many_tasks():
    """Half its width is 1.96 standard errors over tasks, however many episodes each has."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=3) + rng.normal() for _ in range(400)]
    means = np.array([row.mean() for row in rows])
    for level, quantile in ((0.95, 1.959964), (0.5, 0.67449)):
        low, high = interval(rows, level=level)
        half = quantile * means.std() / np.sqrt(400)
        assert (high - low) / 2 == pytest.approx(half, rel=0.05)
        assert (high + low) / 2 == pytest.approx(means.mean(), abs=0.2 * means.std() / np.sqrt(400))
        assert interval(rows, level=level) == (low, high)


def test_unscored_rewards_do_not_count():
    found = score([[1.0, math.nan], [math.nan], [0.0, 1.0, 1.0]], k=[2], failed=3)
    assert (found.tasks, found.episodes, found.failed) == (2, 4, 3)
    assert found.mean == pytest.approx((1 + 2 / 3) / 2)
    assert found.pass_at_k[2] == 1.0  # of the one task that has two episodes
    assert math.isnan(score([], k=[1]).pass_at_k[1])


BAD = [{"n": 0}, {"k": 3, "n": 2}, {"k": [1, 0], "n": 2}, {"level": 1.0}, {"success": math.nan}, {"greedy": 1}]


@for_each("options", [*BAD, {"wrong": 1}])
def test_bad_options(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        run(**options)
    with pytest.raises(ConfigError, match="identical"):
        run(greedy=True, n=2)
