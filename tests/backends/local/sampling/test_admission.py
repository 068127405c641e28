"""Rows are admitted as memory has room for their keys and values; on a CPU, whose memory is played by a number."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.cache.kv_cache import KVCache  # noqa: E402
from rlkit.backends.local.model import memory as device_memory  # noqa: E402
from rlkit.backends.local.sampling._batching import ContinuousBatching  # noqa: E402
from tests.backends.local import white_box  # noqa: E402

PARAMS = rlkit.SamplingParams(max_tokens=10, stop=())


@pytest.fixture
def policy(tiny):
    with rlkit.connect(
        "local", model=tiny("llama"), lora=rlkit.Lora(rank=2, train_unembed=True), seed=0, device="cpu"
    ) as made:
        yield made


@pytest.fixture
def memory(policy, monkeypatch):
    """``memory(tokens)`` leaves room for the keys and values of so many; the most rows at a step are noted."""
    seen = []
    step = ContinuousBatching.step

    def noted(self):
        seen.append(len(self.rows))
        step(self)

    def room(tokens):
        each = device_memory.kv_bytes(policy.base)
        seen.clear()

        def free(_):
            decoders = policy._scheduler.decoders
            held = sum(decoder.held for decoder in decoders)
            return int(tokens * each / device_memory.KV_SHARE) - held

        monkeypatch.setattr(device_memory, "free_bytes", free)
        return seen

    monkeypatch.setattr(ContinuousBatching, "step", noted)
    return room


def sampled(policy, *requests):
    sampler = policy.sampler().result()
    futures = [sampler.sample(prompt, PARAMS, n=n, seed=i) for i, (prompt, n) in enumerate(requests)]
    return [(s.tokens.tolist(), s.logprobs.tolist()) for future in futures for s in future.result()]


def test_what_has_no_room_waits(policy, memory):
    """Seven rows of 15 tokens where there is room for two at a time: all come, with the bits that they have at once."""
    requests = [([5, 6, 7, 8, 9], 4), ([9, 8, 7, 6, 5], 3)]
    expected = sampled(policy, *requests)
    seen = memory(2 * 15)
    assert sampled(policy, *requests) == expected
    assert max(seen) == 2


def test_a_longer_one_waits_until_rows_have_ended(policy, memory):
    """All rows count as long as the longest may become, since slots are all alike; order is kept."""
    requests = [([5, 6, 7, 8, 9], 4), (list(range(3, 53)), 1), ([7], 1)]
    expected = sampled(policy, *requests)
    seen = memory(65)
    assert sampled(policy, *requests) == expected
    assert max(seen) == 4
    assert seen[-9:] == [1] * 9


def test_one_row_is_tried_in_any_case(policy, memory):
    """Where memory has no room for one, it is asked for nevertheless: it may end before, or the error tells why."""
    expected = sampled(policy, ([5, 6, 7], 2))
    seen = memory(3)
    assert sampled(policy, ([5, 6, 7], 2)) == expected
    assert max(seen) == 1


def test_the_librarys_caches_are_counted_too(tiny, monkeypatch):
    """State-space models and whatever else is decoded through them: by the keys and values that they would have."""
    with rlkit.connect(
        "local", model=tiny("mamba"), lora=rlkit.Lora(rank=2, train_unembed=True), seed=0, device="cpu"
    ) as policy:
        expected = sampled(policy, ([5, 6, 7], 5))
        decoder, seen = white_box.decoder(policy), []
        step = decoder.step
        decoder.step = lambda: (seen.append(len(decoder.rows)), step())
        room = int(2 * 13 * device_memory.kv_bytes(policy.base) / device_memory.KV_SHARE)
        monkeypatch.setattr(device_memory, "free_bytes", lambda _: room)
        found = sampled(policy, ([5, 6, 7], 5))
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert max(seen) == 2


def test_slots_are_as_large_as_their_rows_may_become(policy, memory):
    """They do not grow on the way; and rows that were many and short leave no memory to few long ones."""
    memory(10**6)
    sampled(policy, ([5, 6, 7], 8))
    cache = white_box.decoder(policy).kv_cache
    shapes = []
    resize = cache.resize
    cache.resize = lambda rows, length: (resize(rows, length), shapes.append((rows, length)))
    reserved = []
    move = cache._move
    cache._move = lambda: (reserved.append(1), move())
    sampled(policy, (list(range(3, 60)), 3))
    assert shapes == [(4, 128)]
    assert len(reserved) == 1


def test_resize_keeps_what_is_in_it():
    """To more and to fewer rows, to longer and to shorter ones."""
    cache = KVCache()
    cache.resize(4, 8)
    cache.at(0, torch.arange(5).repeat(4, 1), 5)
    keys, values = (torch.from_numpy(np.random.default_rng(i).normal(size=(4, 2, 5, 3))) for i in range(2))
    cache.update(keys, values, 0)
    cache.resize(2, 6)
    assert cache.store[0][0].shape == (4, 2, 8, 3)  # that is there already
    cache.resize(2, 12)
    assert cache.nbytes == 2 * 2 * 2 * 12 * 3 * 8
    for stored, expected in zip(cache.store[0], (keys, values), strict=True):
        assert torch.equal(stored[:, :, :5], expected[:2])
    cache.resize(6, 5)
    for stored, expected in zip(cache.store[0], (keys, values), strict=True):
        assert stored.shape == (6, 2, 5, 3)
        assert torch.equal(stored[:2], expected[:2])


class Holder:
    """Who holds so many bytes, and will hold so many."""

    def __init__(self, held=0, reserved=0):
        self.held, self.reserved = held, max(held, reserved)


def test_what_fits_is_counted(policy):
    """Half of the free memory and of what is held, in whole rows; any number where nobody knows."""
    each = device_memory.kv_bytes(policy.base)
    assert each == 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, 8 numbers of 4 bytes
    asking = Holder(10 * each)
    assert device_memory.rows_that_fit(policy.base, 10, asking, free=50 * each) == 3
    assert device_memory.rows_that_fit(policy.base, 10**9, asking) > 10**9


def test_all_decoders_of_a_base_share_one_account(policy):
    """What others hold is counted once, as theirs, and what their rows will take is, too; also another backend's."""
    each = device_memory.kv_bytes(policy.base)
    asking, other = Holder(10 * each), Holder(20 * each, 30 * each)
    for holder in (asking, other):
        policy.base.kv_account.add(holder)
    assert device_memory.rows_that_fit(policy.base, 10, asking, free=70 * each) == 2  # half of 100, less 30
    assert device_memory.rows_that_fit(policy.base, 10, other, free=70 * each) == 4
    assert device_memory.rows_that_fit(policy.base, 10, asking, free=0) == 0  # and never less
    del other, holder
    gc.collect()
    assert device_memory.rows_that_fit(policy.base, 10, asking, free=90 * each) == 5


def test_snapshots_that_take_turns_share_the_memory(policy, memory):
    """Policy and base have requests at once: together they never have more slots than there is room for."""
    seen = memory(6 * 16)
    step, together = ContinuousBatching.step, []

    def noted(self):
        together.append(sum(len(decoder.rows) for decoder in policy._scheduler.decoders))
        step(self)

    ContinuousBatching.step = noted  # which ``memory`` takes back
    samplers = [policy.sampler().result(), policy.base_sampler().result()]
    futures = [sampler.sample([5, 6, 7, 8, 9], PARAMS, n=6, seed=1) for sampler in samplers]
    assert all(len(future.result()) == 6 for future in futures)
    assert len(policy._scheduler.decoders) == 2
    assert {*policy._scheduler.decoders} <= {*policy.base.kv_account._holders}
    assert max(together) <= 6 + 1  # one is tried in any case
    assert seen
    idle = next(x for x in policy._scheduler.decoders if x.snapshot is samplers[1].snapshot)
    idle.kv_cache.resize(6, 16)  # as graphs keep it
    assert idle.held > 0
    assert len(samplers[0].sample([5, 6, 7, 8, 9], PARAMS, n=6, seed=1).result()) == 6
    assert idle.held == 0  # given back to whom it lacks
    assert max(seen[-9:]) == 6
