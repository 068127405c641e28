"""Several environments at once, in given proportions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import attrs

from rlkit import _check
from rlkit.envs.protocol import Task, TaskSettings, TaskSource, check_name
from rlkit.errors import ConfigError

__all__ = ["Mixture", "mixture"]


def mixture(
    parts: Mapping[str, TaskSource],
    *,
    weights: Mapping[str, float] | None = None,
    settings: Mapping[str, TaskSettings] | None = None,
) -> Mixture:
    """Return several environments, drawn from in proportion to their weights.

    Which environment a place in the stream of tasks belongs to is a function of the place and the weights alone: of any
    first P tasks each environment has its share as Sainte-Laguë's method deals out P seats, so no batch is far off.
    Each environment goes through its own tasks as it does alone.

    Args:
        parts: name -> its tasks, or another mixture. The names are those in metrics; a mixture's parts are called
            "name/theirs".
        weights: name -> > 0, how often; 1 where nothing is said.
        settings: name -> what that environment wants to have different (group size, temperature, reduction, limits);
            overrides what its tasks say themselves.

    Raises:
        ConfigError: there are no parts, one has no ``at`` and ``batch``, or weights or settings name none of them.

    >>> from rlkit.envs import function
    >>> sums, jokes = function(["1 + 1 =", "2 + 2 ="], len), function(["Knock, knock."], len)
    >>> both = mixture({"sums": sums, "jokes": jokes}, weights={"sums": 2}, settings={"jokes": TaskSettings(n=16)})
    >>> [task.name for task in both.batch(0, 6)]
    ['sums', 'jokes', 'sums', 'sums', 'jokes', 'sums']
    """
    return Mixture(parts, weights or {}, settings or {})


class Mixture(Sequence[Task]):
    """What ``mixture`` makes. As a sequence it is the tasks of all parts, one part after the other."""

    def __init__(
        self, parts: Mapping[str, TaskSource], weights: Mapping[str, float], settings: Mapping[str, TaskSettings]
    ) -> None:
        _check.require(isinstance(parts, Mapping) and parts, "parts", parts, "a mapping from names to tasks")
        for name, part in parts.items():
            check_name("parts: name", name)
            _check.require(isinstance(part, TaskSource), f"parts[{name!r}]", part, "tasks, or a mixture")
        for label, mapping in (("weights", weights), ("settings", settings)):
            if not isinstance(mapping, Mapping) or not mapping.keys() <= parts.keys():
                what = f"has {', '.join(map(repr, sorted(set(mapping) - set(parts))))}"
                raise ConfigError(label, what, "names of parts", ", ".join(parts))
        for name, value in settings.items():
            _check.require(isinstance(value, TaskSettings), f"settings[{name!r}]", value, "TaskSettings")
        self.parts = dict(parts)
        self.weights = {
            name: _check.real(f"weights[{name!r}]", weights.get(name, 1.0), low=1e-6, high=1e6) for name in parts
        }
        self.settings = {name: settings.get(name, TaskSettings()) for name in parts}
        self.name = "mixture"

    def at(self, position: int, *, seed: int = 0) -> Task:
        """Return the task at this place of the stream."""
        return self._draw(_check.integer("position", position, low=0), 1, seed)[0]

    def batch(self, step: int, size: int, *, seed: int = 0) -> list[Task]:
        """Return the tasks of a step; a function of its arguments alone, as ``Tasks.batch`` is."""
        step, size = _check.integer("step", step, low=0), _check.integer("size", size, low=1)
        return self._draw(step * size, size, seed)

    def _draw(self, start: int, size: int, seed: int) -> list[Task]:
        counts = self.counts(start)
        tasks = []
        for _ in range(size):
            name = self._next(counts)
            tasks.append(self._rename_task(name, self.parts[name].at(counts[name], seed=seed)))
            counts[name] += 1
        return tasks

    def counts(self, position: int) -> dict[str, int]:
        """Return how many of the first ``position`` tasks each part has.

        >>> from rlkit.envs import function
        >>> tasks = function(["Say a."], len)
        >>> mixture({"a": tasks, "b": tasks}, weights={"a": 3}).counts(100)
        {'a': 75, 'b': 25}

        Source: A. Sainte-Laguë, La représentation proportionnelle et la méthode des moindres carrés, 1910: the next
        seat goes to the largest weight / (2 seats + 1); with one more seat no part loses one.
        """
        total = sum(self.weights.values())
        surely = max(0, position - len(self.parts))  # so many seats can be dealt out by rounding down, minus one
        counts = {name: max(0, int(surely * weight / total) - 1) for name, weight in self.weights.items()}
        for _ in range(position - sum(counts.values())):
            counts[self._next(counts)] += 1
        return counts

    def _next(self, counts: Mapping[str, int]) -> str:
        return min(self.weights, key=lambda name: (2 * counts[name] + 1) / self.weights[name])

    def _rename_task(self, name: str, task: Task) -> Task:
        inner = f"{name}/{task.name}" if isinstance(self.parts[name], Mixture) else name
        return attrs.evolve(task, name=inner, settings=self.settings[name].over(task.settings))

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @overload
    def __getitem__(self, item: int) -> Task: ...
    @overload
    def __getitem__(self, item: slice) -> list[Task]: ...
    def __getitem__(self, item: int | slice) -> Task | list[Task]:
        """Return one task, or a list of some."""
        if isinstance(item, slice):
            return [self[i] for i in range(*item.indices(len(self)))]
        place = item + len(self) if item < 0 else item
        if place >= 0:
            for name, part in self.parts.items():
                if place < len(part):
                    return self._rename_task(name, part[place])
                place -= len(part)
        raise IndexError(f"mixture: index {item} is out of range; there are {len(self)} tasks")

    def __repr__(self) -> str:
        return f"Mixture({', '.join(f'{name}={weight:g}' for name, weight in self.weights.items())})"
