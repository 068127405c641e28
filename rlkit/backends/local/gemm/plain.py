"""x W^T with a weight as it lies in memory, by the library that is fastest on this processor."""

from __future__ import annotations

import functools

import torch

from rlkit.backends.local.gemm import mkl

__all__ = ["plain_matmul", "torch_matmul"]


def plain_matmul(x: torch.Tensor, weight: torch.Tensor, summand: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + summand.

    In float32 on a CPU that MKL is not written for, oneDNN computes 1.05 to 1.5 times as much in the same time, with
    weights of either layout. Where a gradient is recorded, it is torch's own product.

    Args:
        x: [N, in].
        weight: [out, in], of any strides.
        summand: a bias [out] or a residual [N, out], of the same dtype.

    >>> plain_matmul(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0]]))
    tensor([[12.]])
    """
    if _by_onednn(x, weight, *(() if summand is None else (summand,))):
        return _onednn(x, weight, summand)
    return torch_matmul(x, weight, summand)


def torch_matmul(x: torch.Tensor, weight: torch.Tensor, summand: torch.Tensor | None = None) -> torch.Tensor:
    """Return x W^T + summand as torch's modules compute it, and as ``batch_invariance`` measures it: for sampling."""
    return x @ weight.t() if summand is None else torch.addmm(summand, x, weight.t())


def _by_onednn(*tensors: torch.Tensor) -> bool:
    if not all(t.dtype == torch.float32 and t.device.type == "cpu" and t.numel() for t in tensors):
        return False
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)  # oneDNN's have no derivative
    return not recorded and _preferred()


def _onednn(x: torch.Tensor, weight: torch.Tensor, summand: torch.Tensor | None) -> torch.Tensor:
    # torch.compile computes linear layers with it; it has no public name.
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # noqa: SLF001
    return out if summand is None else out.add_(summand)


@functools.cache
def _preferred() -> bool:
    """Return whether this build of torch has oneDNN's products, they are right, and MKL's are not the better ones."""
    if mkl.preferred() or not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x, other = (torch.randn(size, generator=generator) for size in ((48, 80), (200, 80), (200, 48)))
    try:
        for a, b in ((x, weight), (x[:1], weight), (other, weight.t()), (other[:, 8:], weight.t()[:, 8:])):
            expected = a.double() @ b.double().t()
            if bool((_onednn(a, b, None).double() - expected).abs().max() > 1e-5 * float(expected.abs().max())):
                return False
    except (AttributeError, RuntimeError, TypeError, NotImplementedError):
        return False
    return True
