"""How ranks find one another: a store of torch's, a socket from each to rank 0, and the process group."""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from rlkit.backends.local.distributed.launch import LOOPBACK
from rlkit.backends.local.distributed.wire import Connection, Message
from rlkit.errors import BackendError, ConfigError

__all__ = ["Listener", "check_free", "join_group", "knock", "torchrun_store"]

SLACK = 30.0  # seconds that collectives wait longer than for signs of life
_ADDRESS = "rlkit/address"


def check_free() -> None:
    """Raise ConfigError where this process is in a process group of somebody else's."""
    if not dist.is_available():
        raise ConfigError("processes: this build of torch has no torch.distributed; leave processes= out")
    if dist.is_initialized():
        raise ConfigError(
            "processes: torch.distributed is initialised in this process already; leave that to rlkit.connect, or call "
            "torch.distributed.destroy_process_group() before"
        )


def torchrun_store(start: float) -> tuple[dist.Store, int, int]:
    """Return the store that torchrun's ranks share, this one's rank, and how many there are."""
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=timedelta(seconds=start))))
    return dist.PrefixStore("rlkit", store), rank, size


def join_group(store: dist.Store, rank: int, size: int, device: str, deadline: float, *, loopback: bool) -> None:
    """Join the process group: gloo for what is on a CPU, NCCL for what is on a GPU of CUDA."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" and dist.is_nccl_available() else "gloo"
    timeout = timedelta(seconds=deadline + SLACK)
    with _on_loopback() if loopback else contextlib.nullcontext():
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


@contextlib.contextmanager
def _on_loopback() -> Iterator[None]:
    """Have gloo listen on this machine alone."""
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

    def announce(self, store: dist.Store, *, token: bool) -> None:
        """Put the address into the store, with the token where ranks have no other way to know it."""
        address = {"host": self._host, "port": self._socket.getsockname()[1], "token": self.token if token else None}
        store.set(_ADDRESS, json.dumps(address))

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
        self._socket.settimeout(0.2)
        while len(connections) < size - 1:
            check()
            if time.monotonic() > end:
                missing = [rank for rank in range(1, size) if rank not in connections]
                raise BackendError(f"processes: ranks {missing} did not come in {start:g} s; see Processes(start=)")
            try:
                link, _ = self._socket.accept()
            except TimeoutError:
                continue
            connection = Connection(link)
            with contextlib.suppress(OSError, EOFError, ValueError, KeyError):
                link.settimeout(10.0)
                hello = connection.receive()
                link.settimeout(None)
                if hmac.compare_digest(str(hello.fields["token"]), self.token):
                    connections[int(hello.fields["rank"])] = connection
                    continue
            connection.close()
        return [connections[rank] for rank in range(1, size)]

    def close(self) -> None:
        """Accept no more."""
        self._socket.close()


def knock(store: dist.Store, rank: int, token: str | None) -> Connection:
    """Return the connection of a rank to rank 0, once that listens."""
    address = json.loads(store.get(_ADDRESS))
    connection = Connection(socket.create_connection((address["host"], address["port"]), timeout=60.0))
    connection.send(Message("hello", {"rank": rank, "token": address["token"] or token}))
    return connection
