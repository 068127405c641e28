"""What a rollout yields: limits, seeds, retries, order, streams, cancellation."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import time

import attrs
import numpy as np
import pytest

import rlkit
from rlkit import BackendError, BackendTimeout, ConfigError, EnvBusy, Future, SamplingParams
from rlkit.envs import StepResult, Task, Tasks, TaskSettings
from rlkit.rollouts import Plan, _requests, rollout, rollout_sync, stream
from tests.each import for_each
from tests.rollouts.parts import Counted, CountedAsync, RandomSampler, all_closed, reset_counts
from tests.without import printed

PARAMS = SamplingParams(max_tokens=6)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(_requests, "PAUSE", 0.01)


def run(tasks, sampler=None, **options):
    options = {"n": 2, "params": PARAMS, **options}
    return asyncio.run(rollout(sampler or RandomSampler(), tasks, **options))


def same(one, two):
    """Whether two lists of groups hold the same trajectories, bit for bit."""
    pairs = list(zip(one, two, strict=True))
    return all(
        a.number == b.number
        and len(a.trajectories) == len(b.trajectories)
        and all(
            len(s.turns) == len(t.turns)
            and s.reward == t.reward
            and s.seed == t.seed
            and all(
                np.array_equal(u.prompt, v.prompt)
                and np.array_equal(u.tokens, v.tokens)
                and np.array_equal(u.logprobs, v.logprobs)
                for u, v in zip(s.turns, t.turns, strict=True)
            )
            for s, t in zip(a.trajectories, b.trajectories, strict=True)
        )
        for a, b in pairs
    )


class Endless(Counted):
    turns = 10**9


@pytest.mark.parametrize("env", [Counted, CountedAsync])
def test_groups_in_the_order_of_tasks(env):
    """A group per task, n members each, rewards as the environment gave them."""
    tasks = Tasks(lambda i: env(), 5, name="counted")
    groups = run(list(tasks), n=3)
    assert [(g.number, g.index, g.env, len(g.trajectories)) for g in groups] == [(i, i, "counted", 3) for i in range(5)]
    for group in groups:
        assert group.same_start
        assert len({t.seed for t in group.trajectories}) == 1
        for t in group.trajectories:
            assert (t.terminated, t.truncated, t.ended, len(t.turns)) == (True, False, "terminated", 3)
            assert t.reward == sum(turn.tokens.size % 2 == 0 for turn in t.turns)
    assert len({group.trajectories[0].seed for group in groups}) == 5


def test_trained_tokens_are_the_sampled_ones():
    """Every prompt is what was sent, and extends the turn before it."""
    sampler = RandomSampler()
    (group,) = run(Counted, sampler, n=4)
    sent = {prompt.tobytes() for prompt, *_ in sampler.requests}
    for t in group.trajectories:
        for before, turn in itertools.pairwise(t.turns):
            whole = np.concatenate([before.prompt, before.tokens])
            assert np.array_equal(turn.prompt[: whole.size], whole)
            assert turn.prompt.tobytes() in sent


def test_the_first_turns_of_a_group_are_one_request():
    """Its prompt is computed once; later turns are asked for alone. Member i has sample i."""
    sampler = RandomSampler()
    (group,) = run(Counted, sampler, n=4)
    assert sorted(n for _, _, n, _ in sampler.requests) == [1] * 8 + [4]
    prompt, params, n, seed = next(request for request in sampler.requests if request[2] == 4)
    again = RandomSampler().sample(prompt, params, n=n, seed=seed).result()
    assert all(np.array_equal(t.turns[0].tokens, s.tokens) for t, s in zip(group.trajectories, again, strict=True))
    seeds = [seed for *_, seed in sampler.requests]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    alone = RandomSampler()
    run(Counted, alone, n=4, shared_start=False)
    assert [n for _, _, n, _ in alone.requests] == [1] * 12


class OwnStart(Counted):
    """Begins otherwise each time it is made."""

    def reset(self, seed):
        return f"Begin {Counted.made} {id(self)}"


def test_members_that_begin_otherwise_ask_for_themselves():
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
    """Concurrency and timing change nothing; another seed, step or plan seed does."""
    reset_counts()
    tasks = [Counted, CountedAsync, Slow] * 4
    first = run(tasks, n=3, concurrency=1, seed=7, step=3)
    assert same(first, run(tasks, n=3, concurrency=36, seed=7, step=3))
    assert same(first, run(tasks, n=3, concurrency=5, seed=7, step=3))
    assert not same(first, run(tasks, n=3, seed=7, step=4))
    assert not same(first, run(tasks, n=3, seed=8, step=3))
    assert same(first[:2], run(tasks[:2], n=3, seed=7, step=3))


def test_a_task_may_have_its_own_seed_and_settings():
    own = TaskSettings(
        n=3, temperature=0.5, max_tokens=2, max_turns=1, reduction="last", nonterminal_override=-5.0, deadline=9.0
    )
    sampler = RandomSampler()
    groups = run([Task(Counted, "a", seed=123, settings=own), Task(Counted, "b")], sampler, n=2)
    a, b = groups
    assert [len(a.trajectories), len(b.trajectories)] == [3, 2]
    assert {t.seed for t in a.trajectories} == {123}
    assert {t.turns[0].sample.temperature for t in a.trajectories} == {0.5}
    assert all(t.turns[0].tokens.size <= 2 for t in a.trajectories)
    assert {(len(t.turns), t.ended, t.reward) for t in a.trajectories} == {(1, "max_turns", -5.0)}
    assert {len(t.turns) for t in b.trajectories} == {3}


def test_min_n_is_never_more_than_n():
    """A task with a smaller group is kept whole; a task's own min_n stands above the plan's."""
    tasks = [Task(Counted, "one", settings=TaskSettings(n=1)), Task(Counted, "two")]
    assert [len(group) for group in run(tasks, n=4, min_n=4)] == [1, 4]
    failing = Task(Flaking, "flaking", settings=TaskSettings(min_n=1))
    assert len(run([Counted, failing], n=2, min_n=2, concurrency=1)[1].failures) == 1


class Flaking(Counted):
    """The second one of a group fails."""

    made_here = 0

    def reset(self, seed):
        Flaking.made_here += 1
        if Flaking.made_here % 2 == 0:
            raise OSError("gone")
        return super().reset(seed)


def test_turns_are_limited():
    (group,) = run(Endless, max_turns=4)
    assert {(len(t.turns), t.ended, t.truncated, t.terminated) for t in group.trajectories} == {
        (4, "max_turns", True, False)
    }


def test_tokens_are_limited():
    """The policy's own tokens are exactly the budget; the last turn was sampled with what was left of it."""
    sampler = RandomSampler()
    (group,) = run(Endless, sampler, max_total_tokens=20, max_turns=1000)
    assert {(t.token_count, t.ended) for t in group.trajectories} == {(20, "max_total_tokens")}
    assert all(1 <= params.max_tokens <= 6 for _, params, *_ in sampler.requests)


@pytest.mark.parametrize("options", [{}, {"max_length": 120}])
def test_the_context_is_limited(options):
    """No prompt and action is longer; an episode whose next prompt leaves no room is truncated."""
    sampler = RandomSampler(max_length=200)
    groups = run(Endless, sampler, max_turns=1000, **options)
    limit = options.get("max_length", 200)
    for t in groups[0].trajectories:
        assert t.ended == "context"
        assert t.turns
        assert max(turn.prompt.size + turn.tokens.size for turn in t.turns) <= limit
    assert all(prompt.size + params.max_tokens <= limit for prompt, params, *_ in sampler.requests)
    assert groups.metrics["env/Endless/truncated/context"] == 2
    with pytest.raises(BackendError, match="2 context in chat; .* the first prompt, of .* leaves no room in"):
        run(Endless, RandomSampler(max_length=4))


class TruncatesItself(Counted):
    def step(self, action):
        return StepResult("no more", 0.5, truncated=True)


def test_the_environments_own_truncation():
    (group,) = run(TruncatesItself)
    assert {(t.ended, t.truncated, t.reward, t.messages[-1]["content"]) for t in group.trajectories} == {
        ("truncated", True, 0.5, "no more")
    }


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
        result = super().step(action)
        info = {"success": True, "text": "x", "score": np.float32(0.5), "nan": float("nan"), "huge": 10**400}
        return rlkit.envs.StepResult(result.observation, result.reward, result.terminated, info=info)


def test_metrics():
    sampler = RandomSampler(version=5)
    groups = run(Informed, sampler, n=4, tags={"split": "train"})
    metrics = groups.metrics
    trajectories = groups[0].trajectories
    assert metrics["env/Informed/episodes"] == metrics["env/Informed/terminated"] == 4
    assert metrics["env/Informed/groups"] == 1
    assert metrics["env/Informed/turns"] == 3
    assert metrics["env/Informed/rewritten"] == 0
    assert metrics["env/Informed/reward"] == np.mean([t.reward for t in trajectories])
    assert metrics["env/Informed/tokens"] == np.mean([t.token_count for t in trajectories])
    assert metrics["env/Informed/info/success"] == 1
    assert metrics["env/Informed/info/score"] == 0.5
    assert "env/Informed/info/text" not in metrics
    assert "env/Informed/info/huge" not in metrics
    assert metrics["sampler/requests"] == len(sampler.requests)
    assert metrics["sampler/tokens"] == sum(t.token_count for t in trajectories)
    assert metrics["sampler/version"] == 5
    assert all(isinstance(value, float) for value in metrics.values())
    assert {"time/env", "time/sampler", "time/rollout", "time/close"} <= metrics.keys()
    assert all(t.tags == {"split": "train"} and t.version == 5 for t in trajectories)


class Busy(Counted):
    """Has no room the first two times."""

    tries = 0

    def reset(self, seed):
        Busy.tries += 1
        if Busy.tries <= 2:
            raise EnvBusy("no room")
        return super().reset(seed)


class Dropped(Counted):
    """Its connection breaks once, in the second step."""

    tries = 0

    def step(self, action):
        if self.steps == 1:
            Dropped.tries += 1
            if Dropped.tries == 1:
                raise ConnectionResetError("gone")
        return super().step(action)


@pytest.mark.parametrize("env", [Busy, Dropped])
def test_listed_exceptions_are_tried_again(env):
    """A new environment, the same seeds: the episode is as if nothing had happened."""
    env.tries = 0
    reset_counts()
    groups = run(env, n=1, min_n=1)
    assert groups.metrics[f"env/{env.__name__}/retried"] == env.tries - 1 > 0
    assert groups.metrics[f"env/{env.__name__}/failed"] == 0
    assert Counted.made == Counted.closed == env.tries
    assert same(groups, run(Counted, n=1, min_n=1))


@pytest.mark.parametrize("options", [{"attempts": 1}, {"attempts": 2}, {"retry": ()}, {"retry": (OSError,)}])
def test_other_exceptions_are_not(options):
    Busy.tries = 0
    with pytest.raises(BackendError, match="1 EnvBusy in reset"):
        run(Busy, n=1, min_n=1, **options)
    assert Busy.tries == (2 if options == {"attempts": 2} else 1)


def test_a_sampler_that_recovers():
    """Requests that fail with a listed exception are sent again; nothing is lost."""

    class Hiccups(RandomSampler):
        failures = 3

        def sample(self, *args, **kwargs):
            if self.failures:
                self.failures -= 1
                raise ConnectionRefusedError("not yet")
            return super().sample(*args, **kwargs)

    groups = run([Counted] * 2, Hiccups(), n=2, attempts=5)
    assert same(groups, run([Counted] * 2, n=2))
    assert groups.metrics["sampler/errors"] == 3


class Dead(RandomSampler):
    """Refuses every request, in the call or later."""

    def __init__(self, error, later=False):
        super().__init__()
        self.error, self.later = error, later

    def sample(self, prompt, params, *, n=1, seed=None):
        self.requests.append(n)
        if not self.later:
            raise self.error
        failed = concurrent.futures.Future()
        threading.Timer(0.01, failed.set_exception, [self.error]).start()
        return Future.wrap(failed)


@pytest.mark.parametrize("later", [False, True])
def test_a_dead_sampler_is_a_typed_error(later):
    """After the attempts of the first request that has used them up; every environment is closed."""
    reset_counts()
    dead = Dead(ConnectionRefusedError("nobody there"), later)
    with pytest.raises(BackendError, match="the sampler failed: ConnectionRefusedError: nobody there") as caught:
        run([Counted] * 32, dead, n=8)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)
    assert len(dead.requests) <= 3 * 32  # a group's first turns are one request
    assert Counted.made > 0
    assert all_closed()


@pytest.mark.parametrize("error", [BackendError("broken"), rlkit.UnsupportedError("not here"), ConfigError("params")])
def test_an_error_of_rlkit_passes_as_it_is(error):
    dead = Dead(error)
    with pytest.raises(type(error)) as caught:
        run([Counted] * 4, dead, n=2)
    assert caught.value is error


def test_an_answer_that_is_not_for_the_prompt():
    class Wrong(RandomSampler):
        def sample(self, prompt, params, *, n=1, seed=None):
            return super().sample([1, 2], params, n=n, seed=seed)

    with pytest.raises(BackendError, match="did not return 2 completion"):
        run(Counted, Wrong())


@for_each(("name", "value"), [("temperature", 0.5), ("top_k", 3), ("top_p", 0.5), ("min_p", 0.5), ("version", 7)])
def test_an_answer_that_was_drawn_otherwise(name, value):
    """Losses and corrections believe what a sample says of itself, so it has to say what was asked for."""

    class Careless(RandomSampler):
        def sample(self, *args, **kwargs):
            return Future.of([attrs.evolve(s, **{name: value}) for s in super().sample(*args, **kwargs).result()])

    with pytest.raises(BackendError, match=f"a sample of the sampler: has {name}={value}; expected"):
        run(Counted, Careless())


def test_an_answer_with_a_token_of_another_version():
    """The error names the version that is too new, not the one with which the sample began."""

    class Ahead(RandomSampler):
        def sample(self, *args, **kwargs):
            drawn = super().sample(*args, **kwargs).result()
            return Future.of([attrs.evolve(s, versions=s.version + np.arange(len(s.tokens)) * 7) for s in drawn])

    with pytest.raises(BackendError, match=r"a sample of the sampler: has version=\d+; expected 0") as caught:
        run(Counted, Ahead())
    assert "version=0" not in str(caught.value)


def test_a_sampler_that_never_answers():
    """The rollout ends when the first episode's deadline does, however many wait behind it."""
    reset_counts()
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
    class Peak(CountedAsync):
        now = most = 0

        async def reset(self, seed):
            Peak.now += 1
            Peak.most = max(Peak.most, Peak.now)
            await asyncio.sleep(0.002)
            return "Begin"

        async def close(self):
            Peak.now -= 1

    run([Peak] * 8, n=3, concurrency=5)
    assert Peak.most == 5
    assert Peak.now == 0


def test_stream_yields_groups_as_they_are_complete():
    """A slow group does not hold up the others, and an endless iterator is read as there is room."""
    release = threading.Event()

    class Waits(Counted):
        def step(self, action):
            release.wait(30)
            return super().step(action)

    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield Task(Waits if i == 0 else Counted, "waits" if i == 0 else "counted")

    async def main():
        reset_counts()
        seen = []
        async with stream(RandomSampler(), endless(), n=2, params=PARAMS, concurrency=4) as groups:
            async for group in groups:
                seen.append(group.number)
                if len(seen) == 5:
                    release.set()
                if 0 in seen:
                    break
            assert groups.metrics["env/counted/groups"] >= 5
        return seen

    seen = asyncio.run(main())
    assert 0 not in seen[:5]
    assert all_closed()
    assert len(read) < len(seen) + 20


def test_leaving_a_stream_closes_everything():
    """By break alone, too: the loop closes the generator."""
    reset_counts()

    async def main():
        async for _ in stream(RandomSampler(), [Endless] * 20, n=2, params=PARAMS, max_turns=50, concurrency=8):
            break

    asyncio.run(main())
    assert Counted.made > 0
    assert all_closed()


@pytest.mark.parametrize("after", [0, 0.005, 0.02, 0.05])
def test_cancellation_closes_everything(after):
    reset_counts()

    async def main():
        task = asyncio.create_task(rollout(RandomSampler(), [Endless, Slowing] * 10, n=2, params=PARAMS, max_turns=500))
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(asyncio.all_tasks())

    assert asyncio.run(main()) == 1
    assert all_closed()


def test_a_share_is_enough():
    """Stragglers are given up, closed and counted; the group is kept with those that ended."""
    reset_counts()
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
    with pytest.raises(ConfigError, match=r"Plan\.share"):
        stream(RandomSampler(), iter([Counted]), share=0.5)


def test_synchronous_inside_of_a_running_loop():
    """As in a notebook, and the same as awaited."""

    async def notebook():
        return rollout_sync(RandomSampler(), [Counted] * 3, n=2, params=PARAMS)

    assert same(asyncio.run(notebook()), run([Counted] * 3))
    assert same(rollout_sync(RandomSampler(), [Counted] * 3, n=2, params=PARAMS), run([Counted] * 3))
    with pytest.raises(BackendError, match="broken"):
        rollout_sync(Dead(BackendError("broken")), Counted)


class Lingering(Counted):
    """All but the first take a while to make, or to close."""

    lingers_in = ""
    numbers = itertools.count()

    def __init__(self):
        self.number = next(self.numbers)
        self.linger("make")
        super().__init__()

    def linger(self, where):
        if self.lingers_in == where:
            time.sleep(0.1 * self.number)

    def close(self):
        self.linger("close")
        super().close()


@pytest.mark.parametrize("slow", ["make", "close"])
def test_what_is_given_up_is_closed_before_the_rollout_ends(monkeypatch, slow):
    """Environments that are being made, or closed, when enough episodes have ended; others end meanwhile."""
    reset_counts()
    monkeypatch.setattr(Lingering, "lingers_in", slow)
    monkeypatch.setattr(Lingering, "numbers", itertools.count())
    run(Lingering, n=6, share=0.3, min_n=1, concurrency=6)
    assert Counted.made == Counted.closed > 2


def test_an_interrupt_ends_a_synchronous_rollout(monkeypatch):
    """KeyboardInterrupt in the waiting thread: environments are closed before it goes on."""
    reset_counts()
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


def test_on_the_toy_backend():
    pytest.importorskip("torch")
    with rlkit.connect("toy", seed=0) as policy:
        sampler = policy.sampler().result()
        one, two = [run([Counted] * 2, sampler, n=3, seed=1) for _ in range(2)]
    assert same(one, two)


def test_global_random_state_is_left_alone():
    import random

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    Busy.tries = 0
    run(Busy, n=1, min_n=1)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


@for_each(
    ("options", "message"),
    [
        ({"m": 3}, "no option 'm'. There are: min_n, temperature"),
        ({"deadlin": 3}, "did you mean 'deadline'"),
        ({"n": 0}, r"Plan\.n"),
        ({"n": 2, "min_n": 3}, r"Plan\.min_n"),
        ({"deadline": 0}, r"Plan\.deadline"),
        ({"deadline": float("inf")}, r"Plan\.deadline"),
        ({"call_timeout": -1.0}, r"Plan\.call_timeout"),
        ({"share": 0.0}, r"Plan\.share"),
        ({"share": 1.5}, r"Plan\.share"),
        ({"retry": "OSError"}, r"Plan\.retry"),
        ({"retry": (BaseException,)}, r"Plan\.retry\[0\]"),
        ({"attempts": 0}, r"Plan\.attempts"),
        ({"params": {"max_tokens": 3}}, r"Plan\.params"),
        ({"reduction": "median"}, "reduction"),
        ({"nonterminal_reward": float("nan")}, "nonterminal_reward"),
        ({"seed": -1}, r"Plan\.seed"),
        ({"seed": None}, r"Plan\.seed"),
        ({"step": -1}, "step"),
        ({"max_length": 1}, r"Plan\.max_length"),
        ({"progress": "yes"}, r"Plan\.progress"),
        ({"plan": {"n": 3}}, "plan"),
        ({"chat": "chat"}, r"Plan\.chat"),
        ({"tags": {"a": []}}, r"Plan\.tags"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ConfigError, match=message):
        stream(RandomSampler(), Counted, **options)


@for_each("tasks", ["Counted", 3, None, [], [3], {"a": Counted}, b"x"])
def test_bad_tasks(tasks):
    reset_counts()
    with pytest.raises(ConfigError, match="tasks"):
        stream(RandomSampler(), tasks)
    assert Counted.made == 0


def test_a_source_without_an_end_is_refused():
    class Source:
        def at(self, position, *, seed=0): ...

        def batch(self, step, size, *, seed=0): ...

    with pytest.raises(ConfigError, match=r"tasks\.batch\(step, size\)"):
        stream(RandomSampler(), Source())


def test_a_policy_is_no_sampler():
    pytest.importorskip("torch")
    with (
        rlkit.connect("toy") as policy,
        pytest.raises(ConfigError, match=r"policy\.sampler\(\)\.result\(\)"),
    ):
        stream(policy, Counted)


def test_a_bad_task_in_an_iterator():
    """It is found when it is read, and everything is closed."""
    reset_counts()
    with pytest.raises(ConfigError, match=r"tasks\[1\]"):
        run(iter([Counted, 3]))
    assert all_closed()


def test_plans_are_kept():
    plan = Plan(n=3, params=PARAMS)
    assert plan.with_options(n=4).n == 4
    assert len(asyncio.run(rollout(RandomSampler(), Counted, plan=plan))[0]) == 3


def test_progress_is_shown_when_asked_for(capsys):
    pytest.importorskip("rich")
    run(Counted, progress=True)
    run(Counted)
    assert capsys.readouterr().out == ""


class Asks(Counted):
    """Says in ``info`` what would have been right."""

    turns = 2
    told = "7"

    def step(self, action):
        result = super().step(action)
        return StepResult(result.observation, 1.0, result.terminated, info={"answer": self.told, "score": 1.0})


@for_each(("told", "kept"), [("7", "7"), (7, 7), (7.5, 7.5), ("7" * 9999, "7" * 500), ([7], None)])
def test_the_right_answer_is_a_tag(told, kept):
    """What an environment gives as info["answer"], if text or a number, shortened; a tag of the plan's own stays."""
    kind = type("Asks", (Asks,), {"told": told})
    (group,) = run(kind, n=2, tags={"kind": "x"})
    tags = {"kind": "x"} if kept is None else {"kind": "x", "answer": kept}
    assert [dict(trajectory.tags) for trajectory in group.trajectories] == [tags, tags]
    (group,) = run(kind, n=2, tags={"answer": "own"})
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
