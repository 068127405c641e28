"""A process between rlkit and a server, which ends the server when rlkit is gone; it is run as a file, without rlkit.

    python keeper.py COMMAND...

It ends the server, and all that the server started, when its standard input ends: when rlkit closes it, or dies. When
the server dies, it ends what is left of its process group, and then itself with the same status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

GRACE = 10.0  # seconds between asking a server to end and ending it


def main() -> int:
    """Run the server; return its status."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603
    print(f"rlkit: process {server.pid}", flush=True)
    threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
    status = server.wait()
    _signal(server, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _end_with_parent(server: subprocess.Popen[bytes]) -> None:
    os.read(0, 1)  # returns at the end; sys.stdin would be locked when this process exits, which aborts it
    _signal(server, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(GRACE)
    _signal(server, signal.SIGKILL)


def _signal(server: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):  # none is left
        os.killpg(server.pid, number)


if __name__ == "__main__":
    sys.exit(main())
