"""Reference values, as data: ``cases("advantages_group", "grpo")`` and ``assert_close(result, case.expected)``.

They are read from ``../shared/golden`` beside the repository where that exists, else from the copy in tests/golden.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from tests.each import for_each

COPY = Path(__file__).parent / "golden"
SHARED = Path(__file__).resolve().parents[2] / "shared" / "golden"


@attrs.frozen
class Case:
    """One reference value; ``inputs`` and ``settings`` are keyword arguments, NaN stands for null."""

    function: str
    inputs: dict[str, Any]
    settings: dict[str, Any]
    expected: Any  # expected["value"], and expected["gradient"] for losses
    source: str
    note: str
    module: str | None
    level: str | None

    def find(self, module: str) -> Callable[..., Any]:
        """The function, from the case's module or the family's."""
        found: Callable[..., Any] = getattr(importlib.import_module(self.module or module), self.function)
        return found


def folder() -> Path:
    """Where the values are."""
    return SHARED if SHARED.is_dir() else COPY


@cache
def load(family: str) -> tuple[Case, ...]:
    """All cases of a family."""
    raw = json.loads((folder() / f"{family}.json").read_text())["cases"]
    return tuple(
        Case(
            case["function"],
            _nan(case["inputs"]),
            case["settings"],
            case["expected"],
            case["source"],
            case.get("note", ""),
            case.get("module"),
            case.get("level"),
        )
        for case in raw
    )


def cases(family: str, *functions: str) -> list[Any]:
    """Parameters for pytest: the cases of a family, or of some of its functions."""
    chosen = [case for case in load(family) if not functions or case.function in functions]
    assert chosen, f"no cases of {functions} in {family}"
    return [pytest.param(case, id=f"{case.function}-{i}") for i, case in enumerate(chosen)]


def each_case(chosen: list[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on all cases of a function, for each function."""
    return for_each("case", chosen, by=lambda case: case.function)


def assert_close(actual: Any, expected: Any, *, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """The same nesting and lengths, and numbers within the tolerances that the values were written with."""
    if isinstance(expected, Mapping):
        assert set(actual) == set(expected)
        for key in expected:
            assert_close(actual[key], expected[key], rtol=rtol, atol=atol)
    elif isinstance(expected, list):
        assert len(actual) == len(expected)
        if any(isinstance(entry, (list, Mapping)) for entry in expected):
            for a, e in zip(actual, expected, strict=True):
                assert_close(a, e, rtol=rtol, atol=atol)
        else:
            np.testing.assert_allclose(np.asarray(actual, float), np.asarray(expected, float), rtol=rtol, atol=atol)
    else:
        np.testing.assert_allclose(float(actual), float(expected), rtol=rtol, atol=atol)


def _nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_nan(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _nan(entry) for key, entry in value.items()}
    return float("nan") if value is None else value
