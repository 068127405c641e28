"""Groups kept to be trained on again, while they are young enough."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from rlkit import _check
from rlkit.errors import DataError
from rlkit.trajectory import Group
from rlkit.trajectory.types import checked_groups

__all__ = ["Replay"]


class Replay:
    """A buffer of groups with a maximum age.

    A group's age is how many optimizer steps the policy is ahead of its oldest sample.

    Args:
        max_age: >= 0; what is older is dropped.
        capacity: groups kept at most, >= 1: the ones added first go first. None: no limit.
        seed: >= 0, of the draws.
        draws: how many times was drawn before: with the same groups, a buffer made with this goes on exactly where
            another one was (``replay.draws``).

    Iterating gives the groups in the order in which they were added, as ``rlkit.storage.append`` takes them.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Group, Trajectory, Turn
    >>> def made(version):
    ...     return Group([Trajectory([Turn(Sample([5], [6], [-1.0], version=version))])], number=version)
    >>> replay = Replay(max_age=2)
    >>> replay.add([made(0), made(1), made(2)])
    >>> [group.number for group in replay.sample(5, current=3)], len(replay)
    ([1, 2], 2)
    """

    def __init__(self, *, max_age: int, capacity: int | None = None, seed: int = 0, draws: int = 0) -> None:
        self.max_age = _check.integer("max_age", max_age, low=0)
        self.draws = _check.integer("draws", draws, low=0)
        self._seed = _check.integer("seed", seed, low=0)
        _check.optional(_check.integer, "capacity", capacity, low=1)
        self._groups: deque[Group] = deque(maxlen=capacity)

    def add(self, groups: Iterable[Group] | Group) -> None:
        """Add groups, such as what ``rollout`` returned.

        Raises:
            DataError: something else; nothing was added.
        """
        self._groups.extend(checked_groups(groups))

    def sample(self, size: int, *, current: int) -> list[Group]:
        """Draw up to ``size`` different groups, drawn uniformly, in the order in which they were added.

        Args:
            size: >= 1; where fewer are left, all of them are returned.
            current: the policy's version now; groups that are too old for it are dropped for good.

        Raises:
            DataError: a group is newer than ``current``.
        """
        size = _check.integer("size", size, low=1)
        self.expire(current)
        stream = np.random.SeedSequence(self._seed, spawn_key=(self.draws,))
        self.draws += 1
        groups = list(self._groups)
        chosen = np.random.default_rng(stream).permutation(len(groups))[:size]
        return [groups[i] for i in sorted(chosen.tolist())]

    def expire(self, current: int) -> int:
        """Drop what is too old for version ``current``; return how many groups that were."""
        current = _check.integer("current", current, low=0)
        for i, group in enumerate(self._groups):
            if group.version > current:
                raise DataError(f"groups[{i}]", f"is of version {group.version}", f"at most current={current}")
        young = [group for group in self._groups if current - group.version <= self.max_age]
        dropped = len(self._groups) - len(young)
        self._groups.clear()
        self._groups.extend(young)
        return dropped

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups))
