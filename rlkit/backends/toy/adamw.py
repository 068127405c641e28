"""AdamW in numpy, on one array of float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rlkit.errors import BackendError, CheckpointError
from rlkit.types import Adam

__all__ = ["AdamState", "Weights"]


@attrs.frozen(eq=False)
class AdamState:
    """Weights and their moments; arrays are replaced, never written, so that snapshots can keep them."""

    value: np.ndarray
    first: np.ndarray
    second: np.ndarray
    steps: int = 0

    @classmethod
    def started(cls, value: np.ndarray) -> AdamState:
        """Before the first step."""
        return cls(value, np.zeros_like(value), np.zeros_like(value))

    def stepped(self, gradient: np.ndarray, params: Adam) -> tuple[AdamState, float]:
        """One step further, and the gradient's norm before it was clipped.

        Raises:
            BackendError: the norm is not finite in float32.
        """
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(gradient.astype(np.float32)).sum(dtype=np.float32)))
        if not np.isfinite(norm):
            raise BackendError(f"optim_step: the gradient's norm is {norm}; nothing was changed, discard() drops it")
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        steps = self.steps + 1
        first = params.beta1 * self.first + (1 - params.beta1) * gradient
        second = params.beta2 * self.second + (1 - params.beta2) * gradient**2
        scale = np.sqrt(second / (1 - params.beta2**steps)) + params.eps
        update = first / (1 - params.beta1**steps) / scale
        decayed = self.value * (1 - params.learning_rate * params.weight_decay)
        return AdamState(decayed - params.learning_rate * update, first, second, steps), norm


class Weights:
    """float64 weights with the gradient that is accumulated.

    Attributes:
        state: the weights and their moments.
        gradient: what is accumulated.
    """

    def __init__(self, state: AdamState) -> None:
        self.state = state
        self.gradient = np.zeros_like(state.value)

    @property
    def value(self) -> np.ndarray:
        """The weights; never written."""
        return self.state.value

    def add(self, gradient: np.ndarray) -> None:
        """Accumulates ``gradient``, or raises BackendError where it is not finite."""
        if not np.isfinite(gradient).all():
            raise BackendError("forward_backward: the gradient is not finite")
        self.gradient = self.gradient + gradient

    def clear(self) -> None:
        """Drop the gradient."""
        self.gradient = np.zeros_like(self.value)

    def step(self, params: Adam) -> Mapping[str, float]:
        """One AdamW step; the gradient is cleared.

        Raises:
            BackendError: the gradient's norm is not finite in float32; nothing was changed.
        """
        self.state, norm = self.state.stepped(self.gradient, params)
        self.clear()
        return {"grad_norm:mean": norm}

    def write(self, file: Path, *, optimizer: bool) -> dict[str, object]:
        """Write ``file`` (npz); return what the state is to hold beside it.

        Raises:
            CheckpointError: something is not finite; nothing was written.
        """
        arrays = {"weights": self.value}
        if optimizer:
            arrays |= {"first": self.state.first, "second": self.state.second}
        for name, array in arrays.items():
            if not np.isfinite(array).all():
                raise CheckpointError(
                    f"save: {name} is not finite; nothing was saved, and earlier saves are as they were"
                )
        np.savez(file, allow_pickle=False, **arrays)
        return {"optimizer": optimizer, "moment_steps": self.state.steps}

    def read(self, file: Path, state: Mapping[str, Any], *, optimizer: bool) -> None:
        """Becomes what was written.

        Raises:
            CheckpointError: it is of another shape, or was saved without its optimizer.
        """
        with np.load(file, allow_pickle=False) as arrays:
            if arrays["weights"].shape != self.value.shape:
                raise CheckpointError(f"{file} has shape {arrays['weights'].shape}; expected {self.value.shape}")
            if not optimizer:
                self.state = AdamState.started(arrays["weights"])
                return
            if not state["optimizer"]:
                raise CheckpointError(
                    f"{file.parent} was saved without its optimizer; use init_from= for the weights alone"
                )
            self.state = AdamState(arrays["weights"], arrays["first"], arrays["second"], int(state["moment_steps"]))
