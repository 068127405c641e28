"""Datums as the service takes them, and its answers as rlkit gives them: the one place that shifts by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit.errors import BackendError
from rlkit.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from tinker import types

    from rlkit.losses.prepare import LossGradient

__all__ = ["metrics_of", "output", "read_logprobs", "send"]


def send(datum: Datum, arrays: Mapping[str, np.ndarray], targets: np.ndarray | None = None) -> types.Datum:
    """Return the SDK's datum.

    What follows the last token of the policy's own has no influence and is left out.

    Args:
        datum: with at least one token of the policy's own.
        arrays: inputs by the service's names: () as it is, [n] or [n, K] scattered, 0 elsewhere.
        targets: int64 [n, K], other tokens to score than the datum's own.
    """
    from tinker import types

    end = int(np.flatnonzero(datum.mask)[-1]) + 1
    inputs = {"target_tokens": _tensor(datum.tokens[1:end] if targets is None else datum.expand(targets)[1:end])}
    for name, array in arrays.items():
        inputs[name] = _tensor(array if array.ndim == 0 else datum.expand(array)[1:end])
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens[: end - 1].tolist()), loss_fn_inputs=inputs)


def _tensor(array: np.ndarray) -> types.TensorData:
    from tinker import types

    dtype = np.int64 if array.dtype.kind == "i" else np.float32
    return types.TensorData.from_numpy(np.asarray(array, dtype, order="C"))


def read_logprobs(
    call: str, response: types.ForwardBackwardOutput, data: Sequence[Datum], places: Sequence[int]
) -> list[np.ndarray]:
    """float32 [n] or [n, K] per datum that was sent, from the arrays [N] or [N, K] of an answer.

    Args:
        call: what was asked for.
        response: the answer.
        data: what was sent.
        places: where the user's list has them, for errors.

    Raises:
        BackendError: the answer is of another size, or not finite where the policy chose.
    """
    outputs = response.loss_fn_outputs
    if len(outputs) != len(data):
        raise BackendError(f"{call}: the service answered for {len(outputs)} datums of {len(data)}")
    arrays = []
    for i, fields, datum in zip(places, outputs, data, strict=True):
        chosen = np.flatnonzero(datum.mask) - 1
        if "logprobs" not in fields:
            raise BackendError(f"{call}: the service gave no logprobs for data[{i}]")
        array = np.asarray(fields["logprobs"].to_numpy(), np.float32)
        if array.ndim == 0 or array.shape[0] <= chosen[-1]:
            raise BackendError(f"{call}: the service gave logprobs of shape {array.shape} for data[{i}], {datum!r}")
        logprobs = array[chosen]
        if not np.isfinite(logprobs).all():
            raise BackendError(f"{call}: the service gave logprobs that are not finite for data[{i}]")
        arrays.append(logprobs)
    return arrays


def metrics_of(call: str, response: types.ForwardBackwardOutput) -> Mapping[str, float]:
    """Return what the service measured; the loss is the sum of its terms where that is all that the service gives.

    Raises:
        BackendError: it gave no loss at all.
    """
    metrics = dict(response.metrics or {})
    if "loss:sum" not in metrics:
        terms = [fields.get("elementwise_loss") for fields in response.loss_fn_outputs]
        if any(x is None for x in terms):
            raise BackendError(f"{call}: the service gave no loss")
        metrics["loss:sum"] = float(sum(np.sum(x.to_numpy(), dtype=np.float64) for x in terms))
    return metrics


def output(
    call: str,
    data: Sequence[Datum],
    logprobs: Sequence[np.ndarray | None],
    metrics: Sequence[Mapping[str, float]],
    found: LossGradient | None = None,
) -> ForwardBackwardOutput:
    """Return what a call returns.

    Args:
        call: for messages.
        data: all datums of the call.
        logprobs: [n] per datum; None for one that was not sent.
        metrics: of each part of the call, as the service gave them; sums add up.
        found: what the loss gave where it was evaluated here, instead of the service's metrics.

    Raises:
        BackendError: the loss is not finite.
    """
    merged: dict[str, float] = {"loss:sum": 0.0}
    if found is None:
        for part in metrics:
            for key, value in part.items():
                if key.endswith((":sum", ":mean")):
                    key = key.removeprefix("custom/")
                    merged[key] = merged.get(key, 0.0) + float(value)
    else:
        merged["loss:sum"] = found.value
        merged.update({k: v / len(data) if k.endswith(":mean") else v for k, v in found.metrics.items()})
    if not np.isfinite(merged["loss:sum"]):
        raise BackendError(f"{call}: the loss is {merged['loss:sum']}")
    merged["tokens:sum"] = float(sum(int(datum.mask.sum()) for datum in data))
    merged["datums:sum"] = float(len(data))
    arrays = [
        np.zeros(len(datum), np.float32) if lp is None else datum.expand(lp.astype(np.float32, copy=False))
        for datum, lp in zip(data, logprobs, strict=True)
    ]
    return ForwardBackwardOutput(arrays, {}, merged, [datum.mask for datum in data])
