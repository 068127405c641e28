"""One account of the memory for keys and values, for all who decode with one base: snapshots, teachers, backends."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

__all__ = ["Holder", "KVAccount"]


class Holder(Protocol):
    """Who holds keys and values."""

    @property
    def held(self) -> int:
        """Bytes that it holds."""

    @property
    def reserved(self) -> int:
        """Bytes that it holds or will, when its rows are as long as they may become."""


class KVAccount:
    """Who holds keys and values of a base; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def add(self, holder: Holder) -> None:
        """Count a holder in, as long as it lives."""
        with self._lock:
            self._holders.add(holder)

    def available(self, holder: Holder, free: int, share: float) -> int:
        """Return the bytes that all rows of ``holder`` may take, those that it has included.

        Args:
            holder: who asks.
            free: bytes that can be allocated now.
            share: of what is free and what all hold, which is for the keys and values of all.
        """
        with self._lock:
            others = [other for other in self._holders if other is not holder]
            held = holder.held + sum(other.held for other in others)
            return int(share * (free + held)) - sum(other.reserved for other in others)
