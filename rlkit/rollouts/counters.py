"""What is counted while episodes are played."""

from __future__ import annotations

import math
import numbers
import statistics
import time
from collections import Counter
from collections.abc import Mapping

from rlkit.trajectory import Failure, Group, Trajectory

__all__ = ["Counters", "numeric"]


class Counters:
    """Sums over the episodes of one rollout; ``metrics()`` gives them by name at any time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.sums: Counter[str] = Counter()
        self._means: dict[str, list[float]] = {}
        self._spreads: set[str] = set()  # of these means also min, max and std are told
        self._names: set[str] = set()

    def together(self, other: Counters) -> Counters:
        """Return what both have counted: counts added up, means over everything."""
        total = Counters()
        total.sums = Counter(self.sums)
        total.sums.update(other.sums)
        names = self._means.keys() | other._means.keys()
        total._means = {name: [*self._means.get(name, ()), *other._means.get(name, ())] for name in names}
        total._spreads = self._spreads | other._spreads
        return total

    def add(self, name: str, number: float = 1) -> None:
        """Add to a count or a sum."""
        self.sums[name] += number  # type: ignore[assignment]  # sums of seconds too

    def mean(self, name: str, number: float) -> None:
        """Take a number into a mean."""
        if math.isfinite(number):
            self._means.setdefault(name, []).append(float(number))

    def spread(self, name: str, number: float) -> None:
        """Take a number into a mean, of which min, max and std are told, too."""
        self._spreads.add(name)
        self.mean(name, number)

    def trajectory(self, trajectory: Trajectory) -> None:
        """Count an episode that was carried through."""
        env = self._env(trajectory.env)
        self.add(f"{env}/episodes")
        self.add(f"{env}/terminated", int(trajectory.terminated))
        self.add(f"{env}/truncated", int(trajectory.truncated))
        if trajectory.truncated:
            self.add(f"{env}/truncated/{trajectory.ended}")
        self.add(f"{env}/cut", sum(turn.stop_reason == "length" for turn in trajectory.turns))
        self.add(f"{env}/empty", sum(not turn.tokens.size for turn in trajectory.turns))
        self.mean(f"{env}/turns", len(trajectory.turns))
        for all_or_one in (env, "rollout"):
            self.spread(f"{all_or_one}/reward", trajectory.reward)
            self.spread(f"{all_or_one}/tokens", trajectory.token_count)
        self.add("rollout/episodes")
        self.add(f"rollout/ended/{trajectory.ended or 'unknown'}")
        if trajectory.turns:
            for name, number in trajectory.turns[-1].metrics.items():
                self.mean(f"{env}/info/{name}", number)

    def failure(self, failure: Failure) -> None:
        """Count an episode that was not."""
        env = self._env(failure.env)
        self.add(f"{env}/episodes", 0)
        self.add(f"{env}/failed")
        self.add(f"{env}/failed/{failure.kind}")
        if failure.kind == "timeout":
            self.add(f"{env}/timed_out")

    def group(self, group: Group, *, kept: bool) -> None:
        """Count a group that is complete."""
        env = self._env(group.env)
        self.add(f"{env}/groups", int(kept))
        self.add(f"{env}/dropped_groups", int(not kept))
        self.add(f"{env}/mixed_groups", int(not group.same_start))

    def _env(self, name: str) -> str:
        env = f"env/{name}"
        if name not in self._names:
            self._names.add(name)
            for count in ("episodes", "failed", "timed_out", "truncated", "retried", "refilled", "abandoned"):
                self.add(f"{env}/{count}", 0)
        return env

    def metrics(self) -> dict[str, float]:
        """Return everything so far, by name."""
        numbers = {name: float(number) for name, number in self.sums.items()}
        # fsum rounds once: a mean does not depend on which episode ended first
        numbers |= {name: math.fsum(values) / len(values) for name, values in self._means.items()}
        for name in self._spreads & self._means.keys():
            values = self._means[name]
            numbers |= {f"{name}/min": min(values), f"{name}/max": max(values)}
            numbers[f"{name}/std"] = statistics.stdev(values) if len(values) > 1 else 0.0
        for name in numbers.keys() & {name for name in self.sums if name.startswith("rollout/ended/")}:
            numbers[name] /= numbers["rollout/episodes"]
        numbers["time/rollout"] = time.monotonic() - self._began
        return dict(sorted(numbers.items()))


def numeric(info: Mapping[str, object]) -> dict[str, float]:
    """Return the finite numbers among what an environment said about a step; booleans count as 0 and 1."""
    plain = {}
    for name, value in info.items():
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            value = value.item()
        if isinstance(name, str) and isinstance(value, numbers.Real):
            try:
                number = float(value)
            except OverflowError:
                continue
            if math.isfinite(number):
                plain[name] = number
    return plain
