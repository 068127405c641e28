"""Batch-invariant attention over the KV cache.

What a token computes depends on the tokens before it alone, bit for bit, on a CPU in float32. Products of weights have
as many rows as ``invariant_row_multiple`` asks for. Keys past a token's own are masked before the softmax, where they
add exact zeros. How many queries are multiplied and how many keys are summed at once is measured (``tile_of``), because
libraries split a sum by its length, each in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import attrs
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rlkit.backends.local.cache.attention_tiles import KEYS, LENGTHS, Tile, tile_of
from rlkit.backends.local.cache.kv_cache import KVCache
from rlkit.backends.local.gemm.lora_linear import upcast
from rlkit.backends.local.model.llama import Llama
from rlkit.backends.local.model.windows import LayerMasks, narrowed

__all__ = ["ATTENTION", "CachedAttention", "CachedTokens", "SharedPrefix", "matmul_attention", "sdpa_attention"]

ATTENTION = "rlkit_matmul"
CAST = 2**17  # numbers of keys in float32 at once, 512 kB: they stay in a core's second cache, new memory costs more


@attrs.frozen
class SharedPrefix:
    """Rows that begin with the same tokens.

    Attributes:
        length: of what they share, a multiple of ``KEYS``, so that sums are cut as for a row by itself.
        groups: indices of the rows, every row in one of them.
    """

    length: int
    groups: list[list[int]]

    @classmethod
    def of(cls, beginnings: Sequence[np.ndarray], versions: Sequence[int]) -> SharedPrefix | None:
        """Return what rows that begin so have in common; None where that is not worth it.

        Args:
            beginnings: tokens of each row.
            versions: of the weights that computed their keys and values.

        >>> a, b = np.arange(600), np.append(np.arange(300), np.zeros(9))
        >>> SharedPrefix.of([a, b, a, b], [0] * 4)
        SharedPrefix(length=256, groups=[[0, 1, 2, 3]])
        >>> SharedPrefix.of([a, b, a, b], [0, 0, 1, 1])
        SharedPrefix(length=256, groups=[[0, 1], [2, 3]])
        >>> SharedPrefix.of([a, b, a[:40]], [0] * 3)
        """
        length = min(x.size for x in beginnings) // KEYS * KEYS
        groups: dict[tuple[bytes, int], list[int]] = {}
        for i, x in enumerate(beginnings if length else ()):
            groups.setdefault((x[:length].astype(np.int64).tobytes(), versions[i]), []).append(i)
        return cls(length, list(groups.values())) if 0 < 2 * len(groups) <= len(beginnings) else None


def matmul_attention(
    _: object,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    shared: SharedPrefix | None = None,
    **__: object,
) -> tuple[torch.Tensor, None]:
    """Attention by two matrix products; queries that share a key head are stacked, so that no key is copied.

    Args:
        query: [P, H, T, D]; the rows after the first B are padding.
        key, value: [B, H / G, S, D].
        attention_mask: added to the scores, [B, 1, T, S].
        scaling: of the scores; None is D ** -0.5.
        softcap: c tanh(scores / c), for the architectures that have it.
        s_aux: the scores [H] of attention sinks, which take their share of each softmax and have no value (gpt-oss).
        shared: which rows begin with the same keys and values; each of those is then read once.

    Returns:
        [P, T, H, D], and no weights.
    """
    padded, heads, length, width = query.shape
    rows, key_heads = key.shape[:2]
    stacked = query[:rows].reshape(rows, key_heads, heads // key_heads * length, width)
    scaling = width**-0.5 if scaling is None else scaling
    each = attention_mask
    if each is not None and length > 1:
        each = each.repeat(1, 1, heads // key_heads, 1)
    tile = Tile(queries=1)
    if query.device.type == "cpu" and query.dtype == torch.float32:
        tile = tile_of(_attend, key_heads, width, value.shape[-1])
    sinks = None if s_aux is None else s_aux.view(key_heads, -1, 1).expand(-1, -1, length).reshape(key_heads, -1, 1)
    out = _attend(stacked, key, value, each, tile, scaling=scaling, softcap=softcap, sinks=sinks, shared=shared)
    out = out.reshape(rows, heads, length, value.shape[-1]).transpose(1, 2)
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, 0, 0, padded - rows)).contiguous(), None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    tile: Tile,
    *,
    scaling: float = 1.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    shared: SharedPrefix | None = None,
) -> torch.Tensor:
    """[B, H, C, D] by keys and values [B, H, S, D], mask [B, 1, 1 or C, S], sinks [H, C, 1]: [B, H, C, D]."""
    count = query.shape[2]
    missing = -count % tile.queries
    stacked = torch.nn.functional.pad(query, (0, 0, 0, missing)) if missing else query
    scores = _scores(upcast(stacked), key, shared).mul_(scaling)  # scores of 20 have two digits in bfloat16
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores[:, :, :count] += mask
    if sinks is not None:  # as many keys as leave the others where sums are cut
        before = scores.new_full((*scores.shape[:3], LENGTHS), torch.finfo(scores.dtype).min)
        before[:, :, :count, :1] = sinks
        scores = torch.cat([before, scores], dim=-1)
    weights = torch.softmax(scores, dim=-1).to(query.dtype)[..., 0 if sinks is None else LENGTHS :]
    out = _weighted(weights, value, 0, tile.keys, shared)
    for start in range(tile.keys, value.shape[2], tile.keys):
        out += _weighted(weights, value, start, tile.keys, shared)
    return out[:, :, :count]


def sdpa_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention by torch's kernel; queries that share a key head are rows of it, so that no key is copied.

    Args:
        query: [B, H, T, D], already scaled.
        key, value: [B, H / G, S, D].
        mask: added to the scores, [B, 1, T, S], in the dtype of the queries, to which torch would convert it each time.

    Returns:
        [B, T, H, D].
    """
    rows, heads, length, width = query.shape
    group = heads // key.shape[1]
    stacked = query.reshape(rows, key.shape[1], group * length, width)
    each = mask if length == 1 else mask.repeat(1, 1, group, 1)
    out = scaled_dot_product_attention(stacked, key, value, attn_mask=each, scale=1.0)
    return out.reshape(rows, heads, length, width).transpose(1, 2)


def _scores(queries: torch.Tensor, key: torch.Tensor, shared: SharedPrefix | None) -> torch.Tensor:
    """[B, H, C, D] by [B, H, S, D] -> [B, H, C, S]."""
    if shared is None:
        return _product(queries, key)
    scores = queries.new_empty(*queries.shape[:3], key.shape[2])
    for rows in shared.groups:
        same = key[rows[0], :, : shared.length].to(queries.dtype).transpose(-1, -2)
        scores[rows, ..., : shared.length] = _apart(_together(queries[rows]) @ same, len(rows))
    scores[..., shared.length :] = _product(queries, key[:, :, shared.length :])
    return scores


def _product(queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, H, C, D] by [B, H, S, D] -> [B, H, C, S] of other keys some rows are cast at a time."""
    if key.dtype == queries.dtype:
        return queries @ key.transpose(-1, -2)
    rows, heads, keys, width = key.shape
    step = max(1, CAST // max(1, heads * keys * width))
    cast = queries.new_empty(min(step, rows), heads, keys, width)
    scores = queries.new_empty(rows, heads, queries.shape[2], keys)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        some = cast[: min(step, rows - start)].copy_(key[part]).flatten(0, 1)
        torch.bmm(queries[part].flatten(0, 1), some.transpose(-1, -2), out=scores[part].flatten(0, 1))
    return scores


def _weighted(
    weights: torch.Tensor, value: torch.Tensor, start: int, keys: int, shared: SharedPrefix | None
) -> torch.Tensor:
    """Return the part [B, H, C, D] of the sum over keys that is about ``keys`` of them from ``start`` on."""
    weights, value = weights[..., start : start + keys], value[..., start : start + keys, :]
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


class CachedAttention:
    """Attention of tokens [B, T] over the KV cache in one layer, as ``Llama`` calls it.

    Args:
        kv_cache: told by ``KVCache.at`` where these tokens are.
        layer: its number.
        mask: [B, 1, T, S], added to the scores: by matrix products on a CPU, by torch's kernel elsewhere.
        shape: (B, T), padding included.
        shared: which of the B rows begin alike.
    """

    def __init__(
        self, kv_cache: KVCache, layer: int, mask: torch.Tensor, shape: Sequence[int], shared: SharedPrefix | None
    ) -> None:
        self._kv_cache, self._layer, self._mask, self._shape, self._shared = kv_cache, layer, mask, shape, shared
        self._matmul = mask.device.type == "cpu"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, tuple[()]]:
        """From q [B T, H, D], already scaled, k and v [B T, H / G, D] to [B T, H D]."""
        q, k, v = (x.view(*self._shape, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        keys, values = self._kv_cache.update(k, v, self._layer)
        if self._matmul:
            out, _ = matmul_attention(None, q, keys, values, self._mask, scaling=1.0, shared=self._shared)
        else:
            out = sdpa_attention(q, keys, values, self._mask)
        return out.flatten(0, 1).flatten(1), ()

    def backward(self, *_: object) -> NoReturn:
        """Raise: samples have no gradient."""
        raise NotImplementedError("attention over the KV cache is for sampling, which has no backward pass")


@attrs.frozen(eq=False)
class CachedTokens:
    """Tokens whose keys and values go to the KV cache, as inputs of a ``Forward``.

    Attributes:
        tokens, positions: [B, T], padding included.
        mask: what ``KVCache.at`` returned for them.
        index: [n], flat places of the tokens whose logits are wanted.
        shared: which of the B rows begin alike; the library's modules do not make use of it.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    kv_cache: KVCache
    index: torch.Tensor
    shared: SharedPrefix | None = None

    def for_llama(self, llama: Llama) -> tuple[torch.Tensor, torch.Tensor, Sequence[CachedAttention], torch.Tensor]:
        """See ``Inputs.for_llama``."""
        mask, queries = self.mask, self.positions[: self.mask.shape[0]]
        mask = mask if mask.device.type == "cpu" else mask.to(llama.dtype)  # as torch's kernel wants it
        masks = {window: narrowed(mask, window, queries) for window in set(llama.windows)}
        attentions = [
            CachedAttention(self.kv_cache, layer, masks[window], self.tokens.shape, self.shared)
            for layer, window in enumerate(llama.windows)
        ]
        return self.tokens.flatten(), self.positions.flatten(), attentions, self.index

    def for_library(
        self,
        device: torch.device,  # noqa: ARG002
        masks: LayerMasks,
        *,
        trees: bool,  # noqa: ARG002
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """See ``Inputs.for_library``."""
        mask = masks.of(self.mask, self.positions[: self.mask.shape[0]])
        arguments = {"input_ids": self.tokens, "position_ids": self.positions, "attention_mask": mask}
        return {**arguments, "past_key_values": self.kv_cache, "use_cache": True}, self.index
