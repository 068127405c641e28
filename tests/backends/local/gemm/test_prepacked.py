"""Weights arranged for the CPU's products: right, alike for any number of rows, and replaceable."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.model import base as base_module  # noqa: E402
from rlkit.backends.local.products import prepacked as module  # noqa: E402
from rlkit.backends.local.products.prepacked import ROW_UNIT, OneDNNWeight, matmul, prepack  # noqa: E402
from tests.backends.local import white_box  # noqa: E402
from tests.float64 import distance  # noqa: E402

SHAPES = [(1, 1), (7, 3), (32, 4), (96, 576), (576, 32), (577, 130), (1200, 64), (576, 1536)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def plain(monkeypatch):
    monkeypatch.setattr(module, "_works", lambda _: False)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_products_are_those_of_the_weight(shape, dtype):
    """Against float64, for one row and many, whatever the weight's layout; the weight itself is not kept or written."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator).to(dtype)
    before = weight.clone()
    # Sums of n terms are off by sqrt(n) roundings; those of bfloat16 are in float32 and rounded once, by 2^-9.
    bound = 2**-7 if dtype == torch.bfloat16 else 2 * shape[1] ** 0.5 * torch.finfo(dtype).eps
    for given in (weight, weight.T.contiguous().T):
        arranged = prepack(given)
        assert tuple(arranged.shape) == shape
        for rows in (1, 2, 33, 300):
            x = torch.randn(rows, shape[1], generator=generator).to(dtype)
            found, expected = matmul(x, arranged), x.double() @ weight.double().t()
            assert found.dtype == dtype
            assert distance([found.double()], [expected]) <= bound
    assert torch.equal(weight, before)


def test_weights_of_another_device_go_to_their_place():
    """Where the one before was, if it fits."""
    before, new, other = (torch.empty(n, 3, device="meta") for n in (2, 2, 4))
    assert prepack(new, before) is before
    assert prepack(other, before) is other
    assert prepack(new) is new


@pytest.mark.skipif(not isinstance(prepack(torch.eye(3)), OneDNNWeight), reason="a build without oneDNN")
@pytest.mark.usefixtures("threads")
def test_rows_are_alike_in_any_multiple():
    """Of a weight that is rearranged or not, of any shape, at any place in the batch."""
    generator = torch.Generator().manual_seed(1)
    wrong = []
    for out, size in SHAPES:
        weight, x = (torch.randn(n, size, generator=generator) for n in (out, 256))
        for copy in (True, False):
            product = OneDNNWeight(weight, copy=copy)
            whole = product(x)
            wrong += [
                (out, size, copy, rows)
                for rows in range(ROW_UNIT, 256, ROW_UNIT)
                for first in {0, 256 - rows}
                if not torch.equal(product(x[first : first + rows]), whole[first : first + rows])
            ]
    assert not wrong


def test_sampling_where_weights_cannot_be_arranged(tiny, monkeypatch):
    """The same logprobs, from a transposed copy."""
    tokens = np.arange(3, 40)
    found = []
    for arranged in (True, False):
        if not arranged:
            plain(monkeypatch)
        with rlkit.connect("local", model=tiny("llama"), seed=0, device="cpu") as policy:
            found.append(policy.sampler().result().logprobs(tokens).result())
            weights = white_box.weights(policy)
            assert all(isinstance(x, OneDNNWeight) == arranged for own in weights.values() for x in own)
            assert len(weights) == 4 * policy.base.model.config.num_hidden_layers + 1  # what reads the same is one
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_snapshots_beside_adapters_share_one_prepacked_base(tiny, kind, dtype):
    """Whatever the adapters; what is sampled has the trainer's logprobs."""
    options = {"model": tiny(kind), "seed": 0, "device": "cpu", "dtype": dtype, "merge": False}
    samplers, shared = [], []
    with rlkit.connect("local", **options) as policy:
        for _ in range(2):
            samplers.append(policy.sampler().result())
            sample = samplers[-1].sample([5, 6, 7], rlkit.SamplingParams(max_tokens=6)).result()[0]
            trained = policy.forward_backward([sample.datum(1.0)], "cross_entropy").result().selected[0]
            np.testing.assert_allclose(sample.logprobs, trained, atol=1e-4 if dtype == "float32" else 0.1)
            policy.optim_step(rlkit.Adam(learning_rate=0.01)).result()
            own = [first for name, (first, *_) in white_box.weights(policy).items() if name != "lm_head"]
            shared.append({id(x) for x in own if isinstance(x, OneDNNWeight)})
        assert len(white_box.decoders(policy)) == 2
    prepacks = isinstance(prepack(torch.eye(3, dtype=getattr(torch, dtype))), OneDNNWeight)  # bfloat16 not everywhere
    assert bool(shared[0]) == prepacks
    assert shared[0] == shared[1]


def test_a_large_base_is_not_copied(tiny, monkeypatch):
    """It is multiplied by as it is; a prepacked weight is no torch memory that could be compared."""
    monkeypatch.setattr(base_module, "COPIED_UNDER", 0)
    with rlkit.connect("local", model=tiny("llama"), seed=0, device="cpu", merge=False) as policy:
        policy.sampler().result().sample([5], rlkit.SamplingParams(max_tokens=2)).result()
        own = {p.untyped_storage().data_ptr() for p in policy.base.model.parameters()}
        for first, *_ in white_box.weights(policy).values():
            assert getattr(first, "_read", first).untyped_storage().data_ptr() in own
