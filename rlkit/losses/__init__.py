"""Loss functions: ``fn(logprobs, <datum inputs>, weights=1.0, *, <settings>) -> scalar`` (needs torch).

A loss is called once per datum with the policy's own tokens only (rule R2) and returns a sum. Its positional
parameter names are the inputs that a datum must carry.
"""

from __future__ import annotations

from rlkit._runtime import has_torch, missing

if not has_torch():
    raise missing("rlkit.losses", "torch", "torch")

from rlkit.losses import kl
from rlkit.losses._compose import with_entropy, with_kl
from rlkit.losses._policy import (
    cispo,
    decoupled_ppo,
    dro,
    importance_sampling,
    opmd,
    opsm,
    ppo,
    reinforce,
    sppo,
    topr,
)
from rlkit.losses._preference import cpo, dpo, kto, orpo, simpo
from rlkit.losses._sequence import gmpo, gspo, gspo_token, luspo, vespo
from rlkit.losses._supervised import (
    cross_entropy,
    mix,
    sft_is,
    sft_phi,
    topk_forward_kl,
    topk_jsd,
    topk_reverse_kl,
    value_clipped,
    value_huber,
)
from rlkit.losses._trust import clip_cov, dppo_kl, dppo_tv, kl_cov, rec, sapo
from rlkit.losses.kl import AdaptiveEntropy, adaptive_entropy
from rlkit.losses.prepare import LossGradient, PreparedLoss, loss, prepare, register, registry

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
    "value_clipped",
    "value_huber",
    "vespo",
    "with_entropy",
    "with_kl",
]
