"""How many operations a decoder layer is: each is a launch on a GPU, which takes microseconds however small it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import rlkit
from rlkit._selfcheck import models
from rlkit.backends.local.cache.kv_attention import CachedTokens
from rlkit.backends.local.cache.kv_cache import KVCache
from rlkit.backends.local.gemm.lora_linear import LoraPair
from rlkit.backends.local.model.base import Base, load_base
from rlkit.backends.local.model.defaults import default_dtype
from rlkit.backends.local.model.forward import LlamaForward
from rlkit.backends.local.training.micro_batches import pack

__all__ = ["Launches", "decode", "of_a_layer", "train"]

# Views, and memory that is not written: nothing is launched for them.
_FREE = """
view _unsafe_view _reshape_alias t transpose permute expand slice select split split_with_sizes unsqueeze squeeze
as_strided detach alias empty empty_like new_empty empty_strided new_empty_strided unbind unfold diagonal
"""
FREE = frozenset(_FREE.split())


class Launches(TorchDispatchMode):  # type: ignore[misc]  # which torch does not type
    """Notes the names of operations that a device has to do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.names: list[str] = []
        self._device = device

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = str(operation.name()).partition("::")[2].partition(".")[0]
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]  # noqa: SLF001
        if name not in FREE and any(x.device == self._device for x in tensors):
            self.names.append(name)
            self.look(name, tensors, kwargs)
        return operation(*args, **kwargs)

    def look(self, name: str, tensors: list[torch.Tensor], kwargs: Mapping[str, Any]) -> None:
        """See one; tests refuse some."""


def decode(base: Base, watch: Launches, *, merge: bool) -> list[str]:
    """Return the operations of one decoding step of 3 rows."""
    forward, cache = LlamaForward(base), KVCache()
    forward.load(_adapter(base), 0.5, merge=merge)
    cache.reserve(3, 40)
    tokens, positions = (torch.zeros(3, 1, dtype=torch.int64, device=base.device) for _ in range(2))
    index = torch.arange(3, device=base.device)
    with torch.no_grad():
        for mode in (torch.no_grad(), watch):  # keys and values get their memory in the first
            with mode:
                mask = cache.at(0, positions, 40)
                forward.logits(CachedTokens(tokens, positions, mask, cache, index))
    return watch.names


def train(base: Base, watch: Launches) -> list[str]:
    """Return the operations of the forward and backward pass of a micro-batch, which is a tree."""
    adapter = {name: (a.requires_grad_(), b.requires_grad_()) for name, (a, b) in _adapter(base).items()}
    forward = LlamaForward(base, adapter, 0.5)
    forward.prepare()
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, 200, 10)
    (batch,) = pack([rlkit.Datum.supervised(prompt, rng.integers(3, 200, 5)) for _ in range(3)], 1024)
    ids = torch.zeros(batch.index.size, dtype=torch.int64, device=base.device)
    for mode in (torch.enable_grad(), watch):  # what is compiled is compiled in the first
        with mode:
            out = forward.outputs(batch, {"logprobs": ids}, None)["logprobs"]
            out.backward(torch.ones_like(out))
    return watch.names


def of_a_layer(folder: Path, device: torch.device) -> dict[str, object]:
    """Return operations per layer: what a third layer adds to two."""
    dtype = default_dtype(device)
    bases = [load_base(str(models.build("tiny", folder / f"{n}", layers=n)), dtype, device) for n in (2, 3)]
    if not all(base.llama for base in bases):
        return {"left out": "rlkit's own forward is not used here"}
    ways: dict[str, Callable[[Base], list[str]]] = {
        "decoding, merged": lambda base: decode(base, Launches(device), merge=True),
        "decoding": lambda base: decode(base, Launches(device), merge=False),
        "training": lambda base: train(base, Launches(device)),
    }
    return {name: len(way(bases[1])) - len(way(bases[0])) for name, way in ways.items()}


def _adapter(base: Base, rank: int = 4) -> dict[str, LoraPair]:
    """An adapter on all products of the layers and on the head."""
    pairs = {}
    for name, module in base.model.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            weight: Any = module.weight
            out, width = weight.shape
            pairs[name] = torch.zeros(rank, width, device=base.device), torch.zeros(out, rank, device=base.device)
    return pairs
