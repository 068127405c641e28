"""Metrics as plain numbers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from rlkit import _check
from rlkit._secrets import redact
from rlkit.errors import DataError

__all__ = ["checked", "number"]


def checked(metrics: object, step: object, where: str = "log") -> tuple[dict[str, float], int]:
    """Return the metrics as name -> float, names that hold a key masked, and the step.

    Raises:
        DataError: the metrics are no mapping of names to numbers.
        ConfigError: the step is no integer >= 0.

    >>> import numpy as np
    >>> checked({"a": np.float32(0.5), "b": True, "c": np.array(2)}, 3)
    ({'a': 0.5, 'b': 1.0, 'c': 2.0}, 3)
    """
    step = _check.integer(f"{where}(step)", step, low=0)
    if not isinstance(metrics, Mapping):
        raise DataError(f"{where}(metrics)", f"got {_check.shown(metrics)}", "a mapping of names to numbers")
    floats = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise DataError(f"{where}(metrics)", f"has the key {_check.shown(name)}", "non-empty names")
        floats[redact(name)] = number(f"{where}(metrics)[{redact(name)!r}]", value)
    return floats, step


def number(where: str, value: Any) -> float:
    """Return a number of Python's, numpy's or torch's as a float.

    Raises:
        DataError: it is none.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's and torch's, without importing torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise DataError(where, f"got {redact(_check.shown(value))}", "a number")
    return _float(value)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond what a float can hold
        return math.inf if value > 0 else -math.inf
