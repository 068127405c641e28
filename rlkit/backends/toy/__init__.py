"""``ToyBackend``: a softmax language model over bytes that learns in milliseconds, for tests and tutorials.

Everything but its size is as in the other backends: order, accumulation, snapshots, saving, failures.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rlkit import _check
from rlkit.backends import saves
from rlkit.backends.checking import Start
from rlkit.backends.inprocess import InProcessBackend
from rlkit.backends.protocol import Sampler
from rlkit.backends.sampling import SeedStream, entropy_of
from rlkit.backends.toy._sampler import LiveToySampler, Policy, RunningRequests, ToySampler
from rlkit.backends.toy.model import AdamState, ByteTokenizer, Distributions, Features, Weights, base_weights
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["ByteTokenizer", "ToyBackend", "ToySampler"]

_MAX_LENGTH = 1024  # tokens


class ToyBackend(InProcessBackend):
    """A log-linear language model over bytes: p(next token | prefix) = softmax(features(prefix) @ W).

    The features are fixed and W [65, 259] is trained, in float64. Unlike a large model it knows nothing at first but
    that text is mostly letters, digits and spaces.

    Args:
        model, lora: accepted, so that a call for another backend works here too; ignored.
        seed: of sampling; None for a fresh one.
        folder: where ``save`` writes, ``rlkit-saves`` by default.
        resume_from: a saved path: weights, optimizer, version and the stream of sampling seeds.
        init_from: a saved path: weights only.
        max_length: longest sequence, in tokens; None: that of the saved policy, 1024 for a new one.

    >>> import rlkit
    >>> policy = ToyBackend(seed=0)
    >>> datum = rlkit.Datum.supervised(policy.tokenizer.encode("Q:"), policy.tokenizer.encode("A"))
    >>> for _ in range(20):
    ...     loss = policy.forward_backward([datum], "cross_entropy")
    ...     step = policy.optim_step(rlkit.Adam(learning_rate=0.1))
    >>> loss.result().metrics["loss:sum"] < 0.1
    True
    """

    def __init__(
        self,
        *,
        model: str | None = None,
        lora: Lora | None = None,
        seed: int | None = None,
        folder: str | Path | None = None,
        resume_from: str | None = None,
        init_from: str | None = None,
        max_length: int | None = None,
    ) -> None:
        start = Start.of("connect", model, lora, folder, resume_from, init_from)
        _check.optional(_check.integer, "max_length", max_length, low=2)
        tokenizer = ByteTokenizer()
        self._features = Features(tokenizer.vocab_size)
        self._base_weights = base_weights(self._features.size, tokenizer.vocab_size)
        self._weights = Weights(AdamState.started(self._base_weights))
        self._seeds = SeedStream(entropy_of(seed))
        version, saved_length = self._load(start.path, optimizer=start.resumes)
        length = saved_length if max_length is None else max_length
        self._running = RunningRequests()
        super().__init__(
            "toy", tokenizer=tokenizer, max_length=length, folder=folder, version=version, background=self._running
        )
        self._running.wake = self._worker.wake

    def _run(
        self, data: Sequence[Datum], loss: PreparedLoss | None, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        from rlkit.backends.checking import output

        yield from ()
        rows = [self._forward(datum) for datum in data]
        gradient = np.zeros_like(self._weights.value)
        part = None
        if loss is not None:
            import torch

            driver = [torch.from_numpy(row.driver(datum, loss.driver)) for row, datum in zip(rows, data, strict=True)]
            entropy = [torch.from_numpy(row.entropy.astype(np.float32)) for row in rows] if loss.entropy else None
            part = loss.gradient(driver, data, entropy=entropy)
            for i, row in enumerate(rows):
                extra = part.entropy[i].numpy() if part.entropy is not None else None
                gradient += row.gradient(data[i], loss.driver, part.driver[i].numpy(), extra)
        if backward:
            self._weights.add(gradient)
        extras = {name: [getattr(row, name) for row in rows] for name in want}
        return output(data, [row.chosen(datum) for row, datum in zip(rows, data, strict=True)], extras, [part])

    def _forward(self, datum: Datum) -> Distributions:
        before = np.flatnonzero(datum.mask) - 1
        features = self._features.all(datum.tokens)[before]
        return Distributions(features, self._weights.value, datum.temperature or 1.0)

    def _step(self, params: Adam) -> Mapping[str, float]:
        return self._weights.step(params)

    def _drop(self) -> None:
        self._weights.clear()

    def _snapshot(self) -> ToySampler:
        return self._sampler_of(self._weights.value, self.version)

    def _live(self, *, recompute: bool) -> LiveToySampler:
        del recompute  # nothing is kept
        return LiveToySampler(
            self._weights.value,
            self._features,
            self._seeds,
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            version=self.version,
            policy=Policy(self._weights.value, self.version),
            requests=self._running,
            update=lambda live: self._queue.submit("update", lambda: live.become(self._weights.value, self.version)),
        )

    def _base(self) -> ToySampler:
        return self._sampler_of(self._base_weights, 0)

    def saved_sampler(self, path: str) -> Future[Sampler]:
        """Open a sampler of a saved state. See ``SavedSamplers``."""

        def job() -> ToySampler:
            folder, state = saves.read(path, backend="toy")
            with saves.restoring(folder):
                weights = Weights(AdamState.started(self._base_weights))
                weights.read(folder / "toy.npz", state, optimizer=False)
                return self._sampler_of(weights.value, int(state.get("version", 0)))

        return self._queue.submit("saved_sampler", job)

    def _sampler_of(self, weights: np.ndarray, version: int) -> ToySampler:
        return ToySampler(
            weights, self._features, self._seeds, tokenizer=self.tokenizer, max_length=self.max_length, version=version
        )

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, object]:
        state = self._weights.write(folder / "toy.npz", optimizer=optimizer)
        seeds = {"seed": str(self._seeds.entropy), "requests": self._seeds.count}
        return {**state, "max_length": self.max_length, **seeds}

    def _load(self, path: str | None, *, optimizer: bool) -> tuple[int, int]:
        """Return the version, and the longest sequence."""
        if path is None:
            return 0, _MAX_LENGTH
        folder, state = saves.read(path, backend="toy")
        with saves.restoring(folder):
            length = int(state.get("max_length", _MAX_LENGTH))
            self._weights.read(folder / "toy.npz", state, optimizer=optimizer)
            if not optimizer:
                return 0, length
            self._seeds = SeedStream(int(state["seed"]), state["requests"])
            return int(state["version"]), length
