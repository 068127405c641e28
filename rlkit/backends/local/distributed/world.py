"""``World``: the processes, of which rank 0 gives orders that all carry out, one after the other.

All backends of a process share one. It begins with the first backend on several processes. Ranks that rlkit started end
with the last one; those that torchrun started follow until this process ends, or says so.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import ctypes
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from rlkit._process import Program, ProgramResult
from rlkit._runtime import torchrun_world_size
from rlkit.backends.local.distributed._messages import IDLE, Part, pack, unpack
from rlkit.backends.local.distributed.sharding import ShardGroups, shard_groups
from rlkit.backends.trainer import check_process
from rlkit.errors import BackendError, ConfigError, RankLost

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes

__all__ = [
    "PROGRAM",
    "SLACK",
    "FollowerWorld",
    "World",
    "acquire",
    "join_torchrun",
    "open_store",
    "release",
    "release_torchrun_at_exit",
]

T = TypeVar("T")

PROGRAM = "rlkit.backends.local.distributed.follower"  # what ranks other than 0 run
_CALL = "call"  # the key of torchrun's store by which rank 0 tells the others how to join
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_FOR_EVER = timedelta(days=365)  # that an order may take to come: the user's loop thinks, or stands at a breakpoint
SLACK = 30.0  # seconds that collectives wait longer than answers
_NOTICED = 2.0  # seconds in which it is noticed that a process which broke off has ended
_GRACE = 5.0  # seconds that a rank has to end
_REMEDY = "connect anew with resume_from= and the last saved path"


def _check_free() -> None:
    """Raise ConfigError where this process cannot have a process group of rlkit's."""
    if not dist.is_available():
        raise ConfigError("processes: this build of torch has no torch.distributed; leave processes= out")
    if dist.is_initialized():
        raise ConfigError(
            "processes: torch.distributed is initialised in this process already; leave that to rlkit.connect, or call "
            "torch.distributed.destroy_process_group() before"
        )


def _join(store: dist.Store, rank: int, size: int, device: str, start: float, deadline: float) -> dist.ProcessGroup:
    """Join the process group, by which orders go; return another for what all do together."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
    store.set_timeout(timedelta(seconds=start))
    hook = sys.excepthook
    with _on_loopback():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=start))
        group = dist.new_group(timeout=timedelta(seconds=deadline + SLACK))
    sys.excepthook = hook  # torch's has "[rank0]:" before every line of an error, and the user sees one rank alone
    return group


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make gloo listen on this machine alone, where all ranks are on it."""
    name, here = "GLOO_SOCKET_IFNAME", os.environ.get("LOCAL_WORLD_SIZE")
    with contextlib.ExitStack() as stack:
        if name not in os.environ and (torchrun_world_size() is None or here == os.environ["WORLD_SIZE"]):
            os.environ[name] = _LOOPBACK
            stack.callback(os.environ.pop, name, None)
        yield


def _send(message: Sequence[torch.Tensor], rank: int, within: timedelta) -> None:
    for tensor in message:
        work = dist.isend(tensor, rank)
        assert work is not None  # noqa: S101  # this process is in the group
        work.wait(within)


def _receive(rank: int, within: timedelta) -> Part:
    sizes = torch.zeros(2, dtype=torch.int64)
    _wait(dist.irecv(sizes, rank), within)
    flat = torch.empty(int(sizes.sum()), dtype=torch.uint8)
    _wait(dist.irecv(flat, rank), within)
    return unpack(sizes, flat)


def _wait(work: Any, within: timedelta) -> None:
    work.wait(within)


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
        _check_free()
        self.rank, self.deadline, self._nth = rank, deadline, 0
        self.group = _join(store, rank, size, device, start, deadline)

    def receive(self) -> Part:
        """Return rank 0's next order. Raises RuntimeError: rank 0 is gone."""
        order = _receive(0, _FOR_EVER)
        self._nth = order[0]["nth"]
        return order

    def answer(self, part: Part = IDLE) -> None:
        """Answer the order."""
        header, tensors = part
        _send(pack(({**header, "nth": self._nth}, tensors)), 0, _FOR_EVER)

    def make_shard_groups(self) -> ShardGroups:
        """Return groups for a backend's weights, made by all ranks together."""
        with _on_loopback():
            return shard_groups(timedelta(seconds=self.deadline + SLACK))


class World:
    """Rank 0's view of all ranks.

    Args:
        settings: how many there are, and how long they may take.
        device: "cuda" where each has its own GPU, else "cpu".

    Attributes:
        size: how many, rank 0 included.
        broken: what has ended it, if anything has.
        group: for what all do together.
        lock: held until an order is answered.
    """

    def __init__(self, settings: Processes, device: str) -> None:
        _check_free()
        self.settings, self.device, self.size = settings, device, settings.count
        self.broken: RankLost | None = None
        self._orders = 0
        self.users, self.numbers = 0, itertools.count(1)  # backends that are open, and names for all
        self._groups: list[dist.ProcessGroup] = []
        self.lock = threading.RLock()
        self._process, self._ended = os.getpid(), False
        self._programs: list[Program] = []
        self._ends: list[concurrent.futures.Future[ProgramResult]] = []
        self._threads: int | None = None
        self.folder = ""
        self._torchrun = torchrun_world_size() is not None
        _worlds.add(self)
        atexit.register(self.end)
        try:
            limits = {"start": settings.start, "deadline": settings.deadline}
            if self._torchrun:
                store = _call_torchrun(self.size, settings.start, {"device": device, **limits})
            else:
                store = self._start_all()
            self.group = _join(store, 0, self.size, device, settings.start, settings.deadline)
        except RuntimeError as error:
            self.end()
            why = "; ".join(self._describe(rank) for rank, end in enumerate(self._ends, 1) if end.done()) or error
            raise BackendError(f"processes: the ranks did not connect to each other: {why}") from error
        except BaseException:
            self.end()
            raise
        self._groups += [dist.group.WORLD, self.group]

    @property
    def forked(self) -> bool:
        """Return whether this process was forked off the one that has the ranks."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Raise RankLost where a rank is gone, BackendError in a process that was forked off."""
        check_process("local", self._process)
        if self.broken is None:
            for rank, end in enumerate(self._ends, 1):
                if end.done() and not self._ended:
                    raise self.fail(f"rank {rank} is gone: {self._describe(rank)}")
        if self.broken is not None:
            raise RankLost(str(self.broken))

    def order(self, kind: str, parts: Sequence[Part] = (), **fields: object) -> None:
        """Tell all ranks what to do next; with ``parts`` each one's own, rank 1's first.

        Raises:
            RankLost: a rank is gone.
        """
        with self.lock:
            self.check()
            self._orders += 1
            common = {**fields, "order": kind, "nth": self._orders}
            parts = parts or [IDLE] * (self.size - 1)
            packed = [pack(({**header, **common}, tensors)) for header, tensors in parts]  # all of it, or nothing
            with self._uninterrupted():
                for rank, message in enumerate(packed, 1):
                    self._reach(rank, partial(_send, message, rank, self._within))

    @contextlib.contextmanager
    def exchange(
        self, kind: str, parts: Sequence[Part] = (), within: float | None = None, **fields: object
    ) -> Iterator[list[Part]]:
        """Give an order that ranks answer, and do this rank's share in the context; then the answers are in the list.

        Args:
            kind, parts, fields: see ``order``.
            within: seconds that the answers may take; None: the deadline.

        Raises:
            RankLost: a rank is gone, or silent.
        """
        answers: list[Part] = []
        limit = self._within if within is None else timedelta(seconds=within)
        with self.lock:
            self.order(kind, parts, **fields)
            try:
                yield answers
            finally:  # whatever was raised here: they are on their way
                with self._uninterrupted():
                    answers += [self._reach(rank, partial(_receive, rank, limit)) for rank in range(1, self.size)]
            if any(header["nth"] != self._orders for header, _ in answers):
                raise self.fail("the other processes answered something else")

    def together(self, kind: str, work: Callable[[], object], backend: int) -> None:
        """Order what all ranks do together, and do it here; where that breaks between them, they are lost."""
        with self.lock, self._uninterrupted():
            self.order(kind, backend=backend)
            try:
                work()
            except RuntimeError as error:  # of torch.distributed
                raise self.fail(f"a collective operation failed on rank 0: {error}") from error

    def make_shard_groups(self) -> ShardGroups:
        """See ``FollowerWorld``."""
        with _on_loopback():
            groups = shard_groups(timedelta(seconds=self.settings.deadline + SLACK))
        self._groups += groups
        return groups

    def fail(self, why: str) -> RankLost:
        """End everything, since a rank is gone or differs from the others; return the error of all later calls."""
        if self.broken is None:
            self.broken = RankLost(f"{why}. The policy takes no more calls: {_REMEDY}")
            for program in self._programs:
                program.kill(grace=0.0)
        return self.broken

    def end(self) -> None:
        """Make all ranks leave. May be called twice; does nothing in a process that was forked off."""
        if self.forked or self._ended:
            return
        self._ended = True
        atexit.unregister(self.end)
        locked = self.lock.acquire(timeout=_GRACE)  # a thread may be in the middle of something for ever
        if self.broken is None and locked and dist.is_initialized():
            with contextlib.suppress(RankLost):
                self.order("end")
        concurrent.futures.wait(self._ends, _GRACE if locked else 0.0)
        for program in self._programs:
            program.kill(grace=0.0)
        concurrent.futures.wait(self._ends, _GRACE)
        if dist.is_initialized():
            dist.destroy_process_group()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        if locked:
            self.lock.release()

    def leak(self) -> None:
        """Never free the process groups: gloo would wait for threads that did not come along in a fork, and crash."""
        for group in self._groups:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))

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

    @property
    def _within(self) -> timedelta:
        return timedelta(seconds=self.settings.deadline)

    def _reach(self, rank: int, work: Callable[[], T]) -> T:
        try:
            return work()
        except RuntimeError as error:
            end = self._ends[rank - 1] if self._ends else None
            if end is not None:
                concurrent.futures.wait([end], _NOTICED)
            if end is not None and end.done():
                raise self.fail(f"rank {rank} is gone: {self._describe(rank)}") from error
            if "imed out" in str(error):
                raise self.fail(f"rank {rank} has not responded for {self.settings.deadline:g} s") from error
            raise self.fail(f"rank {rank} is gone: {error}") from error

    def _describe(self, rank: int) -> str:
        """Describe how a rank ended, with its last output."""
        end = self._ends[rank - 1]
        if (error := end.exception()) is not None:
            return str(error)
        result = end.result()
        how = f"was killed by {signal.Signals(-result.code).name}" if result.code < 0 else f"ended with {result.code}"
        text = f"{result.stdout}\n{result.stderr}".strip()[-2000:]
        return f"its process {how}" + (f"; it wrote: {text}" if text else "")

    def _start_all(self) -> dist.Store:
        """Start the other ranks; return the store by which all find each other: a file of this user's."""
        settings = self.settings
        threads = settings.threads
        if threads is None and self.device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, torch.get_num_threads() // self.size)  # or they would take turns on the cores
        if threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(threads)
        self.folder = tempfile.mkdtemp(prefix="rlkit-ranks-")  # of mode 0700
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # "" in a notebook
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        shape: Mapping[str, object] = {"size": self.size, "device": self.device, "folder": self.folder}
        limits = {"start": settings.start, "deadline": settings.deadline, "threads": threads}
        for rank in range(1, self.size):
            told = json.dumps({**shape, **limits, "rank": rank}).encode()
            command = [sys.executable, "-P", "-m", PROGRAM]
            left = ["rm", "-rf", self.folder]  # where this process is killed
            program = Program(command, environment=environment, stdin=told, keep=20_000, ending=left)
            self._programs.append(program)
            self._ends.append(self._programs[-1].start())
        store = open_store(self.folder, settings.start)
        _wait_for_ranks(store, self.size, settings.start, self._ends)
        return store


def join_torchrun(rank: int) -> tuple[dist.Store, dict[str, Any]]:
    """Wait until rank 0 calls all that torchrun started; return the store, and how to join.

    torchrun's store outlasts a restart, so what is found there may be of an earlier start.
    """
    store, seen, told = _torchrun_store(), b"", {}
    meeting: dist.Store | None = None
    while meeting is None or not meeting.check(["begun"]):
        said = store.get(_CALL)
        if said not in (b"", seen):
            seen, told = said, json.loads(said)
            meeting = dist.PrefixStore(told.pop("name"), store)
            meeting.set(f"rank{rank}", "here")
        time.sleep(0.05)
    return meeting, told


def _call_torchrun(size: int, start: float, told: Mapping[str, object]) -> dist.Store:
    """Call all that torchrun started, and wait for them; return a store of this meeting alone."""
    store, name = _torchrun_store(), secrets.token_hex(8)
    store.set(_CALL, json.dumps({**told, "name": name}))
    meeting = dist.PrefixStore(name, store)
    _wait_for_ranks(meeting, size, start)
    store.set(_CALL, "")
    meeting.set("begun", "")
    return meeting


def _torchrun_store() -> dist.Store:
    store, _, _ = next(dist.rendezvous("env://", timeout=_FOR_EVER))
    return dist.PrefixStore("rlkit", store)


@cache
def release_torchrun_at_exit() -> None:
    """Have those that torchrun started leave if this process, the first, ends without having had them do anything."""

    def release_all() -> None:
        if not _worlds:
            with contextlib.suppress(RuntimeError):  # they are gone, or never came so far
                _call_torchrun(torchrun_world_size() or 1, _GRACE, {})

    atexit.register(release_all)


def _wait_for_ranks(
    store: dist.Store, size: int, start: float, ends: Sequence[concurrent.futures.Future[ProgramResult]] = ()
) -> None:
    names, until = [f"rank{rank}" for rank in range(1, size)], time.monotonic() + start
    while not store.check(names):
        if any(end.done() for end in ends) or time.monotonic() > until:
            raise RuntimeError(f"not all of them came in {start:g} s; see Processes(start=)")
        time.sleep(0.02)


def open_store(folder: str, start: float) -> dist.FileStore:
    """Return a store of ranks on one machine: a file, which needs no port that others could read and write."""
    store = dist.FileStore(os.path.join(folder, "store"))  # noqa: PTH118  # torch takes no Path
    store.set_timeout(timedelta(seconds=start))  # until its file is there
    return store


_world: World | None = None
_worlds: weakref.WeakSet[World] = weakref.WeakSet()  # also those that have ended: a closed backend has their groups
_opening = threading.Lock()


def acquire(settings: Processes, device: str) -> World:
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
            if torchrun_world_size() is not None:  # which starts all of them again, or none
                _world.check()
            _world.end()
            _world = None
        if _world is None:
            _world = World(settings, device)
        elif _world.size != settings.count or _world.device != device:
            what = f"got {settings.count} on {device}, but this process has {_world.size} on {_world.device}"
            raise ConfigError("processes", what, "the same, or close the other backends first")
        _world.users += 1
        return _world


def release(world: World) -> None:
    """Take note that a backend is closed; the last one ends the ranks that rlkit started."""
    global _world  # noqa: PLW0603  # as above
    with _opening:
        world.users -= 1
        if world.users == 0 and torchrun_world_size() is None:
            world.end()
            _world = None if _world is world else _world


def _after_fork() -> None:
    global _opening  # noqa: PLW0603  # somebody may have held it
    _opening = threading.Lock()
    for world in _worlds:
        world.leak()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
