"""``Server``: the loop of ranks other than 0: open backends, and do with each what rank 0 says, until it leaves."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlkit.backends.local.distributed.gather_orders import ShardGroups, shard_groups
from rlkit.backends.local.distributed.peer import Peer, Reply
from rlkit.backends.local.distributed.rendezvous import SLACK, check_free, join_group, knock
from rlkit.backends.local.distributed.sharding import ShardedWeights
from rlkit.backends.local.distributed.wire import Message
from rlkit.errors import BackendError

__all__ = ["Opener", "Served", "Server"]


class Served(Protocol):
    """A backend that does as rank 0 says."""

    def handle(self, message: Message) -> Reply | None:
        """Carry out what rank 0 says; return what is sent back once it is done."""

    def close(self) -> None:
        """Free it."""


class Opener(Protocol):
    """Opens a backend as rank 0 describes it."""

    def __call__(
        self,
        options: Mapping[str, Any],
        device: str,
        group: dist.ProcessGroup,
        peer: Peer,
        number: int,
        rank: int,
        weights: ShardedWeights | None,
    ) -> Served:
        """See ``rlkit.backends.local.replica.Replica``."""


class Server:
    """A rank that serves.

    Args:
        opener: makes its backends.
        store: of all ranks.
        rank: this one's number.
        size: how many there are.
        token: what rank 0 knows it by; None where the store has it.
        lost: called where rank 0 is gone without a word.
        loopback: all ranks are on this machine.
    """

    def __init__(
        self,
        opener: Opener,
        store: dist.Store,
        rank: int,
        size: int,
        token: str | None,
        lost: Callable[[], None],
        *,
        loopback: bool,
    ) -> None:
        check_free()
        self._opener, self._rank, self._lost = opener, rank, lost
        self._backends: dict[int, Served] = {}
        self._left = threading.Event()
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "rlkit-load")
        connection = knock(store, rank, token)
        join = connection.receive()
        self._deadline = float(join.fields["deadline"])
        join_group(store, rank, size, str(join.fields["device"]), self._deadline, loopback=loopback)
        self._peer = Peer(connection, self._handle, self._gone, beats=True)

    def run(self) -> None:
        """Serve until rank 0 leaves."""
        self._peer.start()
        self._left.wait()
        self._peer.close()
        dist.destroy_process_group()

    def _gone(self, error: BaseException) -> None:
        del error
        if not self._left.is_set():
            self._lost()

    def _handle(self, message: Message) -> Reply | None:
        if message.kind == "end":
            self._left.set()
            return None
        number = int(message.fields["backend"])
        if message.kind == "open":
            timeout = timedelta(seconds=self._deadline + SLACK)
            group = dist.new_group(timeout=timeout)  # in rank 0's order
            shares = shard_groups(timeout) if message.fields["options"].get("shard") else None
            return self._loader.submit(self._open, number, message, group, shares)
        backend = self._backends.get(number)
        if backend is None:
            raise BackendError("no such backend is open here")
        if message.kind == "close":
            del self._backends[number]
            return self._loader.submit(_close, backend)
        return backend.handle(message)

    def _open(self, number: int, message: Message, group: dist.ProcessGroup, shares: ShardGroups | None) -> Message:
        device = str(message.fields["device"])
        if device == "cuda":
            device = f"cuda:{os.environ.get('LOCAL_RANK', self._rank)}"
        options = message.fields["options"]
        place = torch.device(device)
        weights = None if shares is None else ShardedWeights(place, *shares, self._deadline + SLACK)
        self._backends[number] = self._opener(options, device, group, self._peer, number, self._rank, weights)
        return Message("")


def _close(backend: Served) -> Message:
    backend.close()
    return Message("")
