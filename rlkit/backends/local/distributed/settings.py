"""``Processes``: on how many processes a local backend trains and samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from rlkit import _check
from rlkit._check import checked
from rlkit._runtime import torchrun_world_size
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from rlkit.backends.local import LoadedPolicy
    from rlkit.backends.local.distributed.leader import Leader

__all__ = ["Processes", "read_processes"]


@attrs.frozen
class Processes:
    """Processes that train and sample together: ``connect("local", ..., processes=2)`` is ``Processes(2)``.

    Args:
        count: how many, this one included.
        deadline: seconds that one of them may take for a micro-batch, or for a few tokens.
        start: seconds that they may take until they have imported torch and found one another, and then to load.
        threads: of torch in each; None shares those of this process, where the model is on a CPU.

    Raises:
        ConfigError: an option is of the wrong type or out of range.
    """

    count: int = checked(attrs.NOTHING, _check.integer, low=1)
    deadline: float = checked(600.0, _check.real, kw_only=True, above=0.0, why="seconds")
    start: float = checked(600.0, _check.real, kw_only=True, above=0.0, why="seconds")
    threads: int | None = checked(None, _check.integer, none=True, kw_only=True, low=1)

    def open(
        self,
        options: Mapping[str, object],
        place: torch.device,
        named: str | None,
        load: Callable[[DeviceMesh | None], LoadedPolicy],
    ) -> Leader:
        """Open the same backend in the other processes. See ``Leader``."""
        from rlkit.backends.local.distributed.leader import Leader

        return Leader(self, options, place, named, load)


def read_processes(processes: object) -> Processes | None:
    """Return what ``connect(processes=)`` asks for, or None for this process alone.

    Args:
        processes: a number, ``Processes``, or None: all that torchrun started, else one.

    Raises:
        ConfigError: it is something else, or another number than torchrun's.
    """
    started = torchrun_world_size()
    if processes is None:
        processes = started or 1
    if not isinstance(processes, Processes):
        processes = Processes(_check.integer("processes", processes, low=1))
    if processes.count == 1:
        return None
    if started is not None and started != processes.count:
        what = f"got {processes.count}, but torchrun started {started}"
        raise ConfigError("processes", what, f"{started}, None for the same number, or 1 for this process alone")
    return processes
