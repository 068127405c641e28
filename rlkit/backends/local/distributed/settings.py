"""``Processes``: on how many processes a local backend trains and samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeGuard

import attrs

from rlkit import _check, _ray_cluster
from rlkit.errors import ConfigError

__all__ = ["Processes", "processes_of", "serves", "torchrun_size"]

RAY_OPTIONS = ("num_cpus", "num_gpus", "memory", "resources", "placement_group")
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun and its like set


@attrs.frozen
class Processes:
    """Processes that train and sample together: ``connect("local", ..., processes=2)`` is ``Processes(2)``.

    Args:
        count: how many, this one included.
        deadline: seconds that one of them may give no sign of life.
        start: seconds that they may take until they have imported torch and found one another.
        threads: of torch in each; None shares those of this process, where the model is on a CPU.
        ray: have Ray place the others, on the cluster that ``ray.init`` connected to, else on this machine; what it
            gives to each: "num_cpus" (1, which is its threads), "num_gpus" (0), "memory" in bytes, "resources" by name,
            and "placement_group", Ray's own or its name. None: on this machine, without Ray.

    Raises:
        ConfigError: an option is of the wrong type or out of range.
        MissingPackageError: ``ray`` is given, and it is not installed.
    """

    count: int
    deadline: float = attrs.field(default=60.0, kw_only=True)
    start: float = attrs.field(default=600.0, kw_only=True)
    threads: int | None = attrs.field(default=None, kw_only=True)
    ray: Mapping[str, Any] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check.integer("processes", self.count, low=1)
        for name in ("deadline", "start"):
            _check.real(f"Processes({name})", getattr(self, name), above=0.0, why="seconds")
        if self.threads is not None:
            _check.integer("Processes(threads)", self.threads, low=1)
        if self.ray is not None:
            _check.require(isinstance(self.ray, Mapping), "Processes(ray)", self.ray, "a dict")
            _ray_cluster.check(self.ray, "Processes(ray)", RAY_OPTIONS, "Processes(ray=)")


def torchrun_size() -> int | None:
    """Return how many processes torchrun started, or None where it did not start this one."""
    if not all(os.environ.get(name) for name in _TORCHRUN):
        return None
    return int(os.environ["WORLD_SIZE"])


def processes_of(processes: object) -> Processes | None:
    """Return what ``processes=`` asks for, or None for this process alone.

    Args:
        processes: a number, ``Processes``, or None: all that torchrun started, else one.

    Raises:
        ConfigError: it is something else, or another number than torchrun's.
    """
    started = torchrun_size()
    if processes is None:
        processes = started or 1
    if not isinstance(processes, Processes):
        processes = Processes(_check.integer("processes", processes, low=1))
    if processes.count == 1:
        return None
    if started is not None and processes.ray is not None:
        raise ConfigError("Processes(ray)", "is given, and torchrun started these processes", "one of the two")
    if started is not None and started != processes.count:
        what = f"got {processes.count}, and torchrun started {started}"
        raise ConfigError("processes", what, f"{started}, None for as many, or 1 for this process alone")
    return processes


def serves(processes: Processes | None) -> TypeGuard[Processes]:
    """Return whether this process serves the first one, as torchrun's others do."""
    return processes is not None and torchrun_size() is not None and os.environ["RANK"] != "0"
