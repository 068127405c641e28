"""Episodes that drive themselves: agents as functions, through sessions, under limits and faults."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading

import attrs
import numpy as np
import pytest

pytest.importorskip("jinja2", reason="needs the extra chat")

import rlkit
from rlkit import ConfigError, DataError, Future, UnknownNameError, credit
from rlkit.backends.toy import ByteTokenizer
from rlkit.envs import StepResult, Task, TaskSettings, agent
from rlkit.evaluation import evaluate_sync
from rlkit.gateway import GatewayError, Request, Sampling
from rlkit.rollouts import Replay, rollout
from rlkit.storage import from_record, to_record
from rlkit.trajectory import datums
from tests.each import for_each
from tests.gateway.parts import Scripted
from tests.rollouts.parts import PARAMS, RandomSampler, describe, fail_agent, is_text, play_agent, run

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


def plain(task, session):
    return asyncio.run(two_turns(task, session))


async def branches(task, session):
    """Two turns, and a helper that is asked something else."""
    await two_turns(task, session)
    return await ask(session, "else")


async def endless(task, session):
    talk = [task["prompt"]]
    while True:
        talk += [await ask(session, *talk), "more"]


async def careful(task, session):
    try:
        return await endless(task, session)
    except GatewayError as error:
        return error.code


@for_each("program", [two_turns, plain])
def test_two_turns_are_one_datum(program):
    """Plain and asynchronous agents; every sampled token is there once, and the last turn has the reward."""
    groups = play_agent(program, rows=ROWS, reward=lambda result, task: float(task["answer"]), tags={"run": "a"})
    assert [group.rewards.tolist() for group in groups] == [[1.0, 1.0], [2.0, 2.0]]
    for trajectory in (t for group in groups for t in group.trajectories):
        assert (trajectory.ended, trajectory.terminated, len(trajectory.turns)) == ("terminated", True, 2)
        assert trajectory.rewards.tolist() == [0.0, trajectory.reward]
        assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 2
        assert trajectory.tags == {"run": "a", "answer": trajectory.reward}
        if all(turn.tokens.size for turn in trajectory.turns):
            (datum,) = datums(trajectory, 1.0)
            assert datum.mask.sum() == trajectory.token_count
    assert groups.metrics["env/agent/episodes"] == 4
    assert groups.metrics["sampler/requests"] == 8
    assert groups.metrics["sampler/tokens"] == sum(t.token_count for g in groups for t in g.trajectories)


def test_seeds_decide_and_arrival_does_not():
    """The same episodes, whatever the concurrency; members differ."""

    def starts(concurrency):
        groups = play_agent(two_turns, rows=ROWS, n=4, concurrency=concurrency, seed=3)
        return [[tuple(t.turns[0].tokens) for t in group.trajectories] for group in groups]

    assert starts(1) == starts(8)
    assert all(len(set(group)) > 1 for group in starts(1))


def test_every_branch_and_the_last_one():
    every, last = (play_agent(branches, about={"credit": c})[0].trajectories for c in ("every", "last"))
    assert [len(t.turns) for t in (*every, *last)] == [3, 3, 1, 1]
    assert [len(datums(t, 1.0, split="allow")) for t in last] == [1, 1]
    assert last[0].messages[0]["content"] == "else"
    assert last[0].rewards.tolist() == [last[0].reward]


def test_weights_of_branches_reach_the_loss():
    """Through credit, storage and replay."""
    policy = rlkit.connect("toy", seed=0)
    groups = play_agent(branches, about={"credit": lambda found: [0.25, 1.0]}, sampler=policy.sampler().result())
    assert [turn.weight for turn in groups[0].trajectories[0].turns] == [0.25, 0.25, 1.0]
    replay = Replay(max_age=1)
    replay.add([from_record(to_record(group)) for group in groups])
    batch = credit.assign(replay.sample(1, current=0), "reinforce", weights="token-sum", split="allow")
    for first, second in zip(batch.data[::2], batch.data[1::2], strict=True):
        assert set(first.select(first.inputs["weights"])) == {0.25}
        assert second.inputs["weights"].max() == 1.0
    policy.forward_backward(batch.data, "ppo").result()


def test_rewards():
    """Asynchronous ones, ones that want the messages, and a group's scores, which are added as to any other."""

    async def later(result, task):
        await asyncio.sleep(0)
        return 0.5

    def count(result, task, messages):
        return float(len(messages))

    assert play_agent(two_turns, reward=later)[0].rewards.tolist() == [0.5, 0.5]
    assert play_agent(two_turns, reward=count)[0].rewards.tolist() == [4.0, 4.0]
    task = agent(two_turns, lambda result, task: None, ["x"])[0]
    scored = attrs.evolve(task, score=lambda actions: [float(i) for i in range(len(actions))])
    assert run([scored], n=3)[0].rewards.tolist() == [0.0, 1.0, 2.0]


async def raises(task, session):
    await two_turns(task, session)
    raise OSError("gone")


def leaves(task, session):
    raise SystemExit(1)


async def silent(task, session):
    return "4"


def wrong(result, task):
    raise ValueError("no")


@for_each(
    ("program", "options", "message"),
    [
        (two_turns, {"reward": lambda result, task: None}, "2 no_reward in step"),
        (two_turns, {"reward": lambda result, task: {}["x"]}, "2 KeyError in play"),
        (two_turns, {"reward": wrong}, "in the reward 'wrong' for tasks[0]"),
        (two_turns, {"reward": lambda result, task: "good"}, "StepResult.reward: got 'good'"),
        (raises, {}, "2 OSError in play; the first error: gone"),
        (leaves, {}, "2 EnvError in play"),
        (silent, {}, "2 no_turns in play"),
        (two_turns, {"rows": ["x" * 500], "max_length": 100}, "2 context in play"),
        (branches, {"about": {"credit": lambda found: [1.0]}}, "gave 1 weights"),
        (branches, {"about": {"credit": lambda found: [0.0, 0.0]}}, "no branch that its credit selects"),
    ],
)
def test_agents_that_fail(program, options, message):
    assert message in fail_agent(program, **options)


def test_a_failure_costs_its_episode_alone():
    calls = itertools.count()

    async def sometimes(task, session):
        return await (raises if next(calls) % 2 else two_turns)(task, session)

    groups = play_agent(sometimes, n=6)
    assert (len(groups[0].trajectories), len(groups[0].failures)) == (3, 3)
    assert groups.metrics["env/agent/failed/OSError"] == 3
    assert {failure.where for failure in groups[0].failures} == {"play"}


def test_retries():
    """The same seeds, so that the episode is the one that would have been."""
    calls = itertools.count()

    async def busy(task, session):
        result = await two_turns(task, session)
        if next(calls) == 0:
            raise ConnectionError("busy")
        return result

    assert describe(play_agent(busy, n=1, seed=1)) == describe(play_agent(two_turns, n=1, seed=1))


NEEDS_ALL = {"fails_when_cut": True}
JSON = {"sampling": Sampling(json_field="response_format")}


@for_each(
    ("turns", "truncated"),
    [
        ([("long", NEEDS_ALL)], True),
        ([("long", JSON)], True),
        ([("short", {}), ("long", NEEDS_ALL)], True),
        ([("long", {})], False),
        ([("short", NEEDS_ALL)], False),
        ([("long", NEEDS_ALL), ("short", NEEDS_ALL)], False),
    ],
)
def test_an_agent_that_fails_at_a_cut_turn_is_truncated(turns, truncated):
    """It is truncated only if its API or its JSON needs the whole answer; otherwise it could have continued."""

    async def program(task, session):
        for text, wish in turns:
            await session.answer(Request(messages=said(text), **wish))
        raise RuntimeError("incomplete")

    sampler = Scripted(ByteTokenizer(), lambda prompt: "x" * (9 if "long" in prompt else 2))
    if not truncated:
        assert "2 RuntimeError in play" in fail_agent(program, sampler=sampler)
        return
    groups = play_agent(program, sampler=sampler)
    ends = [(t.ended, t.truncated, t.reward, len(t.turns)) for t in groups[0].trajectories]
    assert ends == [("max_tokens", True, 0.0, len(turns))] * 2
    assert groups.metrics["env/agent/truncated/max_tokens"] == 2


@for_each(
    ("limit", "ended", "check"),
    [
        ({"max_turns": 3}, "max_turns", lambda t: len(t.turns) == 3),
        ({"max_total_tokens": 20}, "max_total_tokens", lambda t: t.token_count <= 20),
        ({"max_length": 150}, "context", lambda t: True),
    ],
)
@for_each(("program", "reward"), [(endless, 0.0), (careful, 1.0)])
def test_limits_truncate(limit, ended, check, program, reward):
    """An agent that fails at a limit is worth 0, one with a result what that is."""
    groups = play_agent(program, reward=lambda result, task: 1.0, **limit)
    for t in groups[0].trajectories:
        assert (t.reward, t.ended, t.truncated, t.terminated) == (reward, ended, True, False)
        assert check(t)
    assert groups.metrics[f"env/agent/truncated/{ended}"] == 2


def test_settings_of_tasks_are_those_of_sessions():
    """Temperature and tokens override what the agent asks for."""

    async def eager(task, session):
        sampling = Sampling(max_tokens=100, temperature=0.3)
        await session.answer(Request(messages=said("x"), sampling=sampling))
        return ""

    sampler = RandomSampler()
    play_agent(eager, sampler=sampler, about={"settings": TaskSettings(temperature=0.7, max_tokens=2)})
    assert {(params.temperature, params.max_tokens) for _, params, _, _ in sampler.requests} == {(0.7, 2)}
    settings = TaskSettings(nonterminal_override=-1.0, max_turns=2)
    assert play_agent(endless, about={"settings": settings})[0].rewards.tolist() == [-1.0, -1.0]


class Stuck(RandomSampler):
    """Answers two requests at once, the third after 6 s, and no other."""

    def sample(self, prompt, params, **more):
        if len(self.requests) == 2:
            threading.Event().wait(6)  # or it would look as if the sampler were dead
        if len(self.requests) == 3:
            return Future.wrap(concurrent.futures.Future())
        return super().sample(prompt, params, **more)


def test_the_deadline():
    """An agent that does nothing has failed; one that waits for the policy is truncated, if there is a turn."""

    async def idle(task, session):
        await ask(session, "x")
        await asyncio.sleep(600)

    assert "2 timeout in play" in fail_agent(idle, deadline=4.0)
    groups = play_agent(endless, sampler=Stuck(), n=1, min_n=1, deadline=10.0, max_turns=None)
    (trajectory,) = groups[0].trajectories
    assert (trajectory.ended, trajectory.reward, len(trajectory.turns)) == ("deadline", 0.0, 3)


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

    assert "out of order" in fail_agent(stubborn, sampler=Broken(), deadline=600.0)


def test_evaluate():
    tasks = {"train": ["x"], "test": ROWS}
    made = agent(two_turns, lambda result, task: float(task["answer"] == 1), tasks, split="test")
    assert evaluate_sync(RandomSampler(), made, n=2, params=PARAMS).scores["agent"].mean == 0.5


def test_a_harness_of_one_s_own():
    """What it says about the end counts, and so do its numbers."""

    class Own:
        def play(self, session, seed):
            asyncio.run(ask(session, "x"))
            return StepResult(reward=1.0, truncated=True, info={"seed": seed, "answer": "y"})

    groups = run(Task(Own, "own", seed=7))
    (trajectory, _) = groups[0].trajectories
    assert (trajectory.ended, trajectory.seed, trajectory.tags["answer"]) == ("truncated", 7, "y")
    assert trajectory.turns[0].metrics == {"seed": 7.0, "branches": 1.0}
    assert groups.metrics["env/own/info/seed"] == 7.0


def test_many_at_once():
    """200 sessions with agents in threads and in loops, all of them at the same time."""
    for program, n in ((plain, 100), (two_turns, 200)):
        assert len(play_agent(program, n=n, concurrency=200)[0].trajectories) == n


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
        playing = asyncio.ensure_future(rollout(RandomSampler(), agent(waits, is_text, ["x"]), n=3, params=PARAMS))
        await asyncio.to_thread(waiting.wait, 60)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled()
        with pytest.raises(GatewayError, match="ended"):
            await ask(cancelled[0], "x")

    asyncio.run(main())
    assert len(cancelled) == 3


def test_rows():
    assert [task.index for task in agent(plain, is_text, np.array(["a", "b"]))] == [0, 1]
    for rows in ([], "abc", [{}], [{1: 2}]):
        with pytest.raises(DataError, match="^tasks"):
            agent(plain, is_text, rows)
    with pytest.raises(UnknownNameError, match="no split named 'test'"):
        agent(plain, is_text, {"train": ["a"]}, split="test")


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
        agent(**{"run": plain, "reward": is_text, "tasks": ["x"]} | arguments)
