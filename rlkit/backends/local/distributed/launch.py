"""How ranks are started and find one another: by rlkit on this machine, or by torchrun."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlkit._process import Program, ProgramResult
from rlkit._runtime import torchrun_world_size
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes

__all__ = [
    "FOR_EVER",
    "GRACE",
    "PROGRAM",
    "SLACK",
    "Ranks",
    "call_torchrun",
    "check_free",
    "join",
    "join_torchrun",
    "on_loopback",
    "open_store",
]

_log = logging.getLogger(__name__)

FOR_EVER = timedelta(days=365)  # that an order may take to come: the user's loop thinks, or stands at a breakpoint
SLACK = 30.0  # seconds that collectives wait longer than answers
GRACE = 5.0  # seconds that a rank has to end
_QUIET = 60.0  # seconds that ranks wait for rank 0 before they say so
_CALL = "call"  # the key of torchrun's store by which rank 0 tells the others how to join
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# What ranks other than 0 run. Their path is that of this process, set where nothing of the user's can hide Python's.
PROGRAM = """\
import json, sys
told = json.load(sys.stdin)
sys.path[:] = told.pop("path")
from rlkit.backends.local.distributed.follower import main
main(**told)
"""


def check_free() -> None:
    """Raise ConfigError where this process cannot have a process group of rlkit's."""
    if not dist.is_available():
        raise ConfigError("processes: this build of torch has no torch.distributed; leave processes= out")
    if dist.is_initialized():
        raise ConfigError(
            "processes: torch.distributed is initialised in this process already; leave that to rlkit.connect, or call "
            "torch.distributed.destroy_process_group() before"
        )


def join(store: dist.Store, rank: int, size: int, device: str, start: float, deadline: float) -> dist.ProcessGroup:
    """Join the process group, by which orders go; return another for what all do together."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
    store.set_timeout(timedelta(seconds=start))
    hook = sys.excepthook
    with on_loopback():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=start))
        group = dist.new_group(timeout=timedelta(seconds=deadline + SLACK))
    sys.excepthook = hook  # torch's has "[rank0]:" before every line of an error, and the user sees one rank alone
    return group


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Make gloo listen on this machine alone, where all ranks are on it."""
    name, here = "GLOO_SOCKET_IFNAME", os.environ.get("LOCAL_WORLD_SIZE")
    with contextlib.ExitStack() as stack:
        if name not in os.environ and (torchrun_world_size() is None or here == os.environ["WORLD_SIZE"]):
            os.environ[name] = _LOOPBACK
            stack.callback(os.environ.pop, name, None)
        yield


class Ranks:
    """The processes that rlkit starts on this machine; none where torchrun starts them.

    Attributes:
        folder: with the store by which they find one another, "" where there is none.
    """

    def __init__(self) -> None:
        self.folder = ""
        self._programs: list[Program] = []
        self._ends: list[concurrent.futures.Future[ProgramResult]] = []
        self._threads: int | None = None  # of torch in this process, before

    def start(self, settings: Processes, device: str) -> dist.Store:
        """Start all but this one, and wait for them; return the store, which no other user can open.

        Raises:
            RuntimeError: one has ended, or they took too long.
        """
        threads = settings.threads
        if threads is None and device == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            threads = max(1, torch.get_num_threads() // settings.count)  # or they would take turns on the cores
        if threads is not None:
            self._threads = torch.get_num_threads()
            torch.set_num_threads(threads)
        self.folder = tempfile.mkdtemp(prefix="rlkit-ranks-")  # of mode 0700
        paths = [path or os.getcwd() for path in sys.path]  # noqa: PTH109  # "" in a notebook
        environment = os.environ | ({} if threads is None else {"OMP_NUM_THREADS": str(threads)})
        limits = {"start": settings.start, "deadline": settings.deadline}
        for rank in range(1, settings.count):
            told = {"path": paths, "folder": self.folder, "rank": rank, "size": settings.count, "device": device}
            program = Program(
                [sys.executable, "-P", "-c", PROGRAM],
                environment=environment,
                stdin=json.dumps({**told, **limits}).encode(),
                keep=20_000,
                ending=["rm", "-rf", self.folder],  # where this process is killed
            )
            self._programs.append(program)
            self._ends.append(program.start())
        store = open_store(self.folder, settings.start)
        _wait_for_ranks(store, settings.count, settings.start, self._ends)
        return store

    def ended(self, ranks: Collection[int], within: float = 0.0) -> str:
        """Return which of some ranks has ended and how, with its last output; "" where none has ``within`` seconds."""
        ends = {rank: self._ends[rank - 1] for rank in ranks if self._ends}
        concurrent.futures.wait(ends.values(), within, concurrent.futures.FIRST_COMPLETED)
        return next((f"rank {rank} is gone: {_describe(end)}" for rank, end in ends.items() if end.done()), "")

    def kill(self) -> None:
        """Kill all that still run."""
        for program in self._programs:
            program.kill(grace=0.0)

    def end(self, grace: float) -> None:
        """Kill those that have not ended by themselves after ``grace`` seconds, and remove what was theirs."""
        concurrent.futures.wait(self._ends, grace)
        self.kill()
        concurrent.futures.wait(self._ends, GRACE)
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def _describe(end: concurrent.futures.Future[ProgramResult]) -> str:
    if (error := end.exception()) is not None:
        return str(error)
    result = end.result()
    how = f"was killed by {signal.Signals(-result.code).name}" if result.code < 0 else f"ended with {result.code}"
    text = f"{result.stdout}\n{result.stderr}".strip()[-2000:]
    return f"its process {how}" + (f"; it wrote: {text}" if text else "")


def open_store(folder: str, start: float) -> dist.FileStore:
    """Return a store of ranks on one machine: a file, which needs no port that others could read and write."""
    store = dist.FileStore(os.path.join(folder, "store"))  # noqa: PTH118  # torch takes no Path
    store.set_timeout(timedelta(seconds=start))  # until its file is there
    return store


def _wait_for_ranks(
    store: dist.Store, size: int, start: float, ends: Sequence[concurrent.futures.Future[ProgramResult]] = ()
) -> None:
    names, until = [f"rank{rank}" for rank in range(1, size)], time.monotonic() + start
    while not store.check(names):
        if any(end.done() for end in ends) or time.monotonic() > until:
            raise RuntimeError(f"not all of them came in {start:g} s; see Processes(start=)")
        time.sleep(0.02)


def join_torchrun(rank: int) -> tuple[dist.Store, dict[str, Any]]:
    """Wait until rank 0 calls all that torchrun started; return the store, and how to join.

    torchrun's store outlasts a restart, so what is found there may be of an earlier start.
    """
    warning = threading.Timer(_QUIET, _log.warning, ("rank %d has waited %g s for rank 0 to connect", rank, _QUIET))
    warning.daemon = True
    warning.start()
    store, seen, told = _open_torchrun_store(FOR_EVER), b"", {}
    meeting: dist.Store | None = None
    while meeting is None or not meeting.check(["begun"]):
        said = store.get(_CALL)
        if said not in (b"", seen):
            seen, told = said, json.loads(said)
            meeting = dist.PrefixStore(told.pop("name"), store)
            meeting.set(f"rank{rank}", "here")
        time.sleep(0.05)
    warning.cancel()
    return meeting, told


def call_torchrun(size: int, start: float, told: Mapping[str, object]) -> dist.Store:
    """Call all that torchrun started, and wait for them; return a store of this meeting alone.

    Raises:
        RuntimeError: they took too long.
    """
    store, name = _open_torchrun_store(timedelta(seconds=start)), secrets.token_hex(8)
    store.set(_CALL, json.dumps({**told, "name": name}))
    meeting = dist.PrefixStore(name, store)
    _wait_for_ranks(meeting, size, start)
    store.set(_CALL, "")
    meeting.set("begun", "")
    return meeting


def _open_torchrun_store(within: timedelta) -> dist.Store:
    told = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=within))
    except (RuntimeError, ValueError) as error:
        named = ", ".join(f"{name}={value}" for name, value in told.items())
        raise RuntimeError(f"torchrun's store was not reached, or not all ranks came ({named}): {error}") from error
    return dist.PrefixStore("rlkit", store)
