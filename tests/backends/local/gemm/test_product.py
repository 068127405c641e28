"""What linear modules compute in sampling: one product for those that read the same, with adapters or merged ones."""

from __future__ import annotations

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")
from transformers.pytorch_utils import Conv1D  # noqa: E402

from rlkit.backends.local.products.linear import Product, fuse_weights  # noqa: E402
from rlkit.backends.local.products.prepacked import prepack  # noqa: E402
from tests.float64 import distance  # noqa: E402

SIZES = {"q_proj": 48, "k_proj": 16, "v_proj": 16, "o_proj": 24}


def make_model(dtype, bias):
    """Four modules, of which three read the same, and GPT-2's kind of module."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({name: torch.nn.Linear(32, size, bias, dtype=dtype) for name, size in SIZES.items()})
    model["c_attn"] = Conv1D(40, 32).to(dtype)
    return model.requires_grad_(False)


def expected_of(module, x, pair):
    """In float64."""
    weight = module.weight.double() if isinstance(module, torch.nn.Linear) else module.weight.double().T
    y = x.double() @ weight.T + (0.0 if module.bias is None else module.bias.double())
    return y if pair is None else y + 0.25 * (x.double() @ pair[0].double().T) @ pair[1].double().T


@torch.no_grad()
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_compute_what_they_are(merge, dtype):
    """Whatever the shape of what they read, with some adapters, all, none and others; their own weights stay."""
    failed = []
    for bias, fused in itertools.product((True, False), (True, False)):
        plain = make_model(dtype, bias)
        model = copy.deepcopy(plain)
        if fused:
            fuse_weights(model)
        products = Product.for_all(dict(model.items()), prepack)
        assert len(products) == (3 if fused else 5)
        own = {name: module.weight.clone() for name, module in model.items()}
        for names in (["k_proj", "c_attn"], [*SIZES], [], ["q_proj", "o_proj", "c_attn"]):
            adapter = {name: (torch.randn(4, 32), torch.randn(own[name].numel() // 32, 4)) for name in names}
            for product in products:
                product.load(adapter, 0.25, merge=merge)
            for shape in ((3, 32), (1, 1, 32), (2, 70, 32)):
                x = torch.randn(shape).to(dtype)
                found = {name: module(x) for name, module in model.items()}
                for name, y in found.items():
                    off = distance([y.double()], [expected_of(plain[name], x, adapter.get(name))])
                    right = y.dtype == dtype and off < (2**-19 if dtype == torch.float32 else 2**-6)
                    failed += [] if right else [(bias, fused, names, shape, name, off)]
        assert all(torch.equal(module.weight, own[name]) for name, module in model.items())
    assert not failed


@torch.no_grad()
def test_modules_may_read_something_else():
    """In any order, and one of them alone: whose product is kept is told by what was read."""
    model = make_model(torch.float32, bias=False)
    fuse_weights(model)
    Product.for_all(dict(model.items()), prepack)
    x, other = torch.randn(2, 32), torch.randn(2, 32)
    for name, read in (
        *(("q_proj", x), ("k_proj", other), ("v_proj", x), ("k_proj", x), ("q_proj", other), ("q_proj", x)),
        *(("v_proj", other), ("v_proj", x)),
    ):
        torch.testing.assert_close(model[name](read), read @ model[name].weight.T)
    kept = model["q_proj"](x)
    x.add_(1.0)  # between two tokens, not between two modules
    torch.testing.assert_close(model["q_proj"](x) - kept, torch.ones(2, 32) @ model["q_proj"].weight.T)


def test_what_cannot_be_one_matrix_is_none():
    """Inputs or dtypes that differ, and weights that lie apart."""
    for other in (torch.nn.Linear(31, 16), torch.nn.Linear(32, 16, dtype=torch.float64)):
        model = make_model(torch.float32, bias=False)
        model["k_proj"] = other
        fuse_weights(model)
        assert len(Product.for_all(dict(model.items()), prepack)) == 5
