"""Loss functions: ``fn(logprobs, <datum inputs>, weights=1.0, *, <settings>) -> scalar`` (needs torch).

A loss is called once per datum with the policy's own tokens only (rule R2) and returns a sum. Its positional
parameter names are the schema of what a datum must carry.
"""

from __future__ import annotations

from rlkit.losses.base import loss, register, registry
from rlkit.losses.policy import cispo, dro, importance_sampling, ppo
from rlkit.losses.prepare import LossGradient, PreparedLoss, prepare
from rlkit.losses.supervised import cross_entropy

__all__ = [
    "LossGradient",
    "PreparedLoss",
    "cispo",
    "cross_entropy",
    "dro",
    "importance_sampling",
    "loss",
    "ppo",
    "prepare",
    "register",
    "registry",
]
