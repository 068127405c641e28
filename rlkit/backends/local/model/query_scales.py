"""Queries that are scaled by their positions, as those of Llama 4's layers without rotary embeddings are.

A query at position t is multiplied by 1 + a ln(1 + floor((t + 1) / f)) (arXiv 2501.19399). The library takes for t the
columns that its cache has, which are positions only where a row stands alone and begins in the first of them. Here t is
the position that the forward pass is given, and so rows of unequal lengths and packed sequences are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["scale_queries_by_position"]


def scale_queries_by_position(model: nn.Module) -> None:
    """Let the layers of ``model`` that scale their queries do so by the positions that they are given.

    The modules are this model's own. Adapters of queries are in them already, or are hooks that run first.
    """
    for layer in model.modules():
        attention: Any = getattr(layer, "self_attn", None)
        if not getattr(attention, "attn_temperature_tuning", False) or getattr(attention, "use_rope", True):
            continue
        attention.attn_temperature_tuning = False  # which is the library's way
        scale = _Scale(float(attention.floor_scale), float(attention.attn_scale))
        layer.register_forward_pre_hook(scale.take_positions, with_kwargs=True)
        attention.q_proj.register_forward_hook(scale.multiply)


class _Scale:
    def __init__(self, floor: float, factor: float) -> None:
        self._floor, self._factor = floor, factor
        self._scale = torch.ones(1)

    def take_positions(self, _: nn.Module, __: tuple[object, ...], arguments: Mapping[str, Any]) -> None:
        """Compute the scales [B, T, 1] of a layer's tokens, at the ``position_ids`` [B, T] among its arguments."""
        steps = torch.floor((arguments["position_ids"].float() + 1.0) / self._floor)
        self._scale = (torch.log1p(steps) * self._factor + 1.0)[..., None]

    def multiply(self, _: nn.Module, __: tuple[object, ...], queries: torch.Tensor) -> torch.Tensor:
        """Return the scaled queries [B, T, H D]."""
        return (queries * self._scale).to(queries.dtype)
