"""On which GPUs a server runs that rlkit starts, and how much of their memory it may take beside a trainer."""

from __future__ import annotations

import logging
import math
import os

from rlkit.errors import ConfigError

__all__ = ["place_server"]

_log = logging.getLogger(__name__)


def place_server(device: str, memory: float | None, devices: str | None) -> tuple[list[str], dict[str, str]]:
    """Return the options and the environment variables that place a server.

    vLLM reserves its share of a GPU when it starts, 0.9 by default, and does not start where less is free. So on the
    trainer's GPU it gets half of what the loaded trainer left, which keeps the other half for training.

    Args:
        device: the trainer's, as torch spells it.
        memory: the share of each GPU that the server may take, of its whole memory; None for the default.
        devices: the GPUs of the server, as in CUDA_VISIBLE_DEVICES; None for the trainer's.

    Raises:
        ConfigError: the trainer's GPU has less memory free than that.
    """
    variables = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    if device.partition(":")[0] == "cuda":
        own = _visible_name(device)
        variables = variables or {"CUDA_VISIBLE_DEVICES": own}
        if own in variables["CUDA_VISIBLE_DEVICES"].split(","):
            memory = _share(device, memory)
    return [] if memory is None else ["--gpu-memory-utilization", f"{memory:g}"], variables


def _visible_name(device: str) -> str:
    """Return what CUDA_VISIBLE_DEVICES calls a device of this process."""
    import torch

    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


def _share(device: str, memory: float | None) -> float:
    import torch

    free, total = torch.cuda.mem_get_info(device)
    most = math.floor(100 * free / total) / 100
    share = math.floor(50 * free / total) / 100 if memory is None else memory
    if not 0 < share <= most:
        found = f"is {share:g}, {share * total / 1e9:.1f} GB of {device}, where the trainer runs"
        raise ConfigError("Vllm(memory)", found, f"at most {most:g}", f"{free / 1e9:.1f} GB of it are free")
    _log.info(
        "vLLM may take %.1f of %.1f GB of %s; %.1f GB stay free for training (Vllm(memory=))",
        *(share * total / 1e9, total / 1e9, device, (free - share * total) / 1e9),
    )
    return share
