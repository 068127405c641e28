"""``Server``: the loop of ranks other than 0: open backends, and do with each what rank 0 says, until it leaves."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hmac
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlkit.backends.local.distributed._launch import LOOPBACK
from rlkit.backends.local.distributed.sharding import ShardedWeights, ShardGroups, shard_groups
from rlkit.backends.local.distributed.wire import Connection, Message, Peer, Reply
from rlkit.errors import BackendError, ConfigError

__all__ = [
    "Listener",
    "Opener",
    "Served",
    "Server",
    "check_free",
    "join_group",
    "knock",
    "on_one_node",
    "open_file_store",
    "open_groups",
    "open_store",
    "torchrun_size",
    "torchrun_store",
]

SLACK = 30.0  # seconds that collectives wait longer than for signs of life
_ADDRESS = "rlkit/address"
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and its like set


def check_free() -> None:
    """Raise ConfigError where this process is in a process group of somebody else's."""
    if not dist.is_available():
        raise ConfigError("processes: this build of torch has no torch.distributed; leave processes= out")
    if dist.is_initialized():
        raise ConfigError(
            "processes: torch.distributed is initialised in this process already; leave that to rlkit.connect, or call "
            "torch.distributed.destroy_process_group() before"
        )


def open_file_store(folder: str, start: float) -> dist.FileStore:
    """Return a store of ranks on one machine: a file, which needs no port that others could read and write."""
    store = dist.FileStore(os.path.join(folder, "store"))  # noqa: PTH118  # torch takes no Path
    store.set_timeout(timedelta(seconds=start))
    return store


def open_store(host: str, start: float) -> dist.TCPStore:
    """Return a store that listens on one address of this machine alone, for ranks on other machines.

    torch would take every address, whatever its host, and anybody who reaches its port reads and writes.
    """
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=start),
        master_listen_fd=listening.detach(),  # which closes it
    )


def torchrun_size() -> int | None:
    """Return how many processes torchrun started, or None where it did not start this one."""
    if not all(os.environ.get(name) for name in _TORCHRUN):
        return None
    return int(os.environ["WORLD_SIZE"])


def torchrun_store(start: float) -> tuple[dist.Store, int, int]:
    """Return the store that torchrun's ranks share, this one's rank, and how many there are."""
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=start))))
    return dist.PrefixStore("rlkit", store), rank, size


def on_one_node() -> bool:
    """Return whether all ranks that torchrun has started are on this machine."""
    here, everywhere = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    return here is not None and here == everywhere


def join_group(store: dist.Store, rank: int, size: int, device: str, deadline: float, *, loopback: bool) -> None:
    """Join the process group: gloo for what is on a CPU, NCCL for what is on a GPU of CUDA."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=deadline + SLACK)
    with _on_loopback() if loopback else contextlib.nullcontext():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Make gloo listen on this machine alone."""
    name = "GLOO_SOCKET_IFNAME"
    before = os.environ.get(name)
    os.environ[name] = before or LOOPBACK
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)


class Listener:
    """Where rank 0 waits for the others.

    Args:
        host: a name of this machine by which others reach it, if it is one.
    """

    def __init__(self, host: str) -> None:
        try:
            self._socket = socket.create_server((host, 0))  # a port that is free, and taken at once
        except OSError:  # torchrun's store is on another machine
            host = socket.gethostname()
            self._socket = socket.create_server((host, 0))
        self._host = host
        self.token = secrets.token_hex(16)

    @property
    def address(self) -> dict[str, str | int]:
        """Return its address, and the token that it expects."""
        return {"host": self._host, "port": self._socket.getsockname()[1], "token": self.token}

    def announce(self, store: dist.Store) -> None:
        """Put the address into the store, for ranks that have no other way to know it."""
        store.set(_ADDRESS, json.dumps(self.address))

    def accept(self, size: int, start: float, check: Callable[[], None]) -> list[Connection]:
        """Return the connections of ranks 1 to ``size`` - 1.

        Args:
            size: of the world.
            start: seconds until all must be there.
            check: called in between, raises where one of them cannot come any more.

        Raises:
            BackendError: they did not come in time.
        """
        end = time.monotonic() + start
        connections: dict[int, Connection] = {}
        self._socket.settimeout(0.05)
        while len(connections) < size - 1:
            check()
            if time.monotonic() > end:
                missing = [rank for rank in range(1, size) if rank not in connections]
                raise BackendError(f"processes: ranks {missing} did not connect in {start:g} s; see Processes(start=)")
            with contextlib.suppress(TimeoutError):
                link, _ = self._socket.accept()
                # In a thread, so that silent connections keep no rank out.
                threading.Thread(target=self._greet, args=(link, connections), name="rlkit-hello", daemon=True).start()
        return [connections[rank] for rank in range(1, size)]

    def _greet(self, link: socket.socket, connections: dict[int, Connection]) -> None:
        """Add the connection of a rank that shows the token; close any other."""
        connection, rank, token = Connection(link), 0, b""
        with contextlib.suppress(Exception):  # strangers may send anything
            link.settimeout(10.0)
            hello = connection.receive(stranger=True).fields
            rank, token = int(hello["rank"]), str(hello["token"]).encode()
            link.settimeout(None)
        if hmac.compare_digest(token, self.token.encode()):
            connections[rank] = connection
        else:
            connection.close()

    def close(self) -> None:
        """Stop accepting connections."""
        self._socket.close()


def open_groups(deadline: float, *, shard: object) -> tuple[dist.ProcessGroup, ShardGroups | None]:
    """Return groups for a backend's gradients and, with ``shard``, its weights; called by all ranks in one order."""
    timeout = timedelta(seconds=deadline + SLACK)
    return dist.new_group(timeout=timeout), shard_groups(timeout) if shard else None


def knock(store: dist.Store, rank: int, address: Mapping[str, Any] | None) -> Connection:
    """Return the connection of a rank to rank 0, once that listens; without its address, where the store says."""
    address = address or json.loads(store.get(_ADDRESS))
    connection = Connection(socket.create_connection((address["host"], address["port"]), timeout=60.0))
    connection.send(Message("hello", {"rank": rank, "token": address["token"]}))
    return connection


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
        """See ``rlkit.backends.local._serve.Replica``."""


class Server:
    """A rank that serves.

    Args:
        opener: makes its backends.
        store: of all ranks.
        rank: this one's number.
        size: how many there are.
        address: of rank 0's ``Listener``; None where the store has it.
        lost: called where rank 0 is gone without a word.
        loopback: all ranks are on this machine.
    """

    def __init__(
        self,
        opener: Opener,
        store: dist.Store,
        rank: int,
        size: int,
        address: Mapping[str, Any] | None,
        lost: Callable[[], None],
        *,
        loopback: bool,
    ) -> None:
        check_free()
        self._opener, self._rank, self._lost = opener, rank, lost
        self._backends: dict[int, Served] = {}
        self._left = threading.Event()
        self._loader = concurrent.futures.ThreadPoolExecutor(1, "rlkit-load")
        connection = knock(store, rank, address)
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
            groups = open_groups(self._deadline, shard=message.fields["options"].get("shard"))  # in rank 0's order
            return self._loader.submit(self._open, number, message, *groups)
        backend = self._backends.get(number)
        if backend is None:
            raise BackendError("this rank has no such open backend")
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
