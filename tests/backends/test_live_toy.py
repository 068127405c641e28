"""A toy policy that is updated between its requests, each of which is one call."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit
from rlkit.backends.protocol import LiveSampler, LiveSampling
from tests.backends.live import PROMPT, step

pytest.importorskip("torch")

LONG = rlkit.SamplingParams(max_tokens=30, stop=())


@pytest.fixture
def policy():
    with rlkit.connect("toy", seed=0) as policy:
        yield policy


def test_it_is_of_the_protocols(policy):
    assert isinstance(policy, LiveSampling)
    live = policy.live_sampler().result()
    assert isinstance(live, LiveSampler)
    assert not isinstance(policy.sampler().result(), LiveSampler)
    assert live.switches == "token"


def test_without_an_update_it_is_a_snapshot(policy):
    """To the bit; and an update where nothing was trained changes nothing."""
    live, frozen = policy.live_sampler().result(), policy.sampler().result()
    assert live.update().result() == 0
    for a, b in zip(*(s.sample(PROMPT, LONG, n=3, seed=1).result() for s in (live, frozen)), strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.logprobs.tobytes() == b.logprobs.tobytes()
        assert a.versions is None


def test_with_no_request_running(policy):
    """The next request is the newer policy's; snapshots beside it stay what they are."""
    live, frozen = policy.live_sampler().result(), policy.sampler().result()
    before = frozen.logprobs(PROMPT).result()
    step(policy)
    assert live.update().result() == 1 == live.version
    (sample,) = live.sample(PROMPT, LONG, seed=0).result()
    assert (sample.version, sample.versions) == (1, None)
    newer = policy.sampler().result()
    np.testing.assert_array_equal(live.logprobs(PROMPT).result(), newer.logprobs(PROMPT).result())
    np.testing.assert_array_equal(frozen.logprobs(PROMPT).result(), before)


def test_it_stands_in_the_order_of_calls(policy):
    """An update is the policy as of its call, whatever is submitted behind it."""
    live = policy.live_sampler().result()
    step(policy)
    first = live.update()
    step(policy)
    second = live.update()
    assert (second.result(), first.result()) == (2, 1)


def test_closed(policy):
    """A sampler that is closed takes neither requests nor updates; one of a closed policy no updates."""
    live = policy.live_sampler().result()
    live.close()
    for call in (live.update, lambda: live.sample(PROMPT, LONG), lambda: live.logprobs(PROMPT)):
        with pytest.raises(rlkit.BackendError, match="sampler is closed"):
            call()
    other = policy.live_sampler().result()
    policy.close()
    for call in (other.update, policy.live_sampler):
        with pytest.raises(rlkit.BackendError, match="the toy backend is closed"):
            call()


def test_bad_arguments(policy):
    with pytest.raises(rlkit.ConfigError, match="recompute"):
        policy.live_sampler(recompute=3)
    live = policy.live_sampler().result()
    with pytest.raises(rlkit.DataError):
        live.sample("text", LONG)
