"""The backends of a server, in the API's terms.

The API speaks of targets, not of completions: ``tokens`` [N] are read, and row i of ``targets`` [N] or [N, K] names the
ids whose logprobs after tokens 0..i are wanted. Here they become datums.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from torch import Tensor

from rlkit import losses
from rlkit.backends import connect, saves
from rlkit.backends.protocol import Sampler, SavedSamplers, Storage, TrainerBackend
from rlkit.errors import DataError
from rlkit.server._losses import Loss
from rlkit.types import Adam, Datum, Lora

__all__ = ["Model", "Models", "Row", "Snapshot", "toy_models"]

_SUFFIX = "_given"  # of the inputs' names: they are not rlkit's, whose logprobs are of the targets alone


@attrs.frozen(eq=False)
class Row:
    """One datum of a training call.

    Attributes:
        tokens: int64 [N], the model's input.
        targets: int64 [N] or [N, K], the ids to score after each of them.
        inputs: the loss's inputs besides logprobs, by the API's names.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


@attrs.frozen(eq=False)
class Snapshot:
    """A sampler, and the backend that it is of: a sampler may end with its backend, so both are kept."""

    sampler: Sampler
    owner: TrainerBackend


class Models:
    """Models made by a function that makes backends.

    Args:
        connect: called with ``lora=``, and with ``resume_from=`` or ``init_from=`` to load what a backend of its kind
            saved: ``functools.partial(rlkit.connect, "local", model=..., folder=...)``.

    >>> import functools, rlkit
    >>> models = Models(functools.partial(rlkit.connect, "toy"))
    >>> models.max_length
    1024
    """

    def __init__(self, connect: Callable[..., TrainerBackend]) -> None:
        self._connect = connect
        self._base = connect(lora=Lora(rank=1))
        self.tokenizer = self._base.tokenizer
        self.max_length = self._base.max_length

    def create(self, lora: Lora) -> Model:
        """Make a new model."""
        return Model(self._connect(lora=lora))

    def load(self, handle: str, *, optimizer: bool) -> Model:
        """Make a model from a path that ``save`` returned; its adapter is the saved one's."""
        return Model(self._connect(resume_from=handle) if optimizer else self._connect(init_from=handle))

    def frozen(self, handle: str | None) -> Snapshot:
        """Open a saved policy; None opens the base model."""
        if handle is None:
            return Snapshot(self._base.base_sampler().result(), self._base)
        if isinstance(self._base, SavedSamplers):
            return Snapshot(self._base.saved_sampler(handle).result(), self._base)
        backend = self._connect(init_from=handle)
        return Snapshot(backend.sampler().result(), backend)

    def delete(self, handle: str) -> None:
        """Remove a saved state."""
        if isinstance(self._base, Storage):
            self._base.delete(handle).result()
        else:
            saves.remove(handle)

    def close(self) -> None:
        """Close the backend that samples from the base."""
        self._base.close()


def toy_models(max_length: int = 1024) -> Models:
    """Return toy backends: small exact models, whose states go with them."""
    folder = tempfile.mkdtemp(prefix="rlkit-states-")
    models = Models(functools.partial(connect, "toy", folder=folder, max_length=max_length))
    weakref.finalize(models, shutil.rmtree, folder, ignore_errors=True)
    return models


class Model:
    """One backend in training."""

    def __init__(self, backend: TrainerBackend) -> None:
        self.backend = backend
        self._pending = False  # a gradient since the last step

    def run(
        self, rows: Sequence[Row], loss: Loss, *, backward: bool
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Return the result of a training call before any update, as ``Loss.evaluate`` does.

        Where all targets are the tokens shifted by one, rows are ordinary datums. Others are losses on given targets.
        """
        for i, row in enumerate(rows):
            self._check_ids(i, row)
        plain = all(row.targets.ndim == 1 and np.array_equal(row.tokens[1:], row.targets[:-1]) for row in rows)
        data = [_datum(i, row, plain=plain) for i, row in enumerate(rows)]
        kept: dict[int, np.ndarray] = {}
        function = _function(loss, rows, None if plain else kept)
        if backward:
            output = self.backend.forward_backward(data, function).result()
        else:
            output = self.backend.forward(data, None if plain else function).result()
        logprobs = [x[1:] for x in output.logprobs] if plain else [kept[i] for i in range(len(rows))]
        self._pending = self._pending or backward
        return loss.evaluate(logprobs, [row.inputs for row in rows])

    def _check_ids(self, i: int, row: Row) -> None:
        """Raise DataError for ids outside of the vocabulary; a backend takes -1 for "no target"."""
        high = self.backend.tokenizer.vocab_size - 1
        for name, ids in (("model_input", row.tokens), ("loss_fn_inputs['target_tokens']", row.targets)):
            if ids.min() < 0 or ids.max() > high:
                raise DataError(f"data[{i}].{name} has ids in [{ids.min()}, {ids.max()}]; expected [0, {high}]")

    def step(self, params: Adam) -> Mapping[str, float]:
        """Take one step. The API allows one without a gradient, in which the moments still move the weights."""
        if not self._pending:
            zero = Datum([0, 0], [False, True])
            self.backend.forward_backward([zero], _zero).result()
        self._pending = False
        return self.backend.optim_step(params).result()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the current policy."""
        return Snapshot(self.backend.sampler().result(), self.backend)

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save into a new folder and return its path. Backends refuse to lose an accumulated gradient."""
        return self.backend.save(name, optimizer=optimizer, sampler=not optimizer).result()

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()


def _datum(i: int, row: Row, *, plain: bool) -> Datum:
    """Return the datum of a row and one more token: its last target, or on given targets any, which has no effect."""
    inputs = {name + _SUFFIX: array for name, array in row.inputs.items()}
    if not plain:
        inputs |= {"target_tokens": row.targets.reshape(row.tokens.size, -1), "row" + _SUFFIX: np.array(i)}
    tokens = np.append(row.tokens, row.targets[-1] if plain else 0)
    return Datum(tokens, np.arange(tokens.size) > 0, inputs)


def _function(loss: Loss, rows: Sequence[Row], kept: dict[int, np.ndarray] | None) -> Callable[..., object]:
    """Return the loss as a function that backends take; on given targets it keeps the logprobs."""
    names = [name + _SUFFIX for name in rows[0].inputs] + ["row" + _SUFFIX] * (kept is not None)
    scored = "logprobs" if kept is None else "target_logprobs"

    def function(**given: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        logprobs = given.pop(scored)
        if kept is not None:
            i = int(given.pop("row" + _SUFFIX))
            logprobs = logprobs.reshape(rows[i].targets.shape)
            kept[i] = logprobs.detach().cpu().numpy()
        terms = loss.function(logprobs, {name.removesuffix(_SUFFIX): x for name, x in given.items()})
        return terms.sum(), {}

    function.__name__ = loss.name
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (scored, *names)]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return losses.loss(elementwise=loss.elementwise)(function)


def _zero(logprobs: Tensor) -> Tensor:
    return logprobs.sum() * 0.0
