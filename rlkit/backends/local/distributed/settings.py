"""``Processes``: on how many processes a local backend trains and samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import attrs

from rlkit import _check, _ray_cluster
from rlkit.backends.local.distributed._launch import PROGRAM
from rlkit.backends.local.distributed.server import torchrun_size
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from rlkit.backends.local.distributed.ranks import Ranks

__all__ = ["Processes", "read_processes"]


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
            _check.check_keywords("Processes(ray)", _ray_cluster.RayWorker, self.ray)
            _ray_cluster.RayWorker(**self.ray)  # checks the values

    def serve(self) -> None:
        """Serve the first process, then end the program, if torchrun started this process with it."""
        if torchrun_size() is not None and os.environ["RANK"] != "0":
            resolve_name(f"{PROGRAM}:serve_torchrun")(self.start)

    def open(self, options: Mapping[str, object], place: torch.device, named: str | None) -> Ranks:
        """Open the same backend in the other processes. See ``Ranks``."""
        from rlkit.backends.local.distributed.ranks import Ranks

        return Ranks(self, options, place, named)


def read_processes(processes: object) -> Processes | None:
    """Return what ``connect(processes=)`` asks for, or None for this process alone.

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
        raise ConfigError("Processes(ray)", "is given, but torchrun started these processes", "only one of the two")
    if started is not None and started != processes.count:
        what = f"got {processes.count}, but torchrun started {started}"
        raise ConfigError("processes", what, f"{started}, None for the same number, or 1 for this process alone")
    return processes
