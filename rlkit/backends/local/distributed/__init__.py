"""The local backend on several processes: data parallel, with the user's loop on rank 0 alone.

``World`` is the processes, which all backends of the user's process share; ``Ranks`` is a backend's part of it.
Commands travel as ``Message`` over a socket to each rank, gradients and weights by torch.distributed.
"""

from __future__ import annotations

from rlkit.backends.local.distributed.settings import Processes

__all__ = ["Processes"]
