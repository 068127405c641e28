"""Trackers of a run's metrics and trajectories: files, the terminal, and services, none of which can block a run."""

from __future__ import annotations

from pathlib import Path

from rlkit._secrets import mask
from rlkit.metrics.names import NAMES, Name, standard
from rlkit.registry import Registry
from rlkit.tracking._training import mismatch_metrics, train_metrics
from rlkit.tracking.jsonl import Jsonl, read_metrics
from rlkit.tracking.protocol import Tracker
from rlkit.tracking.several import Several

__all__ = [
    "NAMES",
    "Jsonl",
    "Name",
    "Several",
    "Tracker",
    "for_run",
    "mask",
    "mismatch_metrics",
    "read_metrics",
    "registry",
    "standard",
    "train_metrics",
]

registry = Registry("tracker", entry_point_group="rlkit.trackers")
"""Name -> class. Text entries are imported at their first use."""

registry["jsonl"] = Jsonl
registry["console"] = "rlkit.tracking._console:Console"
registry["wandb"] = "rlkit.tracking._services:Wandb"
registry["tensorboard"] = "rlkit.tracking._services:TensorBoard"
registry["trackio"] = "rlkit.tracking._services:Trackio"
registry["mlflow"] = "rlkit.tracking._services:Mlflow"


def for_run(name: str, folder: str | Path) -> Tracker:
    """Return the tracker of that name, with its defaults for a run that is kept in ``folder``.

    It is the result of the class's ``for_run(folder)``, or without that method, of the class called with the folder.

    Raises:
        UnknownNameError: no tracker has that name; the message suggests and lists the names.
        ConfigError: its package is not installed.

    >>> import tempfile
    >>> for_run("jsonl", tempfile.mkdtemp())
    Jsonl('...')
    """
    kind = registry[name]
    tracker: Tracker = getattr(kind, "for_run", kind)(Path(folder))
    return tracker


for _public in (
    Jsonl,
    Name,
    Several,
    Tracker,
    for_run,
    mask,
    mismatch_metrics,
    read_metrics,
    standard,
    train_metrics,
):
    _public.__module__ = __name__  # where users import them from
