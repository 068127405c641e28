"""Evaluation harnesses that others wrote, run unmodified against a policy that the gateway serves."""

from __future__ import annotations

from rlkit.harnesses.keeping import Result, results
from rlkit.harnesses.running import HARNESSES, evaluate, installed
from rlkit.harnesses.types import Score

__all__ = ["HARNESSES", "Result", "Score", "evaluate", "installed", "results"]

for _public in (Result, Score, evaluate, installed, results):
    _public.__module__ = __name__  # where users import them from
