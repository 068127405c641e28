"""Micro-batches longer than the budget: computed in parts, never more tokens at once, with the same numbers."""

from __future__ import annotations

import errno
import os
import tempfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rlkit
from rlkit.errors import BackendError, ConfigError
from tests.properties import examples

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from rlkit.backends.local.attention import tree  # noqa: E402
from rlkit.backends.local.attention.tree import Window, narrowed  # noqa: E402
from rlkit.backends.local.cache import rows  # noqa: E402
from rlkit.backends.local.model.forward import LibraryForward  # noqa: E402
from rlkit.backends.local.model.llama import Layer  # noqa: E402
from rlkit.backends.local.training import _chunked_attention as chunked_attention  # noqa: E402
from rlkit.backends.local.training import forward  # noqa: E402
from rlkit.backends.local.training._flex_attention import MaskedAttention  # noqa: E402
from rlkit.backends.local.training.micro_batches import pack  # noqa: E402
from tests.backends.local import white_box  # noqa: E402
from tests.backends.local.training.test_micro_batches import batches_of_data, random_tree, relative  # noqa: E402

WHOLE = 10**6


@pytest.fixture
def double(monkeypatch):
    """So that nothing but the order of sums makes a difference."""
    white_box.allow_float64(monkeypatch)


@pytest.fixture
def small_tiles(monkeypatch):
    """Blocks of a few keys, of which a few queries are looked at at once."""
    monkeypatch.setattr(chunked_attention.ChunkedAttention.__init__, "__defaults__", (None, 5, None))
    monkeypatch.setattr(chunked_attention, "SCORES", {"cpu": 90})


def policies(model, budgets, **options):
    """With one adapter, that is not zero; one for each budget."""
    for budget in budgets:
        policy = rlkit.connect("local", model=model, seed=0, device="cpu", micro_batch_tokens=budget, **options)
        rng = np.random.default_rng(0)
        for parameter in white_box.parameters(policy).values():
            parameter.data.add_(torch.from_numpy(0.05 * rng.normal(size=parameter.shape)).to(parameter))
        with policy:
            yield policy


def numbers(output):
    """All that was asked for, of each datum."""
    return [*output.logprobs, *(x for name in sorted(output.outputs) for x in output.outputs[name])]


def gradient(policy, data, loss, want=()):
    """Of a loss, and what it gave."""
    output = policy.forward_backward(data, loss, want=want).result()
    gradients = [p.grad.clone() for p in white_box.parameters(policy).values()]
    policy.discard().result()
    return output, gradients


def long_tree(rng):
    """A group behind a long prompt, and the turns of an episode."""
    prompt = rng.integers(3, 200, 60)
    samples = [rlkit.Sample(prompt, rng.integers(3, 200, n), -rng.random(n) * 5) for n in (3, 9, 20, 1)]
    data = [sample.datum(rng.normal()) for sample in samples]
    history = rng.integers(3, 200, 10)
    for _ in range(4):
        answer = rng.integers(3, 200, 7)
        data.append(rlkit.Sample(history, answer, -rng.random(7) * 5).datum(rng.normal()))
        history = np.concatenate([history, answer, rng.integers(3, 200, 5)])
    return [data[i] for i in rng.permutation(len(data))]


@rlkit.losses.loss(level="pair")
def preferred(logprobs, reference_logprobs, weights=(1.0, 1.0)):
    """DPO of any two datums, of one prompt or not."""
    return rlkit.losses.dpo(logprobs, reference_logprobs, weights)


@pytest.mark.parametrize(
    ("kind", "data", "offload"),
    [
        ("llama", long_tree, False),
        ("llama", random_tree, True),
        ("qwen2", random_tree, False),
        ("qwen3", long_tree, True),
        ("mistral", random_tree, False),
        ("mistral", long_tree, True),
    ],
)
def test_chunks_change_no_number(tiny, kind, data, offload, double, small_tiles, monkeypatch, tmp_path):
    """Outputs, losses over datums and pairs, with the entropy, and gradients: as of one micro-batch of everything."""
    monkeypatch.setattr(forward, "STAY", 0 if offload else 8)
    options = {
        "lora": rlkit.Lora(rank=3, train_unembed=True),
        "dtype": "float64",
        "offload_folder": tmp_path if offload else None,
    }
    data = data(np.random.default_rng(4))
    data = [d.with_inputs(reference_logprobs=np.full(d.mask.sum(), -1.0)) for d in data[: len(data) // 2 * 2]]
    for loss, want in (("cross_entropy", ()), ("importance_sampling", ("entropy", "sum_p2")), (preferred, ())):
        (a, whole), *others = (gradient(p, data, loss, want) for p in policies(tiny(kind), (WHOLE, 7, 23), **options))
        for b, chunked in others:
            for x, y in zip(numbers(a), numbers(b), strict=True):
                np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)
            assert relative(chunked, whole) < 1e-6
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "lora",
    [
        {"train_mlp": False},
        {"train_attn": False},
        {"train_unembed": False},
        {"train_attn": False, "train_mlp": False},  # the head alone: no layer has a gradient
        {"target_modules": ("layers.1.self_attn.k_proj",)},  # nothing below it has one
        {"target_modules": ("layers.0.mlp.down_proj", "layers.1.self_attn.q_proj")},
    ],
)
def test_adapters_on_some_modules(tiny, lora, double):
    """As of one micro-batch, whichever modules have an adapter; a loss over all datums takes two passes."""
    data = long_tree(np.random.default_rng(1))
    options = {"lora": rlkit.Lora(rank=3, alpha=7, **lora), "dtype": "float64"}
    for loss in ("cross_entropy", over_all):
        (_, whole), (_, chunked) = (gradient(p, data, loss) for p in policies(tiny("qwen3"), (WHOLE, 11), **options))
        assert relative(chunked, whole) < 1e-6


@rlkit.losses.loss(level="batch")
def over_all(logprobs, advantages):
    """One that has no parts."""
    return -torch.cat(logprobs).exp().mean() * torch.cat(advantages).sum()


def test_in_float32(tiny):
    """The gradient is that of one micro-batch but for rounding."""
    data = long_tree(np.random.default_rng(2))
    (_, whole), (_, chunked) = (gradient(p, data, "ppo") for p in policies(tiny("llama"), (WHOLE, 16)))
    assert relative(chunked, whole) < 5e-6


def test_in_bfloat16(tiny):
    """The gradient is that of one micro-batch but for rounding, which is of a hundredth there."""
    data = long_tree(np.random.default_rng(2))
    found = [gradient(p, data, "cross_entropy") for p in policies(tiny("llama"), (WHOLE, 16), dtype="bfloat16")]
    assert relative(found[1][1], found[0][1]) < 0.05


def test_values_of_a_critic(tiny, double):
    """Values and gradients of a critic, by chunks."""
    tokenizer = rlkit.sampler("local", model=tiny("llama")).tokenizer
    data = [d.with_inputs(returns=1.0, old_values=0.1) for d in long_tree(np.random.default_rng(5))]
    found = []
    for budget in (WHOLE, 9):
        options = {"seed": 3, "micro_batch_tokens": budget, "dtype": "float64", "device": "cpu"}
        with rlkit.critic("local", model=tiny("llama"), tokenizer=tokenizer, **options) as critic:
            values = []
            for _ in range(2):  # the first step moves the head from 0
                values.append(critic.forward_backward(data).result().outputs["values"])
                gradients = [p.grad.clone() for p in critic._trainer.parameters.values()]
                critic.optim_step(rlkit.Adam(learning_rate=0.05)).result()
            found.append((np.concatenate(values[1]), gradients))
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-6)
    assert relative(found[1][1], found[0][1]) < 2e-6  # values are handed to the loss in float32


@given(st.integers(0, 2**32), st.sampled_from([5, 16, 64]), st.sampled_from([3, 8, 512]))
@examples(60)
def test_tiles_are_what_is_visible(seed, chunk, keys):
    """Every pair of a token and one that it sees is in one tile, and no other pair."""
    (batch,) = pack(random_tree(np.random.default_rng(seed)), WHOLE)
    size = batch.tokens.size
    seen = np.zeros((size, size), int)
    for begin in range(0, size, chunk):
        part = slice(begin, min(begin + chunk, size))
        found = chunked_attention.tiles(batch.runs, part, keys)
        assert all(tile.keys.stop - tile.keys.start <= keys for tile in found)
        first = {row for tile in found if tile.causal for row in range(tile.rows.start, tile.rows.stop)}
        assert first == set(range(part.stop - part.start))
        assert sorted(found, key=lambda tile: not tile.causal) == found
        for tile in found:
            queries = slice(begin + tile.rows.start, begin + tile.rows.stop)
            shape = seen[queries, tile.keys].shape
            seen[queries, tile.keys] += np.tri(*shape, dtype=int) if tile.causal else 1
    assert np.array_equal(seen, tree.visible(batch.runs, size))


def test_a_group_sees_its_prompt_in_common_tiles():
    """Eight completions behind one prompt: as many tiles over the prompt as it has blocks, not eight times as many."""
    data = [rlkit.Datum.supervised(np.arange(1, 101), np.full(5, k + 120)) for k in range(8)]
    (batch,) = pack(data, WHOLE)
    found = chunked_attention.tiles(batch.runs, slice(100, batch.tokens.size), 50)
    assert [tile.keys for tile in found if not tile.causal] == [slice(0, 50), slice(50, 100)]


@given(
    st.integers(0, 2**32),
    st.sampled_from([(4, 2), (3, 3), (6, 1)]),
    st.sampled_from([4, 30]),
    st.sampled_from([None, Window(1), Window(5), Window(17), Window(7, chunks=True)]),
)
@examples(30)
def test_chunked_attention_is_masked_attention(seed, heads, chunk, window):
    """On random trees, and its gradients; also where the exponentials of scores are beyond numbers."""
    rng = np.random.default_rng(seed)
    (batch,) = pack(random_tree(rng), WHOLE)
    size = batch.tokens.size
    q, k, v = (torch.from_numpy(rng.normal(size=(size, h, 8))) for h in (heads[0], heads[1], heads[1]))
    q *= rng.choice([1.0, 300.0])
    grad = torch.from_numpy(rng.normal(size=(size, heads[0] * 8)))
    visible = torch.from_numpy(tree.visible(batch.runs, size))[None, None]
    positions = torch.from_numpy(batch.positions)
    masked = MaskedAttention(narrowed(visible, window, positions[None], positions)[0, 0])
    expected, saved = masked.forward(q, k, v)
    expected = [expected, *(x.flatten(1) for x in masked.backward(grad, saved))]

    storage = rows.Storage(size, torch.device("cpu"), away=False, folder=None)
    kv, dkv = (storage.rows(2 * heads[1] * 8, torch.float64) for _ in range(2))
    kv.write(slice(0, size), torch.stack([k, v], dim=1).flatten(1))
    out, dq = torch.zeros_like(expected[0]), torch.zeros_like(expected[0])
    attention = chunked_attention.ChunkedAttention(batch.runs, batch.positions, *heads, window, keys=6)
    for begin in range(0, size, chunk):
        part = slice(begin, min(begin + chunk, size))
        out[part], saved = attention.forward(part, q[part], kv)
        dq[part] = attention.backward(part, grad[part], saved, kv, dkv).flatten(1)
    dk, dv = dkv.read(slice(0, size)).chunk(2, dim=1)
    for a, b in zip((out, dq, dk, dv), expected, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@given(batches_of_data(), st.integers(1, 30))
@examples(60)
def test_what_is_longer_than_the_budget_has_company(data, budget):
    """A batch is within the budget, or its first datum is longer and it has at most twice as much."""
    batches = pack(data, budget, chunked=True)
    assert sorted(i for batch in batches for i in batch.members) == [i for i, d in enumerate(data) if d.mask.any()]
    for batch in batches:
        first = np.flatnonzero(data[batch.members[0]].mask)[-1]
        assert batch.tokens.size <= budget or (first > budget and batch.tokens.size <= 2 * first)


def test_a_long_prompt_is_computed_once():
    """Eight completions of 10 behind a prompt of 100, under a budget of 40."""
    data = [rlkit.Datum.supervised(np.arange(1, 101), np.full(11, k + 120)) for k in range(8)]
    assert [batch.tokens.size for batch in pack(data, 40, chunked=True)] == [100 + 8 * 10]
    assert [batch.tokens.size for batch in pack(data, 40)] == [110] * 8


@given(seed=st.integers(0, 2**32), budget=st.integers(1, 90))
@examples(8)
def test_no_more_than_the_budget_at_once(tiny, seed, budget):
    """Whatever the data: no layer and no head is given more tokens than ``micro_batch_tokens``."""
    sizes, data = [], random_tree(np.random.default_rng(seed)) + long_tree(np.random.default_rng(seed))
    project = Layer.project

    def noting(layer, x):
        sizes.append(x.shape[0])
        return project(layer, x)

    options = {"lora": rlkit.Lora(rank=2, train_unembed=True), "seed": 0, "device": "cpu", "micro_batch_tokens": budget}
    with pytest.MonkeyPatch.context() as patch, rlkit.connect("local", model=tiny("llama"), **options) as policy:
        patch.setattr(Layer, "project", noting)
        policy.forward_backward(data, "cross_entropy").result()
    assert max(sizes) <= budget


class Largest(TorchDispatchMode):
    """Notes the most numbers of a new tensor."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        old = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old:
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


def test_nothing_grows_with_the_length_where_there_is_a_folder(tiny, small_tiles, monkeypatch, tmp_path):
    """The largest tensor of a datum of 120 tokens is that of one of 40, less than [tokens, hidden]."""
    monkeypatch.setattr(forward, "STAY", 0)
    rng, found = np.random.default_rng(0), []
    options = {"lora": rlkit.Lora(rank=2, train_unembed=False), "offload_folder": tmp_path}
    for policy in policies(tiny("llama"), [8], **options):
        for n in (40, 120):
            data = [rlkit.Datum.supervised(rng.integers(3, 200, 4), rng.integers(3, 200, n - 4))]
            with Largest() as largest:  # in this thread, so without the backend's queue
                for _ in policy._trainer.run(data, rlkit.losses.prepare("cross_entropy"), (), backward=True):
                    pass
            found.append(largest.most)
    assert found[0] == found[1] < 120 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_in_a_file(dtype):
    """What was written is read; what was not is zeros."""
    with tempfile.TemporaryFile() as file:
        first, second = (rows.FileRows(file, 8 * 100 * 3 * k, 3, dtype) for k in range(2))
        x = torch.randn(100, 3).to(dtype)
        second.write(slice(10, 40), x[10:40])
        first.write(slice(90, 100), x[90:])
        assert torch.equal(second.read(slice(15, 40)), x[15:40])
        assert torch.equal(first.read(slice(80, 100)), torch.cat([torch.zeros(10, 3, dtype=dtype), x[90:]]))
        assert torch.equal(second.read(slice(50, 60)), torch.zeros(10, 3, dtype=dtype))


def test_a_full_disk_is_told(tiny, monkeypatch, tmp_path):
    """The gradient before it stays, and the backend goes on."""
    monkeypatch.setattr(forward, "STAY", 0)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    data = long_tree(np.random.default_rng(0))
    for policy in policies(tiny("llama"), [8], offload_folder=tmp_path):
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with pytest.raises(BackendError, match="offload_folder: .*No space left.* more space"):
                policy.forward_backward(data, "cross_entropy").result()
        assert policy.forward_backward(data, "cross_entropy").result()


def test_the_folder_has_to_be_there(tiny, tmp_path):
    """Before anything is read."""
    for folder in (tmp_path / "none", 3):
        with pytest.raises(ConfigError, match="offload_folder: .*an existing folder"):
            rlkit.connect("local", model=tiny("llama"), offload_folder=folder)
    with pytest.raises(
        ConfigError, match="offload_folder: got .* expected None .*a datum in parts by bloom is not exact"
    ):
        rlkit.connect("local", model=tiny("bloom"), offload_folder=tmp_path)


@pytest.mark.parametrize("kind", ["mamba", "bloom"])
def test_the_librarys_layers_are_computed_again(tiny, kind):
    """Of what is not computed in parts, beyond the budget: the same gradient, with less kept for the backward pass."""
    data = long_tree(np.random.default_rng(3))
    grads, kept = [], []
    for policy in policies(tiny(kind), [8], lora=rlkit.Lora(rank=2, train_unembed=True)):
        trainer = policy._trainer
        for used in (trainer.forward, LibraryForward(trainer.model, trees=trainer.forward.trees)):
            trainer.forward, sizes = used, []

            def note(x, sizes=sizes):
                sizes.append(x.numel())
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):  # of this thread: without the queue
                for _ in trainer.run(data, rlkit.losses.prepare("cross_entropy"), (), backward=True):
                    pass
            grads.append([p.grad.clone() for p in white_box.parameters(policy).values()])
            kept.append(sum(sizes))
            policy.discard().result()
    assert relative(*grads) < 1e-6
    assert kept[0] < kept[1] / 2
