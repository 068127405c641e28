"""Flat batches: rewards in any order, with labels that say which group each belongs to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from rlkit import _check, _rows
from rlkit.advantages._registry import registry
from rlkit.errors import ConfigError, DataError

__all__ = ["by_group"]

_PER_SAMPLE = ("lengths",)  # settings that hold one number per reward, and are regrouped with them


def by_group(estimator: str | Callable[..., Any], rewards: Any, groups: Any, **settings: Any) -> Any:
    """The advantages of a group estimator for flat rewards with group labels.

    Args:
        estimator: a registered name, such as "grpo", or a function that takes a list of groups [G_i] and gives
            back advantages of the same form.
        rewards: [N], in any order.
        groups: [N] labels, hashable: strings, integers, ...; equal labels make a group.
        settings: keyword arguments of the estimator; ``lengths`` [N] is regrouped with the rewards.

    Returns:
        float64 [N], in the order of ``rewards``.

    Raises:
        DataError: rewards are no 1-D numbers, labels are not as many, or the estimator returns another form.
        UnknownNameError: no estimator has that name.
        ConfigError: the estimator has no such setting, lacks one that it needs, or takes no rewards.

    >>> by_group("rloo", [1.0, 5.0, 0.0, 3.0], ["a", "b", "a", "b"])
    array([ 1.,  2., -1., -2.])
    """
    function = registry.resolve(estimator)
    _check_settings(estimator, function, settings)
    flat = _rows.vector("rewards", rewards)
    if flat.size == 0:
        raise DataError(_check.problem("rewards", "is empty", "at least one reward"))
    codes, count = _rows.labels("groups", groups, flat.size)
    order = np.argsort(codes, kind="stable")
    lengths = np.bincount(codes, minlength=count)
    rows = _rows.Rows("rewards", flat[order], lengths, "list")
    _rows.Rows("rewards", flat, np.array([flat.size]), "one").check_finite(flat, nan=True)
    for name in _PER_SAMPLE:
        if name in settings:
            per_sample = _rows.vector(name, settings[name], flat.size, why="one per reward")
            settings[name] = rows.restore(per_sample[order])
    advantages = _rows.parse(f"{estimator!r}(...)", function(rows.restore(rows.flat), **settings))
    if advantages.flat.size != flat.size or not np.array_equal(advantages.lengths, lengths):
        what = f"returned rows of lengths {advantages.lengths.tolist()[:8]}"
        raise DataError(_check.problem(f"{estimator!r}", what, f"{lengths.tolist()[:8]}", "one advantage per reward"))
    result = np.empty(flat.size)
    result[order] = advantages.flat
    return result


def _check_settings(estimator: Any, function: Callable[..., Any], settings: Collection[str]) -> None:
    """Raise for settings that the estimator does not have, and for those that it can not do without."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature to read; the call itself will tell
        return
    name = repr(estimator) if isinstance(estimator, str) else str(getattr(function, "__name__", "the estimator"))
    if not parameters or parameters[0].kind in (parameters[0].KEYWORD_ONLY, parameters[0].VAR_KEYWORD):
        raise ConfigError(_check.problem("estimator", f"{name} takes no rewards", "a function of a list of groups"))
    known = {p.name: p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    there = ", ".join(known) or "none"
    unknown = [key for key in settings if key not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(f"settings: {name} has no setting {unknown[0]!r}; it has: {there}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in settings]
    if missing:
        raise ConfigError(f"settings: {name} needs {missing[0]!r}, which has no default; it has: {there}")
