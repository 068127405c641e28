"""Runs on disk: a user's own loop that can be killed at any moment and goes on exactly."""

from __future__ import annotations

from rlkit.runs.opening import sampler
from rlkit.runs.record import Record, records
from rlkit.runs.retention import Retention
from rlkit.runs.run import Run

__all__ = ["Record", "Retention", "Run", "records", "sampler"]
