"""Turns, trajectories and groups: what rollouts yield, and the datums that train them."""

from __future__ import annotations

from rlkit.trajectory._merging import datums
from rlkit.trajectory.types import Failure, Group, Trajectory, Turn

__all__ = ["Failure", "Group", "Trajectory", "Turn", "datums"]

for _public in (Failure, Group, Trajectory, Turn, datums):
    _public.__module__ = __name__  # where users import them from
