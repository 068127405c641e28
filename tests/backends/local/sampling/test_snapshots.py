"""Several snapshots at once: each keeps its weights and prefixes, all advance, none starves."""

from __future__ import annotations

import concurrent.futures
import gc
import threading

import numpy as np
import pytest

import rlkit
from rlkit.backends import local
from tests.backends.local import white_box

pytest.importorskip("peft")

KINDS = ["llama", "gpt2", "mistral"]
PROMPT = np.arange(3, 60)
PARAMS = rlkit.SamplingParams(max_tokens=6, stop=())


def trained(model, steps, **options):
    """A policy, and samplers of its base and of its first ``steps`` versions."""
    policy = rlkit.connect(
        "local", model=model, lora=rlkit.Lora(rank=4, train_unembed=True), seed=0, device="cpu", **options
    )
    samplers = [policy.base_sampler().result()]
    for _ in range(steps):
        policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8])], "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05))
        samplers.append(policy.sampler().result())
    return policy, samplers


def bits(samples):
    return [(s.version, s.tokens.tolist(), s.logprobs.tobytes()) for s in samples]


def count_loads(monkeypatch, gate=None):
    """How often weights are loaded for a snapshot from now on; a load waits while the gate, an event, is not set."""
    from rlkit.backends.local.model import forward

    loads = []
    inner = forward.SamplingForward.load

    def load(self, *args, **options):
        loads.append(self)
        assert gate is None or gate.wait(60)
        inner(self, *args, **options)

    monkeypatch.setattr(forward.SamplingForward, "load", load)
    return loads


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_taking_turns_loads_nothing(tiny, kind, merge, monkeypatch):
    """Policy, reference and teacher, sampled and scored in turn: weights are loaded once for each, prefixes stay."""
    policy, samplers = trained(tiny(kind), 2, merge=merge, merged_copies=2)
    loads = count_loads(monkeypatch)
    with policy:
        first = [(bits(s.sample(PROMPT, PARAMS, seed=1).result()), s.logprobs(PROMPT).result()) for s in samplers]
        assert len(loads) == len(samplers)
        for sampler, (sampled, scored) in zip(samplers, first, strict=True):
            assert bits(sampler.sample(PROMPT, PARAMS, seed=1).result()) == sampled
            assert np.array_equal(sampler.logprobs(PROMPT).result(), scored)
            if kind != "mistral":
                assert white_box.decoder(policy).prefix_cache.entries
        assert len(loads) == len(samplers)
        assert len({sampled[0][2] for sampled, _ in first}) == len(samplers)


def test_all_advance(tiny):
    """A short request of one snapshot is answered while a long one of another is being decoded."""
    policy, (base, sampler) = trained(tiny("llama"), 1)
    with policy:
        long = sampler.sample([5], rlkit.SamplingParams(max_tokens=120, stop=()), n=3)
        assert base.sample([5, 6], rlkit.SamplingParams(max_tokens=2, stop=())).result()
        assert base.logprobs([5, 6]).result().size == 2
        assert not long.done()
        assert len(long.result()) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_more_snapshots_than_decoders(tiny, kind, monkeypatch):
    """Each is answered by its own weights, also while the others always have more to do."""
    monkeypatch.setattr(local, "_SNAPSHOTS", 2)
    policy, samplers = trained(tiny(kind), 3, merged_copies=2)
    over = threading.Event()

    def more(sampler, params):
        """Have two requests wait or be sampled at any time, until it is over."""
        ahead = [sampler.sample([5], params, n=2)]
        while not over.is_set():
            ahead.append(sampler.sample([5], params, n=2))
            assert ahead.pop(0).result()
        assert ahead.pop().result()

    with policy:
        alone = [bits(sampler.sample(PROMPT, PARAMS, seed=1).result()) for sampler in samplers]
        scores = [sampler.logprobs(PROMPT).result() for sampler in samplers]
        longer = rlkit.SamplingParams(max_tokens=60, stop=())
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            steady = [pool.submit(more, sampler, longer) for sampler in samplers[:2]]
            try:
                futures = [(s.sample(PROMPT, PARAMS, seed=1), s.logprobs(PROMPT)) for s in samplers * 2]
                for k, (sampled, scored) in enumerate(futures):
                    assert bits(sampled.result()) == alone[k % len(samplers)]
                    assert np.array_equal(scored.result(), scores[k % len(samplers)])
            finally:
                over.set()
        assert [each.result() for each in steady] == [None, None]
        assert len(white_box.decoders(policy)) == 2


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_one_merged_copy(tiny, kind, monkeypatch, caplog):
    """It is made anew for the sampler whose turn it is, which samples as with a copy of its own; a warning says so."""
    many, samplers = trained(tiny(kind), 3, merged_copies=3)
    with many:
        expected = [(bits(s.sample(PROMPT, PARAMS, seed=1).result()), s.logprobs(PROMPT).result()) for s in samplers]
    policy, samplers = trained(tiny(kind), 3)
    gate = threading.Event()
    gate.set()
    loads = count_loads(monkeypatch, gate)
    with policy:
        for _ in range(3):
            for sampler, (sampled, scored) in zip(samplers, expected, strict=True):
                assert bits(sampler.sample(PROMPT, PARAMS, seed=1).result()) == sampled
                assert np.array_equal(sampler.logprobs(PROMPT).result(), scored)
        assert len(loads) == 1 + 3 * 3  # the base's weights stay
        lanes = policy._scheduler._lanes
        assert [lane.merged for lane in lanes].count(True) == 1
        gate.clear()
        together = [s.sample(PROMPT, PARAMS, seed=1) for s in samplers[1:] * 4]
        gate.set()
        assert [bits(future.result()) for future in together] == [x for x, _ in expected[1:]] * 4
        assert len(loads) <= 10 + 3  # all that wait for a copy use it before the next is made
        assert not caplog.records
        for _ in range(20):
            for sampler in samplers[1:]:
                sampler.logprobs([5, 6]).result()
        (warning,) = caplog.messages
        assert warning.startswith(
            "weights were merged 20 times for one sampler, because 3 samplers take turns with merged_copies=1;"
        )


def test_the_number_of_copies_is_recorded(tiny, tmp_path):
    """A run that goes on has it, unless it is given another."""
    with rlkit.connect("local", model=tiny("llama"), merged_copies=3, folder=tmp_path, device="cpu") as policy:
        path = policy.save("here").result()
    for given, found in ((None, 3), (2, 2)):
        with rlkit.connect("local", resume_from=path, merged_copies=given, device="cpu") as policy:
            assert policy._scheduler._max_copies == found
    with pytest.raises(rlkit.ConfigError, match="merged_copies"):
        rlkit.connect("local", model=tiny("llama"), merged_copies=0)


def test_weights_of_closed_samplers_go(tiny):
    """Merged copies of snapshots that nobody holds make room for the next one, all of them."""
    policy, samplers = trained(tiny("llama"), 3, merged_copies=3)
    with policy:
        for sampler in samplers:
            sampler.sample([5], PARAMS).result()
        assert len(white_box.decoders(policy)) == 4
        del sampler
        while samplers:
            samplers.pop().close()
        gc.collect()
        assert policy.sampler().result().sample([5], PARAMS).result()
        assert len(white_box.decoders(policy)) <= 2  # the base's snapshot is the backend's own


def test_prefixes_share_one_bound(tiny):
    """``prefix_mb`` is for all snapshots together; the one that is sampled from least recently gives way."""
    policy, samplers = trained(tiny("llama"), 2, prefix_mb=1)
    rng = np.random.default_rng(0)
    with policy:
        for sampler in samplers * 2:
            futures = [sampler.sample(prompt, PARAMS) for prompt in rng.integers(3, 200, (60, 100))]
            assert all(future.result() for future in futures)
            policy.discard().result()  # a row's last blocks are kept after its request was answered
            caches = [decoder.prefix_cache for decoder in white_box.decoders(policy)]
            sizes = [sum(block.nbytes for block in cache.entries.values()) for cache in caches]
            assert sizes == [cache.size for cache in caches]
            assert sum(sizes) <= 10**6
        assert sizes[-1] > 10**6 / 2
