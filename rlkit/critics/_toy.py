"""``ToyCritic``: values linear in the toy backend's features; for small vocabularies, tests and tutorials."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlkit import _check
from rlkit.backends import saves
from rlkit.backends.checking import Start
from rlkit.backends.protocol import Tokenizer
from rlkit.backends.toy.model import AdamState, Features, Weights
from rlkit.critics._inprocess import InProcessCritic, check_tokenizer
from rlkit.types import Adam, Datum, Lora

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["ToyCritic"]


class ToyCritic(InProcessCritic):
    """V(prefix) = features(prefix) . w: the last three tokens, and a fading memory of those before.

    Needs no files and no model, and reads any tokens; it takes 2 kB for each entry of the vocabulary. It can
    distinguish little.

    Args:
        tokenizer: the policy's.
        model, lora: accepted, so that a call for another critic works here too; ignored.
        seed: accepted, without effect: it draws no random numbers.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer and version.
        init_from: a saved path: weights only.
        max_length: longest datum, in tokens.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,  # noqa: ARG002
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        max_length: int = 2**20,
    ) -> None:
        start = Start.of("critic", model, lora, folder, resume_from, init_from)
        _check.integer("max_length", max_length, low=2)
        tokenizer = check_tokenizer(tokenizer, None)
        self._features = Features(tokenizer.vocab_size)
        self._weights = Weights(AdamState.started(np.zeros(self._features.size)))
        version = 0
        if start.path is not None:
            saved, state = saves.read(start.path, backend="toy-critic")
            with saves.restoring(saved):
                self._weights.read(saved / "critic.npz", state, optimizer=start.resumes)
                version = int(state["version"]) if start.resumes else 0
        super().__init__("toy-critic", tokenizer=tokenizer, max_length=max_length, folder=folder, version=version)

    def _values_and_parts(
        self, data: Sequence[Datum], loss: PreparedLoss | None, *, backward: bool
    ) -> Generator[None, None, tuple[Sequence[np.ndarray], Sequence[LossGradient]]]:
        yield from ()
        rows = [self._features.all(datum.tokens)[np.flatnonzero(datum.mask) - 1] for datum in data]  # [n, features]
        values = [row @ self._weights.value for row in rows]
        if loss is None:
            return values, []
        import torch

        gradient = loss.gradient([torch.from_numpy(v) for v in values], data)
        if backward:
            parts = [row.T @ g.numpy().astype(float) for row, g in zip(rows, gradient.driver, strict=True)]
            self._weights.add(np.sum(parts, axis=0))
        return values, [gradient]

    def _step(self, params: Adam) -> Mapping[str, float]:
        return self._weights.step(params)

    def _drop(self) -> None:
        self._weights.clear()

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, object]:
        return self._weights.write(folder / "critic.npz", optimizer=optimizer)
