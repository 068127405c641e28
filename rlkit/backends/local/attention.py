"""Attention over slots that depends on a row's own tokens alone.

What a token computes depends on the tokens before it alone, bit for bit, on a CPU in float32. Products of weights have
as many rows as ``rows_alike`` asks for. Keys past a token's own are masked before the softmax, where they add exact
zeros, and the sum over keys is taken ``KEYS`` at a time, because a longer one would be split by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlkit.backends.local.cache import Slots

__all__ = ["ATTENTION", "Shared", "SlotAttention", "kernel_attention", "matmul_attention"]

ATTENTION = "rlkit_matmul"
NARROW = 64  # heads up to this width need 4 rows of queries, wider ones 16
KEYS = 256


@attrs.frozen
class Shared:
    """Rows that begin with the same tokens.

    Attributes:
        length: of what they share, a multiple of ``KEYS``, so that sums are cut as for a row by itself.
        groups: indices of the rows, every row in one of them.
    """

    length: int
    groups: list[list[int]]

    @classmethod
    def of(cls, beginnings: Sequence[np.ndarray]) -> Shared | None:
        """What rows that begin so have in common; None where that is not worth it.

        >>> a, b = np.arange(600), np.append(np.arange(300), np.zeros(9))
        >>> Shared.of([a, b, a, b])
        Shared(length=256, groups=[[0, 1, 2, 3]])
        >>> Shared.of([a, b, a[:40]])
        """
        length = min(x.size for x in beginnings) // KEYS * KEYS
        groups: dict[bytes, list[int]] = {}
        for i, x in enumerate(beginnings if length else ()):
            groups.setdefault(x[:length].astype(np.int64).tobytes(), []).append(i)
        return cls(length, list(groups.values())) if 0 < 2 * len(groups) <= len(beginnings) else None


def matmul_attention(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    shared: Shared | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by two matrix products; queries that share a key head are stacked, so that no key is copied.

    Args:
        query: [P, H, T, D]; the rows after the first B are padding.
        key, value: [B, H / G, S, D].
        attention_mask: added to the scores, [B, 1, T, S].
        scaling: of the scores; None is D ** -0.5.
        softcap: c tanh(scores / c), for the architectures that have it.
        shared: which rows begin with the same keys and values; each of those is then read once.

    Returns:
        [P, T, H, D], and no weights.
    """
    padded, heads, length, width = query.shape
    rows, key_heads = key.shape[:2]
    stacked = query[:rows].reshape(rows, key_heads, heads // key_heads * length, width)
    count = stacked.shape[2]
    missing = -count % (4 if width <= NARROW else 16)
    stacked = torch.nn.functional.pad(stacked, (0, 0, 0, missing)) if missing else stacked
    wide = torch.promote_types(query.dtype, torch.float32)  # scores of 20 have two digits in bfloat16
    scores = _scores(stacked.to(wide), key, shared).mul_(width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        each = attention_mask if length == 1 else attention_mask.repeat(1, 1, heads // key_heads, 1)
        scores[:, :, :count] += each
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    out = _weighted(weights, value, 0, shared)
    for start in range(KEYS, value.shape[2], KEYS):
        out += _weighted(weights, value, start, shared)
    out = out[:, :, :count].reshape(rows, heads, length, value.shape[-1]).transpose(1, 2)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 0, 0, padded - rows)).contiguous(), None


def kernel_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor
) -> torch.Tensor:
    """The same by one kernel of the library's: queries that share a key head are rows of it, so that none is copied.

    Args:
        query: [B, H, T, D], already scaled.
        key, value: [B, H / G, S, D].
        visible: bool [B, 1, T, S].

    Returns:
        [B, T, H, D].
    """
    rows, heads, length, width = query.shape
    group = heads // key.shape[1]
    stacked = query.reshape(rows, key.shape[1], group * length, width)
    each = visible if length == 1 else visible.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(stacked, key, value, attn_mask=each, scale=1.0)
    return out.reshape(rows, heads, length, width).transpose(1, 2)


def _scores(queries: torch.Tensor, key: torch.Tensor, shared: Shared | None) -> torch.Tensor:
    """[B, H, C, D] by [B, H, S, D] -> [B, H, C, S]."""
    if shared is None:
        return queries @ key.to(queries.dtype).transpose(-1, -2)
    scores = queries.new_empty(*queries.shape[:3], key.shape[2])
    for rows in shared.groups:
        alike = key[rows[0], :, : shared.length].to(queries.dtype).transpose(-1, -2)
        scores[rows, ..., : shared.length] = _apart(_together(queries[rows]) @ alike, len(rows))
    rest = key[:, :, shared.length :].to(queries.dtype)
    scores[..., shared.length :] = queries @ rest.transpose(-1, -2)
    return scores


def _weighted(weights: torch.Tensor, value: torch.Tensor, start: int, shared: Shared | None) -> torch.Tensor:
    """The part [B, H, C, D] of the sum over keys that begins at ``start``."""
    weights, value = weights[..., start : start + KEYS], value[..., start : start + KEYS, :]
    if shared is None or start >= shared.length:
        return weights @ value
    out = weights.new_empty(*weights.shape[:3], value.shape[3])
    for rows in shared.groups:
        out[rows] = _apart(_together(weights[rows]) @ value[rows[0]], len(rows))
    return out


def _together(x: torch.Tensor) -> torch.Tensor:
    """[n, H, C, K] -> [H, n C, K]."""
    return x.transpose(0, 1).flatten(1, 2)


def _apart(x: torch.Tensor, n: int) -> torch.Tensor:
    """[H, n C, K] -> [n, H, C, K]."""
    return x.unflatten(1, (n, -1)).transpose(0, 1)


AttentionInterface.register(ATTENTION, matmul_attention)


class SlotAttention:
    """Attention of tokens [B, T] over slots, layer after layer, as ``Llama`` calls it: by matrix products on a CPU, by
    the library's kernel elsewhere.

    Args:
        slots: told by ``Slots.at`` where these tokens are.
        mask: what ``Slots.at`` returned.
        shape: (B, T), padding included.
        shared: which of the B rows begin alike.
    """

    def __init__(self, slots: Slots, mask: torch.Tensor, shape: Sequence[int], shared: Shared | None = None) -> None:
        self._slots, self._mask, self._shape, self._shared = slots, mask, shape, shared
        self._visible = None if mask.device.type == "cpu" else mask == 0
        self._layer = 0

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        """From q [B T, H, D], already scaled, k and v [B T, H / G, D] to [B T, H D]."""
        q, k, v = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        keys, values = self._slots.update(k, v, self._layer)
        self._layer += 1
        if self._visible is None:
            out, _ = matmul_attention(None, q, keys, values, self._mask, scaling=1.0, shared=self._shared)
        else:
            out = kernel_attention(q, keys, values, self._visible)
        return out.flatten(0, 1).flatten(1), ()

    def backward(self, *_: Any) -> Any:
        """There is none: samples have no gradient."""
        raise NotImplementedError("attention over slots is for sampling, which has no backward pass")
