"""Serve a model of this machine as the Tinker API, until it is interrupted.

Programs written for the Tinker SDK then train LoRAs here: set TINKER_BASE_URL to the address that is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading

from rlkit._commands._settings import settings

__all__ = ["add_options", "run"]

KEY = "RLKIT_SERVER_KEY"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit serve``."""
    parser.add_argument("--model", help="as for rlkit.connect: a directory, a hub id, smollm2-135m-instruct")
    parser.add_argument("--backend", default="local", help="local, toy, or another that is installed (default: local)")
    parser.add_argument("--name", help="the base model's name for clients (default: the last part of --model)")
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"other than loopback: needs a key in ${KEY}, and TLS in front"
    )
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one (default: 8000)")
    parser.add_argument("--folder", default="rlkit-saves", help="where states are saved (default: rlkit-saves)")
    parser.add_argument(
        "--tokenizer", help="what clients load the tokenizer by (default: where the model's was read from)"
    )
    parser.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="of rlkit.connect, such as dtype=bfloat16, or of rlkit.server.Service, such as idle=7200",
    )
    parser.add_argument("--seed", type=int, help="of session ids and of samples without a seed")


def run(options: argparse.Namespace) -> int:
    """Serve until a signal to end."""
    from rlkit.server import serve

    key = os.environ.get(KEY) or None
    stop = threading.Event()
    with serve(
        options.backend,
        model=options.model,
        host=options.host,
        port=options.port,
        key=key,
        names=None if options.name is None else [options.name],
        folder=options.folder,
        tokenizer_id=options.tokenizer,
        **settings("--option", options.option, taken=("seed",)),
        seed=options.seed,
    ) as server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        shown = "tml-local" if key is None else f"<what is in ${KEY}>"
        print(f"serving {server.names[0]} at {server.url}", flush=True)
        print(f"clients: TINKER_BASE_URL={server.url} TINKER_API_KEY={shown}", flush=True)
        stop.wait()
    return 0
