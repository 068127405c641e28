"""The backends of a service, in the API's terms.

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
from pathlib import Path

import attrs
import numpy as np
from torch import Tensor

from rlkit import losses
from rlkit.backends import connect, saves
from rlkit.backends.protocol import Sampler, SavedSamplers, Storage, TrainerBackend
from rlkit.errors import DataError
from rlkit.server._losses import Loss
from rlkit.types import Adam, Datum, Lora

__all__ = ["BackendModel", "BackendModels", "BackendSnapshot", "ExactModels", "LossRow"]

_SUFFIX = "_given"  # of the inputs' names: they are not rlkit's, whose logprobs are of the targets alone


@attrs.frozen(eq=False)
class LossRow:
    """One datum of a training call.

    Attributes:
        tokens: int64 [N], the model's input.
        targets: int64 [N] or [N, K], the ids to score after each of them.
        inputs: the loss's inputs besides logprobs, by the API's names.
    """

    tokens: np.ndarray
    targets: np.ndarray
    inputs: Mapping[str, np.ndarray]


class BackendModels:
    """Models made by a function that makes backends.

    Args:
        connect: called with ``lora=``, and with ``resume_from=`` or ``init_from=`` to load what a backend of its kind
            saved: ``functools.partial(rlkit.connect, "local", model=..., folder=...)``.

    >>> import functools, rlkit
    >>> models = BackendModels(functools.partial(rlkit.connect, "toy"))
    >>> models.max_length
    1024
    """

    def __init__(self, connect: Callable[..., TrainerBackend]) -> None:
        self._connect = connect
        self._base = connect(lora=Lora(rank=1))
        self.tokenizer = self._base.tokenizer
        self.max_length = self._base.max_length

    def create(self, lora: Lora) -> BackendModel:
        """Make a new model."""
        return BackendModel(self._connect(lora=lora))

    def load(self, handle: str, *, optimizer: bool) -> BackendModel:
        """Make a model from a path that ``save`` returned; its adapter is the saved one's."""
        return BackendModel(self._connect(resume_from=handle) if optimizer else self._connect(init_from=handle))

    def frozen(self, handle: str | None) -> BackendSnapshot:
        """Open a saved policy; None opens the base model."""
        if handle is None:
            return BackendSnapshot(self._base.base_sampler().result(), self._base)
        if isinstance(self._base, SavedSamplers):
            return BackendSnapshot(self._base.saved_sampler(handle).result(), self._base)
        backend = self._connect(init_from=handle)  # a trainer for each: the size of a model, as far as is known
        return BackendSnapshot(backend.sampler().result(), backend, whole=True)

    def delete(self, handle: str) -> None:
        """Remove a saved state."""
        if isinstance(self._base, Storage):
            self._base.delete(handle).result()
        else:
            saves.remove(handle)

    def files(self, handle: str) -> Mapping[str, Path]:
        """Return the adapter's files, in the backend's own format; the local backend's is peft's."""
        folder, state = saves.read(handle, backend=None)
        return {str(name): folder / str(name) for name in state["sha256"]}

    def close(self) -> None:
        """Close the backend that samples from the base."""
        self._base.close()


class ExactModels(BackendModels):
    """Toy backends: small exact models, whose states go with the service.

    Args:
        max_length: longest sequence, in tokens.
    """

    def __init__(self, max_length: int = 1024) -> None:
        folder = tempfile.mkdtemp(prefix="rlkit-states-")
        self._remove = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        super().__init__(functools.partial(connect, "toy", folder=folder, max_length=max_length))

    def close(self) -> None:
        super().close()
        self._remove()


class BackendSnapshot:
    """A sampler of a backend.

    Attributes:
        nbytes: memory that it keeps; None if it is a whole backend.
    """

    def __init__(self, sampler: Sampler, owner: TrainerBackend, *, whole: bool = False) -> None:
        self.sampler = sampler
        self._owner = owner  # kept: a sampler may end with its backend
        self.nbytes: int | None = None if whole else getattr(sampler, "nbytes", 0)


class BackendModel:
    """One backend in training."""

    def __init__(self, backend: TrainerBackend) -> None:
        self.backend = backend
        self._pending = False  # a gradient since the last step

    def run(
        self, rows: Sequence[LossRow], loss: Loss, *, backward: bool
    ) -> tuple[list[dict[str, np.ndarray]], dict[str, float]]:
        """Return the result of a training call before any update, as ``Loss.evaluate`` does.

        Where targets are the tokens shifted by one, and [N], a row is an ordinary datum. All others go through the
        losses on given targets.
        """
        for i, row in enumerate(rows):
            self._check_ids(i, row)
        plain = all(row.targets.ndim == 1 and np.array_equal(row.tokens[1:], row.targets[:-1]) for row in rows)
        if not plain:
            logprobs = self._on_targets(rows, loss, backward=backward)
        elif backward:
            logprobs = self._shifted(rows, loss)
        else:
            logprobs = self._scored(rows, [np.ones(row.tokens.size, bool) for row in rows])
        self._pending = self._pending or backward
        return loss.evaluate(logprobs, [row.inputs for row in rows])

    def _check_ids(self, i: int, row: LossRow) -> None:
        """Raise DataError for ids outside of the vocabulary; a backend takes -1 for "no target"."""
        high = self.backend.tokenizer.vocab_size - 1
        for name, ids in (("model_input", row.tokens), ("loss_fn_inputs['target_tokens']", row.targets)):
            if ids.min() < 0 or ids.max() > high:
                raise DataError(f"data[{i}].{name} has ids in [{ids.min()}, {ids.max()}]; expected [0, {high}]")

    def _on_targets(self, rows: Sequence[LossRow], loss: Loss, *, backward: bool) -> list[np.ndarray]:
        logprobs: dict[int, np.ndarray] = {}
        data = [_on_targets(i, row) for i, row in enumerate(rows)]
        function = _function(loss, rows, logprobs)
        call = self.backend.forward_backward if backward else self.backend.forward
        call(data, function).result()
        return [logprobs[i] for i in range(len(rows))]

    def _shifted(self, rows: Sequence[LossRow], loss: Loss) -> list[np.ndarray]:
        """Take the gradient where the loss has one, and score the rest, prompts mostly, in a pass without."""
        chosen = [_chosen(row, loss) for row in rows]
        if not any(x.any() for x in chosen):  # a gradient of zeros counts, too: a step may follow
            chosen = [np.ones(row.tokens.size, bool) for row in rows]
        data = [_shifted(row, where, row.inputs) for row, where in zip(rows, chosen, strict=True)]
        rest = self._scored(rows, [~where for where in chosen])
        output = self.backend.forward_backward(data, _function(loss, rows, None)).result()
        return [a + lp[1:] for a, lp in zip(rest, output.logprobs, strict=True)]

    def _scored(self, rows: Sequence[LossRow], where: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return [N] each: logprobs of the targets at ``where``, 0 elsewhere."""
        if not any(x.any() for x in where):
            return [np.zeros(row.tokens.size, np.float32) for row in rows]
        data = [_shifted(row, x, {}) for row, x in zip(rows, where, strict=True)]
        return [lp[1:] for lp in self.backend.forward(data).result().logprobs]

    def step(self, params: Adam) -> Mapping[str, float]:
        """Take one step. The API allows one without a gradient, in which the moments still move the weights."""
        if not self._pending:
            zero = Datum([0, 0], [False, True])
            self.backend.forward_backward([zero], _zero).result()
        self._pending = False
        return self.backend.optim_step(params).result()

    def snapshot(self) -> BackendSnapshot:
        """Return a snapshot of the current policy."""
        return BackendSnapshot(self.backend.sampler().result(), self.backend)

    def save(self, name: str, *, optimizer: bool) -> str:
        """Save into a new folder and return its path. Backends refuse to lose an accumulated gradient."""
        return self.backend.save(name, optimizer=optimizer, sampler=not optimizer).result()

    def close(self) -> None:
        """Close the backend."""
        self.backend.close()


def _chosen(row: LossRow, loss: Loss) -> np.ndarray:
    """Return where the loss may have a gradient, bool [N]."""
    if loss.gates is None:
        return np.ones(row.tokens.size, bool)
    chosen = np.zeros(row.tokens.size, bool)
    for name in loss.gates:
        chosen |= row.inputs[name] != 0
    return chosen


def _shifted(row: LossRow, where: np.ndarray, inputs: Mapping[str, np.ndarray]) -> Datum:
    """Return the datum of a row and its last target; the policy's own tokens are the targets at ``where``."""
    chosen = {name + _SUFFIX: array if array.ndim == 0 else array[where] for name, array in inputs.items()}
    return Datum(np.append(row.tokens, row.targets[-1]), np.append(False, where), chosen)


def _on_targets(i: int, row: LossRow) -> Datum:
    """Return the datum of a row and one more token, which has no effect."""
    inputs = {name + _SUFFIX: array for name, array in row.inputs.items()}
    inputs["target_tokens"] = row.targets.reshape(row.tokens.size, -1)
    inputs["row" + _SUFFIX] = np.array(i)
    return Datum(np.append(row.tokens, 0), np.arange(row.tokens.size + 1) > 0, inputs)


def _function(loss: Loss, rows: Sequence[LossRow], kept: dict[int, np.ndarray] | None) -> Callable[..., object]:
    """Return the loss as a function that backends take; on given targets it keeps the logprobs."""
    names = [name + _SUFFIX for name in rows[0].inputs] + ["row" + _SUFFIX] * (kept is not None)
    driver = "logprobs" if kept is None else "target_logprobs"

    def function(**given: Tensor) -> tuple[Tensor, Mapping[str, float]]:
        logprobs = given.pop(driver)
        if kept is not None:
            i = int(given.pop("row" + _SUFFIX))
            logprobs = logprobs.reshape(rows[i].targets.shape)
            kept[i] = logprobs.detach().cpu().numpy()
        terms, _ = loss.function(logprobs, {name.removesuffix(_SUFFIX): x for name, x in given.items()})
        return terms.sum(), {}

    function.__name__ = loss.name.replace(" ", "_")
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (driver, *names)]
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return losses.loss(elementwise=loss.elementwise)(function)


def _zero(logprobs: Tensor) -> Tensor:
    return logprobs.sum() * 0.0
