"""Several snapshots at once: each keeps its weights and prefixes, all advance, none starves."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import rlkit
from tests.backends.local import white_box

pytest.importorskip("peft")
from rlkit.backends import local

KINDS = ["llama", "gpt2", "mistral"]
PROMPT = np.arange(3, 60)
PARAMS = rlkit.SamplingParams(max_tokens=6, stop=())


def trained(model, steps, **options):
    """A policy, and samplers of its base and of its first ``steps`` versions."""
    policy = rlkit.connect("local", model=model, lora=rlkit.Lora(rank=4), seed=0, device="cpu", **options)
    samplers = [policy.base_sampler().result()]
    for _ in range(steps):
        policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8])], "cross_entropy")
        policy.optim_step(rlkit.Adam(learning_rate=0.05))
        samplers.append(policy.sampler().result())
    return policy, samplers


def bits(samples):
    return [(s.version, s.tokens.tolist(), s.logprobs.tobytes()) for s in samples]


def count_loads(monkeypatch):
    """How often weights are loaded for a snapshot from now on."""
    from rlkit.backends.local.model import forward

    loads = []
    for kind in (forward.LlamaForward, forward.LibraryForward):

        def load(self, *args, inner=kind.load, **options):
            loads.append(self)
            inner(self, *args, **options)

        monkeypatch.setattr(kind, "load", load)
    return loads


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_taking_turns_loads_nothing(tiny, kind, merge, monkeypatch):
    """Policy, reference and teacher, sampled and scored in turn: weights are loaded once for each, prefixes stay."""
    policy, samplers = trained(tiny(kind), 2, merge=merge)
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
    policy, samplers = trained(tiny(kind), 3)
    with policy:
        alone = [bits(sampler.sample(PROMPT, PARAMS, seed=1).result()) for sampler in samplers]
        scores = [sampler.logprobs(PROMPT).result() for sampler in samplers]
        longer = rlkit.SamplingParams(max_tokens=60, stop=())
        steady = [sampler.sample([5], longer, n=2) for sampler in samplers[:2] for _ in range(3)]
        futures = [(s.sample(PROMPT, PARAMS, seed=1), s.logprobs(PROMPT)) for s in samplers * 2]
        steady += [sampler.sample([5], longer, n=2) for sampler in samplers[:2] for _ in range(3)]
        for k, (sampled, scored) in enumerate(futures):
            assert bits(sampled.result()) == alone[k % len(samplers)]
            assert np.array_equal(scored.result(), scores[k % len(samplers)])
        assert not all(future.done() for future in steady[6:])  # which came later
        assert all(future.result() for future in steady)
        assert len(white_box.decoders(policy)) == 2


def test_weights_of_closed_samplers_go(tiny):
    """Merged copies of snapshots that nobody holds make room for the next one, all of them."""
    policy, samplers = trained(tiny("llama"), 3)
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
