"""Linear modules that read the same input, fused into one product, with their LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from rlkit.backends.local.products import prepacked
from rlkit.backends.local.products.prepacked import Prepacked, Weight, matmul, prepack, torch_matmul
from rlkit.errors import BackendError

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["Adapter", "LoraLinear", "LoraPair", "adapter_of", "fuse_weights", "fused_weight", "keep_address", "upcast"]

LoraPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r]
Adapter: TypeAlias = Mapping[str, LoraPair]  # by the full name of the module


class LoraLinear:
    """x -> x W^T + bias + scale (x A^T) B^T, the modules' outputs side by side.

    Args:
        weight: [out, in], of all modules together.
        bias: [out], or None.
        sizes: outputs of each module.
        pairs: (A, B) of each module, or None where it has no adapter.
        scale: of the adapters.

    >>> import torch
    >>> one = LoraLinear(torch.eye(2), None, [2], [(torch.ones(1, 2), torch.ones(2, 1))], scale=0.5)
    >>> one.prepare()
    >>> one(torch.tensor([[1.0, 2.0]]))
    tensor([[2.5000, 3.5000]])
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: Sequence[int],
        pairs: Sequence[LoraPair | None],
        scale: float,
    ) -> None:
        self.weight, self.bias, self._sizes = weight, bias, sizes
        self.packed: Weight | None = None  # what calls multiply by instead, with the adapters merged or separate
        self.a: torch.Tensor | None = None
        self.b: torch.Tensor | None = None
        self.attach(pairs, scale)

    def attach(self, pairs: Sequence[LoraPair | None], scale: float) -> None:
        """Take other adapters, from the next ``prepare`` or ``merge`` on."""
        self.scale = scale
        starts = [sum(self._sizes[:i]) for i in range(len(self._sizes))]
        parts = zip(starts, self._sizes, pairs, strict=True)
        self._pairs = [(slice(start, start + size), *pair) for start, size, pair in parts if pair is not None]

    @torch.no_grad()
    def prepare(self, packed: Weight | None = None) -> None:
        """Read the adapters as they are now: all A one above the other, all scaled B as a block diagonal.

        ``packed`` is the weight itself, for sampling, prepacked where that is worth it.
        """
        self.packed = packed if isinstance(packed, Prepacked) else None
        if not self._pairs:
            self.a = self.b = None
            return
        stacked = torch.cat([a for _, a, _ in self._pairs]).to(self.weight.dtype)
        blocks, start = stacked.new_zeros(self.weight.shape[0], stacked.shape[0]), 0
        for outputs, a, b in self._pairs:
            blocks[outputs, start : start + a.shape[0]] = (b * self.scale).to(blocks.dtype)
            start += a.shape[0]
        self.a, self.b = keep_address(stacked, self.a), keep_address(blocks, self.b)

    @torch.no_grad()
    def merge(self) -> None:
        """Merge the adapters into a prepacked copy of the weight: W + scale B A, computed in float32 and cast."""
        copied = isinstance(self.packed, torch.Tensor) and self.packed is not self.weight
        place, self.packed = self.packed if copied else None, None
        merged = self.weight
        if self._pairs:
            merged = self.weight.to(torch.float32, copy=True)
            for outputs, a, b in self._pairs:
                merged[outputs].addmm_(b.float(), a.float(), alpha=self.scale)
        self.packed = prepack(merged.to(self.weight.dtype), place)
        self._pairs, self.a, self.b = [], None, None

    @property
    def weights(self) -> list[Weight]:
        """Return every [out, in] that a call multiplies by."""
        weight = self.weight if self.packed is None else self.packed
        return [x for x in (weight, self.a, self.b) if x is not None]

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map [N, in] to [N, out]; ``residual`` [N, out] is added."""
        if residual is not None and self._adds_in_float32(x, residual):
            return self._onto(residual, x)
        # The product adds one summand for free: a residual of its dtype, or else the bias. Prepacked ones add none.
        fits = residual is not None and residual.dtype == x.dtype and self.bias is None and self.packed is None
        if self.packed is not None:
            y = matmul(x, self.packed)
            y = y if self.bias is None else y.add_(self.bias)
        else:
            y = torch_matmul(x, self.weight, residual if fits else self.bias)
        if self.a is not None and self.b is not None:
            y.addmm_(x @ self.a.t(), self.b.t())
        return y if fits or residual is None else residual + y

    def _adds_in_float32(self, x: torch.Tensor, residual: torch.Tensor) -> bool:
        wide = x.dtype == torch.bfloat16 and residual.dtype == torch.float32 and self.bias is None
        return wide and prepacked.works(x.device)

    def _onto(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Add all to a residual in float32, where a product can do that."""
        weight = self.weight if self.packed is None else self.packed
        assert isinstance(weight, torch.Tensor), "weights can be prepacked on CPUs only"  # noqa: S101
        y = prepacked.add_product(residual, x, weight.t())
        if self.a is None or self.b is None:
            return y
        return prepacked.add_product(y, x @ self.a.t(), self.b.t())


def adapter_of(model: PeftModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the parameters of a peft model's adapter: full module name in the base -> (A [r, in], B [out, r])."""
    pairs = {}
    for name, module in model.base_model.model.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            pairs[name] = (module.lora_A["default"].weight, module.lora_B["default"].weight)
    return pairs


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def keep_address(new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Copy ``new`` into the old buffer where it fits, so that recorded CUDA graphs stay valid."""
    fits = old is not None and old.shape == new.shape and old.dtype == new.dtype
    return old.copy_(new) if fits and old is not None else new


@torch.no_grad()
def fuse_weights(modules: Sequence[nn.Linear]) -> None:
    """Make the weights [out_i, in] of linear modules slices of one tensor, each where the one before ends."""
    whole = torch.cat([module.weight for module in modules])
    start = 0
    for module in modules:
        size = module.weight.shape[0]
        module.weight = nn.Parameter(whole[start : start + size], requires_grad=False)
        start += size


def fused_weight(modules: Sequence[nn.Linear]) -> torch.Tensor:
    """Return the one tensor that ``fuse_weights`` made.

    Raises:
        BackendError: a weight was replaced or moved since.
    """
    weights = [module.weight.detach() for module in modules]
    first, rows = weights[0], 0
    whole = first.untyped_storage().data_ptr()
    for module, weight in zip(modules, weights, strict=True):
        behind = weight.storage_offset() == first.storage_offset() + rows * first.shape[1]
        if weight.untyped_storage().data_ptr() != whole or not behind or weight.dtype != first.dtype:
            raise BackendError(
                f"the weight of {module} was moved after the model was loaded; expected the base's tensors "
                "unchanged, because products read several of them as one"
            )
        rows += weight.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride())
