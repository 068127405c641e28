"""Memory of a device: what it leaves room for.

Options of ``connect("local")`` that the user leaves out follow from the memory of the device: CPUs and GPUs want
different ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from rlkit.backends.local.model.probe import LLAMA

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rlkit.backends.local.model.base import Base

__all__ = [
    "Holder",
    "KVAccount",
    "default_dtype",
    "default_max_rows",
    "free_bytes",
    "kv_bytes",
    "micro_batch_tokens_for",
    "return_freed",
    "rows_that_fit",
    "to_device",
]


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return ``array`` on ``device``; to a GPU from pinned memory, so that nothing waits for the copy."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def free_bytes(device: torch.device) -> int | None:
    """Return what can be allocated there now, or None where no one says: on a CPU pages are taken as they are used."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
    return None


def return_freed() -> None:
    """Give the system what was freed, also between what is kept: such holes add up to several times that."""
    with contextlib.suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


class Holder(Protocol):
    """Who holds keys and values."""

    @property
    def held(self) -> int:
        """Return the bytes that it holds."""

    @property
    def reserved(self) -> int:
        """Return the bytes that it holds or will, when its rows are as long as they may become."""


class KVAccount:
    """Who holds keys and values of a base; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: weakref.WeakSet[Holder] = weakref.WeakSet()

    def add(self, holder: Holder) -> None:
        """Count a holder in, as long as it lives."""
        with self._lock:
            self._holders.add(holder)

    def available(self, holder: Holder, free: int, share: float) -> int:
        """Return the bytes that all rows of ``holder`` may take, those that it has included.

        Args:
            holder: who asks.
            free: bytes that can be allocated now.
            share: of what is free and what all hold, which is for the keys and values of all.
        """
        with self._lock:
            others = [other for other in self._holders if other is not holder]
            held = holder.held + sum(other.held for other in others)
            return int(share * (free + held)) - sum(other.reserved for other in others)


SHARE = 0.4  # of the memory that is free at connect, for the activations of a micro-batch
KV_SHARE = 0.5  # of the memory that is free when requests come, for their keys and values; micro-batches come between
TOKENS = (1024, 16384)  # of a micro-batch: on a CPU and at least, and from which on a GPU gains nothing more
ROWS = {"cuda": 256}  # completions decoded at once; elsewhere 64
OTHERS = 2  # times as much is kept of a token by other architectures than by Llama's


def default_dtype(device: torch.device) -> str:
    """Return "bfloat16" on a GPU of CUDA that computes it, "float32" elsewhere: MPS has no fast product of the former.

    >>> default_dtype(torch.device("cpu")), default_dtype(torch.device("mps"))
    ('float32', 'float32')
    """
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16"
    return "float32"


def default_max_rows(device: torch.device) -> int:
    """Return how many completions are decoded at once; on a GPU those that have no memory wait.

    >>> default_max_rows(torch.device("cpu")), default_max_rows(torch.device("cuda"))
    (64, 256)
    """
    return ROWS.get(device.type, 64)


def micro_batch_tokens_for(base: Base, free: int | None = None) -> int:
    """Return how many tokens are trained at once: 1,024 on a CPU, as many as ``SHARE`` of the free memory elsewhere.

    Args:
        base: the model.
        free: bytes that can be allocated; None asks the device.
    """
    low, high = TOKENS
    free = free_bytes(base.device) if free is None else free
    if free is None:
        return low
    return int(min(max(SHARE * free / activation_bytes(base) // low * low, low), high))


def rows_that_fit(base: Base, length: int, holder: Holder, free: int | None = None) -> int:
    """Return how many rows of ``length`` tokens memory has for keys and values; on a CPU any number.

    Args:
        base: the model.
        length: of the longest of them, at its end.
        holder: who asks; what others on the base hold, or will, is theirs.
        free: bytes that can be allocated; None asks the device.
    """
    free = free_bytes(base.device) if free is None else free
    if free is None:
        return sys.maxsize
    return max(0, base.kv_account.available(holder, free, KV_SHARE) // (length * kv_bytes(base)))


def kv_bytes(base: Base) -> int:
    """Return the bytes of a token's keys and values, in all layers."""
    config = base.model.config.get_text_config()
    _, key_heads, head_dim = _head_sizes(config)
    return int(2 * config.num_hidden_layers * key_heads * head_dim * base.model.dtype.itemsize)


def _head_sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Return the heads of queries, those of keys and values, and the numbers of one."""
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def activation_bytes(base: Base) -> float:
    """Return how much is kept of a token between the forward and the backward pass of a micro-batch."""
    config, width = base.model.config.get_text_config(), base.model.dtype.itemsize
    hidden, (heads, key_heads, head_dim) = config.hidden_size, _head_sizes(config)
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    # The residual stream twice in float32, and its norms; queries, keys and values before their norms and as they are
    # attended to; the attention's output; gate and up, the activation of the one and its product with the other.
    attention = 2 * (heads + 2 * key_heads) * head_dim + heads * head_dim
    layer = 8 * hidden + width * (2 * hidden + attention + 4 * inner)
    return float(config.num_hidden_layers * layer * (1 if base.kind in LLAMA else OTHERS))
