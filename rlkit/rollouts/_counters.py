"""What is counted while episodes are played, and the bar that shows it."""

from __future__ import annotations

import importlib.util
import math
import numbers
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from rlkit.trajectory import Failure, Group, Trajectory

__all__ = ["Counters", "Progress", "numeric"]


class Counters:
    """Sums over the episodes of one rollout; ``metrics()`` gives them by name at any time."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.sums: Counter[str] = Counter()
        self._means: dict[str, list[float]] = {}
        self._spreads: set[str] = set()  # of these means also min, max and std are told
        self._names: set[str] = set()

    def merge(self, other: Counters) -> Counters:
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
        cut = [turn.stop_reason == "length" for turn in trajectory.turns]
        self.add(f"{env}/cut", sum(cut))
        for each in cut:
            self.mean("rollout/cut", each)
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
        rewards = [reward for reward in group.rewards.tolist() if math.isfinite(reward)]
        if kept and len(rewards) > 1:
            self.mean("rollout/with_signal", min(rewards) < max(rewards))

    def _env(self, name: str) -> str:
        env = f"env/{name}"
        if name not in self._names:
            self._names.add(name)
            for count in ("episodes", "failed", "timed_out", "truncated", "retried", "abandoned"):
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


class Progress:
    """A bar of rich that counts episodes, where stderr is a terminal and it is wanted.

    Args:
        total: episodes, or None where that is unknown.
        wanted: None: if rich is installed.
    """

    def __init__(self, total: int | None, wanted: bool | None) -> None:
        self._bar: Any = None
        if wanted is None:
            wanted = importlib.util.find_spec("rich") is not None
        if wanted and sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("episodes", total=total)

    def episode(self, *, failed: int) -> None:
        """Count one more that has ended."""
        if self._bar is not None:
            text = f"episodes ({failed} failed)" if failed else "episodes"
            self._bar.update(self._task, advance=1, description=text)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
