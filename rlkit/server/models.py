"""What stands behind a service: the seam between the API's protocol and a model.

The API speaks of targets, not of completions: ``tokens`` [N] are read, and row i of ``targets`` [N] or [N, K] names the
ids whose logprobs after tokens 0..i are wanted. A model gives those and takes a loss's gradient with respect to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs
import numpy as np

from rlkit.backends.protocol import Sampler, Tokenizer
from rlkit.server.losses import Loss
from rlkit.types import Adam, Lora

__all__ = ["Model", "Models", "Outputs", "Row", "Snapshot"]


@attrs.frozen(eq=False)
class Row:
    """One datum of a training call.

    Attributes:
        tokens: int64 [N], what the model reads.
        targets: int64 [N] or [N, K], what it is asked about after each of them.
        inputs: what the loss reads beside logprobs, by the API's names.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@attrs.frozen(eq=False)
class Outputs:
    """What a training call found before any update.

    Attributes:
        arrays: one mapping per datum: "logprobs" float32 shaped like the targets, and what the loss adds to it.
        metrics: "loss:sum" and the loss's own.
    """

    arrays: Sequence[Mapping[str, np.ndarray]]
    metrics: Mapping[str, float]


class Snapshot(Protocol):
    """A frozen policy.

    It may have an attribute ``nbytes``: the memory that it keeps beside the base, None for as much as a model.
    """

    @property
    def sampler(self) -> Sampler:
        """Draws and scores."""

    def distribution(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [N, V], the whole distribution after each of ``tokens`` [N], or UnsupportedError."""


class Model(Protocol):
    """One model in training. Its methods are called by one thread, in order."""

    def run(self, rows: Sequence[Row], loss: Loss, *, backward: bool) -> Outputs:
        """Logprobs and the loss; with ``backward`` its gradient is added, all or nothing."""

    def step(self, params: Adam) -> Mapping[str, float]:
        """One AdamW step; clears the gradient."""

    def snapshot(self) -> Snapshot:
        """The policy as it is."""

    def save(self, name: str, *, optimizer: bool) -> Any:
        """Keeps the state; the returned handle loads it again. ``name`` is a label."""

    def close(self) -> None:
        """Frees the model."""


class Models(Protocol):
    """Makes models of one base."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The base's tokenizer."""

    @property
    def max_length(self) -> int:
        """Longest sequence, in tokens."""

    def create(self, lora: Lora) -> Model:
        """A new model."""

    def load(self, handle: Any, *, optimizer: bool) -> Model:
        """A model from what ``Model.save`` returned, with or without its optimizer."""

    def frozen(self, handle: Any) -> Snapshot:
        """A saved policy to sample from; None is the base."""

    def delete(self, handle: Any) -> None:
        """Removes what ``Model.save`` kept."""

    def files(self, handle: Any) -> Mapping[str, Path]:
        """The files of what ``Model.save`` kept without its optimizer, by their names, or UnsupportedError."""

    def close(self) -> None:
        """Frees what is held for all models."""
