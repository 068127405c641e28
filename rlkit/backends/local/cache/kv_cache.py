"""The KV cache: keys and values of many rows of different lengths in preallocated slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.cache_utils import Cache

from rlkit.backends.local.cache.attention_tiles import LENGTHS
from rlkit.backends.sampling import rounded_up

__all__ = ["KVCache", "causal_mask"]


def causal_mask(positions: torch.Tensor, keys: int) -> torch.Tensor:
    """Return what is added to the scores of queries at ``positions`` [B, T]: [B, 1, T, keys], lowest behind each."""
    hidden = torch.arange(keys, device=positions.device) > positions[:, None, :, None]
    mask = torch.zeros(hidden.shape, device=positions.device)
    return mask.masked_fill_(hidden, torch.finfo(torch.float32).min)


class KVCache(Cache):
    """One slot per row; slot b holds the keys and values of its row's first tokens.

    transformers' modules see a cache: ``update`` writes at the places that ``at`` named and returns what to attend
    to.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.store: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._rows = 0
        self._length = 0
        self._slots = slice(0, 0)
        self._places: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))
        self._read = 0

    def reserve(self, rows: int, length: int) -> None:
        """Make room for ``rows`` rows of ``length`` tokens; what is stored stays."""
        if rows <= self._rows and length <= self._length:
            return
        if rows > self._rows:
            self._rows = max(rows, 2 * self._rows)
        if length > self._length:
            self._length = rounded_up(length + length // 2, LENGTHS)  # growing moves everything, so do it seldom
        self._move()

    def resize(self, rows: int, length: int) -> None:
        """Make room for exactly ``rows`` rows of ``length`` tokens where there is less; what is in these stays.

        Slots that more rows had, or longer ones, are given up: rows times length is what memory is spent on.
        """
        if rows > self._rows or length > self._length:
            self._rows, self._length = rows, length
            self._move()

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(x.numel() * x.element_size() for pair in self.store for x in pair)

    def free(self) -> None:
        """Give the memory back."""
        self._rows, self._length = 0, 0
        self.store = [(self._empty(k), self._empty(v)) for k, v in self.store]

    def at(self, first: int, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """Say where the next forward's tokens are, and return its mask [B, 1, T, S].

        Args:
            first: slot of the first row.
            positions: [B, T], places in slots first..first+B-1, all less than ``longest``.
            longest: how many keys of each slot are looked at, rounded up.
        """
        rows = torch.arange(first, first + positions.shape[0], device=positions.device)[:, None]
        self._slots, self._places = slice(first, first + positions.shape[0]), (rows, positions)
        self._read = rounded_up(longest, LENGTHS)
        return causal_mask(positions, self._read)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where keys and values are; they move when slots grow or are freed."""
        return (self._rows, self._length, *(x.data_ptr() for pair in self.store for x in pair))

    def clear(self) -> None:
        """Zero everything: what is masked is multiplied by zero, which would not make infinities harmless."""
        for pair in self.store:
            for x in pair:
                x.zero_()

    def copy(self, source: int, first: int, last: int, length: int) -> None:
        """Copy the first ``length`` tokens of slot ``source`` to slots first..last-1."""
        for keys, values in self.store:
            for x in (keys, values):
                x[first:last, :, :length] = x[source : source + 1, :, :length].clone()

    def read_block(self, slot: int, start: int, end: int) -> torch.Tensor:
        """Return a copy of the keys and values of all layers at start..end-1 of a slot, in one dimension."""
        return torch.cat([x[slot, :, start:end].reshape(-1) for pair in self.store for x in pair])

    def write_blocks(self, slot: int, blocks: Sequence[torch.Tensor]) -> None:
        """Put ``blocks`` of equal lengths, one after the other, at the beginning of a slot."""
        both = torch.stack(list(blocks))
        per_token = sum(x.shape[1] * x.shape[3] for pair in self.store for x in pair)
        length, first = both.shape[1] // per_token, 0
        for pair in self.store:
            for x in pair:
                last = first + x.shape[1] * length * x.shape[3]
                part = both[:, first:last].view(len(blocks), x.shape[1], length, x.shape[3])
                x[slot, :, : len(blocks) * length] = part.transpose(0, 1).flatten(1, 2)
                first = last

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [P, H, T, D], padding aside, and return keys and values [B, H, S, D]; called by the attention."""
        while len(self.store) <= layer_idx:
            self.store.append((self._empty(key_states), self._empty(value_states)))
        rows, places = self._places
        out = []
        for stored, new in zip(self.store[layer_idx], (key_states, value_states), strict=True):
            stored[rows, :, places] = new[: rows.shape[0]].transpose(1, 2)
            out.append(stored[self._slots, :, : self._read])
        return out[0], out[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: rows differ in it, and positions are always given. A model that reads it is found out by the probe."""
        del layer_idx
        return 0

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        return like.new_zeros(self._rows, like.shape[1], self._length, like.shape[3])

    def _move(self) -> None:
        """Move all to slots of the shape that is now asked for, one tensor at a time: none is there twice for long."""
        for i in range(len(self.store)):
            self.store[i] = (self._grow(self.store[i][0]), self.store[i][1])
            self.store[i] = (self.store[i][0], self._grow(self.store[i][1]))

    def _grow(self, x: torch.Tensor) -> torch.Tensor:
        grown = self._empty(x)
        rows, length = min(x.shape[0], self._rows), min(x.shape[2], self._length)
        grown[:rows, :, :length] = x[:rows, :, :length]
        return grown
