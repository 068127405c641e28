"""Loss functions: ``fn(logprobs, <datum inputs>, weights=1.0, *, <settings>) -> scalar`` (needs torch).

A loss is called once per datum with the policy's own tokens only (rule R2) and returns a sum. Its positional
parameter names are the schema of what a datum must carry.
"""

from __future__ import annotations

from rlkit.losses import kl
from rlkit.losses.base import loss, register, registry
from rlkit.losses.batch import clip_cov, kl_cov
from rlkit.losses.coefficients import AdaptiveEntropy, adaptive_entropy
from rlkit.losses.compose import with_entropy, with_kl
from rlkit.losses.distillation import topk_forward_kl, topk_jsd, topk_reverse_kl
from rlkit.losses.offpolicy import decoupled_ppo, opsm
from rlkit.losses.policy import cispo, dro, importance_sampling, ppo
from rlkit.losses.preference import cpo, dpo, kto, orpo, simpo
from rlkit.losses.prepare import LossGradient, PreparedLoss, prepare
from rlkit.losses.rec import rec
from rlkit.losses.reinforce import opmd, reinforce, topr
from rlkit.losses.sequence import gmpo, gspo, gspo_token, luspo, vespo
from rlkit.losses.supervised import cross_entropy, mix, sft_is, sft_phi
from rlkit.losses.traceable import traceable
from rlkit.losses.trust import dppo_kl, dppo_tv, sapo, sppo
from rlkit.losses.value import value_clipped, value_huber

__all__ = [
    "AdaptiveEntropy",
    "LossGradient",
    "PreparedLoss",
    "adaptive_entropy",
    "cispo",
    "clip_cov",
    "cpo",
    "cross_entropy",
    "decoupled_ppo",
    "dpo",
    "dppo_kl",
    "dppo_tv",
    "dro",
    "gmpo",
    "gspo",
    "gspo_token",
    "importance_sampling",
    "kl",
    "kl_cov",
    "kto",
    "loss",
    "luspo",
    "mix",
    "opmd",
    "opsm",
    "orpo",
    "ppo",
    "prepare",
    "rec",
    "register",
    "registry",
    "reinforce",
    "sapo",
    "sft_is",
    "sft_phi",
    "simpo",
    "sppo",
    "topk_forward_kl",
    "topk_jsd",
    "topk_reverse_kl",
    "topr",
    "traceable",
    "value_clipped",
    "value_huber",
    "vespo",
    "with_entropy",
    "with_kl",
]
