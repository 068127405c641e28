"""Advantage estimators: pure functions that turn rewards into what a policy loss multiplies.

All take one row, rows of one length, or a list of rows of different lengths, and give back the same form in float64.
``registry`` holds them by name; ``register("name")`` adds one.
"""

from __future__ import annotations

from rlkit.advantages._registry import register, registry
from rlkit.advantages.group import dr_grpo, grpo, rloo
from rlkit.advantages.labelled import by_group
from rlkit.advantages.returns import discounted_returns, rebn
from rlkit.advantages.weights import token_weights

__all__ = [
    "by_group",
    "discounted_returns",
    "dr_grpo",
    "grpo",
    "rebn",
    "register",
    "registry",
    "rloo",
    "token_weights",
]

for _function in (by_group, *registry.values()):
    _function.__module__ = __name__  # where users import it from
