"""The prefix cache: keys and values of earlier sequences, so that a turn of an episode does not compute them again."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import numpy as np
import torch

from rlkit.backends.local.sampling.kv_cache import KVCache

__all__ = ["BLOCK", "PrefixCache", "block_names"]

BLOCK = 16  # tokens kept, found and dropped together


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
    """Blocks of one snapshot, shared by all sequences that begin with the same tokens.

    Args:
        limit: bytes kept at most; the least recently used blocks go first.
        together: the caches of all snapshots that share the limit and have blocks, the one that is written to least
            recently first; its blocks go first.
    """

    def __init__(self, limit: int, together: list[PrefixCache] | None = None) -> None:
        self._limit = limit
        self.blocks: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # the least recently used first
        self.size = 0
        self._together = [] if together is None else together

    def find(self, names: list[bytes]) -> int:
        """Return how many of the first blocks of ``names`` are here."""
        return next((i for i, name in enumerate(names) if name not in self.blocks), len(names))

    def load(self, names: list[bytes], kv_cache: KVCache, slot: int) -> None:
        """Put these blocks, all of them here, at the beginning of a slot."""
        if names:
            kv_cache.write_blocks(slot, [self.blocks[name] for name in names])
        for name in reversed(names):
            self.blocks.move_to_end(name)

    def store(self, names: list[bytes], kv_cache: KVCache, slot: int) -> None:
        """Store the blocks that are not here yet from a slot that begins with all of ``names``."""
        if self._together[-1:] != [self]:
            self._together[:] = [*(cache for cache in self._together if cache.blocks and cache is not self), self]
        # A block is of no use without those before it, so these come last and are dropped later.
        for i, name in reversed(list(enumerate(names))):
            if name not in self.blocks:
                block = kv_cache.read_block(slot, i * BLOCK, (i + 1) * BLOCK)
                if block.nbytes > self._limit:
                    return
                self.blocks[name] = block
                self.size += block.nbytes
            self.blocks.move_to_end(name)
            self._shrink()

    def clear(self) -> None:
        """Give the memory back; from any thread, if its snapshot is in use no more."""
        self.blocks.clear()
        self.size = 0

    def _shrink(self) -> None:
        while sum(cache.size for cache in self._together) > self._limit:
            oldest = next((cache for cache in self._together if cache.blocks), self)
            try:
                oldest.size -= oldest.blocks.popitem(last=False)[1].nbytes
            except KeyError:  # its snapshot's last sampler was closed in another thread meanwhile
                return
