"""What the name of a metric says: its environment, and how several numbers of that name become one.

The reduction of a name, in this order: an ending ":sum", ":mean", ":max" or ":min", which every metric of a loss has;
the counters of the table in docs/tracking.md, which are sums, and its means; the last word, where it is sum, max or min
("sampler/mismatch/ratio_max"). All others are means, which are not summed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

__all__ = ["add", "averaged", "combine", "general", "reduction", "split_name", "with_ending"]

Reduction: TypeAlias = Literal["sum", "mean", "max", "min"]
_REDUCTIONS: tuple[Reduction, ...] = ("sum", "mean", "max", "min")
_COUNTERS = (
    "episodes|terminated|truncated(?:/.+)?|cut|empty|failed(?:/.+)?|timed_out|close_failed|rewritten|unforced|retried"
    "|abandoned|groups|dropped_groups|mixed_groups"
)
_OF_ENV = f"(?:reward|tokens)(?:/.+)?|turns|info/.+|{_COUNTERS}"
_ENVIRONMENT = re.compile(f"(env)/(.+?)/({_OF_ENV})|(env)/([^/]+)/(.+)|(eval)/(.+)/([^/]+)", re.DOTALL)
_SUMS = re.compile(
    rf"env/\*/(?:{_COUNTERS})|rollout/episodes|sampler/(?:requests|samples|tokens|prompt_tokens|retried|errors)"
    r"|train/(?:loss|tokens|datums)|(?:filter|time)/.+",
    re.DOTALL,
)
_MEANS = re.compile(r"(?:env/\*/info|rollout/ended|upload|tracking/[^/]+)/.+", re.DOTALL)


def split_name(name: str) -> tuple[str, str, str] | None:
    """Return ("env" or "eval", the environment, the rest) of an environment's metric; None for another.

    An environment's name may hold slashes: it is the shortest one that is followed by a standard name.

    >>> split_name("env/owner/name/info/turns"), split_name("eval/owner/name/pass@4"), split_name("eval/mean")
    (('env', 'owner/name', 'info/turns'), ('eval', 'owner/name', 'pass@4'), None)
    """
    match = _ENVIRONMENT.fullmatch(name)
    if match is None:
        return None
    kind, environment, what = (group for group in match.groups() if group is not None)
    return kind, environment, what


def general(name: str) -> str:
    """Return the name with "*" in the place of the environment.

    >>> general("env/owner/name/reward"), general("train/loss")
    ('env/*/reward', 'train/loss')
    """
    split = split_name(name)
    return name if split is None else f"{split[0]}/*/{split[2]}"


def reduction(name: str) -> Reduction:
    """Return the reduction of numbers of that name: over parts of a batch, environments, or steps.

    Means of steps cannot be combined without their weights: over steps the last one is used.

    >>> [reduction(x) for x in ("loss:sum", "env/a/failed", "env/a/reward/max", "train/ratio_min", "env/a/tokens/std")]
    ['sum', 'sum', 'max', 'min', 'mean']
    """
    said = name.rpartition(":")[2] if ":" in name else ""
    if said not in _REDUCTIONS:
        short = general(name)
        last = "mean" if _MEANS.fullmatch(short) else re.split(r"[/_:]", name)[-1]
        said = "sum" if _SUMS.fullmatch(short) else last
    return said if said in _REDUCTIONS else "mean"


def combine(how: Reduction, values: Iterable[float]) -> float:
    """Combine several numbers of equal weight, at least one, into one.

    >>> [combine(how, [1.0, 2.0]) for how in ("sum", "mean", "max", "min")]
    [3.0, 1.5, 2.0, 1.0]
    """
    listed = list(values)
    if how in ("max", "min"):
        return max(listed) if how == "max" else min(listed)
    return math.fsum(listed) / (len(listed) if how == "mean" else 1)


def with_ending(name: str) -> str:
    """Return a loss's metric with the ending that says its reduction: that of its last word, else ":mean".

    >>> [with_ending(name) for name in ("count:sum", "ratio_max", "entropy")]
    ['count:sum', 'ratio_max:max', 'entropy:mean']
    """
    if name.endswith(tuple(f":{each}" for each in _REDUCTIONS)):
        return name
    said = re.split(r"[/_:]", name)[-1]
    return f"{name}:{said if said in ('max', 'min') else 'mean'}"


def add(into: dict[str, float], more: Mapping[str, float], weight: float = 1.0) -> None:
    """Put the metrics of one more part of a batch into ``into``; a mean counts ``weight`` times, see ``averaged``.

    >>> whole = {"loss:sum": 1.0, "ratio:max": 1.5}
    >>> add(whole, {"loss:sum": 2.0, "ratio:max": 1.25, "size:mean": 4.0}, 3)
    >>> whole
    {'loss:sum': 3.0, 'ratio:max': 1.5, 'size:mean': 12.0}
    """
    for name, value in more.items():
        how = reduction(name)
        number = value * weight if how == "mean" else value
        if name in into:
            number = combine("sum" if how == "mean" else how, (into[name], number))
        into[name] = number


def averaged(metrics: Mapping[str, float], weight: float) -> dict[str, float]:
    """Return the metrics that ``add`` collected, with means divided by their total weight."""
    return {name: value / weight if reduction(name) == "mean" else value for name, value in metrics.items()}
