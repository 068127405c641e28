"""Flat batches: rewards in any order, with labels that say which group each belongs to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import attrs
import numpy as np

from rlkit import _rows
from rlkit._calls import answered
from rlkit._forms import Labels, RowsLike
from rlkit.advantages import baselines, group
from rlkit.advantages._registry import registry
from rlkit.advantages.balanced import rec
from rlkit.advantages.passk import pass_at_k, pkpo
from rlkit.advantages.returns import discounted_returns, rebn
from rlkit.advantages.tokenwise import reinforce_pp_baseline
from rlkit.errors import ConfigError, DataError

__all__ = ["by_group"]

_FLAT = (  # these take the groups as they are stored, so that no list of them is built
    *(getattr(module, name) for module in (baselines, group) for name in module.__all__),
    *(discounted_returns, pass_at_k, pkpo, rebn, rec, reinforce_pp_baseline),
)
_PER_SAMPLE = ("lengths",)  # settings that hold one number per reward, and are regrouped with them


@answered
def by_group(estimator: str | Callable[..., Any], rewards: RowsLike, groups: Labels, **settings: object) -> np.ndarray:
    """Return the advantages of a group estimator for flat rewards with group labels.

    Args:
        estimator: a registered name, such as "grpo", or a function that takes a list of groups [G_i] and gives
            back advantages of the same form.
        rewards: [N], in any order; it is quickest where each group's stand together.
        groups: [N] labels, hashable: strings, integers, ...; equal labels make a group. An array of integers is
            quickest.
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
        raise DataError("rewards", "is empty", "at least one reward")
    codes, count = _rows.labels("groups", groups, flat.size)
    apart = bool((codes[1:] < codes[:-1]).any())  # usually a group's rewards stand together already
    order = np.argsort(codes, kind="stable") if apart else slice(None)
    lengths = np.bincount(codes, minlength=count)
    rows = _rows.Rows("rewards", flat[order], lengths, "flat" if any(function is f for f in _FLAT) else "list")
    _rows.Rows("rewards", flat, np.array([flat.size]), "one").check_finite(flat, nan=True)
    for name in _PER_SAMPLE:
        if name in settings:
            per_sample = _rows.vector(name, settings[name], flat.size, why="one per reward")
            settings[name] = attrs.evolve(rows, flat=per_sample[order])
    result = np.empty(flat.size)
    result[order] = function(rows, **settings) if rows.form == "flat" else _by_list(estimator, function, rows, settings)
    return result


def _by_list(estimator: object, function: Callable[..., Any], rows: _rows.Rows, settings: dict[str, Any]) -> np.ndarray:
    """Return the advantages [N] of a function that takes a list of groups, and whose result is still to be checked."""
    settings = {name: rows.restore(x.flat) if isinstance(x, _rows.Rows) else x for name, x in settings.items()}
    advantages = _rows.parse(f"{estimator!r}(...)", function(rows.restore(rows.flat), **settings))
    if not np.array_equal(advantages.lengths, rows.lengths):
        what, expected = (f"{x.lengths.tolist()[:8]}" for x in (advantages, rows))
        raise DataError(f"{estimator!r}", f"returned rows of lengths {what}", expected, "one advantage per reward")
    return advantages.flat


def _check_settings(estimator: object, function: Callable[..., Any], settings: Collection[str]) -> None:
    """Raise for settings that the estimator does not have, and for those that it cannot do without."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature to read; the call itself will tell
        return
    name = repr(estimator) if isinstance(estimator, str) else str(getattr(function, "__name__", "the estimator"))
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigError("estimator", f"{name} takes no rewards", "a function of a list of groups")
    known = {p.name: p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    there = ", ".join(known) or "none"
    unknown = [key for key in settings if key not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ConfigError(f"settings: {name} has no setting {unknown[0]!r}; it has: {there}")
    missing = [key for key, p in known.items() if p.default is p.empty and key not in settings]
    if missing:
        raise ConfigError(f"settings: {name} needs {missing[0]!r}, which has no default; it has: {there}")
