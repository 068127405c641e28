"""Batches whose policy is updated while they are played."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

import rlkit
from rlkit import BackendError, ConfigError, SamplingParams, UnsupportedError
from rlkit.backends import toy
from rlkit.corrections import token_tis
from rlkit.envs import Tasks
from rlkit.rollouts import Plan, async_rollouts
from rlkit.trajectory import datums
from tests.backends.local import white_box
from tests.rollouts.parts import TASKS, Counted, train

pytest.importorskip("torch")

PLAN = Plan(n=2, params=SamplingParams(max_tokens=40, stop=()), seed=5)


def in_flight(policy, tasks=TASKS, **options):
    """Return batches of two tasks in flight, or with other options."""
    return async_rollouts(policy, tasks, **{"size": 2, "plan": PLAN, "in_flight": True} | options)


@pytest.fixture
def policy(monkeypatch):
    """Its tokens take longer than a step of training, however busy the machine is."""
    draw = toy.draw
    monkeypatch.setattr(toy, "draw", lambda *args: time.sleep(0.002) or draw(*args))
    with rlkit.connect("toy", seed=0) as policy:
        policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8])], "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()  # imports
        yield policy


def samples_of(groups):
    return [turn.sample for group in groups for t in group.trajectories for turn in t.turns]


@pytest.mark.parametrize(("max_lag", "interval"), [(0, 1), (1, 1), (3, 1), (2, 2)])
def test_no_token_is_too_old(policy, max_lag, interval):
    """Batches continue under newer policies, in the order and with the seeds of snapshots; tokens keep the bound."""
    first = policy.version
    with in_flight(policy, steps=8, max_lag=max_lag, interval=interval) as batches:
        for step, groups in enumerate(batches):
            now = policy.sampler().result().version
            assert now == first + step
            assert [group.step for group in groups] == [step] * 2
            lags = [now - sample.token_versions for sample in samples_of(groups)]
            oldest = max(x.max() for x in lags)
            assert min(x.min() for x in lags) >= 0
            assert oldest <= max_lag + interval - 1
            assert groups.metrics["sampler/lag/max"] == oldest
            assert groups.metrics["sampler/lag"] == pytest.approx(np.concatenate(lags).mean())
            assert groups.metrics["sampler/mixed"] == pytest.approx(np.mean([np.ptp(x) > 0 for x in lags]))
            train(policy, groups)


def test_long_episodes_continue_under_newer_weights(policy):
    """What is slow is waited for, and drawn to its end by the newest policy: nothing is dropped, nothing too old."""

    class Slow(Counted):
        def step(self, action):
            time.sleep(0.05)
            return super().step(action)

    with in_flight(policy, Tasks(lambda i: Slow(), 6, name="slow"), steps=5, max_lag=2) as batches:
        for step, groups in enumerate(batches):
            assert len(samples_of(groups)) == 2 * 2 * 3
            versions = np.concatenate([sample.token_versions for sample in samples_of(groups)])
            if step > 2:
                assert {*versions} - {versions.min()}
            assert versions.min() >= 1 + step - 2
            train(policy, groups)


def test_awaited(policy):
    async def run():
        async with in_flight(policy, size=1, steps=4, max_lag=1) as batches:
            return [train(policy, groups).metrics["sampler/lag/max"] async for groups in batches]

    found = asyncio.run(run())
    assert len(found) == 4
    assert max(found) <= 1


@pytest.mark.parametrize("recompute", [False, True])
def test_a_local_policy(tiny, tmp_path, recompute):
    """Of a LoRA that is trained meanwhile: every token is of its version, and ratios are to the one that drew it."""
    pytest.importorskip("peft")
    plan = PLAN.with_options(params=SamplingParams(max_tokens=24, stop=()), max_turns=1)
    options = {"model": tiny("llama"), "lora": rlkit.Lora(rank=4), "seed": 0, "device": "cpu", "folder": tmp_path}
    with rlkit.connect("local", **options) as policy:
        with policy.live_sampler().result() as first:
            first.sample([5], SamplingParams(max_tokens=1)).result()
        decoder = white_box.decoder(policy)
        decode = decoder.step
        decoder.step = lambda *args, **given: time.sleep(0.01) or decode(*args, **given)  # longer than training takes
        taken, mixed, seen = [], 0.0, []
        with in_flight(policy, size=3, steps=6, max_lag=2, recompute=recompute, plan=plan) as batches:
            for groups in batches:
                mixed += groups.metrics["sampler/mixed"]
                taken.append(policy.sampler())
                data = [d for g in groups for t in g.trajectories for d in datums(t, 1.0)]
                seen.append((groups, data, policy.forward(data)))
                train(policy, groups)
        frozen = {snapshot.version: snapshot for snapshot in (future.result() for future in taken)}
        for groups, data, now in seen:
            trainer = now.result().selected
            drawn = [d.select(d.inputs["sampling_logprobs"]) for d in data]
            weights = token_tis(trainer_logprobs=trainer, sampling_logprobs=drawn, clip_high_threshold=1e30)
            for sample, logprobs, w in zip(samples_of(groups), trainer, weights, strict=True):
                text = np.concatenate([sample.prompt, sample.tokens])
                for version in {*sample.token_versions.tolist()}:
                    own = sample.token_versions == version
                    theirs = frozen[version].logprobs(text).result()[sample.prompt.size :]
                    if recompute or version == sample.version:  # others read keys that older weights computed
                        np.testing.assert_allclose(w[own], np.exp(logprobs - theirs)[own], rtol=2e-3)
        assert {*frozen} == {*range(6)}
        assert mixed > 0


def test_a_service_whose_requests_end_as_they_began(tmp_path):
    """True is refused there; with "requests" later turns take the newer policy, and every sample is of one."""
    pytest.importorskip("tinker")
    from rlkit.testing import FakeTinker

    with FakeTinker(seed=0) as fake:
        where = {"base_url": fake.base_url, "api_key": fake.api_key, "deadline": 30.0, "folder": tmp_path}
        policy = rlkit.connect("tinker", model="toy", seed=0, **where)
        with in_flight(policy, size=1, steps=2) as batches:
            with pytest.raises(UnsupportedError, match="in_flight='requests'"):
                next(batches)
            with pytest.raises(StopIteration):
                next(batches)
        drawn = set()
        with in_flight(policy, steps=5, max_lag=1, in_flight="requests") as batches:
            for step, groups in enumerate(batches):
                assert all(sample.versions is None for sample in samples_of(groups))
                versions = {sample.version for sample in samples_of(groups)}
                assert max(0, step - 1) <= min(versions) <= max(versions) <= step
                assert groups.metrics["sampler/mixed"] == 0.0
                drawn |= versions
                train(policy, groups)
        assert len(drawn) > 1


def test_an_update_that_fails(policy, monkeypatch):
    """It is raised where a batch is asked for, and no more come."""
    live_sampler = type(policy).live_sampler

    def failing(self, **options):
        def update(*_):
            raise BackendError("no weights")

        live = live_sampler(self, **options)
        live.result().update = update
        return live

    monkeypatch.setattr(type(policy), "live_sampler", failing)
    with in_flight(policy, size=1) as batches:
        next(batches)
        with pytest.raises(BackendError, match="no weights"):
            next(batches)
        with pytest.raises(StopIteration):
            next(batches)


def test_a_policy_without_a_live_sampler(policy):
    class Frozen:
        def __getattr__(self, name):
            if name == "live_sampler":
                raise AttributeError(name)
            return getattr(policy, name)

        __enter__ = __exit__ = None

    with pytest.raises((UnsupportedError, ConfigError)):
        in_flight(Frozen())


def test_left_early(policy):
    """In the middle of what runs: its environments are closed, and the policy continues."""
    with in_flight(policy, size=4, max_lag=3) as batches:
        train(policy, next(batches))
    assert policy.sampler().result().sample([5], SamplingParams(max_tokens=2)).result()
