"""What the options of ``connect("local")`` are where the user gives none: CPUs and GPUs want different ones."""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.device import free_bytes
from rlkit.backends.local.model.kv_account import Holder

__all__ = ["default_dtype", "default_max_rows", "kv_bytes", "micro_batch_tokens_for", "rows_that_fit"]

SHARE = 0.4  # of the memory that is free at connect, for the activations of a micro-batch
KV_SHARE = 0.5  # of the memory that is free when requests come, for their keys and values; micro-batches come between
TOKENS = (1024, 16384)  # of a micro-batch: on a CPU and at least, and from which on a GPU gains nothing more
ROWS = {"cuda": 256}  # completions decoded at once; elsewhere 64
LIBRARY = 4  # times as much is kept of a token by the library's modules as by rlkit's own forward


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
    model: Any = base.model
    config = model.config.get_text_config()
    heads = getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(2 * config.num_hidden_layers * key_heads * head_dim * model.dtype.itemsize)


def activation_bytes(base: Base) -> float:
    """Return how much is kept of a token between the forward and the backward pass of a micro-batch."""
    model: Any = base.model
    config, width = model.config.get_text_config(), model.dtype.itemsize
    hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    inner = max(inner) if isinstance(inner, (list, tuple)) else inner
    # The residual stream twice in float32; queries, keys and values before their norms and as they are attended to;
    # the attention's output; both inputs of the gated product.
    layer = 8 * hidden + width * (2 * (heads + 2 * key_heads) * head_dim + heads * head_dim + 2 * inner)
    return float(config.num_hidden_layers * layer * (1 if base.llama else LIBRARY))
