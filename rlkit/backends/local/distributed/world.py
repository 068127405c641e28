"""``World``: the processes, of which rank 0 gives orders that all carry out, one after the other.

All backends of a process share one. It begins with the first backend on several processes. Ranks that rlkit started end
with the last one; those that torchrun started follow until this process ends, or says so.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from rlkit._runtime import torchrun_world_size
from rlkit.backends.local.distributed._messages import IDLE, Part, describe_error, pack, unpack
from rlkit.backends.local.distributed.launch import (
    FOR_EVER,
    GRACE,
    SLACK,
    Ranks,
    call_torchrun,
    check_free,
    join,
)
from rlkit.backends.trainer import check_process
from rlkit.errors import BackendError, ConfigError, RankLost

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes

__all__ = ["FollowerWorld", "World", "acquire", "one_after_another", "release", "release_torchrun_at_exit"]

T = TypeVar("T")

_NOTICED = 2.0  # seconds in which it is noticed that a process which broke off has ended
_REMEDY = "connect anew with resume_from= and the last saved path"


def _send(message: Sequence[torch.Tensor], rank: int, within: timedelta) -> None:
    for tensor in message:
        work = dist.isend(tensor, rank)
        assert work is not None  # noqa: S101  # this process is in the group
        work.wait(within)


def _receive(rank: int, within: timedelta) -> Part:
    sizes = torch.zeros(2, dtype=torch.int64)
    _fill(sizes, rank, within)
    flat = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    _fill(flat, rank, within)
    return unpack(sizes, flat)


def _fill(tensor: torch.Tensor, rank: int, within: timedelta) -> None:
    work = dist.irecv(tensor, rank)
    assert work is not None  # noqa: S101  # as above
    work.wait(within)


@contextlib.contextmanager
def one_after_another(rank: int, size: int, start: float) -> Iterator[None]:
    """Let ranks do something in the order of their numbers, so that the memory for it is taken once at a time."""
    token, within = torch.zeros(1), timedelta(seconds=start)
    if rank > 0:
        _fill(token, rank - 1, within)
    try:
        yield
    finally:
        if rank + 1 < size:
            _send([token], rank + 1, within)


class FollowerWorld:
    """The world, as a rank other than 0 sees it.

    Args:
        store: of all ranks.
        rank, size: this one's number, and how many there are.
        device: "cuda" where each has its own GPU, else "cpu".
        start: seconds until all must be there.
        deadline: seconds that one may take for what all do together.

    Attributes:
        group: for what all do together.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, device: str, start: float, deadline: float) -> None:
        check_free()
        self.rank, self.size, self.start, self._nth = rank, size, start, 0
        self.group = join(store, rank, size, device, start, deadline)

    def receive(self) -> Part:
        """Return rank 0's next order. Raises RuntimeError: rank 0 is gone."""
        order = _receive(0, FOR_EVER)
        self._nth = order[0]["nth"]
        return order

    def answer(self, part: Part = IDLE) -> None:
        """Answer the order."""
        header, tensors = part
        _send(pack(({**header, "nth": self._nth}, tensors)), 0, FOR_EVER)


class World:
    """Rank 0's view of all ranks.

    Args:
        settings: how many there are, and how long they may take.
        device: "cuda" where each has its own GPU, else "cpu".

    Attributes:
        size: how many, rank 0 included.
        broken: what has ended it, if anything has.
        group: for what all do together.
        users: names of the backends that are open.
    """

    def __init__(self, settings: Processes, device: str) -> None:
        check_free()
        self.settings, self.device, self.size = settings, device, settings.count
        self.broken: RankLost | None = None
        self.users, self._names, self._orders = set[int](), itertools.count(1), 0
        self._groups: list[dist.ProcessGroup] = []
        self._lock, self._next = threading.Lock(), threading.Lock()
        self._spent = defaultdict[int, float](float)  # seconds that each backend has held the ranks
        self._process, self._joined, self._ended = os.getpid(), False, False
        self._ranks = Ranks()
        _worlds.add(self)
        atexit.register(self.end)
        try:
            if torchrun_world_size() is None:
                store = self._ranks.start(settings, device)
            else:
                limits = {"start": settings.start, "deadline": settings.deadline}
                store = call_torchrun(self.size, settings.start, {"device": device, **limits})
            self.group = join(store, 0, self.size, device, settings.start, settings.deadline)
        except RuntimeError as error:
            why = self._ranks.ended(range(1, self.size)) or error
            self.end()
            raise BackendError(f"processes: the ranks did not connect to each other: {why}") from error
        except BaseException:
            self.end()
            raise
        self._joined = True
        self._groups += [dist.group.WORLD, self.group]

    @property
    def folder(self) -> str:
        """See ``Ranks``."""
        return self._ranks.folder

    @property
    def forked(self) -> bool:
        """Return whether this process was forked off the one that has the ranks."""
        return os.getpid() != self._process

    def add_user(self) -> int:
        """Return the name of a new backend."""
        name = next(self._names)
        self.users.add(name)
        return name

    def check(self) -> None:
        """Raise RankLost where a rank is gone, BackendError in a process that was forked off."""
        check_process("local", self._process)
        if self.broken is None and not self._ended and (why := self._ranks.ended(range(1, self.size))):
            raise self.fail(why)
        if self.broken is not None:
            raise RankLost(str(self.broken))

    def spent_by_others(self, backend: int) -> float:
        """Return the seconds that other backends have held the ranks so far."""
        return sum(seconds for each, seconds in [*self._spent.items()] if each != backend)

    def order(self, kind: str, backend: int, parts: Sequence[Part] = (), **fields: object) -> None:
        """Tell all ranks what to do next; with ``parts`` each one's own, rank 1's first.

        Raises:
            RankLost: a rank is gone.
        """
        with self._turn(backend):
            self._tell(kind, {**fields, "backend": backend}, parts)

    @contextlib.contextmanager
    def exchange(
        self, kind: str, backend: int, parts: Sequence[Part] = (), within: float | None = None, **fields: object
    ) -> Iterator[list[Part]]:
        """Give an order that ranks answer, and do this rank's share in the context; then the answers are in the list.

        Args:
            kind, backend, parts, fields: see ``order``.
            within: seconds that the answers may take; None: the deadline.

        Raises:
            RankLost: a rank is gone, or silent.
        """
        answers: list[Part] = []
        with self._turn(backend):
            self._tell(kind, {**fields, "backend": backend}, parts)
            try:
                yield answers
            finally:  # whatever was raised here: they are on their way
                with self._uninterrupted():
                    answers += [self._reach(rank, within, partial(_receive, rank)) for rank in range(1, self.size)]
            if any(header["nth"] != self._orders for header, _ in answers):
                raise self.fail("the other processes answered something else")

    def together(
        self, kind: str, backend: int, work: Callable[[], T], parts: Sequence[Part] = (), **fields: object
    ) -> None:
        """Order what all ranks do together, and do it here; where that breaks between them, they are lost."""
        with self._turn(backend):
            self._tell(kind, {**fields, "backend": backend}, parts)
            self.in_step(work)

    def in_step(self, work: Callable[[], T]) -> T:
        """Return what ``work`` gives, in which all ranks wait for one another: if it fails, they are lost."""
        try:
            with self._uninterrupted():
                return work()
        except Exception as error:  # of torch.distributed, or of this rank alone
            silent = "imed out" in str(error) and f"a rank has not responded for {self.settings.deadline + SLACK:g} s"
            raise self._lose(range(1, self.size), silent or f"rank 0 raised {describe_error(error)}") from error

    def fail(self, why: str) -> RankLost:
        """End everything, since a rank is gone or differs from the others; return the error of all later calls."""
        if self.broken is None:
            self.broken = RankLost(f"{why}. The policy takes no more calls: {_REMEDY}")
            self._ranks.kill()
        return self.broken

    def end(self) -> None:
        """Make all ranks leave. May be called twice; does nothing in a process that was forked off."""
        if self.forked or self._ended:
            return
        self._ended = True
        atexit.unregister(self.end)
        locked = self._lock.acquire(timeout=GRACE)  # a thread may be in the middle of something for ever
        told = self._joined and locked and self.broken is None
        if told:
            with contextlib.suppress(RankLost):
                self._tell("end", {}, within=GRACE)
        self._ranks.end(GRACE if told else 0.0)
        if dist.is_initialized():
            dist.destroy_process_group()
        if locked:
            self._lock.release()

    def leak(self) -> None:
        """Never free the process groups: gloo would wait for threads that did not come along in a fork, and crash."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

    @contextlib.contextmanager
    def _turn(self, backend: int) -> Iterator[None]:
        """Hold the ranks, until an order is answered; who waits already comes before who asks again."""
        with self._next:
            self._lock.acquire()
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent[backend] += time.monotonic() - began
            self._lock.release()

    def _tell(
        self, kind: str, fields: Mapping[str, object], parts: Sequence[Part] = (), within: float | None = None
    ) -> None:
        self.check()
        self._orders += 1
        common = {**fields, "order": kind, "nth": self._orders}
        parts = parts or [IDLE] * (self.size - 1)
        packed = [pack(({**header, **common}, tensors)) for header, tensors in parts]  # all of it, or nothing
        with self._uninterrupted():
            for rank, message in enumerate(packed, 1):
                self._reach(rank, within, partial(_send, message, rank))

    @contextlib.contextmanager
    def _uninterrupted(self) -> Iterator[None]:
        """Give the ranks up where a signal interrupts: nobody knows any more who has said what."""
        try:
            yield
        except Exception:
            raise
        except BaseException as error:
            self.fail(f"{type(error).__name__} interrupted an exchange between the processes")
            raise

    def _reach(self, rank: int, within: float | None, work: Callable[[timedelta], T]) -> T:
        within = self.settings.deadline if within is None else within
        if self.broken is not None:
            raise RankLost(str(self.broken))
        try:
            return work(timedelta(seconds=within))
        except RuntimeError as error:
            silent = (
                "imed out" in str(error) and f"rank {rank} has not responded for {within:g} s, a limit of Processes"
            )
            raise self._lose([rank], silent or f"rank {rank} is gone: {error}") from error

    def _lose(self, ranks: Sequence[int], why: str) -> RankLost:
        """Give the ranks up: say which of some has ended, or ``why`` where none has."""
        return self.fail(self._ranks.ended(ranks, _NOTICED) or why)


_world: World | None = None
_worlds: weakref.WeakSet[World] = weakref.WeakSet()  # also those that have ended: a closed backend has their groups
_opening = threading.Lock()


def acquire(settings: Processes, device: str) -> tuple[World, int]:
    """Return the world of this process, begun if there is none, and the name of one user more.

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
            if torchrun_world_size() is not None:  # which starts all of them again, or none
                _world.check()
            _world.end()
            _world = None
        if _world is None:
            _world = World(settings, device)
        elif _world.size != settings.count or _world.device != device:
            what = f"got {settings.count} on {device}, but this process has {_world.size} on {_world.device}"
            raise ConfigError("processes", what, "the same, or close the other backends first")
        return _world, _world.add_user()


def release(world: World, backend: int) -> None:
    """Close a backend on all ranks; the last one ends those that rlkit started. May be called twice.

    In a thread of its own, which Ctrl-C does not interrupt: the next backend waits for it.
    """
    thread = threading.Thread(target=_release, args=(world, backend), name="rlkit-release")
    thread.start()
    thread.join()


def _release(world: World, backend: int) -> None:
    global _world  # noqa: PLW0603  # as above
    with _opening:
        if backend not in world.users:
            return
        world.users.remove(backend)
        if not world.users and torchrun_world_size() is None:
            world.end()
            _world = None if _world is world else _world
            return
    with contextlib.suppress(RankLost):
        world.order("close", backend)


@cache
def release_torchrun_at_exit() -> None:
    """Have those that torchrun started leave if this process, the first, ends without having had them do anything."""

    def release_all() -> None:
        if not _worlds:
            with contextlib.suppress(RuntimeError):  # they are gone, or never came so far
                call_torchrun(torchrun_world_size() or 1, GRACE, {})

    atexit.register(release_all)


def _after_fork() -> None:
    global _opening  # noqa: PLW0603  # somebody may have held it
    _opening = threading.Lock()
    for world in _worlds:
        world.leak()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
