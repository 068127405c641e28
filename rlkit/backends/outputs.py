"""How a backend puts together what ``forward`` and ``forward_backward`` return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient

__all__ = ["output"]


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
            for key, value in part.metrics.items():
                metrics[key] = metrics.get(key, 0.0) + value
    metrics = {key: value / len(data) if key.endswith(":mean") else value for key, value in metrics.items()}
    metrics["tokens:sum"] = float(sum(int(datum.mask.sum()) for datum in data))
    metrics["datums:sum"] = float(len(data))

    def expanded(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [datum.expand(np.asarray(x, np.float32)) for datum, x in zip(data, arrays, strict=True)]

    outputs = {name: expanded(arrays) for name, arrays in extras.items()}
    return ForwardBackwardOutput(expanded(logprobs), outputs, metrics, [datum.mask for datum in data])
