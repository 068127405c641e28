"""The layer for GPUs computes what the layer for CPUs does; with stand-ins for the kernels that a CPU lacks."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from rlkit.backends.local.model import llama  # noqa: E402
from rlkit.backends.local.model.llama import Layer  # noqa: E402
from tests.backends.local import meta  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _standins(monkeypatch):
    meta.with_fused_norms(monkeypatch)
    tried = llama.fused_works
    tried.cache_clear()
    yield
    tried.cache_clear()


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 0.02)])
def test_both_layers_agree(dtype, tolerance, normed):
    """With norms of queries and keys and without."""
    kinds = (Layer, llama.FusedLayer)
    expected, found = (llama.pass_through(kind, CPU, dtype, normed=normed) for kind in kinds)
    assert expected.dtype == found.dtype
    assert (expected - found).norm() < tolerance * expected.norm()


def test_the_comparison_at_connect_bites(monkeypatch):
    """A norm that is off by a tenth, and a kernel that is not there, each with a warning."""
    assert llama.fused_works(CPU, torch.bfloat16)
    right = llama.fused_norm

    def missing(*_):
        torch._check_not_implemented(False, lambda: "no such kernel")

    for dtype in (torch.float32, torch.bfloat16):
        for function, told in ((lambda *x: right(*x) * 1.1, "numbers differ by"), (missing, "no such kernel")):
            monkeypatch.setattr(llama, "fused_norm", function)
            llama.fused_works.cache_clear()
            with pytest.warns(UserWarning, match=told):
                assert not llama.fused_works(CPU, dtype)


def test_which_layer_a_device_gets(monkeypatch):
    """A GPU of CUDA the fused one if it works there; CPUs and MPS the other."""
    monkeypatch.setattr(llama, "fused_works", lambda *_: True)
    found = [llama.layer_class(torch.device(x), torch.bfloat16) for x in ("cuda", "cpu", "mps")]
    assert found == [llama.FusedLayer, Layer, Layer]
