"""A run as one HTML file, and in a notebook."""

from __future__ import annotations

from rlkit.report._notebook import Display, Live, live
from rlkit.report._page import write

__all__ = ["Display", "Live", "live", "write"]

for _public in (Display, Live, live, write):
    _public.__module__ = __name__  # where users import them from
