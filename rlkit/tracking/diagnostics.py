"""A training call's diagnostics under their standard names."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlkit import metrics
from rlkit.errors import DataError
from rlkit.types import Datum, ForwardBackwardOutput

__all__ = ["mismatch_metrics", "train_metrics"]


def train_metrics(
    data: Sequence[Datum], output: ForwardBackwardOutput, update: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return the metrics of ``forward_backward`` and ``optim_step``, and the distance of trainer and sampler.

    Args:
        data: the batch; the distances are over those datums that have ``sampling_logprobs``, and left out where none
            has.
        output: the result of ``forward_backward(data, ...)``.
        update: the result of ``optim_step``, or None.

    Returns:
        "train/loss", "train/tokens", "train/datums", whatever the loss and the optimizer report (without ":sum" and
        ":mean"), "train/advantage/..." over the datums that have advantages, and "train/kl_v1", "train/kl_v2",
        "train/kl_k3", "train/entropy", "train/clip_fraction/...", "train/effective_sample_size", "train/ratio/...":
        see ``rlkit.metrics``.

    Raises:
        DataError: data and output do not belong together, or a logprob is not finite.

    >>> import numpy as np
    >>> from rlkit import Datum, ForwardBackwardOutput
    >>> mask = np.array([False, True, True])
    >>> datum = Datum([5, 6, 7], mask, {"sampling_logprobs": [-1.0, -1.0]})
    >>> logprobs = np.array([0.0, -0.5, -2.0], np.float32)
    >>> output = ForwardBackwardOutput([logprobs], {}, {"loss:sum": 3.0, "tokens:sum": 2.0}, [mask])
    >>> found = train_metrics([datum], output, {"grad_norm:mean": 0.5})
    >>> found["train/loss"], found["train/grad_norm"], found["train/kl_v1"], found["train/entropy"]
    (3.0, 0.5, 0.25, 1.0)
    """
    if len(data) != len(output.logprobs):
        what = f"has {len(data)} datums, but the output has {len(output.logprobs)}"
        raise DataError("data", what, "the batch that produced the output")
    reported = {**output.metrics, **(update or {})}
    diagnostics = {}
    for key in sorted(reported):  # "x:mean" before "x:sum": where there are both, the sum keeps its ending
        name = f"train/{key.removesuffix(':mean').removesuffix(':sum')}"
        diagnostics[name if name not in diagnostics else f"train/{key}"] = float(reported[key])
    diagnostics |= _advantages(data)
    both = zip(data, output.selected, strict=True)
    pairs = [(datum, lp) for datum, lp in both if "sampling_logprobs" in datum.inputs and lp.size]
    if not pairs:
        return diagnostics
    for i, (datum, logprobs) in enumerate(pairs):
        if datum.mask.sum() != logprobs.size:
            what = f"has {int(datum.mask.sum())} tokens of the policy, but the output has {logprobs.size}"
            raise DataError(f"data[{i}]", what, "the batch that produced the output")
    sampling = [datum.select(datum.inputs["sampling_logprobs"]) for datum, _ in pairs]
    return diagnostics | _compare([logprobs for _, logprobs in pairs], sampling)


def _compare(trainer: Sequence[np.ndarray], sampling: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the distance of trainer and sampler."""
    two: dict[str, Any] = {"trainer_logprobs": trainer, "sampling_logprobs": sampling}
    functions = (metrics.kl_v1, metrics.kl_v2, metrics.kl_k3, metrics.effective_sample_size)
    found = {f"train/{function.__name__}": function(**two) for function in functions}
    found["train/entropy"] = metrics.entropy_estimate(sampling_logprobs=sampling)
    found |= {f"train/clip_fraction/{side}": value for side, value in metrics.clip_fraction(**two).items()}
    return found | {f"train/ratio/{which}": value for which, value in metrics.ratio_statistics(**two).items()}


def mismatch_metrics(data: Sequence[Datum], trainer_logprobs: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the distance of sampler and trainer on tokens of the current policy, before it is updated.

    Two programs compute one policy: a value other than 0 is their rounding, or a bug. ``train_metrics`` has the same
    distances under "train/kl_..." and "train/ratio/...", over all training data, older samples and later updates
    included.

    Args:
        data: datums of the newest version, with ``sampling_logprobs``.
        trainer_logprobs: float32 [n] of each, ``selected`` of what ``forward`` or ``forward_backward`` gave.

    Returns:
        "sampler/mismatch/kl", k3 in nats per token, and "sampler/mismatch/ratio_min" and "..._max" of the ratio
        trainer / sampler; {} without a token.

    Raises:
        DataError: data and logprobs do not belong together.

    >>> import numpy as np
    >>> from rlkit import Datum
    >>> datum = Datum([5, 6, 7], [0, 1, 1], {"sampling_logprobs": [-1.0, -1.0]})
    >>> mismatch_metrics([datum], [np.array([-1.0, -1.0])])
    {'sampler/mismatch/kl': 0.0, 'sampler/mismatch/ratio_min': 1.0, 'sampler/mismatch/ratio_max': 1.0}
    """
    if not sum(logprobs.size for logprobs in trainer_logprobs):
        return {}
    sampling = [datum.select(datum.inputs["sampling_logprobs"]) for datum in data]
    kl = metrics.kl_k3(trainer_logprobs=trainer_logprobs, sampling_logprobs=sampling)
    ratios = metrics.ratio_statistics(trainer_logprobs=trainer_logprobs, sampling_logprobs=sampling)
    return {"sampler/mismatch/kl": kl} | {f"sampler/mismatch/ratio_{x}": ratios[x] for x in ("min", "max")}


def _advantages(data: Sequence[Datum]) -> dict[str, float]:
    """Return statistics over datums of the mean advantage of each."""
    per_datum = [datum.select(datum.inputs["advantages"]) for datum in data if "advantages" in datum.inputs]
    means = [float(advantages.mean()) for advantages in per_datum if advantages.size]
    if not means:
        return {}
    std = statistics.stdev(means) if len(means) > 1 else 0.0
    named = {"mean": statistics.fmean(means), "min": min(means), "max": max(means), "std": std}
    return {f"train/advantage/{which}": value for which, value in named.items()}
