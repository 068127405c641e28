"""The checks of a training call's arguments, alike for every backend: before any work, naming datum and field."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit._lazy import has_torch, missing
from rlkit.backends.protocol import Config, LossLike
from rlkit.errors import ConfigError, DataError, UnsupportedError
from rlkit.types import Adam, Datum, Lora

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["OF_DISTRIBUTION", "Checked", "Remote", "Start", "check_adam", "checked_call", "checked_data"]

Checked: TypeAlias = "tuple[list[Datum], PreparedLoss | None, tuple[str, ...]]"
Remote: TypeAlias = "Callable[[PreparedLoss, Sequence[Datum]], str]"

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


def checked_call(
    name: str,
    data: Sequence[Datum],
    loss: LossLike | None,
    config: Config | None,
    want: Sequence[str],
    wanted: Sequence[str],
    vocab_size: int,
    max_length: int,
    *,
    drivers: Sequence[str],
    remote: Remote | None = None,
) -> Checked:
    """Return ``data`` as a list, the loss prepared and tried out on made-up logprobs, and ``want`` as a tuple.

    Args:
        name: the backend's, for messages.
        data, loss, config, want: as in ``TrainerBackend.forward``.
        wanted: what the backend has for ``want``.
        vocab_size, max_length: the model's.
        drivers: what the model gives for losses to be driven by.
        remote: why a loss is computed in this process, "" where a service does it: then torch may be missing.
    """
    _check.require(not isinstance(want, str) and isinstance(want, Sequence), "want", want, "a sequence of names")
    for output in want:
        if output not in wanted:
            has = f"it has: {', '.join(wanted)}" if wanted else "it has none beside logprobs"
            raise UnsupportedError(f"want: the {name} backend has no output {output!r}; {has}")
    data = checked_data(data, vocab_size, max_length)
    if loss is None:
        return data, None, tuple(want)
    from rlkit.losses.prepare import prepare

    prepared = prepare(loss, config)
    if prepared.driver not in drivers:
        why = "a value head, which a policy has not: use a critic"
        if prepared.driver != "values":
            why = f"{prepared.driver}, which a critic has not: it takes losses of values, such as value_clipped"
        raise UnsupportedError(f"the loss {prepared.name!r} needs {why}")
    if prepared.entropy and "entropy" not in wanted:
        raise UnsupportedError(
            f"the loss {prepared.name!r} needs exact entropies, which the {name} backend cannot give; "
            "rlkit.advantages.entropy_bonus is the sampled estimate"
        )
    prepared.check(data)
    if remote is None or has_torch():
        prepared.try_out(data)
    else:
        _check_remote(prepared, data, remote)
    return data, prepared, tuple(want)


def _check_remote(prepared: PreparedLoss, data: Sequence[Datum], remote: Remote) -> None:
    """Raise what trying out would, as far as that is possible without torch."""
    prepared.check_settings()
    for i, datum in enumerate(data):
        for name in (*prepared.inputs, *prepared.optional):
            if name in datum.inputs and datum.inputs[name].ndim > 1:
                what, where = f"has shape {datum.inputs[name].shape}", f"data[{i}].inputs[{name!r}]"
                raise DataError(where, what, "a number, or one per token", f"for {prepared.name!r}")
    why_here = remote(prepared, data)
    if why_here:
        what = f"the loss {prepared.name!r} is computed in this process ({why_here}), which"
        raise missing(what, "torch", "tinker", "torch")


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
