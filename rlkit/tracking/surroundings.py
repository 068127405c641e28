"""What a run ran on: written down at each start, for whoever looks at it later; nothing goes on from it."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from rlkit import _disk

__all__ = ["FILE", "found", "note"]

FILE = "surroundings.jsonl"
_PACKAGES = ("rlkit-lm", "numpy", "torch", "transformers", "peft", "tinker", "reasoning-gym", "gem-llm", "openreward")


def note(folder: Path) -> None:
    """Add a line for this start; a folder that cannot be written is the run's own matter."""
    with contextlib.suppress(OSError):
        _disk.append(folder / FILE, [json.dumps(_now())])


def found(folder: Path) -> dict[str, Any]:
    """Return the last start's, and how many there were; {} where none can be read."""
    try:
        lines = (folder / FILE).read_text("utf-8").splitlines()
        last = json.loads(lines[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return {}
    return last | {"starts": len(lines)} if isinstance(last, dict) else {}


def _now() -> dict[str, Any]:
    from rlkit.tracking import masked

    command = masked([Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv and sys.argv[0] else ["python"])
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"started": started, "command": " ".join(map(str, command)), **_machine(), **_source(str(Path.cwd()))}


@functools.cache
def _machine() -> dict[str, Any]:
    versions = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = {"system": platform.platform(), "processor": f"{_processor()}, {cores} cores"}
    gpus = [_line(path, "Model") for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))]
    return {**machine, "gpus": gpus or "none seen", "python": platform.python_version(), "versions": versions}


def _processor() -> str:
    return _line(Path("/proc/cpuinfo"), "model name") or platform.processor() or platform.machine()


def _line(path: Path, name: str) -> str:
    """Return what stands behind the colon in the first line that begins with ``name``."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text("utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


@functools.cache
def _source(folder: str) -> dict[str, Any]:
    """Return the commit that is checked out in ``folder``, and whether tracked files differ from it."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", folder, *arguments]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)  # noqa: S603  # no shell
            return done.stdout.strip()
        return None

    commit = git("rev-parse", "HEAD")
    if commit is None:
        return {}
    return {"git commit": commit + (", with changes" if git("status", "--porcelain", "-uno") else "")}
