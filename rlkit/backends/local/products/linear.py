"""What the library's modules compute by: products of frozen weights, with an adapter, and norms.

While an adapter is trained, autograd of peft's modules keeps and adds more than the numbers need. ``install`` gives
each linear module one function, x W^T + bias + scale (x A^T) B^T, with a backward pass of its own; W is never written,
and is read when it is called, since sharded weights are there then alone. In sampling a module is a ``Product``, whose
weights are arranged once for all the tokens of a snapshot.

In bfloat16 an addition to the residual stream loses what is smaller than a 256th of it. ``widen`` keeps the stream in
float32 while products stay in bfloat16: the embedding gives float32, and norms give the products what they read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.products.prepacked import Weight, keep_address, matmul, plain_matmul, prepack

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "Adapter",
    "LoraPair",
    "Product",
    "adapter_of",
    "fuse_weights",
    "install",
    "install_norms",
    "linear",
    "widen",
]

LoraPair: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # A [r, in], B [out, r]
Adapter: TypeAlias = Mapping[str, LoraPair]  # by the full name of the module


def adapter_of(model: PeftModel) -> dict[str, LoraPair]:
    """Return the parameters of a peft model's adapter: full module name in the base -> (A [r, in], B [out, r])."""
    pairs = {}
    for name, module in model.base_model.model.named_modules():
        if "default" in getattr(module, "lora_A", ()):
            pairs[name] = (module.lora_A["default"].weight, module.lora_B["default"].weight)
    return pairs


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    scale: float = 0.0,
) -> torch.Tensor:
    """Return x W^T + bias + scale (x A^T) B^T, with gradients of x, A and B.

    Args:
        x: [..., in], in the weight's dtype, or in float32 where ``wide_matmul`` works.
        weight: [out, in], of any strides.
        bias: [out].
        a: [r, in], in any dtype.
        b: [out, r].
        scale: of the adapter.

    >>> linear(torch.tensor([[1.0, 2.0]]), torch.eye(2), None, torch.ones(1, 2), torch.ones(2, 1), 0.5)
    tensor([[2.5000, 3.5000]])
    """
    y: torch.Tensor = _Linear.apply(x, weight, bias, a, b, scale)
    return y


class _Linear(torch.autograd.Function):
    # Of y = x W^T + s low B^T with low = x A^T:
    #   dlow = s dy B,  dx = dy W + dlow A,  dA = dlow^T x,  dB = s dy^T low.

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        rows, low = x.reshape(-1, x.shape[-1]), None
        y = matmul(rows, weight, bias)
        ctx.dtypes = None if a is None or b is None else (a.dtype, b.dtype)
        if a is not None and b is not None:
            a, b = a.to(y.dtype), b.to(y.dtype)
            low = plain_matmul(rows, a)
            y.addmm_(low, b.t(), alpha=scale)
        ctx.scale, ctx.shape = scale, x.shape
        ctx.save_for_backward(None if a is None else rows, weight, a, b, low)
        # No view, since modules write to outputs, which autograd forbids for views that a function returns.
        out: torch.Tensor = torch.ops.aten._unsafe_view(y, [*x.shape[:-1], y.shape[1]])  # noqa: SLF001
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight, a, b, low = ctx.saved_tensors
        grad = grad.reshape(-1, grad.shape[-1])
        dx = matmul(grad, weight.t()) if ctx.needs_input_grad[0] else None
        da = db = None
        if a is not None:
            dlow = plain_matmul(grad, b.t())  # without the scale, which the products below have
            if dx is not None:
                dx.addmm_(dlow, a, alpha=ctx.scale)
            scaled, none = {"beta": 0, "alpha": ctx.scale}, grad.new_empty(1)
            da = torch.addmm(none, dlow.t(), rows, **scaled).to(ctx.dtypes[0])
            db = torch.addmm(none, grad.t(), low, **scaled).to(ctx.dtypes[1])
        return None if dx is None else dx.view(ctx.shape), None, None, da, db, None


def install(model: nn.Module) -> None:
    """Make the linear modules of a peft model compute by ``linear``, and its norms as ``install_norms`` does.

    Trained weights and modules of other kinds, such as quantised ones, stay as they are.
    """
    within = {id(m.base_layer) for m in model.modules() if hasattr(m, "base_layer")}  # an adapter calls it no more
    for module in (m for m in model.modules() if id(m) not in within):
        inner: Any = getattr(module, "base_layer", module)
        if type(inner) in (nn.Linear, Conv1D) and not _is_trained(inner):
            module.forward = partial(_by_linear, module)
    install_norms(model)


def install_norms(model: nn.Module) -> None:
    """Make the norms of a model that are ``torch.nn.functional.rms_norm`` compute by it, but for trained ones."""
    for module in model.modules():
        named = type(module).__name__.endswith("RMSNorm")
        if named and not _is_trained(module) and (eps := _eps_of(module)) is not None:
            module.forward = partial(_by_rms_norm, module, eps)


def _is_trained(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


def _by_linear(module: Any, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    inner = getattr(module, "base_layer", module)
    weight, dtype = _weight_of(module)
    x = x.to(dtype)
    if inner is module:
        return linear(x, weight, inner.bias)
    a, b = (half["default"].weight for half in (module.lora_A, module.lora_B))
    return linear(x, weight, inner.bias, a, b, module.scaling["default"])


def _weight_of(module: Any) -> tuple[torch.Tensor, torch.dtype]:
    """Return the weight [out, in] of a linear module, and the dtype of what it reads: a head may read float32."""
    wide = getattr(module, "wide_weight", None)
    if wide is not None:
        return wide, torch.promote_types(wide.dtype, torch.float32)
    inner = getattr(module, "base_layer", module)
    weight = inner.weight if isinstance(inner, nn.Linear) else inner.weight.t()
    return weight, weight.dtype


# Linear modules of one parent that read the same; their weights are one matrix, and their product is one.
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


def _siblings(linears: Mapping[str, nn.Module]) -> list[list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for name in linears:
        parent, _, last = name.rpartition(".")
        groups.setdefault((parent, FUSED.get(last, last)), []).append(name)
    return list(groups.values())


@torch.no_grad()
def fuse_weights(model: nn.Module) -> None:
    """Make the weights of linear modules that read the same slices of one tensor; their values stay."""
    linears = {name: m for name, m in model.named_modules() if type(m) is nn.Linear}
    for modules in ([linears[name] for name in names] for names in _siblings(linears)):
        kinds = {(m.weight.shape[1], m.weight.dtype) for m in modules}
        if len(modules) > len(kinds) == 1:
            parts = torch.cat([m.weight for m in modules]).split([m.weight.shape[0] for m in modules])
            for module, part in zip(modules, parts, strict=True):
                module.weight = nn.Parameter(part, requires_grad=False)


def _whole(weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return weights [out_i, in] as one tensor, if each begins in memory where the one before ends."""
    first, rows = weights[0].detach(), 0
    for x in weights:
        behind = x.storage_offset() == first.storage_offset() + rows * first.shape[1]
        same = x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not (behind and same and x.shape[1] == first.shape[1] and x.dtype == first.dtype):
            return None
        rows += x.shape[0]
    return first if len(weights) == 1 else first.as_strided((rows, first.shape[1]), first.stride())


class Product:
    """The forward of linear modules that read the same, in sampling: x W^T + bias + scale (x A^T) B^T.

    It has no gradient. Adapters are merged into a copy of W, or added; the modules' own weights are never written.

    Args:
        modules: of the library, by name; they compute so from now on. If there are several, the weight of each begins
            in memory where the one before ends.
        arrange: gives their own weight [out, in] as it is multiplied by; asked at the first call, which may never come.
    """

    def __init__(self, modules: Mapping[str, Any], arrange: Callable[[torch.Tensor], Weight]) -> None:
        self.modules, self._arrange = modules, arrange
        self._parts: dict[str, slice] = {}  # of the outputs
        biases, end = [], 0
        for name, module in modules.items():
            weight, self._dtype = _weight_of(module)
            begin, end = end, end + weight.shape[0]
            self._parts[name] = slice(begin, end)
            biases.append(weight.new_zeros(weight.shape[0]) if module.bias is None else module.bias.detach())
            module.forward = self if len(modules) == 1 else partial(self._part_of, name)
        self._bias = None if all(m.bias is None for m in modules.values()) else torch.cat(biases)
        self._weight: Weight | None = None
        self._merged = False
        self._low_rank: tuple[Weight, Weight] | None = None
        self._read: torch.Tensor | None = None  # what the first of several modules read, and what all of them give
        self._given: torch.Tensor | None = None

    @classmethod
    def for_all(cls, linears: Mapping[str, Any], arrange: Callable[[torch.Tensor], Weight]) -> list[Product]:
        """Return the products of linear modules; one for those whose weights ``fuse_weights`` made one."""
        products = []
        for names in _siblings(linears):
            fused = len(names) == 1 or _whole([linears[name].weight for name in names]) is not None
            products += [
                cls({x: linears[x] for x in group}, arrange) for group in ([names] if fused else [[x] for x in names])
            ]
        return products

    @property
    def _own(self) -> torch.Tensor:
        own = _whole([_weight_of(module)[0] for module in self.modules.values()])
        assert own is not None, f"the weights of {', '.join(self.modules)} were moved"  # noqa: S101
        return own

    @torch.no_grad()
    def load(self, adapter: Adapter, scale: float, *, merge: bool) -> None:
        """Take copies of the adapters of its modules, if they have any, in place of those before.

        On a GPU what has the same shape is written to the same address.
        """
        own, pairs = self._own, [(part, *adapter[name]) for name, part in self._parts.items() if name in adapter]
        place = self._weight if self._merged and isinstance(self._weight, torch.Tensor) else None
        before, self._low_rank = self._low_rank, None
        self._weight, self._merged = None, merge and (bool(pairs) or place is not None)
        if self._merged:
            merged = own.to(torch.promote_types(own.dtype, torch.float32), copy=True)
            for part, a, b in pairs:
                merged[part].addmm_(b.to(merged.dtype), a.to(merged.dtype), alpha=scale)
            self._weight = prepack(merged.to(self._dtype), place)
        elif pairs:  # all A one above the other, and all scaled B as a block diagonal
            low = torch.cat([a for _, a, _ in pairs]).to(self._dtype)
            high, end = low.new_zeros(own.shape[0], low.shape[0]), 0
            for part, a, b in pairs:
                begin, end = end, end + a.shape[0]
                high[part, begin:end] = b * scale
            arrange = prepack if self._dtype == torch.float32 else keep_address
            self._low_rank = arrange(low, before and before[0]), arrange(high, before and before[1])

    @property
    def weight(self) -> Weight:
        """The [out, in] that a call multiplies by first: the modules' own, or with the adapter merged."""
        if self._weight is None:
            self._weight = self._arrange(self._own)
        return self._weight

    @property
    def addresses(self) -> tuple[int, ...]:
        """Return where that is which ``load`` made."""
        made = (self._weight if self._merged else None, *(self._low_rank or ()))
        return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in made)

    def __call__(self, x: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Map [..., in] to [..., out]."""
        x = x.to(self._dtype)
        y = matmul(x, self.weight, self._bias)
        if self._low_rank is not None:
            low, high = matmul(x, self._low_rank[0]), self._low_rank[1]
            if isinstance(high, torch.Tensor):  # rounded once, as in training: small steps are lost in both or neither
                y.view(-1, y.shape[-1]).addmm_(low.flatten(0, -2), high.t())
            else:  # addmm_ is not batch-invariant
                y.add_(matmul(low, high))
        return y

    def _part_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        part = self._parts[name]
        if part.start == 0 or x is not self._read or self._given is None:
            self._read, self._given = x, self(x)
        given = self._given[..., part]
        if part.stop == self._given.shape[-1]:  # of the last module
            self._read = self._given = None
        return given


def _by_rms_norm(module: Any, eps: float, x: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    return F.rms_norm(x, weight.shape, weight if weight.dtype == x.dtype else weight.to(x.dtype), eps)


@torch.no_grad()
def _eps_of(module: nn.Module) -> float | None:
    """Return what a norm adds to the mean square, if it is ``rms_norm`` with a weight as it is; else None."""
    weight = getattr(module, "weight", None)
    eps = next((x for name in ("variance_epsilon", "eps") if isinstance(x := getattr(module, name, None), float)), None)
    reads = inspect.signature(module.forward).parameters  # some take a gate besides
    if not isinstance(weight, nn.Parameter) or weight.ndim != 1 or eps is None or len(reads) != 1:
        return None
    x = torch.randn(3, weight.numel(), generator=torch.Generator().manual_seed(0))
    x = x.to(weight.device, torch.promote_types(weight.dtype, torch.float32))
    same = torch.allclose(module(x), F.rms_norm(x, weight.shape, weight.to(x.dtype), eps), rtol=1e-5, atol=1e-6)
    return eps if same else None


def widen(model: Any, layers: Sequence[nn.Module], head: torch.Tensor | None) -> None:
    """Keep the residual stream of a model in bfloat16 in float32, from its embedding to its head, after ``install``.

    Args:
        model: each of whose layers reads the stream through norms alone and adds to it what linear modules give.
        layers: of it.
        head: the weight of the output head, as ``linear`` takes it with float32; None if nobody reads logits.
    """
    model.get_input_embeddings().register_forward_hook(lambda _, __, out: out.float())
    for module in (m for layer in layers for m in layer.modules() if type(m).__name__.endswith("RMSNorm")):
        module.forward = partial(_rounded, module, module.forward)
    if head is not None:
        module = model.get_output_embeddings()
        module.register_buffer("wide_weight", head, persistent=False)  # so that it goes where the model goes
        module.forward = partial(_by_linear, module)


def _rounded(module: Any, norm: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return norm(x).to(module.weight.dtype)
