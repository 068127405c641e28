"""The local backend on several processes: data parallel, with the user's loop on rank 0 alone.

``World`` is the processes, which all backends of the user's process share. Rank 0 gives orders, one after the other,
and all carry them out: ``Leader`` is a backend's side on rank 0, ``Follower`` on each of the others. Orders, datums and
logprobs travel as a header of JSON with tensors, by torch.distributed.
"""

from __future__ import annotations

from rlkit.backends.local.distributed.settings import Processes

__all__ = ["Processes"]
