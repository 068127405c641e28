"""The machine of a run and the options of its policies: kept for its page, and never read to resume."""

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rlkit import _files
from rlkit._files import plain, replace_file
from rlkit._secrets import mask

__all__ = ["Settings", "found", "found_settings", "note"]

FILE = "surroundings.jsonl"  # a line for each start
SETTINGS = "settings.json"
_PACKAGES = ("rlkit-lm", "numpy", "torch", "transformers", "peft", "tinker", "reasoning-gym", "gem-llm", "openreward")


def note(folder: Path) -> None:
    """Add a line for this start; ignore a folder that cannot be written, which is left to the run."""
    with contextlib.suppress(OSError):
        _files.append(folder / FILE, [json.dumps(_now())])


def found(folder: Path) -> dict[str, object]:
    """Return the record of the last start, and the number of starts; {} if none can be read."""
    try:
        lines = (folder / FILE).read_text("utf-8").splitlines()
        last = json.loads(lines[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return {}
    return last | {"starts": len(lines)} if isinstance(last, dict) else {}


def _now() -> dict[str, object]:
    command = mask([Path(sys.argv[0]).name, *sys.argv[1:]] if sys.argv and sys.argv[0] else ["python"])
    started = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    return {"started": started, "command": " ".join(map(str, command)), **_machine(), **_source(str(Path.cwd()))}


@functools.cache
def _machine() -> dict[str, object]:
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
    """Return the text after the colon in the first line that begins with ``name``."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in path.read_text("utf-8").splitlines():
            if line.startswith(name):
                return line.partition(":")[2].strip()
    return ""


@functools.cache
def _source(folder: str) -> dict[str, object]:
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


class Settings:
    """The file settings.json in a run's folder, without what looks like a key."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / SETTINGS
        self._noted: object = None

    def note(self, settings: Mapping[str, object]) -> None:
        """Write the settings if they have changed; ignore a folder that cannot be written, which is left to the run."""
        now = plain(mask(_described(settings)))
        if now and now != self._noted:
            self._noted = now
            with contextlib.suppress(OSError), replace_file(self._path) as temporary:
                temporary.write_text(json.dumps(now, indent=1, allow_nan=False), "utf-8")


def found_settings(folder: Path) -> dict[str, object]:
    """Return the settings in a run's folder; {} if they cannot be read."""
    try:
        settings = json.loads((folder / SETTINGS).read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _described(value: Any) -> object:
    """Return plain data: classes made with attrs as their fields, functions by name, other objects by their class."""
    if attrs.has(type(value)):
        shown = attrs.asdict(value, recurse=False)
        return {name: _described(each) for name, each in shown.items()}
    if isinstance(value, Mapping):
        return {str(name): _described(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_described(each) for each in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Path):
        return str(value)
    return getattr(value, "__qualname__", type(value).__qualname__)
