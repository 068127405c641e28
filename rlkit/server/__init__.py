"""The Tinker API over any rlkit model, in process and on a socket.

``Service`` answers requests of the Tinker SDK. ``rlkit.testing.FakeTinker`` puts the SDK on top of one without a
socket.
"""

from __future__ import annotations

from rlkit._lazy import has_torch, missing

if not has_torch():
    raise missing("rlkit.server, which runs losses that are sent to it,", "torch", "torch", "tinker")

from rlkit.server.adapter import BackendModels, ExactModels
from rlkit.server.http import Server
from rlkit.server.requests import Response
from rlkit.server.service import Service
from rlkit.server.serving import serve
from rlkit.server.state import Applied

__all__ = ["Applied", "BackendModels", "ExactModels", "Response", "Server", "Service", "serve"]
