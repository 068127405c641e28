"""AdamW in numpy, on one array."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlkit.errors import BackendError, CheckpointError
from rlkit.types import Adam

__all__ = ["Weights"]


class Weights:
    """float64 weights with their gradient and moments.

    Attributes:
        value: never written: a step makes a new array, so that snapshots keep the old one.
        gradient: what is accumulated.
    """

    def __init__(self, value: np.ndarray) -> None:
        self.value = value
        self.gradient = np.zeros_like(value)
        self._moments = [np.zeros_like(value), np.zeros_like(value)]
        self._steps = 0

    def add(self, gradient: np.ndarray) -> None:
        """Accumulates ``gradient``, or raises BackendError where it is not finite."""
        if not np.isfinite(gradient).all():
            raise BackendError("forward_backward: the gradient is not finite")
        self.gradient = self.gradient + gradient

    def clear(self) -> None:
        """Drops the gradient."""
        self.gradient = np.zeros_like(self.value)

    def step(self, params: Adam) -> Mapping[str, float]:
        """One AdamW step; the gradient is cleared.

        Raises:
            BackendError: the gradient's norm is not finite in float32; nothing was changed.
        """
        gradient = self.gradient
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(gradient.astype(np.float32)).sum(dtype=np.float32)))
        if not np.isfinite(norm):
            raise BackendError(f"optim_step: the gradient's norm is {norm}; nothing was changed, discard() drops it")
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        self._steps += 1
        first, second = self._moments
        first = params.beta1 * first + (1 - params.beta1) * gradient
        second = params.beta2 * second + (1 - params.beta2) * gradient**2
        scale = np.sqrt(second / (1 - params.beta2**self._steps)) + params.eps
        update = first / (1 - params.beta1**self._steps) / scale
        decayed = self.value * (1 - params.learning_rate * params.weight_decay)
        self.value = decayed - params.learning_rate * update
        self._moments = [first, second]
        self.clear()
        return {"grad_norm:mean": norm}

    def write(self, file: Path, *, optimizer: bool) -> dict[str, Any]:
        """Writes ``file`` (npz); returns what the state is to hold beside it."""
        arrays = {"weights": self.value}
        if optimizer:
            arrays |= {"first": self._moments[0], "second": self._moments[1]}
        np.savez(file, allow_pickle=False, **arrays)
        return {"optimizer": optimizer, "moment_steps": self._steps}

    def read(self, file: Path, state: Mapping[str, Any], *, optimizer: bool) -> None:
        """Becomes what was written.

        Raises:
            CheckpointError: it is of another shape, or was saved without its optimizer.
        """
        with np.load(file, allow_pickle=False) as arrays:
            if arrays["weights"].shape != self.value.shape:
                raise CheckpointError(f"{file} has shape {arrays['weights'].shape}; expected {self.value.shape}")
            self.value = arrays["weights"]
            if not optimizer:
                return
            if not state["optimizer"]:
                raise CheckpointError(
                    f"{file.parent} was saved without its optimizer; use init_from= for the weights alone"
                )
            self._moments = [arrays["first"], arrays["second"]]
        self._steps = int(state["moment_steps"])
