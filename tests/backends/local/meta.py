"""A GPU that is not there: models on the device "meta", stand-ins for its kernels, and what watches over operations."""

from __future__ import annotations

import copy

import attrs
import torch

from rlkit._selfcheck.speed import Launches
from rlkit.backends.local.cache import kv_cache
from rlkit.backends.local.model import llama
from rlkit.backends.local.model.base import load_base
from rlkit.backends.local.model.llama import fuse_layers
from rlkit.backends.local.training import _flex_attention

META = torch.device("meta")
WAITS = frozenset({"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal"})  # for what the device computed

_library = torch.library.Library("rlkit_tests", "DEF")
_library.define("norm(Tensor x, Tensor? weight, float eps) -> (Tensor, Tensor)")
_library.define("norm_backward(Tensor d, Tensor x, Tensor scale, Tensor? weight) -> Tensor")
_library.define("attention(Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor")
_library.define("attention_backward(Tensor d, Tensor q, Tensor k, Tensor v, Tensor mask, float scale) -> Tensor[]")


def _norm(x, weight, eps):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (wide * scale * (1 if weight is None else weight)).to(x.dtype), scale


def _norm_backward(d, x, scale, weight):
    wide, g = x.to(scale.dtype), d.to(scale.dtype) * (1 if weight is None else weight)
    unit = wide * scale
    return ((g - unit * (g * unit).mean(-1, keepdim=True)) * scale).to(x.dtype)


def _attention(q, k, v, mask, scale):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _attention_backward(d, q, k, v, mask, scale):
    return [torch.empty_like(x) for x in (q, k, v)]


for _key in ("CPU", "Meta"):
    _library.impl("norm", _norm, _key)
    _library.impl("norm_backward", _norm_backward, _key)
_library.impl("attention", _attention, "Meta")
_library.impl("attention_backward", _attention_backward, "Meta")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        ctx.save_for_backward(*inputs[:4])
        ctx.scale = inputs[4]
        return torch.ops.rlkit_tests.attention(*inputs)

    @staticmethod
    def backward(ctx, d):
        return *torch.ops.rlkit_tests.attention_backward(d, *ctx.saved_tensors, ctx.scale), None, None


def _kernel(q, k, v, attn_mask, scale):
    """Torch's attention as the one kernel that it is on a GPU, which takes masks that are added and have its dtype."""
    assert attn_mask.dtype == q.dtype
    return _Attention.apply(q, k, v, attn_mask, scale)


def with_fused_norms(monkeypatch):
    """Torch's fused norms, which are one kernel on a GPU alone, as operations that other devices have as well."""
    monkeypatch.setattr(llama, "fused_norm", torch.ops.rlkit_tests.norm)
    monkeypatch.setattr(llama, "fused_norm_backward", torch.ops.rlkit_tests.norm_backward)


def with_kernels(monkeypatch):
    """All that is one kernel on a GPU, for counting on "meta"."""
    with_fused_norms(monkeypatch)
    for module in (kv_cache, _flex_attention):
        monkeypatch.setattr(module, "scaled_dot_product_attention", _kernel)


def meta_base(folder, dtype="bfloat16"):
    """A base whose weights have shapes alone."""
    base = load_base(folder, dtype, "cpu")
    model = copy.deepcopy(base.model).to("meta")
    fuse_layers(model)
    return attrs.evolve(base, model=model, device=META, llama=True, known={})


class Watch(Launches):
    """Refuses what waits for the device, or mixes it with the CPU."""

    def __init__(self):
        super().__init__(META)

    def look(self, name, tensors, kwargs):
        assert name not in WAITS, f"{name} waits for the device"
        assert kwargs.get("device") != torch.device("cpu"), f"{name} brings something to the CPU"
        if name not in ("copy_", "_to_copy"):  # from the CPU; a number there is an argument of the kernel
            devices = {str(x.device) for x in tensors if x.ndim}
            assert len(devices) < 2, f"{name} mixes {devices}"
