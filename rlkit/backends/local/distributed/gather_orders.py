"""In which order the ranks gather: rank 0 says so, and all follow.

A collective needs every rank, in one order. But ranks do not compute in step: a rank waits for the user's loss between
its forward and its backward pass, samples what it is asked for, or has more tokens than another. So whoever needs
something tells rank 0, which gives all ranks the next order, and a thread of each rank carries orders out one after the
other, whatever that rank is computing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeAlias

import torch
import torch.distributed as dist

__all__ = ["GatherOrders", "ShardGroups", "shard_groups"]

ShardGroups: TypeAlias = tuple[dist.ProcessGroup, dist.ProcessGroup]

_WAIT = timedelta(days=365)  # for the next order; that a rank is gone is seen at once
_END = -1


def shard_groups(timeout: timedelta) -> ShardGroups:
    """Return a group that gathers, and one for its orders. Made by all ranks together.

    Args:
        timeout: of one gather.
    """
    return dist.new_group(timeout=timeout), dist.new_group(backend="gloo", timeout=_WAIT)


class GatherOrders:
    """The orders as one rank sees them. Made by all ranks together.

    Args:
        group: of gloo, used for nothing else.
        carry_out: called with each order in turn, in a thread.
        failed: called once if the ranks lost one another.
    """

    def __init__(
        self, group: dist.ProcessGroup, carry_out: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        self.rank, self._size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        self._carry_out, self._failed = carry_out, failed
        self._orders: queue.SimpleQueue[int] = queue.SimpleQueue()  # of rank 0 to itself
        self._outbox: queue.SimpleQueue[tuple[int, torch.Tensor] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last: dict[int, int] = {}  # number of the last order for each
        self._count = 0
        self._closing = False
        runs = [self._follow, self._send, self._listen] if self.rank == 0 else [self._follow, self._send]
        self._threads = [threading.Thread(target=self._run, args=(run,), daemon=True) for run in runs]
        for thread in self._threads:
            thread.start()

    def wish(self, what: int, after: int) -> None:
        """Have ``what`` ordered, if it was not in one of the orders behind the first ``after``."""
        if self.rank == 0:
            self._take(what, after)
        else:
            self._outbox.put((0, torch.tensor([what, after])))

    def close(self) -> None:
        """End the threads of all ranks; called by rank 0 once nobody computes any more, and by others then."""
        with self._lock:
            if self.rank == 0 and not self._closing:
                self._order(_END)
            self._closing = True
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5.0)

    def _take(self, what: int, after: int) -> None:
        with self._lock:
            if self._last.get(what, 0) <= after:
                self._order(what)
                self._last[what] = self._count

    def _order(self, what: int) -> None:
        self._count += 1
        for rank in range(1, self._size):
            self._outbox.put((rank, torch.tensor([what])))
        self._orders.put(what)

    def _run(self, loop: Callable[[], None]) -> None:
        try:
            loop()
        except BaseException as error:  # noqa: BLE001  # whoever waits for an order is told
            if not self._closing:
                self._failed(error)

    def _follow(self) -> None:
        order = torch.zeros(1, dtype=torch.int64)
        while True:
            if self.rank == 0:
                what = self._orders.get()
            else:
                dist.recv(order, 0, group=self._group)
                what = int(order)
            if what == _END:
                self._closing = True
                if self.rank:
                    self._outbox.put((0, torch.tensor([_END, 0])))
                self._outbox.put(None)
                self._failed(RuntimeError("the backend is closed"))
                return
            self._carry_out(what)

    def _send(self) -> None:
        while (message := self._outbox.get()) is not None:  # a send waits until the other end receives
            rank, tensor = message
            dist.send(tensor, rank, group=self._group)

    def _listen(self) -> None:
        wish, left = torch.zeros(2, dtype=torch.int64), self._size - 1
        while left:
            dist.recv(wish, group=self._group)
            what, after = wish.tolist()
            if what == _END:
                left -= 1
            else:
                self._take(what, after)
