"""Base weights that do not fit: each rank has a part of every layer's, and all gather a layer while it is computed.

Fully sharded data parallelism (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277) of frozen weights, by torch's
``fully_shard``. Its gathers pair up by order alone, so all ranks compute the same layers in the same order: in each
round one micro-batch, in one pass of the library's modules, or two tokens that count for nothing; and a rank that
fails in the middle leaves. Adapters, embeddings and the output head are whole everywhere.
"""

from __future__ import annotations

import contextlib
import ctypes
from typing import TYPE_CHECKING

import attrs
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from rlkit.backends.local.model.forward import layers_of
from rlkit.backends.local.training.micro_batches import pack
from rlkit.backends.local.training.trainer import Inputs
from rlkit.errors import ConfigError
from rlkit.types import Datum

if TYPE_CHECKING:
    from peft import PeftModel

    from rlkit.backends.local.model.base import Base

__all__ = ["make_idle_inputs", "make_mesh", "shard"]


def shard(base: Base, model: PeftModel, mesh: DeviceMesh, device: torch.device) -> Base:
    """Leave this rank's part of each layer of a peft model in memory, and put the rest on its device.

    Args:
        base: what it adapts, with whole weights on a CPU; it is not changed.
        model: whose adapters all ranks keep.
        mesh: of all ranks.
        device: of this one.

    Returns:
        ``base`` with the modules of ``model`` for its own. They cannot be copied.

    Raises:
        ConfigError: it has no layers that can be told apart, or they share weights.
    """
    kind, layers = base.kind, layers_of(model)
    owners = [id(p) for layer in layers for p in {*layer.parameters()}]
    if not layers or len(owners) != len({*owners}):
        what = "shares weights between its layers" if layers else "has no layers that transformers names as such"
        raise ConfigError("shard", f"got True, but a {kind} model {what}", "False for this model")
    owned = {p for layer in layers for p in layer.parameters() if not p.requires_grad}
    whole = {p for p in model.parameters() if p not in owned}
    for module in [*layers, model]:  # of which the last has nothing but what layers share: memory to gather in
        fully_shard(module, mesh=mesh, reshard_after_forward=True, ignored_params=whole)
    model.to(device)
    if device.type == "cpu":
        _return_freed_memory()
    return attrs.evolve(base, model=model.get_base_model(), device=device)


def _return_freed_memory() -> None:
    """Have glibc give each freed block of 4 MB or more back: kept ones would add up to the memory of whole weights."""
    with contextlib.suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 2**22)  # M_MMAP_THRESHOLD


def make_mesh(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return all ranks of a group, each with such a device."""
    return DeviceMesh.from_group(group, device.type)


def make_idle_inputs(device: torch.device) -> Inputs:
    """Return what a rank computes that has no micro-batch: the logprob of one token."""
    (batch,) = pack([Datum([0, 0], [0, 1])], 2)
    return Inputs(batch, {"logprobs": torch.zeros(1, dtype=torch.int64, device=device)}, None)
