"""Exact small models: the toy's, driven by targets instead of completions, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rlkit.backends.sampling import SeedStream
from rlkit.backends.toy import ByteTokenizer, ToySampler
from rlkit.backends.toy.adamw import State, Weights
from rlkit.backends.toy.model import Features, base_weights
from rlkit.backends.toy.model import Row as Distributions
from rlkit.errors import DataError, UnsupportedError
from rlkit.server.losses import Loss
from rlkit.server.models import Outputs, Row
from rlkit.types import Adam, Datum, Lora

__all__ = ["ExactModels"]


class ExactModels:
    """Models that are the toy backend's, weights and arithmetic alike, so that curves of the two can be compared.

    Args:
        max_length: longest sequence, in tokens.
    """

    def __init__(self, max_length: int = 1024) -> None:
        self.tokenizer = ByteTokenizer()
        self.max_length = max_length
        self.features = Features(self.tokenizer.vocab_size)
        self._base = base_weights(self.features.size, self.tokenizer.vocab_size)

    def create(self, lora: Lora) -> ExactModel:
        """A new model. The adapter's shape does nothing: all weights are trained."""
        del lora
        return ExactModel(self, State.started(self._base))

    def load(self, handle: State, *, optimizer: bool) -> ExactModel:
        """A model from what ``save`` returned."""
        return ExactModel(self, handle if optimizer else State.started(handle.value))

    def frozen(self, handle: State | None) -> ExactSnapshot:
        """A saved policy; None is the base."""
        return ExactSnapshot(self, self._base if handle is None else handle.value)

    def delete(self, handle: State) -> None:
        """The state goes with its last reference."""

    def files(self, handle: State) -> Mapping[str, Path]:
        """None: states are in memory."""
        del handle
        raise UnsupportedError("this server's model has no files: its states are in memory")

    def close(self) -> None:
        """Nothing is held."""


class ExactSnapshot:
    """A frozen policy."""

    def __init__(self, models: ExactModels, weights: np.ndarray) -> None:
        self.sampler = ToySampler(
            weights,
            models.features,
            SeedStream(0),  # never drawn from: the service gives every request its seed
            tokenizer=models.tokenizer,
            max_length=models.max_length,
            version=0,
        )
        self._features = models.features
        self._weights = weights

    def distribution(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [N, V]: the logprobs of every next token."""
        found: np.ndarray = Distributions(self._features.all(tokens), self._weights, 1.0).logprobs
        return found.astype(np.float32)


class ExactModel:
    """One model in training, in float64; the loss sees float32 logprobs."""

    def __init__(self, models: ExactModels, state: State) -> None:
        self._models = models
        self._weights = Weights(state)

    def run(self, rows: Sequence[Row], loss: Loss, *, backward: bool) -> Outputs:
        """See ``Model.run``."""
        datums = [self._datum(i, row) for i, row in enumerate(rows)]
        found = [Distributions(self._models.features.all(row.tokens), self._weights.value, 1.0) for row in rows]
        logprobs = [
            distributions.driver(datum, "target_logprobs").reshape(row.targets.shape)
            for distributions, datum, row in zip(found, datums, rows, strict=True)
        ]
        result = loss.gradient(logprobs, [row.inputs for row in rows])
        if backward:
            total = np.zeros_like(self._weights.value)
            for distributions, datum, part in zip(found, datums, result.logprobs, strict=True):
                total += distributions.gradient(datum, "target_logprobs", part.reshape(part.shape[0], -1), None)
            self._weights.add(total)
        return Outputs(result.arrays(logprobs), result.metrics)

    def step(self, params: Adam) -> Mapping[str, float]:
        """One step of AdamW. Without a gradient it is zero, and the moments still move the weights."""
        return self._weights.step(params)

    def snapshot(self) -> ExactSnapshot:
        """The policy as it is."""
        return ExactSnapshot(self._models, self._weights.value)

    def save(self, name: str, *, optimizer: bool) -> State:
        """The state; an accumulated gradient is not part of it."""
        del name, optimizer
        return self._weights.state

    def close(self) -> None:
        """Nothing is held."""

    def _datum(self, i: int, row: Row) -> Datum:
        """The toy's form of a row: a last token that nothing depends on, and targets beside all but the first."""
        size = self._models.tokenizer.vocab_size
        for name, ids in (("model_input", row.tokens), ("loss_fn_inputs['target_tokens']", row.targets)):
            if ids.min() < 0 or ids.max() >= size:
                raise DataError(f"data[{i}].{name} has ids in [{ids.min()}, {ids.max()}]; expected [0, {size - 1}]")
        if row.tokens.size > self._models.max_length:
            raise DataError(
                f"data[{i}].model_input has {row.tokens.size} tokens; the limit is {self._models.max_length}"
            )
        targets = np.zeros((row.tokens.size + 1, row.targets.reshape(row.tokens.size, -1).shape[1]), np.int64)
        targets[1:] = row.targets.reshape(row.tokens.size, -1)
        mask = np.arange(row.tokens.size + 1) > 0
        return Datum(np.append(row.tokens, 0), mask, {"target_tokens": targets})
