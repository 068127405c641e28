"""Modules that multiply by prepacked weights, and give them back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from rlkit.backends.local.products.prepacked import PackedLinear  # noqa: E402
from tests.float64 import distance  # noqa: E402


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_computes_the_same(bias, other, dtype):
    """With its own weight or another one, for any shape; afterwards it is as it was."""
    torch.manual_seed(0)
    module = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    own = module.weight
    weight = (torch.randn(80, 48) if other else own.detach().clone()).to(dtype)
    packed = PackedLinear(module, weight if other else None)
    for shape in ((3, 48), (1, 1, 48), (2, 70, 48)):
        x = torch.randn(shape).to(dtype)
        found, exact = module(x), x.double() @ weight.double().T + (module.bias.double() if bias else 0.0)
        assert found.dtype == dtype
        # Rounding the product and then the sum is 2^-9 of them; float32 adds up 48 terms.
        assert distance([found.double()], [exact]) < (2**-20 if dtype == torch.float32 else 2**-7)
    assert bool(module.weight.isnan().all()) == other  # nobody reads the wrong one
    packed.remove()
    assert module.weight is own
    assert module(x).equal(torch.nn.functional.linear(x, own, module.bias))
