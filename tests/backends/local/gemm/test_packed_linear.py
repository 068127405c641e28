"""Modules that multiply by prepacked weights, and give them back."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
from rlkit.backends.local.gemm.packed_linear import PackedLinear  # noqa: E402


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("other", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_computes_the_same(bias, other, dtype):
    """With its own weight or another one, for any shape; afterwards it is as it was."""
    torch.manual_seed(0)
    close = {"atol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 2**-7}  # a place of bfloat16
    module = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    plain = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    plain.load_state_dict(module.state_dict())
    own = module.weight
    if other:
        plain.weight.copy_(torch.randn(80, 48))
    packed = PackedLinear(module, plain.weight.detach().clone() if other else None)
    for shape in ((3, 48), (1, 1, 48), (2, 70, 48)):
        x = torch.randn(shape).to(dtype)
        assert torch.allclose(module(x), plain(x), **close)
    assert bool(module.weight.isnan().all()) == other  # nobody reads the wrong one
    packed.remove()
    assert module.weight is own
    assert module(x).equal(torch.nn.functional.linear(x, own, module.bias))
