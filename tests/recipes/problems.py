"""A small problem, and runs of it from settings."""

from __future__ import annotations

from benchmarks import algorithms_table as table
from rlkit import recipes
from rlkit.tracking import read_metrics

__all__ = ["curve", "loaded", "played", "table"]


def loaded(folder, *overrides, backend="toy", algorithm="grpo", steps=3):
    """Settings of a run on the small problem."""
    with table.backend(backend, folder) as where:
        own = table.settings(algorithm, backend, folder, where, steps)
    return recipes.load(overrides=[*own, *overrides])


def played(folder, *overrides, backend="toy", algorithm="grpo", steps=3):
    """The outcome of such a run."""
    with table.backend(backend, folder) as where:
        own = table.settings(algorithm, backend, folder, where, steps)
        (outcome,) = recipes.run(recipes.load(overrides=[*own, *overrides]))
    return outcome


def curve(outcome, *names):
    """[(step, numbers)] of a run; all but seconds where no names are given."""
    return [
        (row["step"], {k: v for k, v in row["metrics"].items() if (k in names if names else "time/" not in k)})
        for row in read_metrics(outcome.folder)
    ]
