"""The Tinker API over any rlkit model: ``serve`` on a socket; ``rlkit.testing.FakeTinker`` in process."""

from __future__ import annotations

from rlkit._runtime import missing

try:
    from rlkit.server._app import Service
    from rlkit.server._serve import Server, serve
except ModuleNotFoundError as error:
    if error.name is None or error.name.startswith("rlkit"):
        raise
    raise missing("rlkit.server", error.name.partition(".")[0], "serve") from error

__all__ = ["Server", "Service", "serve"]
