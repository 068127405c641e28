"""One rule over many cases as one test, which lists every case that failed."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHOWN = 600  # characters of each failure; the first is shown with its traceback


def for_each(
    names: str | Iterable[str], values: Iterable[Any], ids: Any = None, by: Callable[..., str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body for each value, like ``pytest.mark.parametrize`` but in one test.

    Decorators above each other run all combinations. ``by`` names the group of a case: each group is a test of its own.
    Cases share the test's fixtures, so a rule whose cases leave something behind in one needs ``parametrize``.
    """
    axis = _read_axis(names, values, ids, by)
    assert axis, "no cases"

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        rule, axes = getattr(function, "loop_of", (function, ()))
        axes = (axis, *axes)

        @functools.wraps(function)
        def loop(*args: Any, **fixtures: Any) -> None:
            __tracebackhide__ = True
            group = fixtures.pop("group", None)
            failures, skipped, count = [], [], 0
            for parts in itertools.product(*axes):
                if any(part[2] not in (None, group) for part in parts):
                    continue
                count += 1
                try:
                    rule(*args, **fixtures, **{name: value for part in parts for name, value in part[1].items()})
                except pytest.skip.Exception as error:  # the other cases still run
                    skipped.append(str(error))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(("-".join(part[0] for part in parts), error))
                    if "from pytest-timeout" in str(error):
                        break  # its alarm is spent: the next case could hang
            if failures:
                lines = [f"  {label}: {type(error).__name__}: {_shorten(error)}" for label, error in failures]
                text = "\n".join([f"{len(failures)} of {count} cases failed; the first is shown above", *lines])
                raise AssertionError(text) from failures[0][1]
            if skipped:
                pytest.skip(f"{len(skipped)} of {count} cases: {skipped[0]}")

        signature = inspect.signature(function)
        kept = [parameter for name, parameter in signature.parameters.items() if name not in axis[0][1]]
        groups = list(dict.fromkeys(part[2] for part in axis if part[2] is not None))
        if groups:
            kept.append(inspect.Parameter("group", inspect.Parameter.KEYWORD_ONLY))
        loop.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        loop.loop_of = (rule, axes)  # type: ignore[attr-defined]
        return pytest.mark.parametrize("group", groups)(loop) if groups else loop

    return decorate


def _read_axis(names: Any, values: Any, ids: Any, by: Any) -> list[tuple[str, dict[str, Any], str | None]]:
    """Read the arguments of ``parametrize``: for each case its label, its arguments and its group."""
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    axis = []
    for i, value in enumerate(values):
        label = None if ids is None else ids(value) if callable(ids) else ids[i]
        if hasattr(value, "marks"):
            assert not value.marks, "a case of a loop cannot be marked"
            label = label or value.id
            value = value.values if len(names) > 1 else value.values[0]
        parts = tuple(value) if len(names) > 1 else (value,)
        label = label or ", ".join(_describe(part) for part in parts)
        axis.append((str(label), dict(zip(names, parts, strict=True)), by(*parts) if by else None))
    return axis


def _describe(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _shorten(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
