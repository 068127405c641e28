"""The prefix cache: what earlier sequences computed, so that a turn of an episode does not compute it again.

Blocks of keys and values are shared by all sequences that begin with the same tokens.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch

from rlkit.backends.local.cache.kv_cache import KVCache

__all__ = ["BLOCK", "PrefixCache", "Together", "block_names"]


BLOCK = 16  # tokens kept, found and dropped together
_AT_ONCE = 128  # blocks read at once, of which there are two copies for a moment


def block_names(tokens: np.ndarray) -> list[bytes]:
    """Return a name per whole block of ``tokens``: a digest of all tokens up to the block's end.

    >>> a, b = block_names(np.arange(40)), block_names(np.append(np.arange(20), [7] * 12))
    >>> len(a), len(b), a[0] == b[0], a[1] == b[1]
    (2, 2, True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    names = []
    for start in range(0, tokens.size - BLOCK + 1, BLOCK):
        digest.update(tokens[start : start + BLOCK].tobytes())
        names.append(digest.digest())
    return names


class PrefixCache:
    """Blocks of one snapshot by name; the least recently used go first.

    Args:
        limit: bytes kept at most.
        together: the caches of all snapshots that share the limit and have entries, the one that is written to least
            recently first; its entries go first.
        snapshot: what the entries were computed with; they are freed once its last sampler is closed.

    Attributes:
        limit: bytes kept at most.
        entries: the least recently used first.
        size: of the entries, in bytes.
    """

    def __init__(self, limit: int, together: Together | None = None, snapshot: object = None) -> None:
        self.limit = limit
        self.entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self.size = 0
        self._together = [] if together is None else together
        self._on_forgotten = None if snapshot is None else weakref.finalize(snapshot, self.clear)
        if self._on_forgotten is not None:
            self._on_forgotten.atexit = False

    def renew(self, snapshot: object) -> PrefixCache:
        """Return an empty cache for another snapshot, in place of this one."""
        if self._on_forgotten is not None:
            self._on_forgotten.detach()
        self.clear()
        # Not this one again: a finalizer may be clearing it in another thread.
        return PrefixCache(self.limit, self._together, snapshot)

    def keep(self, name: bytes, entry: torch.Tensor) -> bool:
        """Keep an entry in place of any of that name, and drop others; False where it is larger than the limit."""
        if entry.nbytes > self.limit:
            return False
        if self._together[-1:] != [self]:
            self._together[:] = [*(cache for cache in self._together if cache.entries and cache is not self), self]
        if name in self.entries:
            self.size -= self.entries.pop(name).nbytes
        self.entries[name] = entry
        self.size += entry.nbytes
        self._shrink()
        return True

    def touch(self, names: Sequence[bytes]) -> None:
        """Take note that these entries are used, the last one first."""
        for name in reversed(names):
            self.entries.move_to_end(name)

    def clear(self) -> None:
        """Free the memory; from any thread, once its snapshot is no longer in use."""
        self.entries.clear()
        self.size = 0

    def _shrink(self) -> None:
        while sum(cache.size for cache in self._together) > self.limit:
            oldest = next((cache for cache in self._together if cache.entries), self)
            try:
                oldest.size -= oldest.entries.popitem(last=False)[1].nbytes
            except KeyError:  # its snapshot's last sampler was closed in another thread meanwhile
                return

    def find(self, names: list[bytes]) -> int:
        """Return how many of the first blocks of ``names`` are here."""
        return next((i for i, name in enumerate(names) if name not in self.entries), len(names))

    def load(self, names: list[bytes], kv_cache: KVCache, slot: int) -> None:
        """Put these blocks, all of them here, at the beginning of a slot."""
        if names:
            kv_cache.write_blocks(slot, [self.entries[name] for name in names])
        self.touch(names)

    def store(self, rows: Sequence[tuple[list[bytes], int]], kv_cache: KVCache) -> None:
        """Store the blocks that are not here yet from slots that begin with all of their names.

        Only blocks that the limit leaves here in the end are read, and many at once: one by one they would take
        thousands of kernels.

        Args:
            rows: (names, slot); the last row's blocks are dropped last.
            kv_cache: where the slots are.
        """
        # A block is useless without those before it, so these come last and are dropped later.
        used: dict[bytes, tuple[int, int]] = {}  # the least recently used first
        for names, slot in rows:
            for i, name in reversed(list(enumerate(names))):
                used.pop(name, None)
                used[name] = (slot, i * BLOCK)
        room = self.limit // max(1, kv_cache.block_bytes(BLOCK))
        kept = list(used)[max(0, len(used) - room) :]
        for first in range(0, len(kept), _AT_ONCE):
            names = kept[first : first + _AT_ONCE]
            blocks = {name: self.entries[name] for name in names if name in self.entries}  # a later one may drop it
            missing = [name for name in names if name not in blocks]
            read = kv_cache.read_blocks([used[name] for name in missing], BLOCK)
            blocks.update(zip(missing, read, strict=True))
            for name in names:
                if name in self.entries:
                    self.touch([name])
                else:
                    self.keep(name, blocks[name])


Together: TypeAlias = list[PrefixCache]  # of all decoders
