"""Compute what a model computes in float64 throughout: the reference for two ways in float32, and for their bound."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

__all__ = ["distance", "wide_floats", "widen"]


def widen(model):
    """Return a copy of the model with its float32 weights as float64; run it within ``wide_floats``."""
    return copy.deepcopy(model).double()


@contextlib.contextmanager
def wide_floats():
    """Compute in float64 where a model asks for float32 by name, as in ``x.float()`` and ``softmax(dtype=float32)``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wide(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.float:
            return args[0].double()
        args = [torch.float64 if x is torch.float32 else x for x in args]
        kwargs = {k: torch.float64 if x is torch.float32 else x for k, x in (kwargs or {}).items()}
        if function is torch._grouped_mm:  # which takes no float64
            rows = args[0].tensor_split(kwargs["offs"][:-1].long().cpu())
            return torch.cat([x @ weight for x, weight in zip(rows, args[1], strict=True)])
        return function(*args, **kwargs)


def distance(found, exact):
    """Return |found - exact| / |exact| of two lists of arrays or tensors, each taken as one long vector."""
    found, exact = (np.concatenate([np.asarray(x, np.float64).ravel() for x in each]) for each in (found, exact))
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))
