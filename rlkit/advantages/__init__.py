"""Advantage estimators: pure functions that turn rewards into the advantages of a policy loss.

All take one row, rows of one length, or a list of rows of different lengths, and return the same form in float64.
``registry`` holds them by name; ``register("name")`` adds one.
"""

from __future__ import annotations

from rlkit.advantages._bootstrapped import gae, lambda_returns, length_adaptive_lambda, n_step_returns, vtrace
from rlkit.advantages._episodes import by_group, gigpo, hierarchical_grpo, per_group, step_wise_grpo
from rlkit.advantages._group import asymre, dr_grpo, gdpo, gpg, grpo, loo_std, maxrl, opmd, opo, rec, reinforce, rloo
from rlkit.advantages._passk import pass_at_k, pkpo
from rlkit.advantages._registry import register, registry
from rlkit.advantages._returns import discounted_returns, potential_shaping, rebn
from rlkit.advantages._running import RunningBaseline, RunningNormalization, running_baseline, running_normalization
from rlkit.advantages.tokens import (
    entropy_bonus,
    jsd,
    jsd_gradient,
    kl_penalty,
    on_policy_distillation,
    optimal_token_baseline,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    token_weights,
)

__all__ = [
    "RunningBaseline",
    "RunningNormalization",
    "asymre",
    "by_group",
    "discounted_returns",
    "dr_grpo",
    "entropy_bonus",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "hierarchical_grpo",
    "jsd",
    "jsd_gradient",
    "kl_penalty",
    "lambda_returns",
    "length_adaptive_lambda",
    "loo_std",
    "maxrl",
    "n_step_returns",
    "on_policy_distillation",
    "opmd",
    "opo",
    "optimal_token_baseline",
    "pass_at_k",
    "per_group",
    "pkpo",
    "potential_shaping",
    "rebn",
    "rec",
    "register",
    "registry",
    "reinforce",
    "reinforce_pp",
    "reinforce_pp_baseline",
    "remax",
    "rloo",
    "running_baseline",
    "running_normalization",
    "step_wise_grpo",
    "token_weights",
    "vtrace",
]

for _public in (by_group, per_group, RunningBaseline, RunningNormalization, *registry.values()):
    _public.__module__ = __name__  # where users import it from
