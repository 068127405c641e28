"""What an episode is worth: rewards one by one, none at all, and those of episodes that were cut."""

from __future__ import annotations

import asyncio

import pytest

import rlkit
from rlkit.envs import Action, StepResult, Task, TaskSettings, function, gymnasium
from rlkit.envs.calling import GuardedEnv
from rlkit.errors import BackendError, EnvError
from rlkit.rollouts import rollout_sync
from tests.each import for_each

PARAMS = rlkit.SamplingParams(max_tokens=4)


@pytest.fixture(scope="module")
def sampler():
    return rlkit.connect("toy", seed=0).sampler().result()


class Scripted:
    """Gives what its script says, a step each, and ends with the last."""

    script: tuple = ()

    def reset(self, seed):
        self.steps = 0
        return "Go."

    def step(self, action):
        self.steps += 1
        given = self.script[self.steps - 1]
        return StepResult("On.", terminated=self.steps == len(self.script), **given)

    def close(self):
        pass


def env(*script):
    return type("Scripted", (Scripted,), {"script": script})


LOOK, PEEK, OPEN = {"reward": None}, {"reward": 0.3}, {"reward": 1.0}
BOTH = {"rewards": (None, 0.3, 1.0)}  # the three as calls of one turn


@pytest.mark.parametrize(
    ("script", "reduction", "expected"),
    [
        ((LOOK, PEEK, OPEN), "mean", 0.65),
        ((BOTH,), "mean", 0.65),
        ((LOOK, OPEN), "min", 1.0),
        ((LOOK, BOTH), "min", 0.3),
        ((PEEK, LOOK), "last", 0.3),
        ((BOTH, LOOK), "sum", 1.3),
        (({"reward": 0.0}, OPEN), "mean", 0.5),
        (({}, OPEN), "mean", 0.5),
    ],
)
def test_none_is_no_reward_and_zero_is_one(sampler, script, reduction, expected):
    (group,) = rollout_sync(sampler, env(*script), n=2, params=PARAMS, reduction=reduction)
    assert group.rewards.tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize(
    ("end", "reduction", "expected"),
    [
        ({"nonterminal_reward": 0.0}, "sum", 0.6),
        ({"nonterminal_reward": -1.0}, "sum", -0.4),
        ({"nonterminal_reward": 0.0}, "max", 0.3),
        ({"nonterminal_reward": 0.0}, "mean", 0.2),
        ({"nonterminal_override": -1.0}, "sum", -1.0),
        ({}, "sum", 0.6),
    ],
)
def test_a_cut_episode(sampler, end, reduction, expected):
    """It earned .3 twice, then its turns were over; the setting may be the rollout's or the task's."""
    cut = env(PEEK, PEEK, OPEN)
    (group,) = rollout_sync(sampler, cut, n=2, params=PARAMS, max_turns=2, reduction=reduction, **end)
    assert group.rewards.tolist() == pytest.approx([expected] * 2)
    task = Task(cut, settings=TaskSettings(**end))
    others = (
        {"nonterminal_override": 7.0} if "nonterminal_reward" in end else {"nonterminal_reward": 7.0} if end else {}
    )
    (group,) = rollout_sync(sampler, task, n=2, params=PARAMS, max_turns=2, reduction=reduction, **others)
    assert group.rewards.tolist() == pytest.approx([expected] * 2), "of the two the task's own stands"
    whole = rollout_sync(sampler, Task(env(PEEK), settings=TaskSettings(**end)), n=2, params=PARAMS)
    assert whole[0].rewards.tolist() == [0.3, 0.3]


def test_no_reward_at_all_is_a_failure(sampler):
    """Counted as such, and in no group; a cut one that has a nonterminal reward has one."""
    nothing = env(LOOK, LOOK)
    both = [Task(nothing, "bad"), Task(env(OPEN), "good")]
    groups = rollout_sync(sampler, both, n=2, params=PARAMS)
    assert [group.env for group in groups] == ["good"]
    found = groups.metrics
    assert (found["env/bad/failed"], found["env/bad/failed/no_reward"], found["env/bad/episodes"]) == (2, 2, 0)
    with pytest.raises(BackendError, match="2 no_reward in step; .*'bad': returned no reward in the whole episode"):
        rollout_sync(sampler, both[0], n=2, params=PARAMS)
    with pytest.raises(BackendError, match="no_reward"):
        rollout_sync(sampler, both[0], n=2, params=PARAMS, max_turns=1)
    for end in ("nonterminal_reward", "nonterminal_override"):
        (group,) = rollout_sync(sampler, both[0], n=2, params=PARAMS, max_turns=1, **{end: 0.5})
        assert group.rewards.tolist() == [0.5, 0.5]


class Silent:
    """In gymnasium's manner, without a reward."""

    def reset(self, *, seed=None, options=None):
        return "Go.", {}

    def step(self, action):
        return "", None, True, False, {}


def score_of_some(actions):
    """None for the first, else 1."""
    return [None if i == 0 else 1.0 for i in range(len(actions))]


@pytest.mark.parametrize("tasks", [function(["Go."], lambda text: None), gymnasium(Silent)[:1]])
def test_adapters_pass_none_on(sampler, tasks):
    with pytest.raises(BackendError, match="2 no_reward"):
        rollout_sync(sampler, list(tasks), n=2, params=PARAMS)


def test_none_among_the_scores_of_a_group(sampler):
    groups = rollout_sync(sampler, list(function(["Go."], score_of_some, group=True)), n=3, params=PARAMS)
    assert groups[0].rewards.tolist() == [1.0, 1.0]
    assert [failure.kind for failure in groups[0].failures] == ["no_reward"]
    assert groups.metrics["env/function/episodes"] == 2


@pytest.mark.parametrize(
    ("reward", "added"), [({"reward": 0.5}, [1.5]), ({"rewards": (0.25, 0.5)}, [0.25, 1.5]), (LOOK, [1.0])]
)
def test_a_groups_score_joins_the_last_reward(sampler, reward, added):
    task = Task(env(reward), score=lambda actions: [1.0] * len(actions))
    (group,) = rollout_sync(sampler, task, n=2, params=PARAMS)
    assert [t.all_rewards.tolist() for t in group.trajectories] == [added] * 2


@for_each(
    ("given", "message"),
    [
        ({"rewards": "1"}, "rewards: got '1'"),
        ({"rewards": [1.0, "1"]}, r"rewards\[1\]"),
        ({"rewards": [float("nan")]}, r"rewards\[0\]"),
        ({"rewards": 1.0}, "rewards: got 1.0"),
        ({"reward": 0.5, "rewards": [1.0]}, "reward: is 0.5.*the sum of rewards is 1"),
    ],
)
def test_rewards_that_are_none_of_that(given, message):
    async def scene():
        opened = await GuardedEnv.open(Task(env(given), "odd"))
        await opened.reset(0)
        await opened.step(Action("x"))

    with pytest.raises(EnvError, match=f"environment 'odd': step: {message}"):
        asyncio.run(scene())
