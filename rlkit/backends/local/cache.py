"""Keys and values of many rows of different lengths in preallocated slots, and the attention that reads them.

What a row computes depends on that row alone, bit for bit, on a CPU in float32: matrix products give the same row
whatever stands in the others as long as their number is a multiple of 4, and keys past a row's end are masked before
the softmax, where they add exact zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from rlkit.backends.sampling import rounded_up

__all__ = ["ATTENTION", "Slots"]

ATTENTION = "rlkit_matmul"
ROWS = 4
LENGTHS = 16


def matmul_attention(
    _: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention by two matrix products; queries that share a key head are stacked, so that no key is copied.

    Args:
        query: [B, H, T, D].
        key, value: [B, H / G, S, D].
        attention_mask: added to the scores, [B, 1, T, S].
        scaling: of the scores; None is D ** -0.5.
        softcap: c tanh(scores / c), for the architectures that have it.

    Returns:
        [B, T, H, D], and no weights.
    """
    rows, heads, length, width = query.shape
    key_heads = key.shape[1]
    stacked = query.reshape(rows, key_heads, heads // key_heads * length, width)
    count = stacked.shape[2]
    if count % ROWS:  # small products choose their kernel by shape, and another kernel rounds otherwise
        stacked = torch.nn.functional.pad(stacked, (0, 0, 0, -count % ROWS))
    scores = (stacked @ key.transpose(-1, -2)) * (width**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        each = attention_mask if length == 1 else attention_mask.repeat(1, 1, heads // key_heads, 1)
        scores[:, :, :count] += each
    weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    out = (weights @ value)[:, :, :count].reshape(rows, heads, length, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, matmul_attention)


class Slots(Cache):
    """One slot per row; slot b holds the keys and values of its row's first tokens.

    transformers' modules see a cache: ``update`` writes at the places that ``at`` named and returns what to attend
    to.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self._store: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows = 0
        self._length = 0
        self._first = 0
        self._places: torch.Tensor | None = None
        self._span = slice(0, 0)
        self._read = 0

    def reserve(self, rows: int, length: int) -> None:
        """Room for ``rows`` rows of ``length`` tokens; what is stored stays."""
        rows, length = rounded_up(rows, ROWS), rounded_up(length, LENGTHS)
        if rows <= self._rows and length <= self._length:
            return
        self._rows = self._rows if rows <= self._rows else max(rows, 2 * self._rows)
        self._length = max(self._length, length if self._length == 0 else rounded_up(length * 5 // 4, LENGTHS))
        self._store = [(self._grown(k), self._grown(v)) for k, v in self._store]

    def free(self) -> None:
        """Gives the memory back."""
        self._store, self._rows, self._length = [], 0, 0

    def at_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """The next forward is one token for each of slots 0..B-1, at ``positions`` [B]; returns its mask [B,1,1,S]."""
        self._first, self._places = 0, positions
        self._read = rounded_up(int(positions.max()) + 1, LENGTHS)
        hidden = torch.arange(self._read, device=positions.device)[None] > positions[:, None]
        return _mask(hidden)[:, None, None]

    def at_span(self, slot: int, start: int, length: int, device: torch.device) -> torch.Tensor:
        """The next forward is tokens start..start+length-1 of one slot; returns its mask [1,1,length,S]."""
        self._first, self._places, self._span = slot, None, slice(start, start + length)
        self._read = rounded_up(start + length, LENGTHS)
        keys = torch.arange(self._read, device=device)
        return _mask(keys[None] > torch.arange(start, start + length, device=device)[:, None])[None, None]

    def copy(self, source: int, first: int, last: int, length: int) -> None:
        """Slots first..last-1 get the first ``length`` tokens of slot ``source``."""
        for keys, values in self._store:
            for x in (keys, values):
                x[first:last, :, :length] = x[source : source + 1, :, :length].clone()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model's attention: stores [B, H, T, D] and returns [B, H, S, D] of keys and of values."""
        while len(self._store) <= layer_idx:
            self._store.append((self._empty(key_states), self._empty(value_states)))
        rows = slice(self._first, self._first + key_states.shape[0])
        out = []
        for stored, new in zip(self._store[layer_idx], (key_states, value_states), strict=True):
            if self._places is None:
                stored[rows, :, self._span] = new
            else:
                stored[torch.arange(new.shape[0], device=new.device), :, self._places] = new[:, :, 0]
            out.append(stored[rows, :, : self._read])
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the next one; positions are always given, so nothing depends on it."""
        del layer_idx
        return self._span.start if self._places is None else 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])

    def _grown(self, x: torch.Tensor) -> torch.Tensor:
        grown = self._empty(x)
        grown[: x.shape[0], :, : x.shape[2]] = x
        return grown


def _mask(hidden: torch.Tensor) -> torch.Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, torch.finfo(torch.float32).min)
