"""Advantage estimators: pure functions that turn rewards into the advantages of a policy loss.

All take one row, rows of one length, or a list of rows of different lengths, and return the same form in float64.
``registry`` holds them by name; ``register("name")`` adds one.
"""

from __future__ import annotations

from rlkit.advantages.group import (
    asymre,
    by_group,
    dr_grpo,
    gdpo,
    gpg,
    grpo,
    hierarchical_grpo,
    loo_std,
    maxrl,
    opmd,
    opo,
    pass_at_k,
    per_group,
    pkpo,
    rec,
    register,
    registry,
    reinforce,
    rloo,
    step_wise_grpo,
)
from rlkit.advantages.returns import (
    discounted_returns,
    gae,
    gigpo,
    lambda_returns,
    length_adaptive_lambda,
    n_step_returns,
    potential_shaping,
    rebn,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    vtrace,
)
from rlkit.advantages.running import RunningBaseline, RunningNormalization, running_baseline, running_normalization
from rlkit.advantages.tokens import (
    entropy_bonus,
    jsd,
    jsd_gradient,
    kl_penalty,
    on_policy_distillation,
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
