"""Weights arranged for the CPU's products: right, alike for any number of rows, and replaceable."""

from __future__ import annotations

import numpy as np
import pytest

import rlkit

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.model import base as base_module  # noqa: E402
from rlkit.backends.local.products import prepacked as measured  # noqa: E402
from rlkit.backends.local.products import prepacked as module  # noqa: E402
from rlkit.backends.local.products.prepacked import Prepacked, invariant_row_multiple, matmul, padding_unit, prepack  # noqa: E402  # noqa: E402
from tests.backends.local import white_box  # noqa: E402
from tests.float64 import distance  # noqa: E402

SHAPES = [(1, 1), (7, 3), (96, 576), (577, 130), (1200, 64)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def plain(monkeypatch):
    monkeypatch.setattr(module, "_works", lambda _: False)


@pytest.fixture
def fresh(monkeypatch):
    """Nothing was measured before."""
    monkeypatch.setattr(measured, "_measurements", {})


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


@pytest.mark.parametrize("arranged", [True, False])
@pytest.mark.usefixtures("threads", "fresh")
def test_rows_are_alike_in_the_numbers_that_were_tried(arranged, monkeypatch):
    """The measured number holds for other values than the tried ones, at any place in the batch."""
    if not arranged:
        plain(monkeypatch)
    generator = torch.Generator().manual_seed(1)
    for shape in SHAPES[2:]:
        weight = prepack(torch.randn(*shape, generator=generator))
        assert isinstance(weight, Prepacked) == arranged
        alike = invariant_row_multiple([weight], 128)
        x = torch.randn(128, shape[1], generator=generator)
        whole = matmul(x, weight)
        for rows in {padding_unit(n, alike) * -(-n // padding_unit(n, alike)) for n in (1, 2, 3, 20, 31, 40, 77, 100)}:
            for first in (0, 128 - rows):
                assert torch.equal(matmul(x[first : first + rows], weight), whole[first : first + rows])


@pytest.mark.parametrize("shape", [(12, 32), (64, 12), (32, 4), (128, 8), (297, 4)])
def test_what_is_measured_hangs_on_no_values(shape, monkeypatch):
    """A fresh adapter is half zeros, whose products are alike in any number; a trained one has the same shape."""
    multiples = []
    for weight in (torch.zeros(shape), torch.randn(shape), torch.empty(shape, device="meta")):
        monkeypatch.setattr(measured, "_measurements", {})
        multiples.append(invariant_row_multiple([weight], 256))
    monkeypatch.setattr(measured, "_measurements", {})
    torch.set_default_dtype(torch.bfloat16)  # as transformers does for all threads while it loads a model
    try:
        multiples.append(invariant_row_multiple([weight], 256))
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(set(multiples)) == 1


def test_sampling_where_weights_cannot_be_arranged(tiny, monkeypatch):
    """The same logprobs, from a transposed copy."""
    tokens = np.arange(3, 40)
    found = []
    for arranged in (True, False):
        if not arranged:
            plain(monkeypatch)
        with rlkit.connect("local", model=tiny("llama"), seed=0, device="cpu") as policy:
            found.append(policy.sampler().result().logprobs(tokens).result())
            layers, _ = white_box.weights(policy)
            assert all(isinstance(x, Prepacked) == arranged for x in layers)
            assert len(layers) == 4 * policy.base.model.config.num_hidden_layers  # what reads the same is one
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
            layers, head = white_box.weights(policy)
            shared.append({id(x) for x in (*layers, *head) if isinstance(x, Prepacked)})
        assert len(white_box.decoders(policy)) == 2
    prepacks = isinstance(prepack(torch.eye(3, dtype=getattr(torch, dtype))), Prepacked)  # bfloat16 not everywhere
    assert any(isinstance(x, Prepacked) for x in layers) == prepacks
    assert shared[0] == shared[1]


def test_a_large_base_is_not_copied(tiny, monkeypatch):
    """It is multiplied by as it is."""
    monkeypatch.setattr(base_module, "COPIED_UNDER", 0)
    with rlkit.connect("local", model=tiny("llama"), seed=0, device="cpu", merge=False) as policy:
        policy.sampler().result().sample([5], rlkit.SamplingParams(max_tokens=2)).result()
        assert not any(isinstance(x, Prepacked) for part in white_box.weights(policy) for x in part)


@pytest.mark.parametrize("alike", [1, 2, 8, 16, 64])
def test_numbers_that_are_computed_are_numbers_that_are_tried(monkeypatch, alike):
    """Whatever is asked for is rounded up to a number that was compared, for any weight."""
    tried = []
    monkeypatch.setattr(measured, "_measurements", {})
    monkeypatch.setattr(measured, "matmul", lambda x, w: tried.append(x.shape[0]) or x @ w.t())
    invariant_row_multiple([torch.zeros(3, 4)], 256)
    for rows in range(1, 257):
        unit = padding_unit(rows, alike)
        assert -(-rows // unit) * unit in tried
