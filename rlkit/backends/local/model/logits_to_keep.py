"""Forwards of a library's model that compute the output embedding at some places alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

__all__ = ["hidden_to_keep", "logits_to_keep"]


@contextmanager
def logits_to_keep(model: Any, index: torch.Tensor) -> Iterator[None]:
    """While open, the model computes logits only at the flat positions ``index`` [n] of its [B, T] input.

    The output embedding sees [1, n, H] instead of [B, T, H]; whatever the architecture does to logits afterwards is
    kept.
    """

    def select(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (_at(args[0], index)[None], *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(select)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def hidden_to_keep(model: Any, index: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """While open, a forward appends the hidden states [n, H] at ``index`` to the list and computes one logit row."""
    kept: list[torch.Tensor] = []

    def take(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        kept.append(_at(args[0], index))
        return (kept[-1][:1][None].detach(), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(take)
    try:
        yield kept
    finally:
        handle.remove()


def _at(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])[index]
