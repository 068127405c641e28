"""The prefix cache: keys and values of earlier sequences, so that a turn of an episode does not compute them again."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from rlkit.backends.local.cache.kv_cache import KVCache
from rlkit.backends.local.cache.shared_lru import SharedLru

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


class PrefixCache(SharedLru[torch.Tensor]):
    """Blocks of one snapshot, shared by all sequences that begin with the same tokens."""

    def find(self, names: list[bytes]) -> int:
        """Return how many of the first blocks of ``names`` are here."""
        return next((i for i, name in enumerate(names) if name not in self.entries), len(names))

    def load(self, names: list[bytes], kv_cache: KVCache, slot: int) -> None:
        """Put these blocks, all of them here, at the beginning of a slot."""
        if names:
            kv_cache.write_blocks(slot, [self.entries[name] for name in names])
        self.touch(names)

    def store(self, names: list[bytes], kv_cache: KVCache, slot: int) -> None:
        """Store the blocks that are not here yet from a slot that begins with all of ``names``."""
        # A block is of no use without those before it, so these come last and are dropped later.
        for i, name in reversed(list(enumerate(names))):
            if name in self.entries:
                self.touch([name])
            elif not self.keep(name, kv_cache.read_block(slot, i * BLOCK, (i + 1) * BLOCK)):
                return
