"""What an episode is worth: rewards one by one, none at all, those of cut episodes, and scores of whole groups."""

from __future__ import annotations

import asyncio
import threading

import pytest

from rlkit.envs import Task, TaskSettings, function, gymnasium, mixture
from rlkit.errors import BackendError
from tests.each import for_each
from tests.rollouts.parts import RandomSampler, in_turn, raising, run, scripted

LOOK, PEEK, OPEN = {"reward": None}, {"reward": 0.3}, {"reward": 1.0}
BOTH = {"rewards": (None, 0.3, 1.0)}  # the three as calls of one turn


@for_each(
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
def test_none_is_no_reward_and_zero_is_one(script, reduction, expected):
    (group,) = run(scripted(*script), reduction=reduction)
    assert group.rewards.tolist() == pytest.approx([expected] * 2)


@for_each(
    ("end", "others", "reduction", "expected"),
    [
        ({"nonterminal_reward": 0.0}, {"nonterminal_override": 7.0}, "sum", 0.6),
        ({"nonterminal_reward": -1.0}, {"nonterminal_override": 7.0}, "sum", -0.4),
        ({"nonterminal_reward": 0.0}, {"nonterminal_override": 7.0}, "max", 0.3),
        ({"nonterminal_reward": 0.0}, {"nonterminal_override": 7.0}, "mean", 0.2),
        ({"nonterminal_override": -1.0}, {"nonterminal_reward": 7.0}, "sum", -1.0),
        ({}, {}, "sum", 0.6),
    ],
)
def test_a_cut_episode(end, others, reduction, expected):
    """It earned .3 twice, then its turns were over; of the rollout's setting and the task's the task's counts."""
    cut, how = scripted(PEEK, PEEK, OPEN), {"max_turns": 2, "reduction": reduction}
    settings = TaskSettings(**end)
    for (group,) in (run(cut, **how, **end), run(Task(cut, settings=settings), **how, **others)):
        assert group.rewards.tolist() == pytest.approx([expected] * 2)
    (whole,) = run(Task(scripted(PEEK), settings=settings))
    assert whole.rewards.tolist() == [0.3, 0.3]


def test_no_reward_at_all_is_a_failure():
    """Counted as such, and in no group; a cut one that has a nonterminal reward has one."""
    bad, good = Task(scripted(LOOK, LOOK), "bad"), Task(scripted(OPEN), "good")
    groups = run([bad, good])
    assert [group.env for group in groups] == ["good"]
    assert [groups.metrics[f"env/bad/{name}"] for name in ("failed", "failed/no_reward", "episodes")] == [2, 2, 0]
    with pytest.raises(BackendError, match="2 no_reward in step; .*'bad': returned no reward in the whole episode"):
        run(bad)
    with pytest.raises(BackendError, match="no_reward"):
        run(bad, max_turns=1)
    for end in ("nonterminal_reward", "nonterminal_override"):
        assert run(bad, max_turns=1, **{end: 0.5})[0].rewards.tolist() == [0.5, 0.5]


class Silent:
    """As gymnasium has it, without a reward."""

    def reset(self, *, seed=None, options=None):
        return "Begin.", {}

    def step(self, action):
        return "", None, True, False, {}


@for_each("tasks", [function(["p"], lambda text: None), gymnasium(Silent)[:1]])
def test_adapters_pass_none_on(tasks):
    with pytest.raises(BackendError, match="2 no_reward"):
        run(list(tasks))


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
def test_bad_rewards(given, message):
    with pytest.raises(BackendError, match=f"2 EnvError in step; .*environment 'odd': step: {message}"):
        run(Task(scripted(given), "odd"))


def rank(actions, bonus=0.0):
    """Give the longest answer the highest reward."""
    order = sorted(range(len(actions)), key=lambda i: (len(actions[i]), i))
    return [order.index(i) + bonus for i in range(len(actions))]


def judged(judge, **options):
    return function(["p"], judge, group=True, name="judged", **options)[0]


def test_a_group_is_scored_together():
    """Once, with the answers of all its members; in the same rollout, an environment that scores itself."""
    calls = []

    def judge(actions, bonus):
        calls.append([str(action) for action in actions])
        return rank(actions, bonus)

    def texts(group):
        return [RandomSampler.tokenizer.decode(t.turns[-1].tokens) for t in group.trajectories]

    rows = [{"prompt": "Say a.", "bonus": 10.0}, {"prompt": "Say b.", "bonus": 20.0}]
    both = mixture({"ranked": function(rows, judge, group=True), "plain": function(["Say c."], len)})
    groups = run(both.batch(0, 4), n=4)
    assert [group.env for group in groups] == ["ranked", "plain", "ranked", "plain"]
    ranked = groups[::2]
    assert sorted(calls) == sorted(texts(group) for group in ranked)
    for group in ranked:
        assert group.rewards.tolist() == rank(texts(group), rows[group.index]["bonus"])
    assert groups.metrics["env/ranked/reward"] == 15.0 + 1.5
    assert groups.metrics["env/ranked/episodes"] == 8


@for_each(
    ("script", "added"),
    [
        (({"reward": 0.25}, {"reward": 0.5}), [0.25, 1.5]),
        (({"rewards": (0.25, 0.5)},), [0.25, 1.5]),
        ((LOOK,), [1.0]),
    ],
)
def test_a_score_is_added_to_the_last_reward(script, added):
    (group,) = run(Task(scripted(*script), score=lambda actions: [1.0] * len(actions)))
    assert [t.all_rewards.tolist() for t in group.trajectories] == [added] * 2


def test_bad_scores_fail_the_group():
    """The other group is kept; the failed episodes are counted."""
    groups = run([judged(lambda actions: [1.0]), function(["p"], len, name="good")[0]], n=3)
    assert [group.env for group in groups] == ["good"]
    counts = [groups.metrics[f"env/judged/{name}"] for name in ("failed/EnvError", "episodes", "dropped_groups")]
    assert counts == [3, 0, 1]


def test_a_score_that_raises_where_nothing_is_left():
    def judge(actions):
        raise ZeroDivisionError("no judge")

    with pytest.raises(BackendError, match="2 ZeroDivisionError in score.*no judge") as caught:
        run(judged(judge))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_score_that_hangs():
    gate = threading.Event()
    try:
        with pytest.raises(BackendError, match="2 timeout in score"):
            run(judged(lambda actions: gate.wait(), settings=TaskSettings(n=2)), n=8, call_timeout=0.5)
    finally:
        gate.set()


def test_members_that_failed_are_not_scored():
    """The others are compared among each other; those that get None have failed, too."""
    seen = []

    async def judge(actions):
        seen.append(len(actions))
        await asyncio.sleep(0)
        return rank(actions)

    good, bad = scripted({"reward": None}), raising(RuntimeError("broken"), "reset")
    (group,) = run(Task(in_turn(good, bad, good, good), score=judge), n=4)
    assert seen == [3]
    assert sorted(group.rewards.tolist()) == [0.0, 1.0, 2.0]
    assert [failure.where for failure in group.failures] == ["reset"]
    groups = run(judged(lambda actions: [None, *[1.0] * (len(actions) - 1)]), n=3)
    assert groups[0].rewards.tolist() == [1.0, 1.0]
    assert [(failure.kind, failure.member) for failure in groups[0].failures] == [("no_reward", 0)]
    assert groups.metrics["env/judged/episodes"] == 2
