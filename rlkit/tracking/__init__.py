"""Where a run's metrics and trajectories go: files, the terminal, and services, none of which can hold a run up."""

from __future__ import annotations

from pathlib import Path

from rlkit._secrets import masked
from rlkit.registry import Registry
from rlkit.tracking.jsonl import Jsonl, read_metrics
from rlkit.tracking.names import NAMES, Name, standard
from rlkit.tracking.protocol import Tracker
from rlkit.tracking.several import Several
from rlkit.tracking.training import mismatch_metrics, train_metrics

__all__ = [
    "NAMES",
    "Jsonl",
    "Name",
    "Several",
    "Tracker",
    "for_run",
    "masked",
    "mismatch_metrics",
    "read_metrics",
    "registry",
    "standard",
    "train_metrics",
]

registry = Registry("tracker", entry_point_group="rlkit.trackers")
"""Name -> class. What stands as text is imported when it is asked for."""

registry["jsonl"] = Jsonl
registry["console"] = "rlkit.tracking.console:Console"
registry["wandb"] = "rlkit.tracking.wandb:Wandb"
registry["tensorboard"] = "rlkit.tracking.tensorboard:TensorBoard"
registry["trackio"] = "rlkit.tracking.trackio:Trackio"
registry["mlflow"] = "rlkit.tracking.mlflow:Mlflow"


def for_run(name: str, folder: str | Path) -> Tracker:
    """Return the tracker of that name, with its defaults for a run that is kept in ``folder``.

    It is what the class's ``for_run(folder)`` makes, or where there is none, what the class makes of the folder.

    Raises:
        UnknownNameError: nothing has that name; the message suggests and lists the names.
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
    masked,
    mismatch_metrics,
    read_metrics,
    standard,
    train_metrics,
):
    _public.__module__ = __name__  # where users import them from
