"""``RayChild``: a rank that Ray places, on this machine or on another of its cluster."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlkit import _ray_cluster
from rlkit.backends.local.distributed.launch import Child

if TYPE_CHECKING:
    from rlkit.backends.local.distributed.settings import Processes

__all__ = ["RayChild", "RayRanks"]

_WHERE = "Processes(ray)"


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
        options = {**(settings.ray or {}), "workers": settings.count - 1}
        place = _ray_cluster.Place.of(self._ray, options, settings.start, _WHERE)
        self._actor = self._ray.remote(_Keeper).options(max_concurrency=4, max_restarts=0, **place.options)

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
        """What it ended with; None while it runs, or waits for its place."""
        if not self._ended.done():
            return None
        return -9 if self._ended.exception() is not None else self._ended.result()[0]

    def describe(self, wait: float = 0.0) -> str:
        """Say how it ended, if it does in ``wait`` seconds, and the last that it wrote."""
        concurrent.futures.wait([self._ended], wait)
        if not self._ended.done():
            return "the process that Ray placed is there still"
        error = self._ended.exception()
        if error is None:
            return self._ended.result()[1]
        return f"the worker of Ray that held it was lost: {(str(error).strip().splitlines() or [''])[0]}"

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
