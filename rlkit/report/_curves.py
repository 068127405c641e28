"""The curves of the page, made from lines of metrics."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from rlkit.metrics.names import combine, general, reduction, split_name
from rlkit.tracking.jsonl import MetricsRow

__all__ = ["Table", "counters", "panels", "table"]

Chart: TypeAlias = dict[str, Any]  # a panel or a curve, as the page reads it in JSON
_Curves: TypeAlias = tuple[list[Chart], set[str]]  # and the names of the metrics that they show
MOST_POINTS = 1200  # of a curve in the page; the extremes of what lies between are kept
MOST_CURVES = 8  # of a panel
_NOISE = 1e-6  # float32 has steps of 1.2e-7: smaller differences mean nothing


@attrs.frozen
class Table:
    """Metrics by name.

    Attributes:
        steps: name -> the steps at which it was logged, rising, each once; the last value of a step counts.
        values: name -> as many numbers, not always finite.
        seconds: from the first line to the last.
        last: the last step, or -1; an evaluation after the last step is not a step.
    """

    steps: Mapping[str, Sequence[int]]
    values: Mapping[str, Sequence[float]]
    seconds: float
    last: int


@attrs.frozen
class _Panel:
    title: str
    patterns: tuple[str, ...]
    unit: str = ""  # "share": in percent; "stack": seconds, one on top of the other
    note: str = ""
    same: float | None = None  # what it is where two programs agree: within ``_NOISE`` of it is rounding


# Patterns as of fnmatch, of ``general`` names; what begins with "=" is worked out, see ``_WORKED_OUT``.
_PANELS = (
    _Panel("Reward", ("env/*/reward", "reward/mean", "reward"), note="mean of the episodes"),
    _Panel("Evaluation", ("eval/mean", "eval/*/mean", "eval/*/success"), note="mean score"),
    _Panel("Benchmarks", ("=benchmarks",), note="score of a harness, 95 % interval"),
    _Panel(
        "KL, sampler to trainer", ("train/kl_v1", "train/kl_v2", "train/kl_k3", "train/kl*"), "", "nats per token", 0
    ),
    _Panel("Mismatch", ("sampler/mismatch/kl",), "", "KL of the sampler, newest policy, nats per token", 0),
    _Panel("Mismatch, ratios", ("sampler/mismatch/ratio*",), "", "trainer / sampler, the least and the largest", 1),
    _Panel("Entropy", ("train/entropy",), note="nats per token"),
    _Panel("Clip fraction", ("train/clip_fraction*", "train/clip*"), "share", "of tokens, ratio out of bounds"),
    _Panel("With signal", ("train/with_signal", "rollout/with_signal"), "share", "of what is trained, of groups"),
    _Panel("Length", ("env/*/tokens", "sample/tokens"), note="tokens of the policy's in an episode"),
    _Panel("Turns", ("env/*/turns",), note="in an episode"),
    _Panel("Cut at max_tokens", ("=cut",), "share", "of turns"),
    _Panel("Truncated", ("=truncated",), "share", "of episodes, by a limit of turns, tokens or time"),
    _Panel("Failed", ("=failed",), "share", "of episodes begun"),
    _Panel("Where the time goes", ("=time",), "stack", "seconds of a step"),
    _Panel("Age of what is trained", ("sampler/lag", "sampler/lag/max"), note="rounds of training, mean and largest"),
    _Panel("Drawn by several policies", ("sampler/mixed",), "share", "of turns, where weights are updated in flight"),
    _Panel("Sampling speed", ("=speed",), note="tokens per second"),
    _Panel("Loss", ("train/loss",)),
    _Panel("Gradient norm", ("train/grad_norm",)),
    _Panel("Learning rate", ("train/learning_rate",)),
    _Panel("Effective sample size", ("train/effective_sample_size",), "share", "of the batch"),
)
# Seconds that are sums over parallel work, or the total: not parts of a step.
_NO_PARTS = {"time/step", "time/env", "time/close", "time/sampler", "time/sampler/requests"}


def table(rows: Iterable[MetricsRow]) -> Table:
    """Return the lines, by name."""
    points_of: dict[str, dict[int, float]] = defaultdict(dict)
    times: list[float] = []
    later: list[float] = []
    for row in rows:
        # later evaluations of checkpoints do not extend a run's time
        (later if all(name.startswith("eval/") for name in row["metrics"]) else times).append(row["time"])
        for name, value in row["metrics"].items():
            points_of[name][row["step"]] = value
    steps = {name: sorted(points) for name, points in points_of.items()}
    values = {name: [points_of[name][step] for step in steps[name]] for name in points_of}
    ends = {name: each[-1] for name, each in steps.items()}
    last = max([end for name, end in ends.items() if not name.startswith("eval/")] or ends.values(), default=-1)
    times = times or later
    return Table(steps, values, max(times) - min(times) if times else 0.0, last)


def panels(of: Table) -> list[Chart]:
    """Return the page's panels: the standard ones that have data, then one for each other name."""
    made, used = [], set()
    for panel in _PANELS:
        names = _matching(panel.patterns, of)
        used |= set(names)
        curves = [_curve(name, of.steps[name], of.values[name]) for name in names]
        if panel.title == "Evaluation":
            used |= _add_intervals(curves, of)
            # with one environment the mean over environments adds nothing
            curves.sort(key=lambda curve: "low" not in curve)
            curves = [curve for i, curve in enumerate(curves) if not any(_alike(curve, other) for other in curves[:i])]
        for pattern in panel.patterns:
            if pattern.startswith("="):
                more, taken = _WORKED_OUT[pattern](of)
                curves += more
                used |= taken
        if any(curve["x"] for curve in curves):
            made.append(_panel(panel.title, curves, panel.unit, panel.note, standard=True, same=panel.same))
    left = sorted(of.steps.keys() - used)
    return made + [_panel(n, [_curve(n, of.steps[n], of.values[n])], "", "", standard=False) for n in left]


def counters(of: Table) -> dict[str, dict[str, float]]:
    """Return environment (and "sampler") -> counter -> its reduction over the run: sum, max, min; the last mean."""
    reduced: dict[str, dict[str, float]] = defaultdict(dict)
    for name, values in of.values.items():
        first, _, rest = name.partition("/")
        finite = [value for value in values if math.isfinite(value)]
        where = split_name(name)
        if first == "env" and where is not None:
            _, env, counter = where
        elif first in ("sampler", "filter", "upload", "tracking"):
            env, counter = first, rest
        else:
            continue
        if finite:
            how = reduction(name)
            over = finite[-1] if how == "mean" else combine(how, finite)
            reduced[f"env/{env}" if first == "env" else env][counter] = over
    return {env: dict(sorted(counts.items())) for env, counts in sorted(reduced.items())}


def _matching(patterns: Iterable[str], of: Table) -> list[str]:
    """Return the names in the order of the patterns, each once."""
    names: dict[str, None] = {}
    among = [(name, short) for name in sorted(of.steps) if (short := general(name)).count("/") <= 2]
    for pattern in patterns:
        names |= dict.fromkeys(name for name, short in among if fnmatch.fnmatchcase(short, pattern))
    return list(names)


def _panel(
    title: str, curves: list[Chart], unit: str, note: str, *, standard: bool, same: float | None = None
) -> Chart:
    left = max(0, len(curves) - MOST_CURVES)
    if left:
        note = f"{note}; {left} more under Other metrics".lstrip("; ")
    shown = curves[:MOST_CURVES]
    flat = unit != "stack" and title != "Reward" and all(_is_flat(curve, same) for curve in shown)
    about: Chart = {"title": title, "unit": unit, "note": note, "standard": standard}
    return about | {"flat": flat, "same": same, "curves": shown}


def _is_flat(curve: Chart, same: float | None) -> bool:
    """Return whether it has one value at several steps, up to rounding."""
    y: Sequence[float] = curve["y"]
    if len(y) < 3 or "low" in curve or "bad" in curve:
        return False
    if same is not None and max(abs(value - same) for value in y) < _NOISE:
        return True
    return max(y) - min(y) <= _NOISE * max(map(abs, y))


def _curve(name: str, steps: Sequence[int], values: Sequence[float], label: str = "") -> Chart:
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    bad = [step for step, value in zip(steps, values, strict=True) if not math.isfinite(value)]
    thinned = _thinned(finite)
    curve = {
        "name": name,
        "label": label or _label(name),
        "x": [x for x, _ in thinned],
        "y": [_digits(y) for _, y in thinned],
    }
    return curve | ({"bad": len(bad), "bad_at": bad[:5]} if bad else {})


def _alike(one: Chart, other: Chart) -> bool:
    return bool(one["x"] == other["x"] and one["y"] == other["y"])


def _label(name: str) -> str:
    first, _, rest = name.partition("/")
    where = split_name(name)
    if first == "env" and where is not None and "/" not in where[2]:
        return where[1]
    return rest if first in ("train", "time", "eval") and rest else name


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most ``MOST_POINTS``: the lowest and the highest of each stretch, and the two ends.

    >>> len(_thinned([(i, float(i % 7)) for i in range(100_000)])) <= MOST_POINTS
    True
    """
    if len(points) <= MOST_POINTS:
        return points
    stretches = MOST_POINTS // 2 - 1
    places = {0, len(points) - 1}
    for i in range(stretches):
        stretch = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        places |= {min(stretch, key=lambda j: points[j][1]), max(stretch, key=lambda j: points[j][1])}
    return [points[i] for i in sorted(places)]


def _digits(value: float) -> float:
    return float(f"{value:.6g}")


def _joined(of: Table, *names: str) -> dict[int, list[float]]:
    """Return step -> the values of the names at it; 0 where one is missing."""
    rows: dict[int, list[float]] = {}
    for i, name in enumerate(names):
        for step, value in zip(of.steps.get(name, ()), of.values.get(name, ()), strict=True):
            if math.isfinite(value):
                rows.setdefault(step, [0.0] * len(names))[i] = value
    return rows


def _environments(of: Table) -> list[str]:
    return sorted({name[len("env/") : -len("/episodes")] for name in of.steps if general(name) == "env/*/episodes"})


def _shares(of: Table, what: str, *more: str, total: Callable[..., float]) -> _Curves:
    """Return a curve of each environment: a counter over the ``total`` of it, of ``more`` counters, and of episodes."""
    curves, used = [], set()
    for env in _environments(of):
        names = [f"env/{env}/{counter}" for counter in (what, *more, "episodes")]
        if of.steps.keys() >= set(names):
            rows = sorted(_joined(of, *names).items())
            shares = {step: counts[0] / max(1.0, total(*counts)) for step, counts in rows}
            curves.append(_curve(names[0], list(shares), list(shares.values()), env))
            used.add(names[0])
    return curves, used


def _time(of: Table) -> _Curves:
    names = [name for name in sorted(of.steps) if name.startswith("time/") and name not in _NO_PARTS]
    rows = _joined(of, *names, "time/step")
    order = sorted(names, key=lambda name: -math.fsum(filter(math.isfinite, of.values[name])))
    steps = sorted(step for step, values in rows.items() if any(values[:-1]))
    columns = [[rows[step][names.index(name)] for step in steps] for name in order]
    curves = [_curve(name, steps, column) for name, column in zip(order, columns, strict=True)]
    left = [max(0.0, rows[step][-1] - math.fsum(rows[step][:-1])) for step in steps]
    if "time/step" in of.steps and any(left):
        curves.append(_curve("time/step", steps, left, "the rest"))
    if len(steps) > MOST_POINTS:  # each curve would keep other steps, and they could not be added up
        every = math.ceil(len(steps) / MOST_POINTS)
        for curve, column in zip(curves, [*columns, left], strict=False):
            curve |= {"x": steps[::every], "y": list(map(_digits, column[::every]))}
    return curves, {*names, "time/step"} & of.steps.keys()


def _add_intervals(curves: Iterable[Chart], of: Table) -> set[str]:
    """Add its interval to each curve eval/<name>/mean if each of its steps has one; return the names used."""
    used = set()
    for curve in curves:
        for end in ("low", "high"):
            name = f"{curve['name'].removesuffix('/mean')}/{end}"
            known = dict(zip(of.steps.get(name, ()), of.values.get(name, ()), strict=True))
            if all(math.isfinite(known.get(step, math.nan)) for step in curve["x"]):
                curve[end] = [_digits(known[step]) for step in curve["x"]]
                used.add(name)
    return used


def _benchmarks(of: Table) -> _Curves:
    """Return a curve of each score that has a standard error, with 1.96 of it to both sides, as normal."""
    curves, used = [], set()
    for name in sorted(of.steps):
        error = f"{name}_stderr"
        if name.startswith("eval/") and error in of.steps:
            errors = dict(zip(of.steps[error], of.values[error], strict=True))
            curve = _curve(name, of.steps[name], of.values[name])
            sides = [1.96 * errors.get(step, math.nan) for step in curve["x"]]
            if all(math.isfinite(side) for side in sides):
                curve["low"] = [_digits(y - side) for y, side in zip(curve["y"], sides, strict=True)]
                curve["high"] = [_digits(y + side) for y, side in zip(curve["y"], sides, strict=True)]
            curves.append(curve)
            used |= {name, error}
    return curves, used


def _speed(of: Table) -> _Curves:
    rows = _joined(of, "sampler/tokens", "time/rollout")
    speeds = {step: tokens / seconds for step, (tokens, seconds) in sorted(rows.items()) if seconds > 0 and tokens > 0}
    return ([_curve("sampler/tokens", list(speeds), list(speeds.values()), "tokens/s")] if speeds else []), set()


_WORKED_OUT: dict[str, Callable[[Table], _Curves]] = {
    "=cut": lambda of: _shares(of, "cut", "turns", total=lambda cut, turns, episodes: turns * episodes),
    "=truncated": lambda of: _shares(of, "truncated", total=lambda truncated, episodes: episodes),
    "=failed": lambda of: _shares(of, "failed", total=lambda failed, episodes: episodes + failed),
    "=benchmarks": _benchmarks,
    "=time": _time,
    "=speed": _speed,
}
