"""Diagnostics: how far the trainer is from the sampler, and what a batch of rewards can teach."""

from __future__ import annotations

from rlkit.metrics.groups import group_informativeness, pass_at_k
from rlkit.metrics.policies import (
    chi2,
    clip_fraction,
    effective_sample_size,
    entropy_estimate,
    kl_k3,
    kl_v1,
    kl_v2,
    perplexity_difference,
    ratio_statistics,
    token_lag,
)

__all__ = [
    "chi2",
    "clip_fraction",
    "effective_sample_size",
    "entropy_estimate",
    "group_informativeness",
    "kl_k3",
    "kl_v1",
    "kl_v2",
    "pass_at_k",
    "perplexity_difference",
    "ratio_statistics",
    "token_lag",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from
