"""Attention of the library's modules in training where torch has no kernel for it: capped scores, attention sinks.

The library's own ("eager") attention keeps several numbers of every pair of tokens and head for the backward pass. Here
a block of queries is computed at a time, and again in the backward pass; keys that none of them sees are left out.
"""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from rlkit.backends.local.gemm.lora_linear import upcast

__all__ = ["RECOMPUTED", "recomputed_attention"]

RECOMPUTED = "rlkit_recomputed"
QUERIES = 128  # at once


def recomputed_attention(
    _: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """Return the attention's output [B, T, H, D], and no weights.

    Args:
        query: [B, H, T, D].
        key, value: [B, H / G, S, D].
        attention_mask: added to the scores, [B, 1, T, S].
        scaling: of the scores; None is D ** -0.5.
        softcap: c tanh(scores / c) instead of the scores.
        s_aux: the scores [H] of attention sinks.
    """
    query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    parts = []
    for first in range(0, query.shape[2], QUERIES):
        part = slice(first, first + QUERIES)
        mask = attention_mask[:, :, part]
        arguments = (query[:, :, part], key, value, mask, _seen(mask), softcap, s_aux)
        parts.append(checkpoint(_attend, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    seen: torch.Tensor | slice,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    rows, heads, length, _ = query.shape
    key, value = key[:, :, seen], value[:, :, seen]
    stacked = upcast(query).reshape(rows, key.shape[1], -1, query.shape[3])  # queries of one key head, as rows
    scores = (stacked @ upcast(key).transpose(-1, -2)).view(rows, heads, length, -1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask[..., seen]
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(rows, -1, length, 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : key.shape[2]].to(value.dtype)
    out = weights.reshape(rows, key.shape[1], -1, key.shape[2]) @ value
    return out.view(rows, heads, length, value.shape[3])


def _seen(mask: torch.Tensor) -> torch.Tensor | slice:
    """Return which keys some query sees; all on a GPU, which would have to wait for the answer."""
    if mask.device.type != "cpu":
        return slice(None)
    return (mask > torch.finfo(mask.dtype).min / 2).flatten(0, 2).any(0).nonzero()[:, 0]


AttentionInterface.register(RECOMPUTED, recomputed_attention)
AttentionMaskInterface.register(RECOMPUTED, eager_mask)
