"""Rewards: reductions, bounds and shaping, as pure functions. NaN is a reward that could not be scored, and stays."""

from __future__ import annotations

from rlkit.rewards.basic import affine, clamp, mapping, nonterminal_reward, reduction, whitening
from rlkit.rewards.length import efficiency_bonus, length_cost, overlong_penalty, stop_properly

__all__ = [
    "affine",
    "clamp",
    "efficiency_bonus",
    "length_cost",
    "mapping",
    "nonterminal_reward",
    "overlong_penalty",
    "reduction",
    "stop_properly",
    "whitening",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from
