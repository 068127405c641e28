"""``Child``: a rank that this process starts, and that ends with it."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkit import _orphans, _ray_cluster

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes

__all__ = ["LOOPBACK", "PROGRAM", "Child", "RayChild", "RayRanks"]

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
PROGRAM = "rlkit.backends.local._serve"  # what ranks other than 0 run; it imports this package
_LOG = 2000  # characters of what it wrote that an error shows


class Child:
    """A process that serves.

    Args:
        rank: its number.
        settings: what it reads first, see ``rlkit.backends.local._serve``.
        threads: of torch; None leaves them.
    """

    def __init__(self, rank: int, settings: Mapping[str, object], threads: int | None) -> None:
        self.rank = rank
        paths = [path or str(os.getcwd()) for path in sys.path]  # noqa: PTH109  # "" in a notebook
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        if settings.get("host") in (None, "127.0.0.1"):
            environment.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # it lives as long as the process
        _orphans.prepare()
        self._process = subprocess.Popen(  # noqa: S603  # this interpreter, a module of this package
            [sys.executable, "-P", "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C is the user's process's
        )
        self.pid = self._process.pid
        folder = settings.get("folder")  # of torch's store; rank 0 removes it, unless it is killed
        _orphans.adopt(self.pid, ending=["rm", "-rf", str(folder)] if folder else ())
        assert self._process.stdin is not None  # noqa: S101  # it is a pipe
        with contextlib.suppress(OSError), self._process.stdin as stdin:  # it is gone already: ``status`` says so
            stdin.write(json.dumps({**settings, "rank": rank, "threads": threads}).encode())

    @property
    def status(self) -> int | None:
        """Return the exit status; None while it runs."""
        known = self._process.returncode
        if known is None and self._process.poll() is not None:
            _orphans.release(self.pid)
        return self._process.returncode

    def describe(self, wait: float = 0.0) -> str:
        """Describe how it ended, if it does in ``wait`` seconds, and its last output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)
        status = self.status
        if status is None:
            how = "still runs"
        elif status < 0:
            how = f"was killed by {signal.Signals(-status).name}"
        else:
            how = f"ended with status {status}"
        text = self._written
        return f"process {self.pid} {how}" + (f"; it wrote: {text}" if text else "")

    @property
    def _written(self) -> str:
        """Return its last output, as long as it has not ended by ``end``."""
        if self._log.closed:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - _LOG))
        return self._log.read().decode("utf-8", "replace").strip()

    def end(self, patience: float) -> None:
        """Wait until it has ended, ``patience`` seconds at most, and kill it then. May be called twice."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        _orphans.release(self.pid)
        self._log.close()


class RayRanks:
    """Where the ranks of a world are to be.

    Args:
        settings: with ``ray``.

    Attributes:
        host: this process's address, by which they reach it.

    Raises:
        ConfigError: the machine, or the placement group, has no room for them.
        BackendTimeout: the placement group got no place.
    """

    def __init__(self, settings: Processes) -> None:
        self._ray = _ray_cluster.connected()
        self.host: str = self._ray.util.get_node_ip_address()
        worker = _ray_cluster.RayWorker(**(settings.ray or {}))
        options, _ = worker.find_room(self._ray, settings.count - 1, settings.start)
        self._actor = self._ray.remote(_Keeper).options(max_concurrency=4, max_restarts=0, **options)

    def start(self, rank: int, settings: Mapping[str, object], threads: int | None) -> RayChild:
        """Start a rank; the arguments are those of ``Child``."""
        return RayChild(self._ray, self._actor.remote(rank, {**settings, "host": self.host}, threads), rank)


class RayChild:
    """What ``Child`` is for a process of this machine.

    Args:
        ray: connected.
        keeper: an actor of ``_Keeper``.
        rank: its number.
    """

    def __init__(self, ray: Any, keeper: Any, rank: int) -> None:
        self.rank = rank
        self._ray, self._keeper = ray, keeper
        self._ended: concurrent.futures.Future[tuple[int, str]] = keeper.wait.remote().future()

    @property
    def status(self) -> int | None:
        """Return the exit status; None while it runs, or waits for its place."""
        if not self._ended.done():
            return None
        return -9 if self._ended.exception() is not None else self._ended.result()[0]

    def describe(self, wait: float = 0.0) -> str:
        """Describe how it ended, if it does in ``wait`` seconds, and its last output."""
        concurrent.futures.wait([self._ended], wait)
        if not self._ended.done():
            return "the process that Ray placed still runs"
        error = self._ended.exception()
        if error is None:
            return self._ended.result()[1]
        return f"its Ray worker was lost: {(str(error).strip().splitlines() or [''])[0]}"

    def end(self, patience: float) -> None:
        """Wait until it has ended, ``patience`` seconds at most, and kill it then. May be called twice."""
        concurrent.futures.wait([self._ended], patience)
        with contextlib.suppress(Exception):  # it is gone, or Ray is
            self._ray.kill(self._keeper)


class _Keeper:
    """In a worker of Ray: holds the process that serves, which ends with it."""

    def __init__(self, rank: int, settings: Mapping[str, object], threads: int | None) -> None:
        os.environ["LOCAL_RANK"] = "0"  # of the GPUs that Ray lets it see
        self._child = Child(rank, settings, threads)

    def wait(self) -> tuple[int, str]:
        """Return how it ended, once it has."""
        while self._child.status is None:
            self._child.describe(wait=60.0)
        return self._child.status, self._child.describe()
