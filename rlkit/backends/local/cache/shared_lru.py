"""What decoders keep of earlier sequences, in bytes that those of several snapshots share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

__all__ = ["SharedLru", "Together"]


class _Sized(Protocol):
    """Something that takes memory."""

    @property
    def nbytes(self) -> int:
        """Its size."""


T = TypeVar("T", bound=_Sized)


class SharedLru(Generic[T]):
    """Entries of one snapshot by name; the least recently used go first.

    Args:
        limit: bytes kept at most.
        together: the caches of all snapshots that share the limit and have entries, the one that is written to least
            recently first; its entries go first.

    Attributes:
        limit: bytes kept at most.
        entries: the least recently used first.
        size: of the entries, in bytes.
    """

    def __init__(self, limit: int, together: Together | None = None) -> None:
        self.limit = limit
        self.entries: OrderedDict[bytes, T] = OrderedDict()
        self.size = 0
        self._together = [] if together is None else together

    def keep(self, name: bytes, entry: T) -> bool:
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
        """Give the memory back; from any thread, if its snapshot is in use no more."""
        self.entries.clear()
        self.size = 0

    def _shrink(self) -> None:
        while sum(cache.size for cache in self._together) > self.limit:
            oldest = next((cache for cache in self._together if cache.entries), self)
            try:
                oldest.size -= oldest.entries.popitem(last=False)[1].nbytes
            except KeyError:  # its snapshot's last sampler was closed in another thread meanwhile
                return


Together: TypeAlias = list[SharedLru[Any]]  # of whatever decoders keep
