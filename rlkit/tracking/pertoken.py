"""What belongs to the tokens of trajectories beside what they were sampled with: advantages, the trainer's logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlkit import _check
from rlkit._json import to_json
from rlkit.errors import DataError
from rlkit.trajectory import Group

__all__ = ["records"]


def records(groups: Sequence[Group], step: int, **given: Sequence[object] | None) -> list[dict[str, object]]:
    """One record per group with an entry per trajectory: a number, or one per token of the policy's.

    Args:
        groups, step: where the values belong.
        given: name -> one entry per trajectory, over all groups; None is left out.

    Raises:
        DataError: naming what does not fit.
    """
    named = {name: _entries(name, value, groups) for name, value in given.items() if value is not None}
    lines: list[dict[str, Any]] = []
    start = 0
    for group in groups if named else ():
        stop = start + len(group)
        record: dict[str, Any] = {"step": step, "env": group.env, "index": group.index, "number": group.number}
        lines.append(record | {name: entries[start:stop] for name, entries in named.items()})
        start = stop
    return lines


def _entries(name: str, value: Any, groups: Sequence[Group]) -> list[Any]:
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or len(value) != len(trajectories):
        what = f"has {len(value)} entries" if hasattr(value, "__len__") else f"got {_check.shown(value)}"
        raise DataError(name, what, f"{len(trajectories)}", "one per trajectory, over all groups")
    entries: list[Any] = []
    for i, (entry, trajectory) in enumerate(zip(value, trajectories, strict=True)):
        array = _check.as_array(f"{name}[{i}]", entry, "a number, or one per token")
        if array.shape not in ((), (trajectory.token_count,)):
            what, expected = f"has shape {array.shape}", f"a number, or shape ({trajectory.token_count},)"
            raise DataError(f"{name}[{i}]", what, expected, "one per token of the policy's")
        numbers = np.asarray(array, np.float64).round(6)
        entries.append([to_json(x) for x in numbers.tolist()] if numbers.ndim else to_json(float(numbers)))
    return entries
