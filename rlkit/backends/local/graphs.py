"""Decoding steps as CUDA graphs: kernels that are the same for every token are recorded once and launched together.

A graph reads and writes fixed addresses and has fixed shapes. So there is one for each number of rows and of keys, both
rounded up, and all are recorded again when weights or slots have moved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeAlias

import attrs
import numpy as np
import torch

from rlkit.backends.local.cache import Slots
from rlkit.backends.local.weights import SamplingLlama
from rlkit.backends.sampling import rounded_up

__all__ = ["Graphs", "rounded"]

FEW = 32  # up to here rows are rounded up to a power of 2, beyond it to a multiple of this
KEYS = 128

Step: TypeAlias = Callable[[], torch.Tensor]
Recorder: TypeAlias = Callable[[Step], tuple[torch.Tensor, Callable[[], object]]]


def recorder(device: torch.device) -> Recorder:
    """Records steps on a GPU: of each, where its output is, and what computes it anew; all share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> tuple[torch.Tensor, Callable[[], object]]:
        with torch.cuda.device(device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries allocate at their first use, which must not be recorded
                step()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                out = step()
        return out, graph.replay

    return record


@attrs.frozen(eq=False)
class _Graph:
    inputs: torch.Tensor  # int64 [2, rows]: tokens and positions
    out: torch.Tensor
    replay: Callable[[], object]


class Graphs:
    """One token more for the rows in slots 0, 1, ... at a time.

    Args:
        model: whose weights stay at their addresses from snapshot to snapshot.
        slots: which nobody else uses beyond the rows while a step runs.
        record: as what ``recorder`` returns, which is taken by default.
    """

    def __init__(self, model: SamplingLlama, slots: Slots, record: Recorder | None = None) -> None:
        self._model, self._slots = model, slots
        self._record = record or recorder(model.base.device)
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._addresses: tuple[tuple[int, ...], ...] = ()
        self.works = True  # False from the first step that could not be recorded

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """[n, V] after ``tokens`` [n] at ``positions`` [n] of slots 0..n-1; good until the next call."""
        n = tokens.size
        rows, keys = rounded(n), rounded_up(int(positions.max()) + 1, KEYS)
        self._slots.reserve(rows, keys)
        addresses = (self._model.addresses, self._slots.addresses)
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses
        values = np.zeros((2, rows), np.int64)  # the rows that are added write to the first key of free slots
        values[:, :n] = tokens, positions
        graph = self._graphs.get((rows, keys))
        if graph is None:
            return self._first(rows, keys, values)[:n]
        graph.inputs.copy_(torch.from_numpy(values))
        graph.replay()
        return graph.out[:n]

    def _first(self, rows: int, keys: int, values: np.ndarray) -> torch.Tensor:
        inputs = torch.from_numpy(values).to(self._model.base.device)

        def step() -> torch.Tensor:
            mask = self._slots.at(0, inputs[1][:, None], keys)
            index = torch.arange(rows, device=inputs.device)
            return self._model.logits(inputs[0][:, None], inputs[1][:, None], mask, self._slots, index)

        try:
            out, replay = self._record(step)
        except RuntimeError as error:
            self.works = False
            self._graphs.clear()
            warnings.warn(f"decoding goes on without CUDA graphs, which could not be recorded: {error}", stacklevel=2)
            return step()
        self._graphs[rows, keys] = _Graph(inputs, out, replay)
        replay()
        return out


def rounded(rows: int) -> int:
    """The number of rows of the graph for ``rows`` rows.

    >>> [rounded(n) for n in (1, 3, 8, 9, 33, 65)]
    [1, 4, 8, 16, 64, 96]
    """
    return 1 << (rows - 1).bit_length() if rows <= FEW else rounded_up(rows, FEW)
