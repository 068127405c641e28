"""What a rollout yields: limits, seeds, retries, order, streams, cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import random
import sys
import threading
import time

import attrs
import numpy as np
import pytest

import rlkit
from rlkit import BackendError, BackendTimeout, ConfigError, DataError, EnvBusy, Future
from rlkit.envs import Task, Tasks, TaskSettings
from rlkit.rollouts import Plan, _requests, rollout, rollout_sync, stream
from tests.each import for_each
from tests.rollouts.parts import (
    PARAMS,
    Counted,
    CountedAsync,
    Endless,
    RandomSampler,
    all_closed,
    describe,
    in_turn,
    raising,
    reset_counts,
    run,
    scripted,
)
from tests.without import printed


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(_requests, "PAUSE", 0.01)
    reset_counts()


@for_each("env", [Counted, CountedAsync])
def test_groups_in_the_order_of_tasks(env):
    """A group per task, n members each, rewards as the environment gave them."""
    groups = run(list(Tasks(lambda i: env(), 5, name="counted")), n=3)
    assert [(g.number, g.index, g.env, len(g.trajectories)) for g in groups] == [(i, i, "counted", 3) for i in range(5)]
    for group in groups:
        assert group.same_start
        assert len({t.seed for t in group.trajectories}) == 1
        for t in group.trajectories:
            assert (t.terminated, t.truncated, t.ended, len(t.turns)) == (True, False, "terminated", 3)
            assert t.reward == sum(turn.tokens.size % 2 == 0 for turn in t.turns)
    assert len({group.trajectories[0].seed for group in groups}) == 5


def test_the_first_turns_of_a_group_are_one_request():
    """Its prompt is computed once, and member i has sample i. Every later prompt extends the turn before, as sent."""
    sampler = RandomSampler()
    (group,) = run(Counted, sampler, n=4)
    assert sorted(n for _, _, n, _ in sampler.requests) == [1] * 8 + [4]
    prompt, params, n, seed = next(request for request in sampler.requests if request[2] == 4)
    samples = RandomSampler().sample(prompt, params, n=n, seed=seed).result()
    assert all(np.array_equal(t.turns[0].tokens, s.tokens) for t, s in zip(group.trajectories, samples, strict=True))
    seeds = [seed for *_, seed in sampler.requests]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    sent = {prompt.tobytes() for prompt, *_ in sampler.requests}
    for before, turn in (pair for t in group.trajectories for pair in itertools.pairwise(t.turns)):
        whole = np.concatenate([before.prompt, before.tokens])
        assert np.array_equal(turn.prompt[: whole.size], whole)
        assert turn.prompt.tobytes() in sent
    alone = RandomSampler()
    run(Counted, alone, n=4, shared_start=False)
    assert [n for _, _, n, _ in alone.requests] == [1] * 12
    assert describe(run(n=1)) == describe(run(n=1, shared_start=False))


def test_members_that_begin_otherwise_ask_for_themselves():
    class OwnStart(Counted):
        def reset(self, seed):
            return f"Begin {Counted.made} {id(self)}"

    sampler = RandomSampler()
    groups = run(OwnStart, sampler, n=3)
    assert len(groups[0].trajectories) == 3
    assert not groups[0].same_start
    assert groups.metrics["env/OwnStart/mixed_groups"] == 1
    assert sorted(n for _, _, n, _ in sampler.requests)[-2:] == [1, 3]


class Slow(CountedAsync):
    """Takes a while that depends on how many were made before it."""

    async def step(self, action):
        await asyncio.sleep(0.001 * (Counted.made * 7 % 5))
        return Counted.step(self, action)


def test_the_same_seed_gives_the_same_episodes_whatever_arrives_first():
    """Concurrency and timing change nothing; another step or seed of the plan does."""
    tasks = [Counted, CountedAsync, Slow] * 4
    first = describe(run(tasks, n=3, concurrency=1, seed=7, step=3))
    for concurrency in (36, 5):
        assert describe(run(tasks, n=3, concurrency=concurrency, seed=7, step=3)) == first
    for other in ({"seed": 7, "step": 4}, {"seed": 8, "step": 3}):
        groups = describe(run(tasks, n=3, **other))
        assert len(groups) == len(first)
        assert groups != first
    assert describe(run(tasks[:2], n=3, seed=7, step=3)) == first[:6]


def test_a_task_may_have_its_own_seed_and_settings():
    settings = TaskSettings(
        n=3, temperature=0.5, max_tokens=2, max_turns=1, reduction="last", nonterminal_override=-5.0, deadline=9.0
    )
    plan = Plan(max_tokens=4, temperature=0.7)
    sampler = RandomSampler()
    a, b = run([Task(Counted, "a", seed=123, settings=settings), Task(Counted, "b")], sampler, plan=plan)
    assert [len(a.trajectories), len(b.trajectories)] == [3, 2]
    assert {t.seed for t in a.trajectories} == {123}
    assert {(params.max_tokens, params.temperature) for _, params, *_ in sampler.requests} == {(2, 0.5), (4, 0.7)}
    assert {t.turns[0].sample.temperature for t in a.trajectories} == {0.5}
    assert {(len(t.turns), t.ended, t.reward) for t in a.trajectories} == {(1, "max_turns", -5.0)}
    assert {len(t.turns) for t in b.trajectories} == {3}


def test_settings_over_plans_over_params():
    """The settings of a task come before those of the plan, which come before ``params``; ``min_n`` is at most n."""
    plan = Plan(n=4, min_n=4, params=PARAMS, max_tokens=3, temperature=0.5, max_turns=7, nonterminal_reward=1.0)
    assert plan.turn_params == attrs.evolve(PARAMS, max_tokens=3, temperature=0.5)
    assert Plan(params=PARAMS, temperature=0.0).turn_params == attrs.evolve(PARAMS, temperature=0.0)
    merged = TaskSettings(n=2, max_tokens=2, nonterminal_override=-1.0).over(plan)
    other_end = {"nonterminal_reward": None, "nonterminal_override": -1.0}
    assert merged == plan.with_options(n=2, min_n=2, max_tokens=2, **other_end)
    assert TaskSettings(n=4, min_n=4, max_tokens=3, nonterminal_reward=1.0).over(merged) == plan


def test_a_task_s_min_n_counts():
    tasks = [Counted, Task(in_turn(Counted, raising(OSError(), "reset")), settings=TaskSettings(min_n=1))]
    assert len(run(tasks, n=2, min_n=2)[1].failures) == 1


def longest(trajectory):
    return max(turn.prompt.size + turn.tokens.size for turn in trajectory.turns)


@for_each(
    ("env", "options", "ended", "check"),
    [
        (Endless, {"max_turns": 4}, "max_turns", lambda t: len(t.turns) == 4),
        (Endless, {"max_total_tokens": 20, "max_turns": 1000}, "max_total_tokens", lambda t: t.token_count == 20),
        (Endless, {"max_turns": 1000}, "context", lambda t: longest(t) <= 200),
        (Endless, {"max_turns": 1000, "max_length": 120}, "context", lambda t: longest(t) <= 120),
        (scripted({"observation": "no more", "reward": 0.5, "truncated": True, "terminated": False}), {}, "truncated",
         lambda t: (t.reward, t.messages[-1]["content"]) == (0.5, "no more")),
    ],
)  # fmt: skip
def test_limits(env, options, ended, check):
    """No request asks for more than is left, and what was played until then is kept."""
    sampler = RandomSampler(max_length=200 if ended == "context" else 4096)
    groups = run(env, sampler, **options)
    assert [(t.ended, t.truncated, t.terminated) for t in groups[0].trajectories] == [(ended, True, False)] * 2
    assert all(check(t) for t in groups[0].trajectories)
    assert groups.metrics[f"env/{env.__name__}/truncated/{ended}"] == 2
    room = options.get("max_length", sampler.max_length)
    for prompt, params, *_ in sampler.requests:
        assert 1 <= params.max_tokens <= min(6, room - prompt.size)


class Slowing(CountedAsync):
    """Each step takes 0.1 s."""

    turns = 10**9

    async def step(self, action):
        await asyncio.sleep(0.1)
        return Counted.step(self, action)


def test_the_deadline_truncates():
    """What was played until then is kept; the clock starts when the episode does, not when it is queued."""
    groups = run([Slowing] * 3, n=1, min_n=1, deadline=0.55, max_turns=1000, concurrency=1)
    assert [g.trajectories[0].ended for g in groups] == ["deadline"] * 3
    assert all(1 <= len(g.trajectories[0].turns) <= 5 for g in groups)
    assert groups.metrics["env/Slowing/truncated/deadline"] == 3
    assert groups.metrics["env/Slowing/failed"] == 0


class Informed(Counted):
    def step(self, action):
        info = {"success": np.True_, "text": "x", "score": np.float32(0.5), "nan": float("nan"), "huge": 10**400}
        return attrs.evolve(super().step(action), info=info)


def test_metrics():
    sampler = RandomSampler(version=5)
    groups = run(Informed, sampler, n=4, tags={"split": "train"})
    metrics, trajectories = groups.metrics, groups[0].trajectories
    rewards = [t.reward for t in trajectories]
    expected = {
        "env/Informed/episodes": 4,
        "env/Informed/terminated": 4,
        "env/Informed/groups": 1,
        "env/Informed/turns": 3,
        "env/Informed/rewritten": 0,
        "env/Informed/reward": np.mean(rewards),
        "env/Informed/reward/min": min(rewards),
        "env/Informed/reward/max": max(rewards),
        "env/Informed/reward/std": pytest.approx(np.std(rewards, ddof=1)),
        "env/Informed/tokens": np.mean([t.token_count for t in trajectories]),
        "env/Informed/info/success": 1,
        "env/Informed/info/score": 0.5,
        "sampler/requests": len(sampler.requests),
        "sampler/tokens": sum(t.token_count for t in trajectories),
        "sampler/version": 5,
    }
    assert {name: metrics.get(name) for name in expected} == expected
    both = (groups + groups).metrics
    assert (both["env/Informed/episodes"], both["env/Informed/turns"]) == (8, 3)
    assert both["env/Informed/reward/max"] == max(rewards)
    assert groups + [groups[0]] == [*groups, groups[0]]  # noqa: RUF005  # a list without metrics
    assert not {f"env/Informed/info/{name}" for name in ("text", "nan", "huge")} & metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
    assert all(0 <= metrics[f"time/{name}"] < 600 for name in ("env", "sampler", "rollout", "close"))
    assert all(t.tags == {"split": "train"} and t.version == 5 for t in trajectories)


Busy = raising(EnvBusy("no room"), "reset")


@for_each("failing", [[Busy, Busy], [raising(ConnectionResetError("gone"))]])
def test_listed_exceptions_are_tried_again(failing):
    """A new environment, the same seeds: the episode is as if nothing had happened."""
    reset_counts()
    groups = run(in_turn(*failing, Counted), n=1)
    assert groups.metrics["env/env/retried"] == len(failing)
    assert groups.metrics["env/env/failed"] == 0
    assert Counted.made == Counted.closed == len(failing) + 1
    assert describe(groups) == describe(run(n=1))


@for_each("options", [{"attempts": 1}, {"attempts": 2}, {"retry": ()}, {"retry": (OSError,)}])
def test_other_exceptions_are_not(options):
    reset_counts()
    with pytest.raises(BackendError, match="1 EnvBusy in reset"):
        run(in_turn(Busy, Busy, Counted), n=1, **options)
    assert Counted.made == options.get("attempts", 1)


class Dead(RandomSampler):
    """Refuses requests, in the call or later; the first ones, if ``times`` is given."""

    def __init__(self, error, later=False, times=math.inf):
        super().__init__()
        self.error, self.later, self.times = error, later, times

    def sample(self, prompt, params, *, n=1, seed=None):
        if len(self.requests) >= self.times:
            return super().sample(prompt, params, n=n, seed=seed)
        self.requests.append((prompt, params, n, seed))
        if not self.later:
            raise self.error
        failed = concurrent.futures.Future()
        threading.Timer(0.01, failed.set_exception, [self.error]).start()
        return Future.wrap(failed)


def test_a_sampler_that_recovers():
    """Requests that fail with a listed exception are sent again; nothing is lost."""
    groups = run([Counted] * 2, Dead(ConnectionRefusedError("not yet"), times=3), attempts=5)
    assert describe(groups) == describe(run([Counted] * 2))
    assert groups.metrics["sampler/errors"] == groups.metrics["sampler/retried"] == 3


@for_each("later", [False, True])
def test_a_dead_sampler_is_a_typed_error(later):
    """After the attempts of the first request that has used them up; every environment is closed."""
    reset_counts()
    dead = Dead(ConnectionRefusedError("refused"), later)
    with pytest.raises(BackendError, match="the sampler failed: ConnectionRefusedError: refused") as caught:
        run([Counted] * 32, dead, n=8)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert len(dead.requests) <= 3 * 32  # a group's first turns are one request
    assert Counted.made > 0
    assert all_closed()


@for_each("error", [BackendError("broken"), rlkit.UnsupportedError("not here"), ConfigError("params")])
def test_an_error_of_rlkit_passes_as_it_is(error):
    with pytest.raises(type(error)) as caught:
        run([Counted] * 4, Dead(error))
    assert caught.value is error


def test_a_prompt_that_cannot_be_sampled_is_a_failure_of_its_episode():
    with pytest.raises(BackendError, match="2 context in chat; .* the first prompt, of .* leaves no room in"):
        run(Endless, RandomSampler(max_length=4))
    with pytest.raises(BackendError, match="2 DataError in sampler; the first error: no such token") as caught:
        run(Counted, Dead(DataError("no such token")))
    assert type(caught.value) is BackendError


def replace(**values):
    return lambda samples: [attrs.evolve(sample, **values) for sample in samples]


def make_newer(samples):
    return [attrs.evolve(s, versions=s.version + np.arange(len(s.tokens)) * 7) for s in samples]


@for_each(
    ("change", "message"),
    [
        (replace(prompt=[1, 2]), "did not return 2 completion"),
        (lambda samples: samples[:1], "did not return 2 completion"),
        (replace(temperature=0.5), "a sample of the sampler: has temperature=0.5; expected"),
        (replace(top_k=3), "has top_k=3; expected"),
        (replace(top_p=0.5), "has top_p=0.5; expected"),
        (replace(min_p=0.5), "has min_p=0.5; expected"),
        (replace(version=7), r"has version=7; expected 0 \(as"),
        (make_newer, r"has version=[1-9]\d*; expected 0 \(as"),  # the one that is too new, not the one it began with
    ],
)
def test_wrong_answers_of_a_sampler(change, message):
    """Losses and corrections believe what a sample says of itself, so it has to say what was asked for."""

    class Careless(RandomSampler):
        def sample(self, *args, **kwargs):
            return Future.of(change(super().sample(*args, **kwargs).result()))

    with pytest.raises(BackendError, match=message):
        run(Counted, Careless())


def test_a_sampler_that_never_answers():
    """The rollout ends when the first episode's deadline does, however many wait."""
    never = concurrent.futures.Future()
    with pytest.raises(BackendTimeout, match="answered no request"):
        run([Counted] * 50, RandomSampler(wait=never), concurrency=2, deadline=2.0)
    assert Counted.made < 20
    assert all_closed()


def test_samples_are_in_flight_together():
    """Nothing waits for another group: all first requests are made before any is answered."""
    gate = concurrent.futures.Future()
    sampler = RandomSampler(wait=gate)

    async def main():
        task = asyncio.create_task(rollout(sampler, [Counted] * 6, n=4, params=PARAMS))
        while len(sampler.requests) < 6:
            await asyncio.sleep(0.001)
        gate.set_result(None)
        return await task

    assert len(asyncio.run(main())) == 6


def test_no_more_than_concurrency_at_once():
    peaks = []

    class Peak(CountedAsync):
        async def step(self, action):
            await asyncio.sleep(0.002)
            peaks.append(Counted.made - Counted.closed)
            return Counted.step(self, action)

    run([Peak] * 8, n=3, concurrency=5)
    assert max(peaks) == 5
    assert all_closed()


def test_stream_yields_groups_as_they_are_complete():
    """A slow group does not hold up the others, and an endless iterator is read as there is room."""
    release = threading.Event()

    class Waits(Counted):
        def step(self, action):
            release.wait(30)
            return super().step(action)

    read, seen = [], []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield Task(Counted if i else Waits, "counted" if i else "waits")

    async def main():
        async with stream(RandomSampler(), endless(), n=2, params=PARAMS, concurrency=4) as groups:
            async for group in groups:
                seen.append(group.number)
                if len(seen) == 5:
                    release.set()
                if 0 in seen:
                    break
            assert groups.metrics["env/counted/groups"] >= 5

    asyncio.run(main())
    assert 0 not in seen[:5]
    assert all_closed()
    assert len(read) < len(seen) + 20


def test_leaving_a_stream_closes_everything():
    """By break alone, too: the loop closes the generator."""

    async def main():
        async for _ in stream(RandomSampler(), [Endless] * 20, n=2, params=PARAMS, max_turns=50, concurrency=8):
            break

    asyncio.run(main())
    assert Counted.made > 0
    assert all_closed()


@for_each(("after", "wait"), [(0, None), (0.005, None), (0.02, None), (0.05, None), (0, concurrent.futures.Future())])
def test_cancellation_closes_everything(after, wait):
    """Before, between and during requests."""
    reset_counts()
    sampler = RandomSampler(wait=wait)

    async def main():
        task = asyncio.create_task(rollout(sampler, [Endless, Slowing] * 10, n=2, params=PARAMS, max_turns=500))
        await asyncio.sleep(after)
        while wait is not None and not sampler.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert all_closed()


def test_a_share_is_enough():
    """Stragglers are given up, closed and counted; the group is kept with those that ended."""
    never = threading.Event()

    class Straggler(Counted):
        def step(self, action):
            if self.number == 3:
                while Counted.closed < 6:  # the others have ended
                    never.wait(0.01)
                never.wait(1)
            return super().step(action)

        def reset(self, seed):
            with Counted.lock:
                self.number = Counted.made
            return super().reset(seed)

    groups = run(Straggler, n=8, share=0.75, min_n=4, concurrency=8, close_timeout=4.0)
    assert 6 <= len(groups[0].trajectories) < 8
    assert groups.metrics["env/Straggler/abandoned"] == 8 - len(groups[0].trajectories)
    assert Counted.made == Counted.closed == 8
    for concurrency in (4, *[16] * 12):  # more groups than there is room for at a time; some that have not begun yet
        many = run([Counted] * 60, share=0.5, concurrency=concurrency).metrics
        assert many["env/Counted/episodes"] >= 60
        assert many["env/Counted/episodes"] + many["env/Counted/abandoned"] == 120
    with pytest.raises(ConfigError, match=r"Plan\.share"):
        stream(RandomSampler(), iter([Counted]), share=0.5)


def test_synchronous_inside_of_a_running_loop():
    """As in a notebook, and the same as awaited."""

    def play():
        return describe(rollout_sync(RandomSampler(), [Counted] * 3, n=2, params=PARAMS))

    async def notebook():
        return play()

    assert asyncio.run(notebook()) == play() == describe(run([Counted] * 3))
    with pytest.raises(BackendError, match="broken"):
        rollout_sync(Dead(BackendError("broken")), Counted)


@for_each("slow", ["make", "close"])
def test_what_is_given_up_is_closed_before_the_rollout_ends(slow):
    """Environments that are being made, or closed, when enough episodes have ended; others end meanwhile."""
    reset_counts()
    numbers = itertools.count()

    class Lingering(Counted):
        """All but the first take a while to make, or to close."""

        def __init__(self):
            self.number = next(numbers)
            time.sleep(0.1 * self.number if slow == "make" else 0)
            super().__init__()

        def close(self):
            time.sleep(0.1 * self.number if slow == "close" else 0)
            super().close()

    run(Lingering, n=6, share=0.3, min_n=1, concurrency=6)
    assert Counted.made == Counted.closed > 2


def test_an_interrupt_ends_a_synchronous_rollout(monkeypatch):
    """KeyboardInterrupt in the waiting thread: environments are closed before it is raised."""
    join = threading.Thread.join
    interrupted = []

    def interrupt(self, timeout=None):
        if self.name == "rlkit-rollout" and not interrupted:
            interrupted.append(self)
            while not Counted.made:
                pass
            raise KeyboardInterrupt
        return join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        rollout_sync(RandomSampler(), [Slowing] * 4, n=2, params=PARAMS, max_turns=1000)
    assert all_closed()
    assert not interrupted[0].is_alive()


def test_global_random_state_is_left_alone():
    def read_states():
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = read_states()
    run(in_turn(Busy, Counted), n=1)
    assert read_states() == before


BAD = {
    "n": [0], "attempts": [0], "max_length": [1], "seed": [-1, None], "share": [0.0, 1.5], "call_timeout": [-1.0],
    "deadline": [0, math.inf], "nonterminal_reward": [math.nan], "reduction": ["median"], "progress": ["yes"],
    "retry": ["OSError", (BaseException,)], "params": [{"max_tokens": 3}], "chat": ["chat"], "tags": [{"a": []}],
}  # fmt: skip


@for_each(
    ("options", "message"),
    [
        *(({name: value}, rf"Plan\.{name}") for name, values in BAD.items() for value in values),
        ({"retry": (OSError, BaseException)}, r"Plan\.retry\[1\]"),
        ({"n": 2, "min_n": 3}, r"Plan\.min_n"),
        ({"nonterminal_reward": 1.0, "nonterminal_override": 1.0}, r"Plan\.nonterminal_reward.*only one of the two"),
        ({"step": -1}, "step"),
        ({"plan": {"n": 3}}, "plan"),
        ({"m": 3}, "no option 'm'. There are: min_n, temperature"),
        ({"deadlin": 3}, "did you mean 'deadline'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        stream(RandomSampler(), Counted, **options)


@for_each("tasks", ["Counted", 3, None, [], [3], {"a": Counted}, b"x", type("Endless", (), {"batch": None})()])
def test_bad_tasks(tasks):
    message = r"tasks\.batch\(step, size\)" if hasattr(tasks, "batch") else "tasks"
    with pytest.raises(ConfigError, match=message):
        stream(RandomSampler(), tasks)
    assert Counted.made == 0


def test_a_bad_task_in_an_iterator():
    """It is found when it is read, and everything is closed."""
    with pytest.raises(ConfigError, match=r"tasks\[1\]"):
        run(iter([Counted, 3]))
    assert all_closed()


def test_a_policy_is_no_sampler():
    pytest.importorskip("torch")
    with (
        rlkit.connect("toy") as policy,
        pytest.raises(ConfigError, match=r"policy\.sampler\(\)\.result\(\)"),
    ):
        stream(policy, Counted)


def test_progress_is_shown_when_asked_for(capsys, monkeypatch):
    """On stderr where that is a terminal, and nowhere else."""
    pytest.importorskip("rich")
    run(Counted, progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(Counted, progress=False)
    assert capsys.readouterr() == ("", "")
    run(in_turn(Counted, raising(OSError(), "reset")), n=2, min_n=1, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "episodes" in err


@for_each(("said", "kept"), [("7", "7"), (7, 7), (7.5, 7.5), ("7" * 9999, "7" * 500), ([7], None)])
def test_the_right_answer_is_a_tag(said, kept):
    """What an environment gives as info["answer"], if text or a number, shortened; a tag of the plan's own stays."""
    step = {"reward": 1.0, "info": {"answer": said, "score": 1.0}}
    (group,) = run(scripted(step, step), tags={"kind": "x"})
    tags = {"kind": "x"} if kept is None else {"kind": "x", "answer": kept}
    assert [dict(trajectory.tags) for trajectory in group.trajectories] == [tags, tags]
    (group,) = run(scripted(step, step), tags={"answer": "own"})
    assert group.trajectories[0].tags["answer"] == "own"


def test_a_rollout_in_threads_imports_neither_ray_nor_the_gateway():
    """The code of other executors, of harnesses and of adapters is imported when a plan or a task needs it."""
    program = """
import sys
from rlkit.envs import function
from rlkit.rollouts import rollout_sync
from tests.rollouts.parts import RandomSampler
tasks = function([{"prompt": "Hi."}], lambda text: float(len(text)))
(group,) = rollout_sync(RandomSampler(), tasks, n=2, max_turns=1, progress=False)
parts = ("_ray", "agent", "gateway", "from_mcp", "from_gem")
print(len(group), [name for name in sys.modules if name.startswith("rlkit.") and any(part in name for part in parts)])
"""
    assert printed(["ray"], program) == "2 []\n"
