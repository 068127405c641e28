"""``ToyBackend``: a softmax language model over bytes that learns in milliseconds, for tests and tutorials.

Everything but its size is as in the other backends: order, accumulation, snapshots, saving, failures.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlkit import _check
from rlkit.backends import saves
from rlkit.backends.inprocess import InProcessBackend
from rlkit.backends.sampling import SeedStream, entropy_of
from rlkit.backends.toy.model import Features, Row, base_weights
from rlkit.backends.toy.sampler import ToySampler
from rlkit.backends.toy.tokenizer import ByteTokenizer
from rlkit.errors import BackendError, CheckpointError, ConfigError
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora

__all__ = ["ByteTokenizer", "ToyBackend", "ToySampler"]


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
        max_length: longest sequence, in tokens.

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
        max_length: int = 1024,
    ) -> None:
        if model is not None and not isinstance(model, str):
            raise ConfigError(_check.problem("model", f"got {_check.shown(model)}", "a name or None"))
        if lora is not None and not isinstance(lora, Lora):
            raise ConfigError(_check.problem("lora", f"got {_check.shown(lora)}", "rlkit.Lora(...) or None"))
        if resume_from is not None and init_from is not None:
            raise ConfigError("connect: got both resume_from= and init_from=; give one of them")
        _check.integer("max_length", max_length, low=2)
        tokenizer = ByteTokenizer()
        self._features = Features(tokenizer.vocab_size)
        self._base_weights = base_weights(self._features.size, tokenizer.vocab_size)
        self._weights = self._base_weights.copy()
        self._moments = [np.zeros_like(self._weights), np.zeros_like(self._weights)]
        self._moment_steps = 0
        self._gradient = np.zeros_like(self._weights)
        self._seeds = SeedStream(entropy_of(seed))
        version = self._load(init_from if resume_from is None else resume_from, optimizer=resume_from is not None)
        super().__init__("toy", tokenizer=tokenizer, max_length=max_length, folder=folder)
        self.version = version

    def _run(
        self, data: Sequence[Datum], loss: Any, want: Sequence[str], *, backward: bool
    ) -> Generator[None, None, ForwardBackwardOutput]:
        import torch

        from rlkit.backends.outputs import output

        yield from ()
        rows = [self._forward(datum) for datum in data]
        gradient = np.zeros_like(self._weights)
        found = None
        if loss is not None:
            driver = [torch.from_numpy(row.driver(datum, loss.driver)) for row, datum in zip(rows, data, strict=True)]
            entropy = [torch.from_numpy(row.entropy.astype(np.float32)) for row in rows] if loss.entropy else None
            found = loss.gradient(driver, data, entropy=entropy)
            for i, row in enumerate(rows):
                extra = found.entropy[i].numpy() if found.entropy is not None else None
                gradient += row.gradient(data[i], loss.driver, found.driver[i].numpy(), extra)
        if backward:
            if not np.isfinite(gradient).all():
                raise BackendError("forward_backward: the gradient is not finite")
            self._gradient = self._gradient + gradient
        extras = {"entropy": [row.entropy for row in rows]} if "entropy" in want else {}
        return output(data, [row.chosen(datum) for row, datum in zip(rows, data, strict=True)], extras, [found])

    def _forward(self, datum: Datum) -> Row:
        before = np.flatnonzero(datum.mask) - 1
        features = self._features.all(datum.tokens)[before]
        return Row(features, self._weights, datum.temperature or 1.0)

    def _step(self, params: Adam) -> Mapping[str, float]:
        gradient = self._gradient
        with np.errstate(over="ignore"):
            norm = float(np.sqrt(np.square(gradient.astype(np.float32)).sum(dtype=np.float32)))
        if not np.isfinite(norm):
            raise BackendError(f"optim_step: the gradient's norm is {norm}; nothing was changed, discard() drops it")
        if params.grad_clip_norm > 0:
            gradient = gradient * min(1.0, params.grad_clip_norm / (norm + 1e-6))
        self._moment_steps += 1
        first, second = self._moments
        first = params.beta1 * first + (1 - params.beta1) * gradient
        second = params.beta2 * second + (1 - params.beta2) * gradient**2
        scale = np.sqrt(second / (1 - params.beta2**self._moment_steps)) + params.eps
        update = first / (1 - params.beta1**self._moment_steps) / scale
        decayed = self._weights * (1 - params.learning_rate * params.weight_decay)
        self._weights = decayed - params.learning_rate * update  # a new array: snapshots keep the old one
        self._moments = [first, second]
        self._drop()
        return {"grad_norm:mean": norm}

    def _drop(self) -> None:
        self._gradient = np.zeros_like(self._weights)

    def _snapshot(self) -> ToySampler:
        return self._sampler_of(self._weights, self.version)

    def _base(self) -> ToySampler:
        return self._sampler_of(self._base_weights, 0)

    def _sampler_of(self, weights: np.ndarray, version: int) -> ToySampler:
        return ToySampler(
            weights,
            self._features,
            self._seeds,
            tokenizer=self.tokenizer,
            max_length=self.max_length,
            version=version,
        )

    def _write(self, folder: Path, *, optimizer: bool) -> dict[str, Any]:
        arrays = {"weights": self._weights}
        if optimizer:
            arrays |= {"first": self._moments[0], "second": self._moments[1]}
        np.savez(folder / "toy.npz", allow_pickle=False, **arrays)
        state: dict[str, Any] = {
            "optimizer": optimizer,
            "seed": str(self._seeds.entropy),
            "requests": self._seeds.count,
        }
        return state | {"moment_steps": self._moment_steps}

    def _load(self, path: str | None, *, optimizer: bool) -> int:
        if path is None:
            return 0
        folder, state = saves.read(path, backend="toy")
        with np.load(folder / "toy.npz", allow_pickle=False) as arrays:
            self._weights = arrays["weights"]
            if not optimizer:
                return 0
            if not state["optimizer"]:
                raise CheckpointError(f"{folder} was saved without its optimizer; use init_from= for the weights alone")
            self._moments = [arrays["first"], arrays["second"]]
        self._moment_steps = state["moment_steps"]
        self._seeds = SeedStream(int(state["seed"]), state["requests"])
        return int(state["version"])
