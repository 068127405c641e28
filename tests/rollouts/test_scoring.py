"""Rewards that compare the episodes of a group."""

from __future__ import annotations

import asyncio
import threading

import pytest

import rlkit
from rlkit.envs import StepResult, Task, TaskSettings, function, mixture
from rlkit.rollouts import rollout, rollout_sync

PARAMS = rlkit.SamplingParams(max_tokens=5)


@pytest.fixture
def sampler():
    return rlkit.connect("toy", seed=0).sampler().result()


def ranks(actions, bonus=0.0):
    """The longest answer is worth most."""
    order = sorted(range(len(actions)), key=lambda i: (len(actions[i]), i))
    return [order.index(i) + bonus for i in range(len(actions))]


def text(sampler, trajectory):
    return sampler.tokenizer.decode(trajectory.turns[-1].tokens)


def test_a_group_is_scored_together(sampler):
    """Once, with the answers of all its members; alongside, an environment that scores itself."""
    calls = []

    def reward(actions, bonus):
        calls.append([str(action) for action in actions])
        return ranks(actions, bonus)

    rows = [{"prompt": "Say a.", "bonus": 10.0}, {"prompt": "Say b.", "bonus": 20.0}]
    both = mixture({"ranked": function(rows, reward, group=True), "plain": function(["Say c."], len)})
    groups = rollout_sync(sampler, both.batch(0, 4), n=4, params=PARAMS, progress=False)
    assert [group.env for group in groups] == ["ranked", "plain", "ranked", "plain"]
    ranked = [group for group in groups if group.env == "ranked"]
    assert sorted(calls) == sorted([text(sampler, t) for t in group.trajectories] for group in ranked)
    for group in ranked:
        bonus = rows[group.index]["bonus"]
        assert [t.reward for t in group.trajectories] == ranks([text(sampler, t) for t in group.trajectories], bonus)
    assert groups.metrics["env/ranked/reward"] == 15.0 + 1.5
    assert groups.metrics["env/ranked/episodes"] == 8


def test_it_is_added_to_the_last_steps_reward(sampler):
    """Earlier turns keep theirs."""

    class Twice:
        def reset(self, seed):
            self.turns = 0
            return "Go on."

        def step(self, action):
            self.turns += 1
            return StepResult("Go on.", 0.25 * self.turns, terminated=self.turns == 2)

        def close(self):
            pass

    task = Task(Twice, "twice", score=lambda actions: [1.0] * len(actions))
    (group,) = rollout_sync(sampler, task, n=3, params=PARAMS, progress=False)
    assert [[turn.reward for turn in t.turns] for t in group.trajectories] == [[0.25, 1.5]] * 3


@pytest.mark.parametrize("given", [[1.0], None, [1.0, float("nan"), 1.0]])
def test_a_score_that_is_none_fails_the_group(sampler, given):
    """The other group is kept; the failed episodes say where."""
    tasks = [function(["p"], lambda actions: given, group=True, name="bad")[0], function(["p"], len, name="good")[0]]
    groups = rollout_sync(sampler, tasks, n=3, params=PARAMS, progress=False)
    assert [group.env for group in groups] == ["good"]
    assert groups.metrics["env/bad/failed/EnvError"] == 3
    assert groups.metrics["env/bad/episodes"] == 0
    assert groups.metrics["env/bad/dropped_groups"] == 1


def test_a_score_that_raises_where_nothing_is_left(sampler):
    def reward(actions):
        raise ZeroDivisionError("no judge")

    task = function(["p"], reward, group=True)[0]
    with pytest.raises(rlkit.BackendError, match="2 ZeroDivisionError in score.*no judge") as caught:
        rollout_sync(sampler, task, n=2, params=PARAMS, progress=False)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_score_that_hangs(sampler):
    gate = threading.Event()
    task = function(["p"], lambda actions: gate.wait(), group=True, settings=TaskSettings(n=2))[0]
    try:
        with pytest.raises(rlkit.BackendError, match="2 timeout in score"):
            rollout_sync(sampler, task, params=PARAMS, progress=False, call_timeout=0.5)
    finally:
        gate.set()


def test_an_asynchronous_judge(sampler):
    async def reward(actions):
        await asyncio.sleep(0)
        return ranks(actions)

    async def scene():
        return await rollout(sampler, function(["p"], reward, group=True)[0], n=4, params=PARAMS, progress=False)

    (group,) = asyncio.run(scene())
    assert sorted(t.reward for t in group.trajectories) == [0.0, 1.0, 2.0, 3.0]


def test_members_that_failed_are_not_scored(sampler):
    """The others are compared among each other."""
    made = []
    lock = threading.Lock()

    class Some:
        def __init__(self):
            with lock:
                made.append(self)
                self.number = len(made)

        def reset(self, seed):
            return "Say a."

        def step(self, action):
            if self.number == 2:
                raise RuntimeError("broken")
            return StepResult(terminated=True)

        def close(self):
            pass

    seen = []
    task = Task(Some, score=lambda actions: seen.append(len(actions)) or ranks(actions))
    (group,) = rollout_sync(sampler, task, n=4, params=PARAMS, progress=False)
    assert seen == [3]
    assert sorted(t.reward for t in group.trajectories) == [0.0, 1.0, 2.0]
    assert [failure.where for failure in group.failures] == ["step"]
