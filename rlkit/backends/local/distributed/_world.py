"""``World``: the other ranks, as rank 0 sees them. All backends of this process share one.

It begins with the first backend on several processes. Ranks that rlkit started end with the last one; those that
torchrun started serve until this process ends, or says so.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from rlkit.backends.local.distributed._launch import Child, RayChild, RayRanks
from rlkit.backends.local.distributed.server import (
    Listener,
    check_free,
    join_group,
    on_one_node,
    open_file_store,
    open_groups,
    open_store,
    torchrun_size,
    torchrun_store,
)
from rlkit.backends.local.distributed.sharding import ShardGroups
from rlkit.backends.local.distributed.wire import Connection, Handler, Message, Peer, Reply
from rlkit.backends.trainer import check_process
from rlkit.errors import BackendError, ConfigError, RankLost

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes

__all__ = ["World", "leave_world", "share_world"]

TICK = 0.25  # seconds between two looks at the ranks
_GRACE = 5.0  # seconds that a rank has to end
_REMEDY = "connect anew with resume_from= and the last saved path"


class World:
    """Rank 0's view of all ranks.

    Args:
        settings: how many there are, and how long they may be silent.
        device: "cuda" where each has its own GPU, else "cpu".

    Attributes:
        size: how many, rank 0 included.
        broken: what has ended it, if anything has.
        ticks: called from time to time, in a thread.
    """

    def __init__(self, settings: Processes, device: str) -> None:
        check_free()
        self.settings, self.device, self.size = settings, device, settings.count
        self.broken: RankLost | None = None
        self.users = 0
        self.ticks: list[Callable[[], None]] = []
        self._handlers: dict[int, Handler] = {}
        self._numbers = itertools.count(1)
        self._lock, self._making_group = threading.RLock(), threading.Lock()
        self._process = os.getpid()
        self._ended = threading.Event()
        self._children: list[Child | RayChild] = []
        self._peers: list[Peer] = []
        self._threads: int | None = None
        self._folder = ""
        self._groups: list[dist.ProcessGroup] = []
        _worlds.add(self)
        self._torchrun = torchrun_size() is not None
        try:
            connections = self._find()
            for rank, connection in enumerate(connections, 1):
                self._peers.append(Peer(connection, self._handle, partial(self._gone, rank)))
        except BaseException:
            self._end_all(0.0)
            self._give_back()
            raise
        for peer in self._peers:
            peer.start()
        threading.Thread(target=self._watch, name="rlkit-ranks", daemon=True).start()
        atexit.register(self.end)

    @property
    def forked(self) -> bool:
        """Return whether this process was forked off the one that has the ranks, with none of its threads."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise RankLost where a rank is gone, BackendError in a process that was forked off."""
        check_process("local", self._process)
        if self.broken is not None:
            raise RankLost(str(self.broken))

    def register(self, handler: Handler) -> int:
        """Return a number for a backend; ``handler`` carries out what ranks ask of it."""
        with self._lock:
            number = next(self._numbers)
            self._handlers[number] = handler
        return number

    def forget(self, number: int) -> None:
        """Carry out no more for a backend."""
        self._handlers.pop(number, None)

    def call(self, rank: int, kind: str, fields: Mapping[str, object], arrays: Sequence[np.ndarray] = ()) -> Reply:
        """Ask a rank for something."""
        return self._peers[rank - 1].call(kind, fields, arrays)

    def tell(self, rank: int, kind: str, fields: Mapping[str, object]) -> None:
        """Send a message to a rank."""
        self._peers[rank - 1].tell(kind, fields)

    def open(self, fields: Mapping[str, Any]) -> tuple[list[Reply], dist.ProcessGroup, ShardGroups | None]:
        """Open a backend on every rank; return their replies, and groups for its gradients and for its weights."""
        with self._making_group:  # ranks make groups in one order
            self.check()
            replies = [self.call(rank, "open", fields) for rank in range(1, self.size)]
            try:
                group, shares = open_groups(self.settings.deadline, shard=fields["options"].get("shard"))
            except RuntimeError as error:
                raise self.fail(f"the ranks did not connect to each other: {error}") from error
            self._groups += [group, *(shares or ())]
            return replies, group, shares

    def fail(self, why: str) -> RankLost:
        """End everything, since a rank is gone or differs from the others; return the error of all later calls."""
        with self._lock:
            if self.broken is None:
                self.broken = RankLost(f"{why}. The policy takes no more calls: {_REMEDY}")
                for peer in self._peers:
                    peer.fail(self.broken)
                threading.Thread(target=self._end_all, args=(0.0,), daemon=True).start()
            return self.broken

    def end(self) -> None:
        """Make all ranks leave. May be called twice; does nothing in a process that was forked off."""
        if self.forked:
            return
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
        atexit.unregister(self.end)
        for peer in self._peers:
            peer.tell("end", {})
        self._end_all(_GRACE)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._give_back()

    def leak(self) -> None:
        """Never free the process groups: gloo would wait for threads that did not come along in a fork, and crash."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    def _find(self) -> list[Connection]:
        settings, host = self.settings, "127.0.0.1"
        store: dist.Store
        if self._torchrun:
            store, _, size = torchrun_store(settings.start)
            host = "127.0.0.1" if on_one_node() else os.environ["MASTER_ADDR"]
            listener = Listener(host)
            listener.announce(store)
        elif settings.ray is not None:
            placed, size = RayRanks(settings), settings.count
            host = placed.host
            store = reached = open_store(host, settings.start)
            listener = Listener(host)
            self._spawn({"port": int(reached.port)}, listener.address, placed)
        else:
            size, self._folder = settings.count, tempfile.mkdtemp(prefix="rlkit-ranks-")  # of mode 0700
            store = open_file_store(self._folder, settings.start)
            listener = Listener(host)
            self._spawn({"folder": self._folder}, listener.address, None)
        try:
            connections = listener.accept(size, settings.start, self._check_children)
        finally:
            listener.close()
        for connection in connections:
            connection.send(Message("join", {"device": self.device, "deadline": settings.deadline}))
        loopback, excepthook = on_one_node() if self._torchrun else host == "127.0.0.1", sys.excepthook
        try:
            join_group(store, 0, size, self.device, settings.deadline, loopback=loopback)
        except RuntimeError as error:
            raise BackendError(f"processes: the ranks did not connect to each other: {error}") from error
        self._groups.append(dist.group.WORLD)
        if not self._torchrun:  # torch's has "[rank0]:" before every line of an error, and the user sees one rank alone
            sys.excepthook = excepthook
        return connections

    def _spawn(self, store: Mapping[str, str | int], address: Mapping[str, str | int], placed: RayRanks | None) -> None:
        threads, settings = self.settings.threads, self.settings
        if threads is None and placed is None and self.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, torch.get_num_threads() // settings.count)  # or they would take turns on the cores
        if threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(threads)
        own = {**store, "address": address, "size": settings.count, "start": settings.start}
        for rank in range(1, settings.count):
            start = Child if placed is None else placed.start
            self._children.append(start(rank, own, threads))

    def _check_children(self) -> None:
        for child in self._children:
            if child.status is not None:
                raise BackendError(f"processes: rank {child.rank} did not start: {child.describe()}")

    def _handle(self, message: Message) -> Reply | None:
        handler = self._handlers.get(int(message.fields["backend"]))
        if handler is None:
            raise BackendError("this backend is closed")
        return handler(message)

    def _gone(self, rank: int, error: BaseException) -> None:
        """Take note that the connection of a rank has ended."""
        if self._ended.is_set() or self.broken is not None:
            return
        child = next((child for child in self._children if child.rank == rank), None)
        what = f"{type(error).__name__}: {error}" if child is None else child.describe(wait=1.0)
        self.fail(f"rank {rank} is gone: {what}")

    def _watch(self) -> None:
        """Fail where a rank is silent for longer than it may be; time that this process was stopped does not count."""
        silent, heard = [0.0] * len(self._peers), [-1] * len(self._peers)
        before = time.monotonic()
        while not self._ended.wait(TICK):
            now = time.monotonic()
            passed, before = min(now - before, 4 * TICK), now
            for i, peer in enumerate(self._peers):
                silent[i] = silent[i] + passed if peer.heard == heard[i] else 0.0
                heard[i] = peer.heard
                if silent[i] > self.settings.deadline and self.broken is None:
                    self.fail(f"rank {i + 1} has not responded for {self.settings.deadline:g} s")
            for tick in list(self.ticks):
                tick()

    def _give_back(self) -> None:
        """Give back the threads of torch and the folder of the store."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _end_all(self, patience: float) -> None:
        for peer in self._peers:
            peer.close()
        for child in self._children:
            child.end(patience)


_world: World | None = None
_worlds: weakref.WeakSet[World] = weakref.WeakSet()  # also those that have ended: a closed backend has their groups
_opening = threading.Lock()


def share_world(settings: Processes, device: str) -> World:
    """Return the world of this process, begun if there is none, with one user more.

    Raises:
        ConfigError: there is one of another size, or of the process that this one was forked off.
        BackendError: its ranks did not start, or are gone.
    """
    global _world  # noqa: PLW0603  # a process has one default process group
    with _opening:
        if _world is not None and _world.forked:
            what = "this process was forked from one that trains with several; start it with the 'spawn' method"
            raise ConfigError("processes", what, "1", "torch.distributed can be initialised only once")
        if _world is not None and _world.broken is not None:
            if torchrun_size() is not None:  # which starts all of them again, or none
                _world.check()
            _world.end()
            _world = None
        if _world is None:
            _world = World(settings, device)
        elif settings.ray is not None and settings.ray != _world.settings.ray:
            raise ConfigError("Processes(ray)", "differs from the first backend's", "the same, or close that first")
        elif _world.size != settings.count or _world.device != device:
            what = f"got {settings.count} on {device}, but this process has {_world.size} on {_world.device}"
            raise ConfigError("processes", what, "the same, or close the other backends first")
        _world.users += 1
        return _world


def leave_world(world: World) -> None:
    """Take note that a backend is closed; the last one ends the ranks that rlkit started."""
    global _world  # noqa: PLW0603  # as above
    with _opening:
        world.users -= 1
        if world.users == 0 and torchrun_size() is None:
            world.end()
            _world = None if _world is world else _world


def _after_fork() -> None:
    global _opening  # noqa: PLW0603  # somebody may have held it
    _opening = threading.Lock()
    for world in _worlds:
        world.leak()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
