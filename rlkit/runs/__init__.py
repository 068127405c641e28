"""Runs on disk: a user's own loop that can be killed at any moment and resumes exactly."""

from __future__ import annotations

from rlkit.runs.checkpoints import Record, Retention, records
from rlkit.runs.run import Run, sampler

__all__ = ["Record", "Retention", "Run", "records", "sampler"]
