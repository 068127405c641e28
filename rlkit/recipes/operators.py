"""What is done to episodes between playing and training: ``data_processor.experience_pipeline.operators``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import ConfigError
from rlkit.recipes.inputs import Operator
from rlkit.recipes.keys import TABLE
from rlkit.trajectory import Group, Trajectory

__all__ = ["Operators", "was_cut"]

_REFUSED: Mapping[str, str] = TABLE["operators"]["refused"]
_UNUSED: Mapping[str, str] = TABLE["operators"]["unused"]


@attrs.frozen(eq=False)
class Operators:
    """The operators of a run, in their order.

    Attributes:
        filters: functions of a group that give the trajectories that stay.
        masks: whether answers that were cut are not trained on; they stay in their group's baseline.
        unused: what has no effect, with the reason.
    """

    filters: Sequence[Callable[[Group], Sequence[Trajectory]]] = ()
    masks: bool = False
    unused: Sequence[str] = ()

    @classmethod
    def of(cls, given: Sequence[Operator]) -> Operators:
        """Return those that settings name.

        Raises:
            ConfigError: one is unknown, cannot be done here, or has another argument.
        """
        filters, masks, unused = [], False, []
        for i, operator in enumerate(given):
            where = f"data_processor.experience_pipeline.operators[{i}]"
            name = operator.name
            if name in _REFUSED:
                raise ConfigError(f"{where}.name", f"is {name!r}", "another operator", _REFUSED[name])
            if name in _UNUSED:
                unused.append(f"{where} ({_UNUSED[name]})")
                continue
            if name == "mask_response_truncated":
                _settings(where, operator.args, ())
                masks = True
                continue
            if name not in _FILTERS:
                known = [*_FILTERS, "mask_response_truncated", *_UNUSED]
                raise ConfigError(f"{where}.name: there is no operator {name!r}{_check.near(name, known)}")
            make, names = _FILTERS[name]
            filters.append(make(**_settings(where, operator.args, names)))
        return cls(filters, masks, unused)

    def apply(self, groups: Sequence[Group]) -> tuple[list[Group], dict[str, float]]:
        """Return the groups with the trajectories that stay, and how many do not."""
        before = sum(len(group) for group in groups)
        left = list(groups)
        for keep in self.filters:
            pairs = [(group, list(keep(group))) for group in left]
            left = [attrs.evolve(group, trajectories=mine) for group, mine in pairs if mine]
        numbers = {"filter/operators": float(before - sum(map(len, left)))} if self.filters else {}
        return left, numbers


def was_cut(trajectory: Trajectory) -> bool:
    """Return whether its last answer ended because there was no room for more tokens."""
    return bool(trajectory.turns) and trajectory.turns[-1].sample.stop_reason == "length"


def _settings(where: str, given: Mapping[str, object], known: Sequence[str]) -> dict[str, object]:
    for name in given:
        if name not in known:
            raise ConfigError(f"{where}.args.{name}: there is no such setting{_check.near(name, known)}")
    return {
        name: value if name == "metric_key" else _check.real(f"{where}.args.{name}", value)
        for name, value in given.items()
    }


def _reward_filter(threshold: float = 0.0) -> Callable[[Group], Sequence[Trajectory]]:
    """Keep episodes of at least so much reward."""
    return lambda group: [t for t in group.trajectories if t.reward >= threshold]


def _std_filter(threshold: float = 0.0) -> Callable[[Group], Sequence[Trajectory]]:
    """Keep groups of two or more whose rewards deviate by more."""
    return lambda group: group.trajectories if len(group) > 1 and np.std(group.rewards) > threshold else []


def _dynamic_sampling(
    metric_key: str = "accuracy", correct_threshold: float = 0.0
) -> Callable[[Group], Sequence[Trajectory]]:
    """Keep groups in which some are right, and not all: above the threshold."""

    def keep(group: Group) -> Sequence[Trajectory]:
        right = sum(t.metrics.get(metric_key, t.reward) > correct_threshold for t in group.trajectories)
        return group.trajectories if 0 < right < len(group) else []

    return keep


_FILTERS: Mapping[str, tuple[Callable[..., Callable[[Group], Sequence[Trajectory]]], tuple[str, ...]]] = {
    "reward_filter": (_reward_filter, ("threshold",)),
    "reward_std_filter": (_std_filter, ("threshold",)),
    "dapo_dynamic_sampling": (_dynamic_sampling, ("metric_key", "correct_threshold")),
}
