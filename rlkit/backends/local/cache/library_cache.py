"""transformers' cache of rows that are decoded together, for any architecture whose cache is made of known layers.

A cache is a list of tensors, whatever the family. Each has a row for every sequence. Keys and values have an axis of
columns as well: rows end in the same column and begin in different ones, so that all of them write their next token to
the same place. States of recurrences and convolutions have no such axis. So a row is removed by putting the last one in
its place, and sequences join by being copied after the last row.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from rlkit._fallback import NotSupportedHere

__all__ = ["RowCache"]

ROOM = 64  # columns made at once


class AttentionLayer(DynamicLayer):
    """Keys and values [R, H, C, D] with room for more rows and columns than there are.

    Args:
        window: how many tokens are seen; None for all.

    Attributes:
        end: columns that are filled.
    """

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def __init__(self, window: int | None = None) -> None:
        super().__init__()
        self.window, self.end = window, 0
        self.is_sliding = window is not None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the next columns, and return all that may be seen from them."""
        rows, begin = key_states.shape[0], self.end
        first, self.end = self._first(), begin + key_states.shape[2]
        if self.keys is None or self.values is None:
            self.keys, self.values, self.is_initialized = key_states, value_states, True
            return key_states, value_states
        self.keys[:rows, :, begin : self.end] = key_states
        self.values[:rows, :, begin : self.end] = value_states
        return self.keys[:rows, :, first : self.end], self.values[:rows, :, first : self.end]

    def get_seq_length(self) -> int:
        """Return how many columns are filled."""
        return self.end

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many columns ``update`` returns, and the first of them."""
        first = self._first()
        return self.end + query_length - first, first

    def _first(self) -> int:
        return 0 if self.window is None else max(0, self.end - self.window + 1)


class HybridLayer(AttentionLayer, LinearAttentionAndFullAttentionLayer):
    """Keys, values and states of a layer that has both."""

    def __init__(self, window: int | None, states: int) -> None:
        AttentionLayer.__init__(self, window)
        LinearAttentionLayer.__init__(self, number_of_states=states)


class IndexedLayer(AttentionLayer, DynamicIndexedLayer):
    """Keys, values, and the keys [R, 1, C, D] of an indexer, which chooses the tokens that are seen.

    Attributes:
        index_end: columns of the indexer that are filled.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index: torch.Tensor | None = None
        self.index_end = 0

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write the next columns [R, T, D], and return all."""
        return self.update_index(indexer_key_states[:, None])[:, 0]

    def update_index(self, idx_k: torch.Tensor) -> torch.Tensor:
        """Write the next columns [R, 1, T, D], and return all; MiniMax's name of it."""
        begin, self.index_end = self.index_end, self.index_end + idx_k.shape[2]
        if self.index is None:
            self.index = idx_k
            return idx_k
        self.index[: idx_k.shape[0], :, begin : self.index_end] = idx_k
        return self.index[: idx_k.shape[0], :, : self.index_end]


@attrs.frozen
class _Leaf:
    """A tensor of the cache: where the library finds it, and whether it has columns."""

    owner: Any  # a mapping or a list
    name: str | int
    columns: bool


class RowCache:
    """The cache of some rows.

    Args:
        library: an empty one of the kind that the model's forward makes.

    Attributes:
        library: what the model's forward gets.
        buffers: its tensors, with room for more rows and columns than there are.
        starts: int64 [B], the column of each row's first token.
        end: columns that are filled.

    Raises:
        NotSupportedHere: the model's cache has layers of another kind.
    """

    def __init__(self, library: DynamicCache) -> None:
        self.library = library
        library.layers = [_own(layer) for layer in library.layers]
        library.layer_class_to_replicate = None if library.layers else AttentionLayer
        self.starts = np.zeros(0, np.int64)
        self.end = 0
        self.buffers: list[torch.Tensor] = []

    @property
    def columns(self) -> bool:
        """Return whether any layer has columns."""
        return any(leaf.columns for leaf in self._leaves())

    @property
    def nbytes(self) -> int:
        """Return the size of its tensors."""
        return sum(x.nbytes for x in self.buffers)

    def reserve(self, columns: int) -> None:
        """Make room for so many columns more."""
        wide = [x for x, leaf in zip(self.buffers, self._leaves(), strict=True) if leaf.columns]
        if wide and self.end + columns > wide[0].shape[2]:
            self._rebuild(self.buffers[0].shape[0], 0, columns)

    def advance(self, rows: int, columns: int) -> None:
        """Take note of a forward pass that wrote so many columns."""
        tensors = [leaf.owner[leaf.name] for leaf in self._leaves()]
        if not self.buffers:
            self.starts, self.buffers = np.zeros(rows, np.int64), tensors
        for buffer, tensor in zip(self.buffers, tensors, strict=True):
            if tensor.data_ptr() != buffer.data_ptr():  # a state that the library does not write in its place
                buffer[:rows] = tensor
        self.bind(self.end + columns)

    def take(self, rows: Sequence[int]) -> RowCache:
        """Return a cache of some of its rows, which begin in the same column."""
        first = int(self.starts[rows[0]])
        index = torch.tensor(rows, device=self.buffers[0].device)
        other, replaced = copy.copy(self), {}
        other.buffers = []
        for leaf, buffer in zip(self._leaves(), self.buffers, strict=True):
            part = buffer[:, :, first : self.end] if leaf.columns else buffer
            other.buffers.append(part.index_select(0, index))
            replaced[id(leaf.owner[leaf.name])] = other.buffers[-1]
        other.library = copy.deepcopy(self.library, replaced)  # with flags and sizes as they are
        other.starts = self.starts[list(rows)] - first
        other.bind(self.end - first)
        return other

    def add(self, other: RowCache, rows: Sequence[int]) -> None:
        """Append rows of another cache, all of which begin in its first column."""
        if not rows:
            return
        if not self.starts.size:
            taken = other.take(rows)
            self.library, self.starts, self.end, self.buffers = taken.library, taken.starts, taken.end, taken.buffers
            return
        count, before = len(rows), self.starts.size
        # Rows end in one column. A longer newcomer pushes the others to the right by ``shift``, a shorter begins later.
        shift, capacity = max(0, other.end - self.end), self.buffers[0].shape[0]
        if shift or before + count > capacity:
            more = capacity if before + count <= capacity else max(before + count, capacity + capacity // 2)
            self._rebuild(more, shift, 1)
        index = torch.tensor(rows, device=self.buffers[0].device)
        for leaf, mine, theirs in zip(self._leaves(), self.buffers, other.buffers, strict=True):
            part = theirs.index_select(0, index)
            if leaf.columns:
                mine[before : before + count, :, self.end - other.end : self.end] = part[:, :, : other.end]
            else:
                mine[before : before + count] = part
        self.starts = np.append(self.starts, np.full(count, self.end - other.end))
        self.bind(self.end)

    def remove(self, slot: int) -> None:
        """Remove a row; the last one takes its place."""
        last = self.starts.size - 1
        if slot < last:
            for buffer in self.buffers:
                buffer[slot] = buffer[last]
            self.starts[slot] = self.starts[last]
        self.starts = self.starts[:last]
        self.bind(self.end)

    def _rebuild(self, rows: int, shift: int, columns: int) -> None:
        """Make tensors of so many rows, with ``shift`` more columns in front and room for ``columns`` at the end.

        Columns in front of which no row begins are dropped.
        """
        first = int(self.starts.min()) if shift == 0 else 0
        end, used = self.end - first + shift, self.starts.size
        buffers = []
        for leaf, buffer in zip(self._leaves(), self.buffers, strict=True):
            if leaf.columns:  # zeros: masked values are multiplied by zero, and must be finite
                new = buffer.new_zeros(rows, buffer.shape[1], end + max(columns, ROOM), buffer.shape[3])
                new[:used, :, shift:end] = buffer[:used, :, first : self.end]
            elif buffer.shape[0] == rows:
                new = buffer
            else:
                new = buffer.new_zeros(rows, *buffer.shape[1:])
                new[:used] = buffer[:used]
            buffers.append(new)
        self.buffers = buffers
        self.starts = self.starts - first + shift
        self.bind(end)

    def bind(self, end: int) -> None:
        """Show the library the rows that there are, and where they end."""
        self.end = end
        for leaf, buffer in zip(self._leaves(), self.buffers, strict=True):
            leaf.owner[leaf.name] = buffer if leaf.columns else buffer[: self.starts.size]
        for layer in self.library.layers:
            if isinstance(layer, AttentionLayer):
                layer.end = end
            if isinstance(layer, IndexedLayer):
                layer.index_end = end

    def _leaves(self) -> Iterator[_Leaf]:
        for layer in self.library.layers:
            if isinstance(layer, AttentionLayer) and layer.keys is not None:
                yield _Leaf(vars(layer), "keys", columns=True)
                yield _Leaf(vars(layer), "values", columns=True)
            if isinstance(layer, IndexedLayer) and layer.index is not None:
                yield _Leaf(vars(layer), "index", columns=True)
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                yield from (_Leaf(states, i, columns=False) for i, state in states.items() if state is not None)
        states = getattr(self.library, "linear_cache", [])  # MiniMax's
        yield from (
            _Leaf(states, i, columns=False) for i, state in enumerate(states) if isinstance(state, torch.Tensor)
        )


def _own(layer: CacheLayerMixin) -> CacheLayerMixin:
    """Return a layer for what a layer of the library keeps."""
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return AttentionLayer(getattr(layer, "sliding_window", None))
    if type(layer) in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
        return HybridLayer(getattr(layer, "sliding_window", None), layer.number_of_states)
    if type(layer) is DynamicIndexedLayer or hasattr(layer, "idx_keys"):
        return IndexedLayer()
    if type(layer) in (LinearAttentionLayer, DummyLayer):
        return layer
    raise NotSupportedHere(f"the cache has a layer of the unsupported type {type(layer).__name__}")
