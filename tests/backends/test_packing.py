"""Packing: every datum sees what it would see alone, and gives the same outputs and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
from rlkit.backends.local.packing import pack  # noqa: E402


@st.composite
def batches_of_data(draw):
    """Groups behind shared prompts, some datums alone, masks with gaps, some all masked out."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    data = []
    for _ in range(draw(st.integers(1, 4))):
        prompt = rng.integers(3, 200, rng.integers(1, 12))
        for _ in range(draw(st.integers(1, 5))):
            rest = rng.integers(3, 200, rng.integers(1, 9))
            own = rng.random(rest.size) < 0.7
            own[0] = rng.random() < 0.8
            mask = np.concatenate([np.zeros(prompt.size, bool), own])
            data.append(rlkit.Datum(np.concatenate([prompt, rest]), mask, {"advantages": rng.normal()}))
    return [data[i] for i in rng.permutation(len(data))]


@given(batches_of_data(), st.integers(8, 80), st.booleans())
@settings(max_examples=80, deadline=None)
def test_every_token_sees_its_own_past(data, budget, share):
    """Each scored token is predicted from exactly its own datum's earlier tokens, at their own positions."""
    seen = []
    for batch in pack(data, budget, share=share):
        rows, length = batch.tokens.shape
        assert len(batch.members) == 1 or rows * length <= budget
        places = iter(batch.index)
        for i in batch.members:
            seen.append(i)
            for t in np.flatnonzero(data[i].mask):
                row, column = divmod(int(next(places)), length)
                if batch.visible is None:
                    keys = np.arange(column + 1)
                    positions = keys
                else:
                    keys = np.flatnonzero(batch.visible[row, column])
                    positions = batch.positions[row, keys]
                assert batch.tokens[row, keys].tolist() == data[i].tokens[:t].tolist()
                assert positions.tolist() == list(range(t))
    assert sorted(seen) == [i for i, datum in enumerate(data) if datum.mask.any()]


@given(batches_of_data(), st.integers(8, 60))
@settings(max_examples=40, deadline=None)
def test_pairs_stay_together(data, budget):
    """Datums 2k and 2k + 1 are in one batch, one behind the other."""
    data = [datum for datum in data if datum.mask.any()]
    data = data[: len(data) // 2 * 2]
    for batch in pack(data, budget, pairs=True):
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(batch.members[::2], batch.members[1::2], strict=True))


def test_a_group_reads_its_prompt_once():
    """Eight completions of 4 tokens behind a prompt of 20 are one row of 20 + 8 * 3 tokens."""
    data = [rlkit.Datum.supervised(np.arange(1, 21), np.full(4, k + 30)) for k in range(8)]
    (batch,) = pack(data, 1024)
    assert batch.tokens.shape == (1, 20 + 8 * 3)
    assert sum(b.tokens.size for b in pack(data, 1024, share=False)) == 8 * 23


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_shared_prefixes_change_no_number(tiny, kind):
    """Outputs, loss and gradient are those of every datum computed by itself."""
    rng = np.random.default_rng(0)
    policy = rlkit.connect(
        "local", model=tiny(kind), lora=rlkit.Lora(rank=4), seed=0, device="cpu", micro_batch_tokens=90
    )
    policy.base.model.double()  # in float32 a random Qwen3 is 4e-5 off float64 by itself, either way
    trainer = policy._trainer
    for parameter in trainer.parameters.values():
        parameter.data.add_(0.05 * np.float32(rng.normal()))
    for loss, data in ((loss, random_groups(rng)) for loss in ("cross_entropy", "ppo") for _ in range(3)):
        near = policy.forward(data).result().selected  # ratios near 1, as in training; far ones amplify float32
        data = [d.with_inputs(sampling_logprobs=lp - 0.05, advantages=1.0) for d, lp in zip(data, near, strict=True)]
        found = []
        for share in (True, False):
            trainer._head._shares = share
            output = policy.forward_backward(data, loss, want=("entropy",)).result()
            found.append((output, [p.grad.clone() for p in trainer.parameters.values()]))
            policy.discard().result()
        (a, packed), (b, alone) = found
        for x, y in zip(a.logprobs + a.outputs["entropy"], b.logprobs + b.outputs["entropy"], strict=True):
            assert np.abs(x - y).max() < 1e-5
        assert relative(packed, alone) < 2e-6
    trainer._head._shares = None
    assert trainer._head.shares
    policy.close()


def relative(a, b):
    """The norm of the difference of two gradients, in norms of the second."""
    a, b = (torch.cat([x.flatten() for x in tensors]) for tensors in (a, b))
    return float((a - b).norm() / b.norm())


def random_groups(rng):
    data = []
    for _ in range(3):
        prompt = rng.integers(3, 200, rng.integers(1, 20))
        for _ in range(rng.integers(1, 6)):
            n = int(rng.integers(1, 12))
            sample = rlkit.Sample(prompt, rng.integers(3, 200, n), -rng.random(n) * 5)
            data.append(sample.datum(weights=rng.normal()))
    return [data[i] for i in rng.permutation(len(data))]


def test_rows_of_a_group_are_even():
    """A group too large for one row is cut into about equal ones, so that little is padding."""
    data = [rlkit.Datum.supervised(np.arange(1, 51), np.full(64, k + 30)) for k in range(40)]
    batches = pack(data, 1024)
    useful = sum(50 * batch.tokens.shape[0] + 63 * len(batch.members) for batch in batches)
    assert useful > 0.85 * sum(batch.tokens.size for batch in batches)
    eight = pack(data[:8], 1024)
    assert [batch.tokens.shape for batch in eight] == [(1, 50 + 8 * 63)]


def test_rows_cost_little():
    """A long prompt is repeated only where the budget asks for it; many completions of a short one are cut."""
    long = [rlkit.Datum.supervised(np.arange(1, 513), np.full(64, k + 30)) for k in range(16)]
    assert [batch.tokens.shape for batch in pack(long, 2048)] == [(1, 512 + 16 * 63)]
    assert [batch.tokens.shape for batch in pack(long, 1024)] == [(1, 512 + 8 * 63)] * 2
    short = [rlkit.Datum.supervised(np.arange(1, 11), np.full(64, k % 9 + 30)) for k in range(64)]
    rows = [row for batch in pack(short, 4096) for row in [batch.tokens.shape[1]] * batch.tokens.shape[0]]
    best = 64 * 63 / np.sqrt(10 * 2010)
    assert abs(len(rows) - best) <= 0.25 * best
