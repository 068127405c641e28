"""The answer in a text, and whether it is right: for reward functions."""

from __future__ import annotations

from rlkit.answers.equality import math_equal
from rlkit.answers.extraction import between_tags, boxed, last_number

__all__ = ["between_tags", "boxed", "last_number", "math_equal"]
