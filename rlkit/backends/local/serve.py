"""Ranks other than 0: ``python -m rlkit.backends.local.serve`` is one, which reads where to go from stdin.

Under torchrun ``LocalBackend`` serves in every process but the first.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from rlkit.backends.local.distributed.rendezvous import torchrun_store
from rlkit.backends.local.distributed.server import Server
from rlkit.backends.local.distributed.settings import Processes
from rlkit.backends.local.replica import Replica

__all__ = ["serve_torchrun"]


def serve_torchrun(processes: Processes) -> NoReturn:
    """Serve in a process that torchrun started, then leave the program with status 0."""
    store, rank, size = torchrun_store(processes.start)
    Server(Replica, store, rank, size, None, lambda: os._exit(1), loopback=False).run()
    raise SystemExit(0)


def main() -> None:
    """Serve in a process that rank 0 started."""
    settings = json.loads(sys.stdin.read())
    timeout = timedelta(seconds=settings["start"])
    host = str(settings.get("host", "127.0.0.1"))
    store = dist.TCPStore(host, int(settings["port"]), is_master=False, timeout=timeout)
    rank, size = int(settings["rank"]), int(settings["size"])
    Server(Replica, store, rank, size, settings["token"], lambda: os._exit(1), loopback=host == "127.0.0.1").run()
    sys.stdout.flush()
    os._exit(0)  # threads of libraries that were loaded would be waited for


if __name__ == "__main__":
    main()
