"""Third-party evaluation harnesses, run unmodified against a policy that the gateway serves."""

from __future__ import annotations

from rlkit.harnesses._running import HARNESSES, Result, evaluate, installed, results
from rlkit.harnesses._types import Score

__all__ = ["HARNESSES", "Result", "Score", "evaluate", "installed", "results"]

for _public in (Result, Score, evaluate, installed, results):
    _public.__module__ = __name__  # where users import them from
