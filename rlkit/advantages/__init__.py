"""Advantage estimators: pure functions that turn rewards into what a policy loss multiplies.

All take one row, rows of one length, or a list of rows of different lengths, and give back the same form in float64.
``registry`` holds them by name; ``register("name")`` adds one.
"""

from __future__ import annotations

from rlkit.advantages._registry import register, registry
from rlkit.advantages.balanced import rec
from rlkit.advantages.baselines import asymre, gpg, maxrl, opmd, opo, reinforce
from rlkit.advantages.bootstrapped import gae, lambda_returns, length_adaptive_lambda, n_step_returns, vtrace
from rlkit.advantages.components import gdpo
from rlkit.advantages.episodes import gigpo, hierarchical_grpo, step_wise_grpo
from rlkit.advantages.from_logprobs import entropy_bonus, jsd, jsd_gradient, kl_penalty, on_policy_distillation
from rlkit.advantages.group import dr_grpo, grpo, loo_std, rloo
from rlkit.advantages.labelled import by_group
from rlkit.advantages.optimal_token import optimal_token_baseline
from rlkit.advantages.passk import pass_at_k, pkpo
from rlkit.advantages.per_group import per_group
from rlkit.advantages.returns import discounted_returns, rebn
from rlkit.advantages.running import RunningBaseline, RunningNormalization, running_baseline, running_normalization
from rlkit.advantages.shaping import potential_shaping
from rlkit.advantages.tokenwise import reinforce_pp, reinforce_pp_baseline, remax
from rlkit.advantages.weights import token_weights

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
