"""Logprobs of many texts: each as if it were alone, what they begin with computed once, given up between two parts."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest

import rlkit
from tests.backends.local import white_box

pytest.importorskip("peft")
import torch

from rlkit.backends.local.sampling import _batching, _scoring
from rlkit.backends.local.sampling._scoring import parts
from rlkit.backends.local.training.micro_batches import pack

KINDS = ["llama", "qwen3", "gpt2", "mistral", "gemma2", "bloom", "mixtral", "mamba"]


def connect(model, **options):
    policy = rlkit.connect(
        "local", model=model, lora=rlkit.Lora(rank=4, train_unembed=True), seed=0, device="cpu", **options
    )
    rng = np.random.default_rng(1)
    for parameter in white_box.parameters(policy).values():
        parameter.data.add_(torch.from_numpy(0.1 * rng.normal(size=parameter.shape)).to(parameter))
    return policy


def texts():
    """Groups with common beginnings, turns of an episode, equal texts, one inside another, one token alone."""
    rng = np.random.default_rng(0)
    prompt, other = rng.integers(3, 200, 40), rng.integers(3, 200, 9)
    group = [np.concatenate([prompt, rng.integers(3, 200, n)]) for n in (1, 5, 5, 30, 17)]
    turns = [np.concatenate([group[3], rng.integers(3, 200, n)]) for n in (7, 20)]
    return [*group, *turns, turns[1], prompt[:20], other, np.append(other, 5), np.array([7]), np.array([7, 8])]


def ask(sampler, kind, text, temperature):
    """One of the five calls; its numbers."""
    if kind == 0:
        return sampler.logprobs(text, temperature=temperature)
    if kind == 1:
        return sampler.top_logprobs(text, 3)
    if kind == 2:
        return sampler.masked_logprobs(text, np.arange(text.size) % 5 == 3, temperature=temperature)
    if kind == 3:
        return sampler.prompt_logprobs(text, 2)
    return sampler.target_logprobs(text, np.stack([text, np.full(text.size, -1), np.roll(text, 3)], axis=1))


def numbers(result):
    return np.concatenate(
        [np.asarray(x, np.float64).ravel() for x in (result if isinstance(result, tuple) else [result])]
    )


@pytest.mark.filterwarnings("ignore:the mixtral model")
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_together_are_as_alone(tiny, kind, merge, monkeypatch):
    """All calls and temperatures mixed, in large trees and small ones; to the bit where rows are."""
    with connect(tiny(kind), merge=merge) as policy:
        sampler = policy.sampler().result()
        asked = [(k % 5, text, 0.7 if k % 3 else 1.0) for k, text in enumerate(texts() * 2)]
        alone = [numbers(ask(sampler, *one).result()) for one in asked]
        exact = policy.capabilities()["batch_invariant"]
        assert exact is (kind in ("llama", "qwen3", "gpt2", "mistral", "gemma2") and white_box.is_invariant(policy))
        for tokens in (4096, 30):
            monkeypatch.setattr("rlkit.backends.local.sampling._batching.TREE_TOKENS", tokens)
            monkeypatch.setattr(_scoring, "ROWS", 7)
            futures = [ask(sampler, *one) for one in asked]
            for future, expected in zip(futures, alone, strict=True):
                together = numbers(future.result())
                assert np.abs(together - expected).max() < 1e-4  # of logprobs of -13; 2e-5 were seen
                if exact:
                    assert np.array_equal(together, expected)
        data = [rlkit.Datum(text, np.arange(text.size) > 0) for text in texts() if text.size > 1]
        trained = policy.forward(data).result().logprobs
        scored = [sampler.logprobs(datum.tokens) for datum in data]
        for future, expected in zip(scored, trained, strict=True):
            assert np.abs(future.result() - expected).max() < 2e-4  # 4e-5 were seen


@pytest.mark.parametrize("limit", [1, 3, 16, 1000])
def test_every_place_is_computed_once(limit):
    """In an order in which what a place sees was computed before, in parts that are no larger than they may be."""
    data = [rlkit.Datum(text, np.arange(text.size) > 0) for text in texts() if text.size > 1]
    for tree in pack(data, 4096):
        done = np.zeros(tree.tokens.size, int)
        for part in parts(tree.runs, limit, lambda rows, length: (rows, length)):
            assert len(part) == 1 or len(part) * max(branch.new.size for branch in part) <= limit
            for branch in part:
                assert done[branch.places[: branch.start]].all()
                assert tree.positions[branch.places].tolist() == list(range(branch.places.size))
            for branch in part:
                done[branch.new] += 1
        assert (done == 1).all()


def test_what_texts_begin_with_is_computed_once(tiny):
    """Eight completions of one prompt, asked for together: the prompt's tokens are in one part alone."""
    with connect(tiny("llama")) as policy:
        sampler = policy.sampler().result()
        sampler.logprobs([5, 6]).result()
        decoder, seen = white_box.decoder(policy), []
        logits = decoder._logits
        begun, asked = threading.Event(), threading.Event()

        def count(tokens, *args, **kw):
            begun.set()
            assert asked.wait(60)
            seen.append(tokens.size)
            return logits(tokens, *args, **kw)

        decoder._logits = count
        rng = np.random.default_rng(0)
        prompt = rng.integers(3, 200, 60)
        first = sampler.logprobs([5, 6])  # the others wait behind it until all are asked for
        assert begun.wait(60)
        futures = [sampler.logprobs(np.concatenate([prompt, rng.integers(3, 200, 21)])) for _ in range(8)]
        asked.set()
        assert first.result().size == 2
        assert all(future.result().size == 81 for future in futures)
        assert sum(seen[1:]) == 60 + 8 * 20  # the last token of a text predicts nothing


def test_a_long_text_is_given_up_between_two_parts(tmp_path):
    """Forgotten or not, others are sampled and scored while it is computed; forgotten, it ends."""
    from tests.models.build import build

    with connect(str(build("llama", tmp_path, max_length=10**5))) as policy:
        sampler = policy.sampler().result()
        params = rlkit.SamplingParams(max_tokens=3, stop=())
        sampler.logprobs([5, 6]).result()
        decoder, seen = white_box.decoder(policy), []
        logits = decoder._logits
        decoder._logits = lambda tokens, *args, **kw: seen.append(tokens.size) or logits(tokens, *args, **kw)
        long = sampler.logprobs(np.full(60_000, 7))
        assert sampler.sample([5], params).result()
        assert policy.base_sampler().result().logprobs([5, 6, 7]).result().size == 3
        assert not long.done()
        del long
        gc.collect()
        deadline = time.monotonic() + 60
        while policy._scheduler.delay() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sum(seen) < 60_000
        assert sampler.logprobs([5, 6]).result().size == 2


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mamba"])
def test_logits_are_computed_where_they_are_asked_for(tiny, kind, monkeypatch):
    """Masked logprobs are those of the whole text, 0 elsewhere; a reference is asked for its samples' tokens alone."""
    rows = []
    read = _scoring.ScoreBatch.read

    def counted(batch, logits, places):
        rows.append(len(logits))
        read(batch, logits, places)

    monkeypatch.setattr(_scoring.ScoreBatch, "read", counted)
    rng = np.random.default_rng(2)
    with connect(tiny(kind)) as policy:
        sampler = policy.sampler().result()
        text = rng.integers(3, 200, 60)
        mask = np.isin(np.arange(60), [0, 41, 42, 50])  # the first token has no logprob
        whole = sampler.logprobs(text).result()
        assert sum(rows) == 59
        rows.clear()
        masked = sampler.masked_logprobs(text, mask).result()
        assert sum(rows) == 3
        assert np.flatnonzero(masked).tolist() == [41, 42, 50]
        assert np.abs(masked - whole)[mask].max() < 2e-5
        assert not sampler.masked_logprobs(text, np.zeros(60, bool)).result().any()
        rows.clear()
        datums = [rlkit.Datum(np.append(text, rng.integers(3, 200, 5)), np.arange(65) >= 60) for _ in range(2)]
        for scored, datum in zip(rlkit.reference_logprobs(sampler, datums).result(), datums, strict=True):
            assert np.abs(scored - sampler.logprobs(datum.tokens).result()[60:]).max() < 2e-5
        assert min(rows) <= 10
        for bad in (mask[:-1], np.full(60, 2), np.full(60, 0.5)):
            with pytest.raises(rlkit.DataError, match="masked_logprobs"):
                sampler.masked_logprobs(text, bad)


def test_a_prompt_of_several_parts(tiny, monkeypatch):
    """One of more tokens than are computed at once: its completions have the trainer's logprobs."""
    monkeypatch.setattr(_batching, "CPU_TOKENS", 16)
    with connect(tiny("llama")) as policy, policy.sampler().result() as sampler:
        prompt = np.random.default_rng(2).integers(3, 200, 70)
        samples = sampler.sample(prompt, rlkit.SamplingParams(max_tokens=8, stop=()), n=2, seed=0).result()
        trained = policy.forward([sample.datum(0.0) for sample in samples]).result().selected
    for sample, logprobs in zip(samples, trained, strict=True):
        np.testing.assert_allclose(sample.logprobs, logprobs, atol=1e-4)
