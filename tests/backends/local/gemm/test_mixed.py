"""Products in float32 of weights in bfloat16, with a stand-in for the products that a CPU lacks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rlkit.backends.local.products import prepacked  # noqa: E402
from rlkit.backends.local.products import prepacked as mixed  # noqa: E402
from rlkit.backends.local.products.linear import Product  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture
def products(monkeypatch):
    """What a GPU does: both factors in bfloat16, the sum in float32."""

    def product(x, w):
        assert x.dtype == w.dtype == torch.bfloat16
        return x.float() @ w.float()

    def add_product(y, x, w):
        assert y.dtype == torch.float32
        return y + product(x, w)

    monkeypatch.setattr(mixed, "product", product)
    monkeypatch.setattr(mixed, "add_product", add_product)


def random(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + shape[0])).to(dtype)


@pytest.mark.parametrize("rows", [1, 64, 65])
def test_three_products_are_one_in_float32(products, rows):
    """As near to float64 as the product in float32 is, and one in bfloat16 is 1,000 times as far."""
    x, weight = random(rows, 300), random(70, 300, dtype=torch.bfloat16)
    exact = x.double() @ weight.double().t()
    y = prepacked.matmul(x, weight)
    assert y.dtype == torch.float32
    rounded = x.to(torch.bfloat16).double() @ weight.double().t()
    error, far = ((found.double() - exact).norm() / exact.norm() for found in (y, rounded))
    assert 1000 * error < far


def test_the_head_keeps_no_copy_in_float32(products):
    """Logits by the weight in bfloat16 are those by its copy in float32, with an adapter beside it or merged."""
    weight, hidden, pair = random(90, 24, dtype=torch.bfloat16), random(7, 24), (random(3, 24), random(90, 3))
    results = []
    for matrix in (weight.float(), weight):
        head, found = torch.nn.Linear(24, 90, bias=False, dtype=torch.bfloat16), []
        head.register_buffer("wide_weight", matrix)
        product = Product({"lm_head": head}, lambda own: own)
        for merge in (False, True):
            product.load({"lm_head": pair}, 0.5, merge=merge)
            found.append(head(hidden))
        results.append(found)
    for expected, found in zip(*results, strict=True):
        assert torch.allclose(expected, found, atol=3e-6 * float(expected.abs().max()))


def test_what_a_device_cannot_multiply_so_is_found_out(monkeypatch, products):
    """It raises, or it is wrong; a CPU is not asked."""
    mixed._right.cache_clear()
    assert mixed._right(CPU)
    assert not mixed.works(CPU)
    right = mixed.product

    def missing(*_):
        raise NotImplementedError

    for function in (missing, lambda x, w: right(x, w).bfloat16().float()):
        monkeypatch.setattr(mixed, "product", function)
        mixed._right.cache_clear()
        assert not mixed._right(CPU)
    mixed._right.cache_clear()
