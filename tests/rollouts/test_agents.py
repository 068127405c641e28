"""Episodes that drive themselves: agents as functions, through sessions, under limits and faults."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading

import attrs
import numpy as np
import pytest

pytest.importorskip("jinja2", reason="needs the extra chat")

import rlkit
from rlkit import BackendError, ConfigError, DataError, Future, SamplingParams, UnknownNameError, credit
from rlkit.backends.toy import ByteTokenizer
from rlkit.envs import StepResult, Task, TaskSettings, agent
from rlkit.evaluation import evaluate_sync
from rlkit.gateway import GatewayError, Request, Sampling
from rlkit.rollouts import Plan, Replay, rollout_sync
from rlkit.storage import from_record, to_record
from rlkit.trajectory import datums
from tests.each import for_each
from tests.gateway.parts import Scripted
from tests.rollouts.parts import RandomSampler

SHORT = SamplingParams(max_tokens=6)
ROWS = [{"prompt": "one", "answer": 1}, {"prompt": "two", "answer": 2}]


def said(*texts):
    """Messages of the user and the assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


async def ask(session, *texts):
    reply = await session.answer(Request(messages=said(*texts)))
    return reply.choices[0].content


async def two_turns(task, session):
    first = await ask(session, task["prompt"])
    return first + await ask(session, task["prompt"], first, "more")


async def branches(task, session):
    """Two turns, and a helper that is asked something else."""
    await two_turns(task, session)
    return await ask(session, "else")


def length(result, task):
    return len(result) / 10


def played(run, *, reward=length, rows=("x",), sampler=None, n=2, tasks=None, plan=None, **options):
    made = agent(run, reward, list(rows), **(tasks or {}))
    return rollout_sync(sampler or RandomSampler(), made, n=n, params=SHORT, **options)


def failures(run, **options):
    """The kinds and places of failures, where some groups are left and where none is."""
    with pytest.raises(BackendError) as caught:
        played(run, **options)
    return str(caught.value)


def plain(task, session):
    return asyncio.run(two_turns(task, session))


@pytest.mark.parametrize("run", [two_turns, plain])
def test_two_turns_are_one_datum(run):
    """Plain and asynchronous agents; every sampled token is there once, and the last turn has the reward."""
    groups = played(run, rows=ROWS, reward=lambda result, task: float(task["answer"]))
    assert [group.rewards.tolist() for group in groups] == [[1.0, 1.0], [2.0, 2.0]]
    for group in groups:
        for trajectory in group.trajectories:
            assert (trajectory.ended, trajectory.terminated, len(trajectory.turns)) == ("terminated", True, 2)
            assert trajectory.rewards.tolist() == [0.0, group.rewards[0]]
            assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 2
            assert trajectory.tags["answer"] == group.rewards[0]
            if all(turn.tokens.size for turn in trajectory.turns):
                (datum,) = datums(trajectory, 1.0)
                assert datum.mask.sum() == trajectory.token_count
    assert groups.metrics["env/agent/episodes"] == 4
    assert groups.metrics["sampler/requests"] == 8
    assert groups.metrics["sampler/tokens"] == sum(t.token_count for g in groups for t in g.trajectories)


def test_seeds_decide_and_arrival_does_not():
    """The same episodes, whatever the concurrency; members differ."""
    one, two = (played(two_turns, rows=ROWS, n=4, concurrency=c, seed=3) for c in (1, 8))
    for group, other in zip(one, two, strict=True):
        starts = [t.turns[0].tokens.tolist() for t in group.trajectories]
        assert starts == [t.turns[0].tokens.tolist() for t in other.trajectories]
        assert len({tuple(start) for start in starts}) > 1


def test_every_branch_and_the_last_one():
    every, last = (played(branches, tasks={"credit": c})[0].trajectories for c in ("every", "last"))
    assert [len(t.turns) for t in (*every, *last)] == [3, 3, 1, 1]
    assert [len(datums(t, 1.0, split="allow")) for t in last] == [1, 1]
    assert last[0].messages[0]["content"] == "else"
    assert last[0].rewards.tolist() == [last[0].reward]


def test_weights_of_branches_reach_the_loss():
    """Through credit, storage and replay."""
    groups = played(branches, tasks={"credit": lambda found: [0.25, 1.0]}, sampler=toy())
    assert [turn.weight for turn in groups[0].trajectories[0].turns] == [0.25, 0.25, 1.0]
    replay = Replay(max_age=1)
    replay.add([from_record(to_record(group)) for group in groups])
    batch = credit.assign(replay.sample(1, current=0), "reinforce", weights="token-sum", split="allow")
    for first, second in zip(batch.data[::2], batch.data[1::2], strict=True):
        assert set(first.select(first.inputs["weights"])) == {0.25}
        assert second.inputs["weights"].max() == 1.0
    policy = rlkit.connect("toy", seed=0)
    policy.forward_backward(batch.data, "ppo").result()


def toy():
    return rlkit.connect("toy", seed=0).sampler().result()


@pytest.mark.parametrize(
    ("weights", "where"),
    [(lambda found: [1.0], "gave 1 weights"), (lambda found: [0.0, 0.0], "no branch that its credit selects")],
)
def test_credit_that_cannot_be_given(weights, where):
    assert where in failures(branches, tasks={"credit": weights})


def test_rewards():
    """Asynchronous ones, ones that want the messages, and None, which is none."""

    async def later(result, task):
        await asyncio.sleep(0)
        return 0.5

    def told(result, task, messages):
        return float(len(messages))

    assert played(two_turns, reward=later)[0].rewards.tolist() == [0.5, 0.5]
    assert played(two_turns, reward=told)[0].rewards.tolist() == [4.0, 4.0]
    assert "2 no_reward in step" in failures(two_turns, reward=lambda result, task: None)
    assert "2 KeyError in play" in failures(two_turns, reward=lambda result, task: {}["x"])
    assert "in the reward 'wrong' for tasks[0]" in failures(two_turns, reward=wrong)
    assert "StepResult.reward: got 'good'" in failures(two_turns, reward=lambda result, task: "good")


def wrong(result, task):
    raise ValueError("no")


def test_agents_that_fail():
    """By an error, by the end of the program, by asking for nothing."""

    async def raises(task, session):
        await two_turns(task, session)
        raise OSError("gone")

    def leaves(task, session):
        raise SystemExit(1)

    async def silent(task, session):
        return "4"

    assert "2 OSError in play; the first error: gone" in failures(raises)
    assert "2 EnvError in play" in failures(leaves)
    assert "2 no_turns in play" in failures(silent)


def test_a_failure_costs_its_episode_alone():
    calls = iter(range(100))

    async def sometimes(task, session):
        if next(calls) % 2:
            raise OSError("gone")
        return await two_turns(task, session)

    groups = played(sometimes, n=6)
    assert (len(groups[0].trajectories), len(groups[0].failures)) == (3, 3)
    assert groups.metrics["env/agent/failed/OSError"] == 3
    assert {failure.where for failure in groups[0].failures} == {"play"}


def test_retries():
    """The same seeds, so that the episode is the one that would have been."""
    calls = iter(range(100))

    async def busy(task, session):
        first = await ask(session, task["prompt"])
        if next(calls) == 0:
            raise ConnectionError("busy")
        return first + await ask(session, task["prompt"], first, "more")

    (again,), (once,) = played(busy, n=1, seed=1), played(two_turns, n=1, seed=1)
    tokens = [[turn.tokens.tolist() for turn in g.trajectories[0].turns] for g in (again, once)]
    assert tokens[0] == tokens[1]


async def endless(task, session):
    talk = [task["prompt"]]
    while True:
        talk += [await ask(session, *talk), "more"]


async def careful(task, session):
    try:
        return await endless(task, session)
    except GatewayError as error:
        return error.code


def test_an_agent_that_fails_at_a_cut_turn_is_truncated():
    """It is truncated only if its API or its JSON needs the whole answer; otherwise it could have gone on."""
    responses, json = {"fails_when_cut": True}, {"sampling": Sampling(json_field="response_format")}
    cases = [
        ([("long", responses)], True),
        ([("long", json)], True),
        ([("short", {}), ("long", responses)], True),
        ([("long", {})], False),
        ([("short", responses)], False),
        ([("long", responses), ("short", responses)], False),
    ]
    wrong = []
    for turns, truncated in cases:

        async def run(task, session, turns=turns):
            for text, wish in turns:
                await session.answer(Request(messages=said(text), **wish))
            raise RuntimeError("incomplete")

        sampler = Scripted(ByteTokenizer(), lambda prompt: "x" * (9 if "long" in prompt else 2))
        if not truncated:
            found = "2 RuntimeError in play" in failures(run, sampler=sampler)
        else:
            groups = played(run, sampler=sampler)
            ends = [(t.ended, t.truncated, t.reward, len(t.turns)) for t in groups[0].trajectories]
            found = ends == [("max_tokens", True, 0.0, len(turns))] * 2
            found &= groups.metrics["env/agent/truncated/max_tokens"] == 2
        if not found:
            wrong.append(turns)
    assert not wrong


def test_limits_truncate():
    """Of turns and tokens and the context; an agent that fails for it is worth 0, one with a result what that is."""
    for limit in ({"max_turns": 3}, {"max_total_tokens": 20}, {"max_length": 150}):
        ended = "context" if "max_length" in limit else next(iter(limit))
        for run, worth in ((endless, 0.0), (careful, 1.0)):
            groups = played(run, reward=lambda result, task: 1.0, **limit)
            assert groups[0].rewards.tolist() == [worth, worth]
            for trajectory in groups[0].trajectories:
                assert (trajectory.ended, trajectory.truncated, trajectory.terminated) == (ended, True, False)
        if ended == "max_turns":
            assert [len(t.turns) for t in groups[0].trajectories] == [3, 3]
        if ended == "max_total_tokens":
            assert all(t.token_count <= 20 for t in groups[0].trajectories)
        assert groups.metrics[f"env/agent/truncated/{ended}"] == 2


def test_what_an_episode_without_an_end_is_worth():
    settings = TaskSettings(nonterminal_override=-1.0, max_turns=2)
    assert played(endless, tasks={"settings": settings})[0].rewards.tolist() == [-1.0, -1.0]


def test_a_first_prompt_that_is_too_long():
    assert "2 context in play" in failures(two_turns, rows=["x" * 500], max_length=100)


def test_settings_of_tasks_are_those_of_sessions():
    """Temperature and tokens stand above what the agent asks for."""

    async def eager(task, session):
        sampling = rlkit.gateway.Sampling(max_tokens=100, temperature=0.3)
        await session.answer(Request(messages=said("x"), sampling=sampling))
        return ""

    sampler = RandomSampler()
    played(eager, sampler=sampler, tasks={"settings": TaskSettings(temperature=0.7, max_tokens=2)})
    assert {(params.temperature, params.max_tokens) for _, params, _, _ in sampler.requests} == {(0.7, 2)}


def test_the_deadline():
    """An agent that does nothing has failed; one that waits for the policy is truncated, if there is a turn."""

    async def idle(task, session):
        await ask(session, "x")
        await asyncio.sleep(600)

    assert "2 timeout in play" in failures(idle, deadline=4.0)
    sampler = Stuck(after=3)
    groups = played(endless, sampler=sampler, n=1, min_n=1, deadline=10.0, max_turns=None)
    (trajectory,) = groups[0].trajectories
    assert (trajectory.ended, trajectory.reward, len(trajectory.turns)) == ("deadline", 0.0, 3)


class Stuck(RandomSampler):
    """Answers nothing after so many requests, of which the last takes most of the time."""

    def __init__(self, after):
        super().__init__()
        self.after = after

    def sample(self, prompt, params, **more):
        if len(self.requests) == self.after - 1:
            threading.Event().wait(6)  # or it would look as if the sampler were dead
        if len(self.requests) == self.after:
            return Future.wrap(concurrent.futures.Future())
        return super().sample(prompt, params, **more)


class Broken(RandomSampler):
    def sample(self, prompt, params, **more):
        if len(self.requests) > 2:
            raise OSError("out of order")
        return super().sample(prompt, params, **more)


def test_a_sampler_that_fails_ends_the_rollout():
    """At once, whatever the agent makes of it."""

    async def stubborn(task, session):
        while True:
            try:
                await ask(session, "x")
            except GatewayError:
                await asyncio.sleep(600)

    with pytest.raises(BackendError, match="out of order"):
        played(stubborn, sampler=Broken(), deadline=600.0)


def test_groups_that_are_scored_together():
    """A task's score is added, as to any other."""
    task = agent(two_turns, lambda result, task: None, ["x"])[0]
    scored = attrs.evolve(task, score=lambda actions: [float(i) for i in range(len(actions))])
    groups = rollout_sync(RandomSampler(), [scored], n=3, params=SHORT)
    assert groups[0].rewards.tolist() == [0.0, 1.0, 2.0]


def test_evaluate():
    made = agent(
        two_turns, lambda result, task: float(task["answer"] == 1), {"train": ["x"], "test": ROWS}, split="test"
    )
    found = evaluate_sync(RandomSampler(), made, n=2, params=SHORT)
    assert found.scores["agent"].mean == 0.5


def test_a_harness_of_one_s_own():
    """What it says about the end counts, and so do its numbers."""

    class Own:
        def play(self, session, seed):
            asyncio.run(ask(session, "x"))
            return StepResult(reward=1.0, truncated=True, info={"seed": seed, "answer": "y"})

    groups = rollout_sync(RandomSampler(), [Task(Own, "own", seed=7)], n=2, params=SHORT)
    (trajectory, _) = groups[0].trajectories
    assert (trajectory.ended, trajectory.seed, trajectory.tags["answer"]) == ("truncated", 7, "y")
    assert trajectory.turns[0].metrics == {"seed": 7.0, "branches": 1.0}
    assert groups.metrics["env/own/info/seed"] == 7.0


def test_many_at_once():
    """200 sessions with agents in threads and in loops, all of them at the same time."""
    groups = played(plain, n=100, concurrency=200)
    more = played(two_turns, n=200, concurrency=200)
    assert len(groups[0].trajectories) == 100
    assert len(more[0].trajectories) == 200


def test_giving_up_ends_agents():
    """No agent is asked for anything more; those that wait are cancelled."""
    cancelled, waiting, there = [], threading.Event(), []

    async def waits(task, session):
        await ask(session, "x")
        there.append(session)
        if len(there) == 3:
            waiting.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(session)
            raise

    async def main():
        task = asyncio.ensure_future(
            rlkit.rollouts.rollout(RandomSampler(), agent(waits, length, ["x"]), n=3, params=SHORT)
        )
        await asyncio.to_thread(waiting.wait, 60)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        with pytest.raises(GatewayError, match="ended"):
            await ask(cancelled[0], "x")

    asyncio.run(main())
    assert len(cancelled) == 3


def test_rows():
    assert [task.index for task in agent(plain, length, np.array(["a", "b"]))] == [0, 1]
    for rows, error in (([], DataError), ("abc", DataError), ([{}], DataError), ([{1: 2}], DataError)):
        with pytest.raises(error, match="^tasks"):
            agent(plain, length, rows)
    with pytest.raises(UnknownNameError, match="no split named 'test'"):
        agent(plain, length, {"train": ["a"]}, split="test")


@for_each(
    ("arguments", "message"),
    [
        ({"run": 3}, "^run: got 3"),
        ({"run": []}, "^run: got "),
        ({"run": ["no-such-program-here"]}, "^run: the command 'no-such-program-here' is not on the PATH"),
        ({"run": ["true"], "folder": "/no/such"}, "^folder: is '/no/such'"),
        ({"run": ["true"], "environment": {"A": 1}}, "^environment: got"),
        ({"folder": "."}, "^folder: is given, but run is a function"),
        ({"reward": lambda result: 1.0}, r"^reward: '<lambda>' takes \(result\)"),
        ({"reward": 1.0}, "^reward: got 1.0"),
        ({"credit": "first"}, "^credit: got 'first'"),
    ],
)
def test_mistakes_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        agent(**{"run": plain, "reward": length, "tasks": ["x"]} | arguments)


def test_the_plan_is_that_of_other_environments():
    """Tags, and groups that are kept only where enough members are left."""
    plan = Plan(n=2, params=SHORT, tags={"run": "a"})
    groups = rollout_sync(RandomSampler(), agent(two_turns, length, ["x"]), plan=plan)
    assert groups[0].trajectories[0].tags == {"run": "a"}
