"""``python -m rlkit.server``: a model of this machine as a server of the Tinker API."""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rlkit
from rlkit.errors import RlkitError
from rlkit.server.http import serve

__all__ = ["main"]

_KEY = "RLKIT_SERVER_KEY"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serves until it is interrupted; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m rlkit.server", description=__doc__)
    parser.add_argument("--model", help="as for rlkit.connect: a directory, a hub id, smollm2-135m-instruct")
    parser.add_argument("--backend", default="local", help="local, toy, or another that is installed (default: local)")
    parser.add_argument("--name", help="the base model's name for clients (default: the last part of --model)")
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"other than loopback: needs a key in ${_KEY}, and TLS in front"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    parser.add_argument("--folder", default="rlkit-saves", help="where states are saved (default: rlkit-saves)")
    parser.add_argument("--seed", type=int, help="of session ids and of samples without a seed")
    options = parser.parse_args(arguments)
    try:
        return _serve(options)
    except RlkitError as error:
        print(f"rlkit.server: {error}", file=sys.stderr)
        return 2


def _serve(options: argparse.Namespace) -> int:
    settings: dict[str, Any] = {"folder": options.folder}
    if options.model is not None:
        settings["model"] = options.model
    name = options.name or (Path(options.model).name if options.model else options.backend)
    names = dict.fromkeys([name, *([options.model] if options.model else [])])
    stop = threading.Event()
    with serve(
        functools.partial(rlkit.connect, options.backend, **settings),
        host=options.host,
        port=options.port,
        key=os.environ.get(_KEY),
        names=tuple(names),
        folder=options.folder,
        seed=options.seed,
    ) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        print(f"serving {name} at {server.url}", flush=True)
        print(f"clients: TINKER_BASE_URL={server.url} TINKER_API_KEY=tml-local", flush=True)
        stop.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
