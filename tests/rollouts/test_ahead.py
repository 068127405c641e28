"""Sampling ahead of training, bounded staleness, replay."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import numpy as np
import pytest

import rlkit
from rlkit import BackendError, ConfigError, DataError, Sample, SamplingParams
from rlkit.corrections import token_tis
from rlkit.rollouts import Replay, Rollouts, async_rollouts, rollout, rollout_sync
from rlkit.storage import append, read
from rlkit.trajectory import Group, Trajectory, Turn, datums
from tests.each import for_each
from tests.rollouts.parts import TASKS, Counted, all_closed, describe, raising, reset_counts, train

OPTIONS = {"n": 2, "params": SamplingParams(max_tokens=4), "seed": 5}


@pytest.fixture
def policy():
    pytest.importorskip("torch")
    with rlkit.connect("toy", seed=0) as policy:
        yield policy


def ahead(policy, tasks=TASKS, **options):
    """Return batches of two tasks, or with other options."""
    return async_rollouts(policy, tasks, **{"size": 2} | OPTIONS | options)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_batch_is_as_old_as_max_lag(policy, max_lag):
    """Step s is sampled from the policy as it was s - max_lag rounds of training ago, never earlier."""
    seen = []
    with ahead(policy, steps=6, max_lag=max_lag) as batches:
        for step, groups in enumerate(batches):
            assert policy.sampler().result().version == step
            assert {t.version for group in groups for t in group.trajectories} == {max(0, step - max_lag)}
            assert groups.metrics["sampler/lag"] == min(step, max_lag)
            assert [group.step for group in groups] == [step] * 2
            seen += [group.index for group in train(policy, groups)]
    assert sorted(seen) == sorted([*range(6)] * 2)


def test_lag_0_is_the_synchronous_loop():
    """Bit for bit; and with any lag two runs are equal, awaited or not."""
    pytest.importorskip("torch")

    def run_synchronous(policy):
        found = []
        for step in range(4):
            groups = rollout_sync(policy.sampler().result(), TASKS.batch(step, 2, seed=5), step=step, **OPTIONS)
            found += train(policy, groups)
        return found

    def run_ahead(policy, max_lag):
        with ahead(policy, steps=4, max_lag=max_lag) as batches:
            return [group for groups in batches for group in train(policy, groups)]

    def run_awaited(policy, max_lag):
        async def run():
            async with ahead(policy, steps=4, max_lag=max_lag) as batches:
                return [group async for groups in batches for group in train(policy, groups)]

        return asyncio.run(run())

    def play(function, *args):
        with rlkit.connect("toy", seed=0) as policy:
            return describe(function(policy, *args))

    synchronous, late = play(run_synchronous), play(run_ahead, 1)
    assert len(synchronous) == len(late) == 4 * 2 * 2
    assert play(run_ahead, 0) == synchronous
    assert play(run_awaited, 1) == late
    assert late[:4] == synchronous[:4]
    assert late != synchronous


def test_sampling_continues_while_training(policy):
    """The next batch's episodes are played while the loop does something else."""
    reset_counts()
    go = threading.Event()

    class Waits(Counted):
        def step(self, action):
            go.wait(30)
            return super().step(action)

    made = []

    def tasks(step):
        made.append(step)
        return [Waits if step else Counted] * 2

    with ahead(policy, tasks, size=None, steps=2, max_lag=1) as batches:
        next(batches)
        assert made == [0, 1]
        while Counted.made < 8:
            pass  # without asking for the second batch, its episodes begin
        go.set()
        assert len(next(batches)) == 2
        with pytest.raises(StopIteration):
            next(batches)
    assert made == [0, 1]


def test_closing_early_closes_environments(policy):
    reset_counts()
    before = threading.active_count()
    with ahead(policy, size=4, max_lag=2) as batches:
        next(batches)
    assert Counted.made > 0
    assert all_closed()
    assert not any(thread.name == "rlkit-ahead" for thread in threading.enumerate())
    assert threading.active_count() <= before + 40
    with pytest.raises(StopIteration):
        next(batches)


def test_a_forgotten_one_ends_its_thread(policy):
    batches = ahead(policy)
    next(batches)
    thread, gone = batches._thread, weakref.ref(batches)
    del batches
    gc.collect()
    thread.join(30)
    assert gone() is None
    assert not thread.is_alive()


def test_an_error_is_raised_where_its_batch_is_asked_for(policy):
    broken = raising(OSError("gone"), "reset")
    with ahead(policy, lambda step: [broken if step == 2 else Counted], size=None, max_lag=1) as batches:
        next(batches), next(batches)
        with pytest.raises(BackendError, match="no group is left"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_a_snapshot_every_so_many_steps(policy):
    """Asked at steps 0 to 5, a fresh one at 0, 2 and 4; used a step later."""
    with ahead(policy, size=1, steps=6, max_lag=1, interval=2) as batches:
        found = [(train(policy, groups)[0].version, groups.metrics["sampler/lag"]) for groups in batches]
    assert found == [(0, 0), (0, 1), (0, 2), (2, 1), (2, 2), (4, 1)]


def test_a_play_of_ones_own(policy):
    """It gets the sampler, the step's tasks and the step; what it returns is the batch."""
    seen = []

    async def play(sampler, tasks, step):
        seen.append((sampler.version, len(tasks), step))
        groups = await rollout(sampler, tasks, step=step, **OPTIONS)
        return Rollouts([group for group in groups if group.index % 2 == 0], {"mine": 1.0})

    with async_rollouts(policy, TASKS, size=6, steps=2, max_lag=0, play=play) as batches:
        assert [(len(groups), groups.metrics) for groups in batches] == [(3, {"mine": 1.0, "sampler/lag": 0.0})] * 2
    assert seen == [(0, 6, 0), (0, 6, 1)]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_it_is_resumed_exactly(cut, tmp_path):
    """What is under way at a checkpoint is saved with it: a resumed run has the very batches of the whole one."""
    pytest.importorskip("torch")

    def play(folder, until):
        found = []
        with rlkit.Run(folder, seed=0, trackers=()) as run:
            policy = run.connect("toy")
            with ahead(policy, max_lag=2, steps=5 - run.step, start=run.step) as made:
                batches = run.keep("batches", made)
                for step in run.steps(until):
                    groups = next(batches)
                    found += train(policy, groups)
                    run.checkpoint(policy)
                    assert groups.metrics["sampler/lag"] == min(step, 2)
        return found

    whole = play(tmp_path / "whole", 5)
    parts = play(tmp_path / "parts", cut) + play(tmp_path / "parts", 5)
    assert [group.step for group in parts] == [group.step for group in whole]
    assert describe(parts) == describe(whole)


@for_each("other", [{"size": 3}, {"tasks": TASKS[:2]}])
def test_another_order_of_tasks_is_refused(policy, other):
    """A run that is resumed with another size, or another number of tasks, would repeat some tasks and miss others."""
    with ahead(policy, steps=2) as before, ahead(policy, steps=2) as same, ahead(policy, **other) as changed:
        next(before)
        state = before.state()
        same.restore(state)
        with pytest.raises(ConfigError, match="the order of the run's beginning"):
            changed.restore(state)
        del state["order"]
        with pytest.raises(ConfigError, match="the order of the run's beginning"):
            same.restore(state)


def test_starts_later(policy):
    """A program that is started again after its last step has nothing to do, and ends."""
    for steps, expected in ((2, [7, 7, 8, 8]), (0, [])):
        with ahead(policy, steps=steps, start=7) as batches:
            assert [group.step for groups in batches for group in groups] == expected


BAD = {
    "size": [None, 0], "max_lag": [-1], "steps": [-1], "start": [-1], "interval": [0], "play": [3], "policy": [None],
    "tasks": [Counted, [Counted], 3], "in_flight": ["tokens", 1], "recompute": [1], "nothing": [-1],
}  # fmt: skip


@for_each(
    ("arguments", "message"),
    [
        *(({name: value}, name) for name, values in BAD.items() for value in values),
        ({"tasks": lambda step: [Counted]}, "size"),
        ({"recompute": True}, "recompute: is True; expected False without in_flight"),
        ({"in_flight": True, "recompute": 2}, "recompute"),
        ({"inflight": True}, "^async_rollouts: no option 'inflight'; did you mean 'in_flight'"),
    ],
)
def test_bad_arguments(policy, arguments, message):
    with pytest.raises(ConfigError, match=message):
        async_rollouts(**{"policy": policy, "tasks": TASKS, "size": 1} | arguments)


def test_a_sampler_is_no_policy(policy):
    with pytest.raises(ConfigError, match="policy"):
        async_rollouts(policy.sampler().result(), TASKS, size=1)
    with pytest.raises(ConfigError, match="no option 'top_p'"):
        rollout_sync(None, TASKS, top_p=0.9)


def made(version, number=0):
    return Group([Trajectory([Turn(Sample([5], [6], [-1.0], version=version))])], number=number)


def test_replay_keeps_to_its_age_and_capacity():
    replay = Replay(max_age=3, capacity=4)
    replay.add(made(v, v) for v in range(6))
    assert [group.number for group in replay] == [2, 3, 4, 5]
    assert [group.number for group in replay.sample(10, current=6)] == [3, 4, 5]
    assert replay.expire(9) == 3
    assert replay.sample(2, current=9) == []
    replay.add([made(12)])
    with pytest.raises(DataError, match=r"groups\[0\]: has the version 12; expected at most current=11"):
        replay.sample(1, current=11)
    with pytest.raises(DataError, match=r"groups\[0\]"):
        replay.add([3])
    for arguments in ({"max_age": -1}, {"max_age": 1, "capacity": 0}, {"max_age": 1, "seed": -1}):
        with pytest.raises(ConfigError):
            Replay(**arguments)


def test_replay_draws_uniformly_and_without_repeats():
    replay = Replay(max_age=0, seed=1)
    replay.add(made(0, i) for i in range(8))
    counts = np.zeros(8)
    for _ in range(2000):
        drawn = [group.number for group in replay.sample(3, current=0)]
        assert len(set(drawn)) == 3
        counts[drawn] += 1
    assert np.allclose(counts, 750, atol=5 * np.sqrt(2000 * 3 / 8 * 5 / 8))  # five standard deviations


def test_replay_is_resumed_exactly(tmp_path):
    """From what was stored, and the number of draws."""
    replay = Replay(max_age=9, seed=3)
    replay.add(made(0, i) for i in range(20))
    replay.sample(4, current=1), replay.sample(4, current=1)
    append(tmp_path / "replay.jsonl", replay)
    again = Replay(max_age=9, seed=3, draws=replay.draws)
    again.add(read(tmp_path / "replay.jsonl"))
    for _ in range(5):
        assert describe(replay.sample(4, current=2)) == describe(again.sample(4, current=2))


def test_replayed_data_with_corrections(policy):
    """Old trajectories, weighted by truncated ratios of the trainer's logprobs to the recorded ones."""
    groups = rollout_sync(policy.sampler().result(), TASKS.batch(0, 3), **OPTIONS)
    replay = Replay(max_age=5)
    replay.add(groups)
    for _ in range(3):
        train(policy, groups)
    data = [datum for group in replay.sample(3, current=3) for t in group.trajectories for datum in datums(t, 1.0)]
    trainer = policy.forward(data).result().selected
    sampled = [datum.select(datum.inputs["sampling_logprobs"]) for datum in data]
    weights = token_tis(trainer_logprobs=trainer, sampling_logprobs=sampled)
    assert any(np.abs(w - 1).max() > 1e-3 for w in weights if w.size)
    weighted = [datum.with_inputs(weights=w) for datum, w in zip(data, weights, strict=True)]
    found = policy.forward(weighted, "reinforce").result().metrics["loss:sum"]
    expected = -sum((w * lp).sum() for w, lp in zip(weights, trainer, strict=True))
    assert found == pytest.approx(expected, rel=1e-5)
