"""Linear modules of a library's model that multiply by prepacked weights, for sampling on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rlkit.backends.local.gemm.prepacked import Weight, matmul, prepack

__all__ = ["PackedLinear"]


class PackedLinear:
    """What a linear module's forward does, without a gradient, by a prepacked weight.

    Args:
        module: the module, which computes so until ``remove``.
        weight: [out, in], another one than its own; the module's is then not a number, so that nobody reads the wrong
            one past its forward. Without one, its own is prepacked when it is first called.
        prepack_own: how.
    """

    def __init__(
        self,
        module: nn.Linear,
        weight: torch.Tensor | None = None,
        prepack_own: Callable[[torch.Tensor], Weight] = prepack,
    ) -> None:
        self._module, self._own, self._prepack_own = module, module.weight, prepack_own
        self._packed = None if weight is None else prepack(weight)
        if weight is not None:
            nothing = torch.full((1, 1), torch.nan, dtype=weight.dtype, device=weight.device)
            module.weight = nn.Parameter(nothing.expand(weight.shape), requires_grad=False)
        module.forward = self

    @property
    def weight(self) -> Weight:
        """[out, in] as it is multiplied by."""
        if self._packed is None:
            self._packed = self._prepack_own(self._own.detach())
        return self._packed

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        out = matmul(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)
        return out if self._module.bias is None else out.add_(self._module.bias)

    def remove(self) -> None:
        """Let the module compute as before."""
        del self._module.forward
        self._module.weight = self._own
