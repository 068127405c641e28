"""What differs from device to device: its name, its memory, how arrays get there, and what options are there."""

from __future__ import annotations

import numpy as np
import torch

from rlkit import _check
from rlkit.errors import ConfigError

__all__ = ["device_of", "free_bytes", "to_device"]


def device_of(device: str | None) -> torch.device:
    """Return the device under one name alone: "cuda" is "cuda:0", or whichever is the current one.

    Args:
        device: its name; None is a GPU of CUDA where there is one, else the CPU.

    Raises:
        ConfigError: no device has that name, or there is none of it here.

    >>> device_of("cpu:0")
    device(type='cpu')
    """
    try:
        named = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError("device", f"got {_check.shown(device)}", "a torch device", str(error)) from error
    there = {"cpu": 1, "meta": 0, "mps": int(torch.backends.mps.is_available())}
    count = torch.cuda.device_count() if named.type == "cuda" else there.get(named.type, 1 + (named.index or 0))
    if (named.index or 0) >= count:
        raise ConfigError("device", f"got {device!r}", "a device that computes, of those that torch finds here")
    if named.type == "cpu":
        return torch.device("cpu")
    if named.type == "cuda" and named.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(named.type, named.index or 0)


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return ``array`` on ``device``; to a GPU from pinned memory, so that nothing waits for the copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def free_bytes(device: torch.device) -> int | None:
    """Return what can be allocated there now, or None where nobody says: on a CPU pages are taken as they are used."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
    return None
