"""Decoding steps as CUDA graphs: kernels that are the same for every token are recorded once and launched together.

A graph reads and writes fixed addresses and has fixed shapes. So there is one for each number of rows and of keys, both
rounded up, and all are recorded again when what they read has moved: the KV cache as it grows, weights if a sampler's
first snapshot had another adapter's shape (``keep_address`` keeps them where they are). Norms and biases belong to the
sampler's ``LlamaForward``, which lives as long as its graphs, and all logits go to one buffer.

No graph is taken unseen: each is recorded with other tokens at other positions than those that it is first replayed
for, and the replay is compared with the step itself. Where they differ, decoding goes on without graphs, with a
warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import torch

from rlkit._warn import warn
from rlkit.backends.local.cache.kv_attention import CachedTokens
from rlkit.backends.local.cache.kv_cache import KVCache
from rlkit.backends.local.gemm.lora_linear import upcast
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.device import to_device
from rlkit.backends.local.model.forward import LlamaForward
from rlkit.backends.sampling import rounded_up

__all__ = ["CudaGraphs", "key_bucket", "row_bucket"]

FEW = 32  # up to here rows are rounded up to a power of 2, beyond it to a multiple of this
LIKE, LIKE_BFLOAT16 = 1e-4, 0.03  # how far a replay may be off the step, as part of the logits' norm
KEYS = 128  # to whose multiples keys are rounded up, beyond 1024 to eighths of a power of 2

_log = logging.getLogger(__name__)

Step: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Step], Callable[[], object]]


def recorder(device: torch.device) -> Recorder:
    """Return what records steps on a GPU, and gives of each what computes it anew; all share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Callable[[], object]:
        with torch.cuda.device(device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries allocate at their first use, which must not be recorded
                step()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        replay: Callable[[], object] = graph.replay
        return replay

    return record


@attrs.frozen(eq=False)
class _Graph:
    inputs: torch.Tensor  # int64 [2, rows]: tokens and positions
    replay: Callable[[], object]


class CudaGraphs:
    """One token more for the rows in slots 0, 1, ... at a time.

    Args:
        forward: whose weights stay at their addresses from snapshot to snapshot.
        base: its model.
        kv_cache: which nobody else uses beyond the rows while a step runs.
        record: makes what records; ``recorder`` by default. It is called again when all graphs are dropped.
    """

    def __init__(
        self, forward: LlamaForward, base: Base, kv_cache: KVCache, record: Callable[[], Recorder] | None = None
    ) -> None:
        self._forward, self._base, self._kv_cache = forward, base, kv_cache
        self._make = record or partial(recorder, base.device)
        self._record: Recorder | None = None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._addresses: tuple[tuple[int, ...], ...] = ()
        self._out = torch.empty(0)
        self.works = True  # False from the first step that could not be recorded

    def clear(self) -> None:
        """Drop all graphs, and the memory that they shared."""
        self._graphs.clear()
        self._record, self._out, self._addresses = None, torch.empty(0), ()

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """[n, V] after ``tokens`` [n] at ``positions`` [n] of slots 0..n-1; good until the next call."""
        n = tokens.size
        rows, keys = row_bucket(n), key_bucket(int(positions.max()) + 1)
        self._kv_cache.reserve(rows, keys)
        addresses = (self._forward.addresses, self._kv_cache.addresses)
        if addresses != self._addresses or rows > self._out.shape[0]:
            self.clear()
            head = self._base.head
            self._out, self._addresses = upcast(head.new_empty(rows, head.shape[0])), addresses
        values = np.zeros((2, rows), np.int64)  # the rows that are added write to the first key of free slots
        values[:, :n] = tokens, positions
        graph = self._graphs.get((rows, keys))
        if graph is None:
            self._record_first(rows, keys, values)
        else:
            graph.inputs.copy_(to_device(values, graph.inputs.device))
            graph.replay()
        return self._out[:n]

    def _record_first(self, rows: int, keys: int, values: np.ndarray) -> None:
        # Recorded with other tokens one place behind, where nobody looks before a token of that place is written.
        others = np.stack([(values[0] + 1) % self._out.shape[1], np.minimum(values[1] + 1, keys - 1)])
        inputs, out = to_device(others, self._base.device), self._out[:rows]

        def step() -> None:
            tokens, positions = inputs[0][:, None], inputs[1][:, None]
            mask = self._kv_cache.at(0, positions, keys)
            index = torch.arange(rows, device=inputs.device)
            out.copy_(self._forward.logits(CachedTokens(tokens, positions, mask, self._kv_cache, index)))

        self._record = self._record or self._make()
        try:
            replay = self._record(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._give_up(f"which could not be recorded: {error}")
            inputs.copy_(to_device(values, inputs.device))
            step()
            return
        inputs.copy_(to_device(values, inputs.device))
        replay()
        replayed = out.clone()
        step()
        difference = float((replayed - out).norm() / out.norm())
        if difference <= (LIKE if self._base.probe.exact else LIKE_BFLOAT16):
            _log.info("decoding %d rows up to %d tokens by a CUDA graph, off the step by %.1g", rows, keys, difference)
            self._graphs[rows, keys] = _Graph(inputs, replay)
        else:
            self._give_up(f"whose replay for {rows} rows differs from the step by {difference:.2g} of its logits")

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self.works, self._record = False, None
        warn(f"decoding goes on without CUDA graphs, {reason}")


def row_bucket(rows: int) -> int:
    """Return the number of rows of the graph for ``rows`` rows.

    >>> [row_bucket(n) for n in (1, 3, 8, 9, 33, 65)]
    [1, 4, 8, 16, 64, 96]
    """
    return 1 << (rows - 1).bit_length() if rows <= FEW else rounded_up(rows, FEW)


def key_bucket(longest: int) -> int:
    """Return how many keys of each row are read.

    >>> [key_bucket(n) for n in (1, 129, 1024, 1025, 5000)]
    [128, 256, 1024, 1280, 5120]
    """
    return rounded_up(longest, max(KEYS, (1 << (longest - 1).bit_length()) // 8))
