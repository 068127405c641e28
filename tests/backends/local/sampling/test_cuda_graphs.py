"""Decoding steps that are recorded: on a CPU with a recorder that computes a step anew instead of launching it."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.cache.kv_cache import (  # noqa: E402
    ATTENTION,
    KVCache,
    matmul_attention,
    sdpa_attention,
)
from rlkit.backends.local.model.forward import SamplingForward  # noqa: E402
from rlkit.backends.local.products import linear  # noqa: E402
from rlkit.backends.local.products.prepacked import PrepackedCopies  # noqa: E402
from rlkit.backends.local.sampling import _batching as graphs  # noqa: E402
from rlkit.backends.local.sampling._batching import ContinuousBatching, CudaGraphs  # noqa: E402
from rlkit.backends.local.sampling.sampler import take_snapshot  # noqa: E402
from tests.backends.local import white_box  # noqa: E402


class Recorder:
    """Computes a step anew, from the inputs at their addresses, as a graph would."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, step):
        self.recorded += 1
        step()

        def replay():
            self.replayed += 1
            step()

        return replay


@pytest.fixture
def recorder(monkeypatch):
    """All continuous batching decodes by graphs of this recorder."""
    made, before = Recorder(), ContinuousBatching.__init__

    def with_graphs(self, forward, base, *args, **options):
        before(self, forward, base, *args, **options)
        self.graphs = CudaGraphs(forward, base, self.kv_cache, lambda: made)

    monkeypatch.setattr(ContinuousBatching, "__init__", with_graphs)
    monkeypatch.setattr(graphs, "KEYS", 32)
    return made


def connect(folder):
    return rlkit.connect("local", model=folder, lora=rlkit.Lora(rank=4, train_unembed=True), seed=0, device="cpu")


def sampled(policy, rng):
    """Many rows of different lengths that end at different times, more than one bucket of rows and of keys."""
    sampler = policy.sampler().result()
    futures = []
    for n in (3, 90, 40, 7):
        params = rlkit.SamplingParams(max_tokens=int(rng.integers(2, 30)), stop=())
        futures.append(sampler.sample(rng.integers(3, 200, n), params, n=5, seed=n))
    scores = sampler.logprobs(rng.integers(3, 200, 20))
    found = [sample for future in futures for sample in future.result()]
    return [s.tokens.tolist() for s in found], np.concatenate([s.logprobs for s in found] + [scores.result()])


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_recorded_steps_sample_what_others_do(tiny, recorder, kind):
    """Tokens and logprobs, over several requests and snapshots; steps are replayed more often than recorded."""
    results = []
    for recorded in (True, False):
        policy = connect(tiny(kind))
        if not recorded:
            policy.sampler().result().logprobs([5, 6]).result()
            white_box.decoder(policy).graphs = None
        rng = np.random.default_rng(0)
        found = [sampled(policy, rng)]
        policy.forward_backward([rlkit.Datum.supervised([5, 6], [7, 8])], "cross_entropy").result()
        policy.optim_step(rlkit.Adam(learning_rate=0.05)).result()
        found += [sampled(policy, rng), sampled(policy, rng)]
        results.append(found)
        policy.close()
    assert recorder.replayed > 2 * recorder.recorded > 0
    for (tokens, numbers), (expected, correct) in zip(*results, strict=True):
        assert tokens == expected
        np.testing.assert_allclose(numbers, correct, atol=2e-6)


def test_graphs_are_recorded_again_where_memory_moved(tiny, recorder):
    """Slots that grow, and weights at other addresses; a step that was recorded is not recorded twice."""
    policy = connect(tiny("llama"))
    sampler, params = policy.sampler().result(), rlkit.SamplingParams(max_tokens=20, stop=())
    counts = []
    for rows, length in ((1, 5), (1, 5), (8, 5), (8, 5), (1, 5), (1, 5), (1, 80), (1, 5), (1, 5)):
        before = recorder.recorded
        sampler.sample(np.arange(3, 3 + length), params, n=rows).result()
        counts.append(recorder.recorded - before)
    assert [count > 0 for count in counts] == [True, False, True, False, True, False, True, True, False]
    white_box.decoder(policy).forward.addresses = (1,)
    sampler.sample(np.arange(3, 8), params).result()
    assert recorder.recorded == sum(counts) + 1
    policy.close()


def test_what_cannot_be_recorded_is_computed(tiny, monkeypatch, recorder):
    """With a warning, and right; memory is given back as without graphs."""

    def broken(_, step):
        step()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(type(recorder), "__call__", broken)
    policy = connect(tiny("llama"))
    sampler, params = policy.sampler().result(), rlkit.SamplingParams(max_tokens=6, stop=())
    with pytest.warns(UserWarning, match="without CUDA graphs.*capturing"):
        found = sampler.sample([5, 6, 7], params, n=3, seed=1).result()
    again = sampler.sample([5, 6, 7], params, n=3, seed=1).result()
    assert [s.tokens.tolist() for s in found] == [s.tokens.tolist() for s in again]
    decoder = white_box.decoder(policy)
    policy.close()  # which waits for the last step to end
    assert not decoder.graphs.works
    assert all(keys.shape[0] == 0 for keys, _ in decoder.kv_cache.store)


@pytest.mark.parametrize("baked", ["tokens", "positions", "both"])
def test_a_graph_that_replays_something_else_is_noticed(tiny, monkeypatch, recorder, baked):
    """One that kept the tokens or the positions of its recording: a warning, and the samples are those of the steps."""
    sampled_right = None
    for graphs_on in (False, True):
        policy = connect(tiny("llama"))
        sampler, params = policy.sampler().result(), rlkit.SamplingParams(max_tokens=6, stop=())
        if not graphs_on:
            sampler.logprobs([5, 6]).result()
            white_box.decoder(policy).graphs = None
            sampled_right = sampler.sample([5, 6, 7], params, n=3, seed=1).result()
            policy.close()
            continue

        def perturbed(self, step):
            tensors = [x.cell_contents for x in step.__closure__ if torch.is_tensor(x.cell_contents)]
            (inputs,) = (x for x in tensors if x.dtype == torch.int64)
            part = {"tokens": slice(0, 1), "positions": slice(1, 2), "both": slice(0, 2)}[baked]
            recorded = inputs[part].clone()
            step()

            def replay():
                asked = inputs.clone()
                inputs[part] = recorded
                step()
                inputs.copy_(asked)

            return replay

        monkeypatch.setattr(type(recorder), "__call__", perturbed)
        with pytest.warns(UserWarning, match="without CUDA graphs, because the replay"):
            found = sampler.sample([5, 6, 7], params, n=3, seed=1).result()
        assert not white_box.decoder(policy).graphs.works
        policy.close()
        assert [s.tokens.tolist() for s in found] == [s.tokens.tolist() for s in sampled_right]
        for sample, right in zip(found, sampled_right, strict=True):
            np.testing.assert_allclose(sample.logprobs, right.logprobs, atol=2e-6)


def test_memory_that_runs_out_halfway_leaves_nothing_behind(tiny, monkeypatch, recorder):
    """Slots that could grow in some layers only are given up; the next request is as right as any."""
    policy = connect(tiny("llama"))
    sampler, params = policy.sampler().result(), rlkit.SamplingParams(max_tokens=6, stop=())
    expected = [s.tokens.tolist() for s in sampler.sample([5, 6, 7], params, n=9, seed=1).result()]
    white_box.decoder(policy).kv_cache.free()
    sampler.sample([5, 6], params).result()
    grown, calls = KVCache._grow, []

    def fails(self, x):
        calls.append(x)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("out of memory")
        return grown(self, x)

    monkeypatch.setattr(KVCache, "_grow", fails)
    with pytest.raises(rlkit.BackendError, match="out of memory: 9 completions") as caught:
        sampler.sample([5, 6, 7], params, n=9, seed=1).result()
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    found = [s.tokens.tolist() for s in sampler.sample([5, 6, 7], params, n=9, seed=1).result()]
    assert found == expected
    assert recorder.replayed
    policy.close()


@pytest.mark.parametrize("length", [1, 5])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (6, 1)])
def test_sdpa_attention_is_matmul_attention(heads, length):
    """For tokens at places of their own in slots that hold more."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    slots = KVCache()
    slots.reserve(3, 40)
    slots.at(0, torch.arange(20).repeat(3, 1), 20)
    slots.update(random(3, heads[1], 20, 8), random(3, heads[1], 20, 8), 0)
    mask = slots.at(0, torch.tensor([[2], [9], [14]]) + torch.arange(length), 19)
    keys, values = slots.update(random(3, heads[1], length, 8), random(3, heads[1], length, 8), 0)
    query = random(3, heads[0], length, 8)
    expected = matmul_attention(query, keys, values, mask)
    assert torch.allclose(sdpa_attention(query, keys, values, mask.double()), expected, atol=1e-12)


@pytest.mark.parametrize("merge", [True, False])
def test_weights_keep_their_addresses(tiny, monkeypatch, merge):
    """As on a GPU: one snapshot after the other in the same memory, and the base's own is never written."""
    monkeypatch.setattr(linear, "prepack", linear.keep_address)
    monkeypatch.setattr(PrepackedCopies, "of", lambda copies, weight: weight)
    policy = connect(tiny("llama"))
    before = [p.clone() for p in policy.base.model.parameters()]
    shapes = {name: (a.shape, b.shape) for name, (a, b) in take_snapshot(policy._policy.peft, 0, 1.0).adapter.items()}
    model, places = SamplingForward(policy.base, policy.base.tree(ATTENTION)), []
    for seed in (None, 1, 2, None, 3):
        generator = torch.Generator().manual_seed(seed or 0)
        adapter = {
            name: tuple(torch.randn(shape, generator=generator) for shape in pair)
            for name, pair in (shapes if seed else {}).items()
        }
        fresh = SamplingForward(policy.base, policy.base.tree(ATTENTION))
        for forward in (model, fresh):
            forward.load(adapter, 0.5, merge=merge)
        for found, expected in zip(model._products, fresh._products, strict=True):
            assert torch.equal(found.weight, expected.weight)
            assert all(map(torch.equal, found._low_rank or (), expected._low_rank or ()))
        places.append(model.addresses)
    assert places[1] == places[2]
    assert places[0] != places[1]
    assert (places[3] == places[2]) == merge
    assert all(map(torch.equal, before, policy.base.model.parameters()))
    policy.close()
