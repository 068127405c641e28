"""The protocol of a tracker."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rlkit import _check
from rlkit._secrets import redact
from rlkit.errors import DataError
from rlkit.trajectory import Group

__all__ = ["Tracker", "checked", "number"]


def checked(metrics: object, step: object, where: str = "log") -> tuple[dict[str, float], int]:
    """Return the metrics as name -> float, names that hold a key masked, and the step.

    Raises:
        DataError: the metrics are not a mapping of names to numbers.
        ConfigError: the step is not an integer >= 0.

    >>> import numpy as np
    >>> checked({"a": np.float32(0.5), "b": True, "c": np.array(2)}, 3)
    ({'a': 0.5, 'b': 1.0, 'c': 2.0}, 3)
    """
    step = _check.integer(f"{where}(step)", step, low=0)
    if not isinstance(metrics, Mapping):
        raise DataError(f"{where}(metrics)", f"got {_check.describe(metrics)}", "a mapping of names to numbers")
    floats = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}(metrics)", f"has the key {_check.describe(name)}", "non-empty names")
        floats[redact(name)] = number(f"{where}(metrics)[{redact(name)!r}]", value)
    return floats, step


def number(where: str, value: object) -> float:
    """Return a number of Python's, numpy's or torch's as a float.

    Raises:
        DataError: it is not a number.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's and torch's, without importing torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise DataError(where, f"got {redact(_check.describe(value))}", "a number")
    try:
        return float(value)
    except OverflowError:  # an integer beyond what a float can hold
        return -math.inf if value < 0 else math.inf


@runtime_checkable
class Tracker(Protocol):
    """Anything that takes a run's numbers and trajectories.

    An attribute ``inline = True`` says that its calls are quick and may be made from the training loop; ``Several``
    makes the calls of all others in a separate thread.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step; may be called several times for one step, with other names."""

    def log_trajectories(
        self,
        groups: Iterable[Group],
        step: int,
        *,
        advantages: Sequence[object] | None = None,
        trainer_logprobs: Sequence[object] | None = None,
    ) -> None:
        """Take the groups of a step.

        Args:
            groups: the groups of a rollout.
            step: the step that they trained, or that they were evaluated at.
            advantages: one entry per trajectory, in the order of the groups: a number, or one per token of the
                policy's, [token_count].
            trainer_logprobs: one entry per trajectory: [token_count], as ``ForwardBackwardOutput.selected`` has them.
        """

    def close(self) -> None:
        """Flush and close. Idempotent."""
