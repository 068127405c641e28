"""Reading a checkpoint so that each rank keeps a part of every weight, and holds one whole weight at a time at most."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

__all__ = ["ShardReader", "is_sharded"]

_EAGER = "HF_DEACTIVATE_ASYNC_LOAD"  # or transformers reads ahead, as much as it can


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether ranks share a weight out; vectors, as norms and biases have, stay whole on each."""
    return bool(parameter.ndim >= 2)


class ShardReader:
    """What one rank keeps of the weights that ``from_pretrained`` reads.

    Args:
        rank: of this process.
        size: how many there are.

    Attributes:
        peak: bytes of weights that were in memory at once at most.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._pieces: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        self._thread = 0
        self.peak = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the pieces that no one took yet."""
        return sum(piece.numel() * piece.element_size() for _, piece in self._pieces.values())

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Leave a tensor without memory in place of each weight that this thread puts into a module meanwhile."""
        self._thread = threading.get_ident()
        before = os.environ.get(_EAGER)
        os.environ[_EAGER] = "1"
        handle = register_module_parameter_registration_hook(self._keep)
        try:
            yield
        finally:
            handle.remove()
            if before is None:
                del os.environ[_EAGER]
            else:
                os.environ[_EAGER] = before

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return this rank's piece [ceil(n / size)] of a weight of n numbers and forget it; None for one not read."""
        entry = self._pieces.pop(id(parameter), None)
        return None if entry is None else entry[1]

    def _keep(self, _: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or not is_sharded(parameter):
            return None
        if threading.get_ident() != self._thread or not getattr(parameter, "_is_hf_initialized", False):
            return None  # somebody else's; or it is not in the checkpoint and is made up
        flat = parameter.detach().reshape(-1)
        length = -(-flat.numel() // self._size)
        piece = flat.new_zeros(length, device="cpu")
        part = flat[self._rank * length : (self._rank + 1) * length]
        piece[: part.numel()] = part
        empty = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), requires_grad=False)
        vars(empty).update(vars(parameter))  # by which transformers knows that it was read
        self._pieces[id(empty)] = empty, piece
        self.peak = max(self.peak, self.nbytes + flat.numel() * flat.element_size())
        return empty
