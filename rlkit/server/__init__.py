"""The Tinker API over any rlkit model, in process and on a socket.

``Service`` answers requests of the Tinker SDK. ``rlkit.testing.FakeTinker`` puts the SDK on top of one without a
socket.
"""

from __future__ import annotations

from rlkit._runtime import has_torch, missing

if not has_torch():
    raise missing("rlkit.server, which runs losses that are sent to it,", "torch", "serve")

from rlkit.server._adapter import BackendModels, ExactModels
from rlkit.server._service import Service
from rlkit.server._serving import Server, serve
from rlkit.server._state import Applied
from rlkit.server._wire import Response

__all__ = ["Applied", "BackendModels", "ExactModels", "Response", "Server", "Service", "serve"]
