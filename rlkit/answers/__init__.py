"""Find and check the answer in a text, for reward functions."""

from __future__ import annotations

from rlkit.answers._equality import between_tags, boxed, last_number, math_equal

__all__ = ["between_tags", "boxed", "last_number", "math_equal"]
