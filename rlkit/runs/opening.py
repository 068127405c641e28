"""Saved policies, opened to sample from."""

from __future__ import annotations

import os
from typing import Any

from rlkit import backends
from rlkit.backends import Sampler, saves
from rlkit.runs.record import is_run, newest

__all__ = ["sampler"]


def sampler(path: str | os.PathLike[str], *, role: str = "policy", step: int | None = None, **options: Any) -> Sampler:
    """Open a run's newest policy, or any saved one, by the backend that saved it.

    Args:
        path: a run's folder, or what ``save`` returned.
        role: which policy of the run.
        step: which checkpoint of the run; None: the newest that is whole.
        options: as in ``rlkit.sampler``. The model and the longest sequence are those of the policy, if not said here;
            on Tinker the service says them, and a ``max_length`` below its own is to be given here again.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
        ConfigError: an option is unknown or wrong.

    >>> import tempfile, rlkit
    >>> with rlkit.Run(tempfile.mkdtemp(), seed=0, trackers=()) as run:
    ...     policy = run.connect("toy")
    ...     record = run.checkpoint(policy)
    >>> sampler(run.folder).version
    0
    """
    saved = str(newest(path, role=role, step=step).policy(role)) if is_run(path) else os.fspath(path)
    if not saved.startswith("tinker://"):
        _, state = saves.read(saved, backend=None)
        return backends.sampler(state["backend"], path=saved, **options)
    if "/weights/" in saved:  # a state to train from, of which the service first has to make a snapshot
        return backends.connect("tinker", init_from=saved, **options).sampler().result()
    return backends.sampler("tinker", path=saved, **options)
