"""Rewards: reductions, bounds and shaping, as pure functions. NaN is a reward that could not be scored, and stays."""

from __future__ import annotations

from rlkit.rewards.basic import affine, clamp, mapping, nonterminal_override, nonterminal_reward, reduction, whitening
from rlkit.rewards.length import cosine_length, efficiency_bonus, length_cost, overlong_penalty, stop_properly
from rlkit.rewards.text import repetition_penalty, think_format

__all__ = [
    "affine",
    "clamp",
    "cosine_length",
    "efficiency_bonus",
    "length_cost",
    "mapping",
    "nonterminal_override",
    "nonterminal_reward",
    "overlong_penalty",
    "reduction",
    "repetition_penalty",
    "stop_properly",
    "think_format",
    "whitening",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from
