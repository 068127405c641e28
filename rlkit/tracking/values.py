"""Metrics as plain numbers, and numbers as JSON."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlkit import _check
from rlkit.errors import DataError
from rlkit.tracking.secrets import redact

__all__ = ["checked", "from_json", "number", "plain", "to_json"]

_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def checked(metrics: Any, step: Any, where: str = "log") -> tuple[dict[str, float], int]:
    """The metrics as name -> float, names that hold a key masked, and the step.

    Raises:
        DataError: the metrics are no mapping of names to numbers.
        ConfigError: the step is no integer >= 0.

    >>> import numpy as np
    >>> checked({"a": np.float32(0.5), "b": True, "c": np.array(2)}, 3)
    ({'a': 0.5, 'b': 1.0, 'c': 2.0}, 3)
    """
    step = _check.integer(f"{where}(step)", step, low=0)
    if not isinstance(metrics, Mapping):
        raise DataError(
            _check.problem(f"{where}(metrics)", f"got {_check.shown(metrics)}", "a mapping of names to numbers")
        )
    found = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise DataError(_check.problem(f"{where}(metrics)", f"has the key {_check.shown(name)}", "non-empty names"))
        found[redact(name)] = number(f"{where}(metrics)[{redact(name)!r}]", value)
    return found, step


def number(where: str, value: Any) -> float:
    """A number of Python's, numpy's or torch's as a float.

    Raises:
        DataError: it is none.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # numpy's and torch's, without importing torch
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise DataError(_check.problem(where, f"got {redact(_check.shown(value))}", "a number"))
    return _float(value)


def _float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer beyond what a float can hold
        return math.inf if value > 0 else -math.inf


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


def plain(value: Any) -> Any:
    """``value`` as JSON can have it, whatever it is: numbers as ``to_json``, arrays as lists, anything else as text.

    >>> import numpy as np
    >>> plain({"rate": np.float32(0.5), "clip": float("inf"), 3: np.array([True, False]), "kind": complex})
    {'rate': 0.5, 'clip': 'Infinity', '3': [True, False], 'kind': "<class 'complex'>"}
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(each) for each in value]
    if isinstance(value, (np.ndarray, np.generic)):
        found = value.tolist()
        return str(value) if isinstance(found, np.generic) else plain(found)  # of what Python has no number for
    if isinstance(value, int):
        return int(value)
    return to_json(float(value)) if isinstance(value, float) else str(value)
