"""Metrics as plain numbers, and numbers as JSON."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

from rlkit import _check
from rlkit.errors import DataError
from rlkit.tracking.secrets import redact

__all__ = ["checked", "from_json", "to_json"]

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def checked(metrics: Any, step: Any) -> tuple[dict[str, float], int]:
    """The metrics as name -> float, names that hold a key masked, and the step.

    Raises:
        DataError: the metrics are no mapping of names to numbers.
        ConfigError: the step is no integer >= 0.

    >>> import numpy as np
    >>> checked({"a": np.float32(0.5), "b": True, "c": np.array(2)}, 3)
    ({'a': 0.5, 'b': 1.0, 'c': 2.0}, 3)
    """
    step = _check.integer("log(step)", step, low=0)
    if not isinstance(metrics, Mapping):
        raise DataError(_check.problem("log(metrics)", f"got {_check.shown(metrics)}", "a mapping of names to numbers"))
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise DataError(_check.problem("log(metrics)", f"has the key {_check.shown(name)}", "non-empty names"))
        found[redact(name)] = _number(f"log(metrics)[{redact(name)!r}]", value)
    return found, step


def _number(where: str, value: Any) -> float:
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's and torch's, without importing torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise DataError(_check.problem(where, f"got {redact(_check.shown(value))}", "a number"))
    try:
        return float(value)
    except OverflowError:  # an integer beyond what a float can hold
        sign: Any = value
        return math.inf if sign > 0 else -math.inf


def to_json(value: float) -> float | str:
    """The number as JSON has it: what is not finite becomes "NaN", "Infinity" or "-Infinity".

    >>> [to_json(x) for x in (0.5, float("nan"), float("-inf"))]
    [0.5, 'NaN', '-Infinity']
    """
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def from_json(value: Any) -> float | None:
    """The number that ``to_json`` wrote; None for anything else.

    >>> [from_json(x) for x in (1, "Infinity", "1", None, True)]
    [1.0, inf, None, None, None]
    """
    if isinstance(value, str):
        return _WORDS.get(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
