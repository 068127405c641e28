"""Runs on disk: a user's own loop that can be killed at any moment and resumes exactly."""

from __future__ import annotations

from rlkit.runs._models import sampler
from rlkit.runs._run import Run
from rlkit.runs.record import Record, Retention, records

__all__ = ["Record", "Retention", "Run", "records", "sampler"]
