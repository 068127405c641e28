"""Products with weights as they lie in memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from rlkit.backends.local.products import prepacked  # noqa: E402
from rlkit.backends.local.products.prepacked import plain_matmul  # noqa: E402


@pytest.fixture(params=["as it comes", "onednn", "onednn fails"])
def library(request, monkeypatch):
    """Whichever computes, on every maker's processor."""

    def fails(*arguments):
        torch._check(False, lambda: "could not create a primitive")  # torch raises a RuntimeError

    if request.param != "as it comes":
        monkeypatch.setattr(prepacked, "_made_by_intel", lambda: False)
    if request.param == "onednn fails":
        monkeypatch.setattr(prepacked, "_plain_onednn", fails)
    prepacked._preferred.cache_clear()
    yield request.param
    prepacked._preferred.cache_clear()


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64, 200])
def test_products_are_those_of_float64(library, rows, dtype):
    """Of weights that lie as [out, in] and as [in, out], of some of their columns, with a bias and without."""
    wide = random(90, 50, dtype=dtype)
    bound = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}[dtype]
    for weight in (wide, wide.t(), wide[:, 8:], wide[8:].t()[::2]):
        x = random(rows, weight.shape[1], seed=1).to(dtype)
        for bias in (None, random(weight.shape[0]).to(dtype)):
            expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
            product = plain_matmul(x, weight, bias)
            assert product.dtype == dtype
            assert product.shape == (rows, weight.shape[0])
            assert rows == 0 or (product.double() - expected).abs().max() <= bound * expected.abs().max()


def test_onednn_is_used_where_it_is_right(library):
    assert not (library == "onednn fails" and prepacked._preferred())
    if library == "onednn" and torch.backends.mkldnn.is_available():
        assert prepacked._preferred()
