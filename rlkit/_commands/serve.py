"""Serve a model of this machine to programs, until it is interrupted.

rlkit serve --model M             the Tinker API: programs of its SDK train LoRAs here (TINKER_BASE_URL)
rlkit serve --openai --model M    the endpoints of OpenAI and Anthropic, to sample a model, a run or a saved policy
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path

from rlkit._commands import _shared
from rlkit._commands._shared import settings

__all__ = ["add_options", "run"]

KEY = "RLKIT_SERVER_KEY"
_FOLDER = "rlkit-saves"
_SHORTEST = 12  # characters of a key


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit serve``."""
    text = "a directory, a hub id, smollm2-135m-instruct; with --openai also a run's folder, a path from save(), a URL"
    parser.add_argument("--model", help=text)
    parser.add_argument("--backend", default="local", help="local, toy, or another installed one (default: local)")
    parser.add_argument("--openai", action="store_true", help="serve the OpenAI and Anthropic APIs instead of Tinker's")
    parser.add_argument("--name", help="the model's name for clients (default: the last part of --model)")
    parser.add_argument(
        "--host", default="127.0.0.1", help=f"address; other than loopback needs a key in ${KEY}, and TLS in front"
    )
    parser.add_argument("--port", type=int, default=8000, help="port, 0 for any free one (default: 8000)")
    parser.add_argument("--folder", help=f"folder for saved states (default: {_FOLDER})")
    parser.add_argument(
        "--tokenizer", help="the name by which clients load the tokenizer (default: the place it was loaded from)"
    )
    parser.add_argument(
        "--option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of rlkit.connect, such as dtype=bfloat16, or of rlkit.server.Service, such as idle=7200",
    )
    parser.add_argument("--seed", type=int, help="seed of session ids and of samples without a seed")
    _shared.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal asks to end."""
    from rlkit.errors import ConfigError

    elsewhere = {"folder": None, "tokenizer": None} if options.openai else {"step": None, "role": "policy"}
    for name, default in elsewhere.items():
        if getattr(options, name) != default:
            raise ConfigError(f"--{name}", "is given", f"it {'without' if options.openai else 'with'} --openai")
    return (_openai if options.openai else _tinker)(options, os.environ.get(KEY) or None)


def _wait() -> None:
    """Return when a signal asks to end."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()


def _tinker(options: argparse.Namespace, key: str | None) -> int:
    from rlkit.server import serve

    with serve(
        options.backend,
        model=options.model,
        host=options.host,
        port=options.port,
        key=key,
        names=None if options.name is None else [options.name],
        folder=options.folder or _FOLDER,
        tokenizer_id=options.tokenizer,
        **settings("--option", options.option, taken=("seed",)),
        seed=options.seed,
    ) as server:
        shown = "tml-local" if key is None else f"<what is in ${KEY}>"
        print(f"serving {server.names[0]} at {server.url}", flush=True)
        print(f"clients: TINKER_BASE_URL={server.url} TINKER_API_KEY={shown}", flush=True)
        _wait()
    return 0


def _openai(options: argparse.Namespace, key: str | None) -> int:
    from rlkit._hosts import is_loopback
    from rlkit.errors import ConfigError
    from rlkit.gateway import Gateway

    if key is None and not is_loopback(options.host):
        raise ConfigError("--host", f"{options.host} can be reached from other machines", f"a key in ${KEY}")
    if key is not None and len(key) < _SHORTEST:
        raise ConfigError(f"${KEY}", "is too short", f"at least {_SHORTEST} characters")
    if options.model is not None:
        _shared.check("--model", options.model, options.backend)
    name = options.name or ("policy" if _shared.is_url(options.model) else Path(options.model or options.backend).name)
    of_backend = settings("--option", options.option, taken=("seed",))
    if options.seed is not None:
        of_backend["seed"] = options.seed
    with (
        _shared.opened(options.model, options.backend, role=options.role, step=options.step, **of_backend) as sampler,
        Gateway(sampler, model=name, host=options.host, port=options.port, open=True, key=key) as gateway,
    ):
        shown = "none" if key is None else f"<what is in ${KEY}>"
        print(f"serving {name} at {gateway.url}/v1", flush=True)
        print(f"clients: OPENAI_BASE_URL={gateway.url}/v1 OPENAI_API_KEY={shown}", flush=True)
        print(f"         ANTHROPIC_BASE_URL={gateway.url} ANTHROPIC_API_KEY={shown}", flush=True)
        _wait()
    return 0
