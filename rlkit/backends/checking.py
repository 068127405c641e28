"""The checks of a training call's arguments, alike for every backend: before any work, naming datum and field."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import ConfigError, DataError
from rlkit.metrics import names
from rlkit.types import Adam, Datum, ForwardBackwardOutput, Lora

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = [
    "OF_DISTRIBUTION",
    "Checked",
    "Start",
    "check_adam",
    "checked_data",
    "measured_output",
    "output",
]

Checked: TypeAlias = "tuple[list[Datum], PreparedLoss | None, tuple[str, ...]]"

# What a backend that has the full distribution p gives per token: its entropy, and the sums of p^2 and of p^2 log p.
OF_DISTRIBUTION = ("entropy", "sum_p2", "sum_p2_logp")


@attrs.frozen
class Start:
    """The saved state that a trainer starts from, with its optimizer where it ``resumes``; ``path`` None: from anew."""

    path: str | None
    resumes: bool

    @classmethod
    def of(
        cls, opener: str, model: object, lora: object, folder: object, resume_from: str | None, init_from: str | None
    ) -> Start:
        """Check the options that all trainers take; ``opener`` is "connect" or "critic"."""
        if resume_from is not None and init_from is not None:
            raise ConfigError(f"{opener}: got both resume_from= and init_from=; give one of them")
        _check.require(model is None or isinstance(model, (str, os.PathLike)), "model", model, "a name or None")
        _check.require(lora is None or isinstance(lora, Lora), "lora", lora, "rlkit.Lora(...) or None")
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not str(folder)):
            raise ConfigError("folder", f"got {_check.shown(folder)}", "a path, or None for rlkit-saves")
        return cls(init_from if resume_from is None else resume_from, resume_from is not None)


def check_adam(params: Adam) -> None:
    """Raise ConfigError where ``params`` of an optimizer step is anything else."""
    _check.require(isinstance(params, Adam), "optim_step(params)", params, "rlkit.Adam(...)")


def checked_data(data: Sequence[Datum], vocab_size: int, max_length: int) -> list[Datum]:
    """Return ``data`` as a non-empty list of datums that fit the model, or raise a DataError naming datum and token."""
    if isinstance(data, Datum) or not isinstance(data, Sequence) or isinstance(data, (str, bytes)):
        raise DataError("data", f"got {_check.shown(data)}", "a list of Datum")
    if not data:
        raise DataError("data is empty; expected at least one Datum")
    for i, datum in enumerate(data):
        _check.require(isinstance(datum, Datum), f"data[{i}]", datum, "a Datum", error=DataError)
        if len(datum) > max_length:
            raise DataError(f"data[{i}].tokens", f"has {len(datum)}", f"<= {max_length}", "the context")
        _check.token_ids(f"data[{i}].tokens", datum.tokens, vocab_size=vocab_size)
        targets = datum.inputs.get("target_tokens")
        if targets is not None and (targets.ndim == 0 or targets.max() >= vocab_size or targets.min() < -1):
            where = f"data[{i}].inputs['target_tokens']"
            raise DataError(where, f"spans {_span(targets)}", f"ids in [0, {vocab_size}) or -1 for none")
    return list(data)


def _span(array: np.ndarray) -> str:
    return f"[{array.min()}, {array.max()}] in shape {array.shape}"


def output(
    data: Sequence[Datum],
    logprobs: Sequence[np.ndarray],
    extras: Mapping[str, Sequence[np.ndarray]],
    parts: Sequence[LossGradient | None],
) -> ForwardBackwardOutput:
    """Return the output of one call.

    Args:
        data: the datums.
        logprobs: [n] per datum.
        extras: name -> [n] per datum.
        parts: what the loss gave, micro-batch by micro-batch; None where there was no loss.
    """
    metrics: dict[str, float] = {"loss:sum": 0.0}
    for part in parts:
        if part is not None:
            metrics["loss:sum"] += part.value
            names.add(metrics, part.metrics)
    # A mean is over the datums that the loss was given: those with a token of the policy's own.
    given = sum(bool(datum.mask.any()) for datum in data)
    return measured_output(data, logprobs, extras, names.averaged(metrics, max(given, 1)))


def measured_output(
    data: Sequence[Datum],
    logprobs: Sequence[np.ndarray],
    extras: Mapping[str, Sequence[np.ndarray]],
    metrics: Mapping[str, float],
) -> ForwardBackwardOutput:
    """Return the output of one call whose loss, and metrics of the loss, are known."""
    tokens = float(sum(int(datum.mask.sum()) for datum in data))
    metrics = {**metrics, "tokens:sum": tokens, "datums:sum": float(len(data))}

    def expanded(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [datum.expand(np.asarray(x, np.float32)) for datum, x in zip(data, arrays, strict=True)]

    outputs = {name: expanded(arrays) for name, arrays in extras.items()}
    return ForwardBackwardOutput(expanded(logprobs), outputs, metrics, [datum.mask for datum in data])
