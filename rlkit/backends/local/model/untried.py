"""Devices on which the self-check has not run: ``connect`` says so, once in a process."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

import rlkit
from rlkit._warn import warn
from rlkit.backends.local.model.hub import cache_folder

__all__ = ["note_tried", "silence", "warn_untried"]

_warned: set[str] = set()


def warn_untried(device: torch.device) -> None:
    """Warn where this version was not checked on such a device, a CPU excepted, which its tests run on."""
    if device.type in ("cpu", "meta") or str(device) in _warned or _note(device).exists():
        return
    _warned.add(str(device))
    warn(
        f"this version of rlkit was not checked on this device yet; `rlkit doctor --device {device}` does so in at "
        "most ten minutes, and its report is welcome",
    )


def silence(device: torch.device) -> None:
    """Warn of it no more in this process: it is about to be checked."""
    _warned.add(str(device))


def note_tried(device: torch.device) -> None:
    """Remember that all numbers were right on such a device, with these versions."""
    file = _note(device)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_identity(device)) + "\n", "utf-8")
    except OSError:
        return  # a cache that cannot be written: the warning stays


def _identity(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "torch": torch.__version__, "rlkit": rlkit.__version__}


def _note(device: torch.device) -> Path:
    digest = hashlib.sha256(json.dumps(_identity(device)).encode()).hexdigest()
    return cache_folder() / "devices" / f"{digest[:16]}.json"
