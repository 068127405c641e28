"""A run, or several, as one HTML file."""

from __future__ import annotations

from rlkit.report.page import write

__all__ = ["write"]

write.__module__ = __name__  # where users import it from
