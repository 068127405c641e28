"""Attention of the library's modules over a prefix tree, in training.

A block of queries is computed at a time, and again in the backward pass; keys that none of them sees are left out. On a
CPU that takes less time than a kernel which computes all pairs with a mask. Where torch has no kernel (capped scores,
attention sinks), the library's own attention would keep several numbers of every pair of tokens and head.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from rlkit.backends.local.gemm.lora_linear import upcast

__all__ = ["RECOMPUTED", "recomputed_attention"]

RECOMPUTED = "rlkit_recomputed"
QUERIES = 128  # at once


def recomputed_attention(
    _: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output [B, T, H, D], and no weights.

    Args:
        query: [B, H, T, D].
        key, value: [B, H / G, S, D].
        attention_mask: which keys are seen, bool [B, 1, T, S]; None for those up to the query's own (T = S).
        scaling: of the scores; None is D ** -0.5.
        softcap: c tanh(scores / c) instead of the scores.
        s_aux: the scores [H] of attention sinks.
    """
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    parts = []
    for first in range(0, query.shape[2], QUERIES):
        part = slice(first, min(first + QUERIES, query.shape[2]))
        if attention_mask is None:
            keys: torch.Tensor | slice = slice(part.stop)
            visible = torch.ones(part.stop - first, part.stop, dtype=torch.bool, device=query.device).tril(first)
        else:
            visible = attention_mask[:, :, part]
            keys = _seen(visible)
            visible = visible[..., keys]
        arguments = (query[:, :, part], key, value, visible, keys, softcap, s_aux)
        parts.append(checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    keys: torch.Tensor | slice,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, length, _ = query.shape
    key, value = key[:, :, keys], value[:, :, keys]
    stacked = upcast(query).reshape(rows, key.shape[1], -1, query.shape[3])  # queries of one key head, as rows
    scores = (stacked @ upcast(key).transpose(-1, -2)).view(rows, heads, length, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(rows, -1, length, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    out = weights.reshape(rows, key.shape[1], -1, key.shape[2]) @ value
    return out.view(rows, heads, length, value.shape[3])


def _seen(visible: torch.Tensor) -> torch.Tensor | slice:
    """Return the keys that some query sees; all on a GPU, which would have to wait for the answer."""
    return visible.flatten(0, 2).any(0).nonzero()[:, 0] if visible.device.type == "cpu" else slice(None)


AttentionInterface.register(RECOMPUTED, recomputed_attention)
AttentionMaskInterface.register(RECOMPUTED, sdpa_mask)
