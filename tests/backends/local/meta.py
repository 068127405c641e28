"""A GPU that is not there: models on the device "meta", stand-ins for its kernels, and recorders of operations."""

from __future__ import annotations

import copy

import attrs
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.backends.local.cache import kv_cache
from rlkit.backends.local.cache.kv_cache import ATTENTION, KVCache
from rlkit.backends.local.model.base import load_base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.model.lora import with_adapter
from rlkit.backends.local.products import linear
from rlkit.backends.local.training import _attention
from rlkit.backends.local.training.forward import training_forward
from rlkit.backends.local.training.micro_batches import pack
from rlkit.types import Datum, Lora

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


def _attend(q, k, v, mask, scale):
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def _attention_backward(d, q, k, v, mask, scale):
    return [torch.empty_like(x) for x in (q, k, v)]


for _key in ("CPU", "Meta"):
    _library.impl("norm", _norm, _key)
    _library.impl("norm_backward", _norm_backward, _key)
_library.impl("attention", _attend, "Meta")
_library.impl("attention_backward", _attention_backward, "Meta")


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps):
        y, scale = torch.ops.rlkit_tests.norm(x, weight, eps)
        ctx.save_for_backward(x, scale, weight)
        return y

    @staticmethod
    def backward(ctx, d):
        return torch.ops.rlkit_tests.norm_backward(d, *ctx.saved_tensors), None, None


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
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, _, weight, eps: _Norm.apply(x, weight, eps))


def with_kernels(monkeypatch):
    """All that is one kernel on a GPU, for counting on "meta"."""
    with_fused_norms(monkeypatch)
    monkeypatch.setattr(linear, "_eps_of", lambda norm: norm.variance_epsilon)  # which compares numbers
    for module in (kv_cache, _attention):
        monkeypatch.setattr(module, "scaled_dot_product_attention", _kernel)


def meta_base(folder, dtype="bfloat16"):
    """A base whose weights have shapes alone."""
    base = load_base(folder, dtype, "cpu")
    model = copy.deepcopy(base.model).to("meta")
    linear.fuse_weights(model)
    return attrs.evolve(base, model=model, device=META)


# Views, and memory that is not written: nothing is launched for them.
_FREE = """
view _unsafe_view _reshape_alias t transpose permute expand slice select split split_with_sizes unsqueeze squeeze
as_strided detach alias empty empty_like new_empty empty_strided new_empty_strided unbind unfold diagonal
"""
FREE = frozenset(_FREE.split())


class Launches(TorchDispatchMode):
    """A recorder of the operations that a device executes."""

    def __init__(self, device):
        super().__init__()
        self.names: list[str] = []
        self._device = device

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = str(operation.name()).partition("::")[2].partition(".")[0]
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name not in FREE and any(x.device == self._device for x in tensors):
            self.names.append(name)
            self.look(name, tensors, kwargs)
        return operation(*args, **kwargs)

    def look(self, name, tensors, kwargs):
        """Look at one operation."""


def decode(base, watch, *, merge):
    """Return the operations of one decoding step of 3 rows."""
    forward, cache = SamplingForward(base, base.tree(ATTENTION)), KVCache()
    forward.load(_adapter(base), 0.5, merge=merge)
    cache.reserve(3, 40)
    tokens, positions = (torch.zeros(3, 1, dtype=torch.int64, device=base.device) for _ in range(2))
    index = torch.arange(3, device=base.device)
    with torch.no_grad():
        for mode in (torch.no_grad(), watch):  # keys and values get their memory in the first
            with mode:
                mask = cache.at(0, positions, 40)
                forward.logits(tokens, positions, mask, cache, index)
    return watch.names


def meta_training(folder, dtype="bfloat16"):
    """What trains a model whose weights have shapes alone."""
    base = load_base(folder, dtype, "cpu")
    model = with_adapter(base, Lora(rank=4, train_unembed=True), 0)
    forward = training_forward(model, base, 1024)  # which compares norms, so on a CPU
    model.to(META)
    return forward


def train(forward, watch):
    """Return the operations of the forward and backward pass of a micro-batch, which is a tree."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 200, 10)
    (batch,) = pack([Datum.supervised(prompt, rng.integers(3, 200, 5)) for _ in range(3)], 1024)
    ids = torch.zeros(batch.index.size, dtype=torch.int64, device=META)
    for mode in (torch.enable_grad(), watch):  # what is compiled is compiled in the first
        with mode:
            out = forward.outputs(batch, {"logprobs": ids}, None)["logprobs"]
            out.backward(torch.ones_like(out))
    return watch.names


def _adapter(base, rank=4):
    """Make an adapter on all products of the layers and on the head."""
    pairs = {}
    for name, module in base.model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            out, width = module.weight.shape
            pairs[name] = torch.zeros(rank, width, device=base.device), torch.zeros(out, rank, device=base.device)
    return pairs


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
