"""Serves an OpenEnv app on a free port of 127.0.0.1; run by another interpreter, which has uvicorn and the environment.

``_openenv_child.py FOLDER MODULE:APP``: the first line that it prints is the port. It ends when its stdin does, so that
a program that is killed leaves no server behind.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    import uvicorn

    folder, app = sys.argv[1:]
    sys.path[0] = folder  # in place of this file's own
    module, _, name = app.partition(":")
    application = getattr(importlib.import_module(module), name or "app")
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:  # or asyncio leaves TCP_NODELAY off
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        print(listening.getsockname()[1], flush=True)
        threading.Thread(target=_end_with_stdin, daemon=True).start()
        uvicorn.Server(uvicorn.Config(application, log_level="warning")).run(sockets=[listening])
