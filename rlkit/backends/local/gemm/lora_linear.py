"""Linear modules that read the same input as one product, with their adapters beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from rlkit.backends.local.gemm.prepacked import Product, packed, product
from rlkit.errors import BackendError

__all__ = ["Adapter", "Fused", "fuse", "in_place", "joined", "wide"]

Adapter = Mapping[str, tuple[torch.Tensor, torch.Tensor]]  # full module name -> (A [r, in], B [out, r])


class Fused:
    """x -> x W^T + bias + scale (x A^T) B^T, the modules' outputs side by side.

    Args:
        weight: [out, in], of all modules together.
        bias: [out], or None.
        sizes: outputs of each module.
        pairs: (A, B) of each module, or None where it has no adapter.
        scale: of the adapters.

    >>> import torch
    >>> one = Fused(torch.eye(2), None, [2], [(torch.ones(1, 2), torch.ones(2, 1))], scale=0.5)
    >>> one.prepare()
    >>> one(torch.tensor([[1.0, 2.0]]))[0]
    tensor([[2.5000, 3.5000]])
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: Sequence[int],
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None],
        scale: float,
    ) -> None:
        self.weight, self.bias, self._sizes = weight, bias, sizes
        self.merged: Product | None = None
        self.a: torch.Tensor | None = None
        self.b: torch.Tensor | None = None
        self.adapt(pairs, scale)

    def adapt(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None], scale: float) -> None:
        """Takes other adapters, from the next ``prepare`` or ``merge`` on."""
        self.scale = scale
        starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        parts = zip(starts, self._sizes, pairs, strict=True)
        self._pairs = [(slice(start, start + size), *pair) for start, size, pair in parts if pair is not None]
        self.parameters = [x for _, a, b in self._pairs for x in (a, b)]

    @torch.no_grad()
    def prepare(self) -> None:
        """Reads the adapters as they are now: all A one above the other, all scaled B in blocks."""
        if not self._pairs:
            self.a = self.b = None
            return
        narrow = torch.cat([a for _, a, _ in self._pairs]).to(self.weight.dtype)
        blocks = narrow.new_zeros(self.weight.shape[0], narrow.shape[0])
        for outputs, inner, _, b in self._blocks():
            blocks[outputs, inner] = (b * self.scale).to(blocks.dtype)
        self.a, self.b = in_place(narrow, self.a), in_place(blocks, self.b)

    @torch.no_grad()
    def merge(self) -> None:
        """Takes the adapters into a copy of the weight: W + scale B A, computed in float32 and cast."""
        own = isinstance(self.merged, torch.Tensor) and self.merged is not self.weight
        place, self.merged = self.merged if own else None, None
        merged = self.weight
        if self._pairs:
            merged = self.weight.to(torch.float32, copy=True)
            for outputs, a, b in self._pairs:
                merged[outputs].addmm_(b.float(), a.float(), alpha=self.scale)
        self.merged = packed(merged.to(self.weight.dtype), place)
        self._pairs, self.parameters = [], []

    @property
    def factors(self) -> list[Product]:
        """Every [out, in] that a call multiplies by."""
        weight = self.weight if self.merged is None else self.merged
        return [x for x in (weight, self.a, self.b) if x is not None]

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, in] -> [N, out], and x A^T for ``gradients``; ``residual`` [N, out] is added."""
        if self.merged is not None:
            y = product(x, self.merged)
            y = y if self.bias is None else y.add_(self.bias)
            return (y if residual is None else residual + y), None
        fits = residual is not None and residual.dtype == x.dtype and self.bias is None
        if fits:
            y = torch.addmm(residual, x, self.weight.t())
        else:
            y = torch.nn.functional.linear(x, self.weight, self.bias)
        low = None
        if self.a is not None and self.b is not None:
            low = x @ self.a.t()
            y.addmm_(low, self.b.t())
        return (y if fits or residual is None else residual + y), low

    def backward(self, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The gradients of x and of x A^T."""
        dx, dlow = dy @ self.weight, self.backward_low(dy)
        if dlow is not None and self.a is not None:
            dx.addmm_(dlow, self.a)
        return dx, dlow

    def backward_low(self, dy: torch.Tensor) -> torch.Tensor | None:
        """The gradient of x A^T alone."""
        return None if self.b is None else dy @ self.b

    def gradients(
        self, x: torch.Tensor, dy: torch.Tensor, low: torch.Tensor | None, dlow: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """Those of ``parameters``, in their dtype."""
        if low is None or dlow is None:
            return []
        da = dlow.t() @ x
        found = []
        for outputs, inner, a, b in self._blocks():
            found.append(da[inner].to(a.dtype))
            found.append((dy[:, outputs].t() @ low[:, inner]).to(b.dtype).mul_(self.scale))
        return found

    def _blocks(self) -> list[tuple[slice, slice, torch.Tensor, torch.Tensor]]:
        found, start = [], 0
        for outputs, a, b in self._pairs:
            found.append((outputs, slice(start, start + a.shape[0]), a, b))
            start += a.shape[0]
        return found


def wide(x: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def in_place(new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """What is new, at the address of the old if it fits there, since recorded steps know addresses."""
    fits = old is not None and old.shape == new.shape and old.dtype == new.dtype
    return old.copy_(new) if fits and old is not None else new


@torch.no_grad()
def fuse(modules: Sequence[Any]) -> None:
    """Makes the weights [out_i, in] of linear modules slices of one tensor, each where the one before ends."""
    whole = torch.cat([module.weight for module in modules])
    start = 0
    for module in modules:
        size = module.weight.shape[0]
        module.weight = nn.Parameter(whole[start : start + size], requires_grad=False)
        start += size


def joined(modules: Sequence[Any]) -> torch.Tensor:
    """The one tensor that ``fuse`` made.

    Raises:
        BackendError: a weight was replaced or moved since.
    """
    weights = [module.weight.detach() for module in modules]
    first, rows = weights[0], 0
    for module, weight in zip(modules, weights, strict=True):
        place = first.data_ptr() + rows * first.shape[1] * first.element_size()
        if weight.data_ptr() != place or weight.dtype != first.dtype:
            raise BackendError(
                f"the weight of {module} is no longer where it was when the model was read; expected the base's "
                "tensors untouched, since products read several of them as one"
            )
        rows += weight.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride())
