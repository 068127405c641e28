"""``Processes``: on how many processes a local backend trains and samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import attrs

from rlkit import _check
from rlkit._runtime import torchrun_world_size
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from rlkit.backends.local import LoadedPolicy
    from rlkit.backends.local.distributed.leader import Leader
    from rlkit.backends.local.distributed.sharding import ShardedWeights

__all__ = ["Processes", "read_processes"]


@attrs.frozen
class Processes:
    """Processes that train and sample together: ``connect("local", ..., processes=2)`` is ``Processes(2)``.

    Args:
        count: how many, this one included.
        deadline: seconds that one of them may take for a micro-batch, or for a few tokens.
        start: seconds that they may take until they have imported torch and found one another.
        threads: of torch in each; None shares those of this process, where the model is on a CPU.

    Raises:
        ConfigError: an option is of the wrong type or out of range.
    """

    count: int
    deadline: float = attrs.field(default=600.0, kw_only=True)
    start: float = attrs.field(default=600.0, kw_only=True)
    threads: int | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check.integer("processes", self.count, low=1)
        for name in ("deadline", "start"):
            _check.real(f"Processes({name})", getattr(self, name), above=0.0, why="seconds")
        if self.threads is not None:
            _check.integer("Processes(threads)", self.threads, low=1)

    def open(
        self,
        options: Mapping[str, object],
        place: torch.device,
        named: str | None,
        load: Callable[[ShardedWeights | None], LoadedPolicy],
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
