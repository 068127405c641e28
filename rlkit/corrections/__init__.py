"""Weights and masks per token: off-policy corrections from two policies' logprobs, and masks from entropies."""

from __future__ import annotations

from rlkit.corrections.entropy import clip_b, clip_v, top_entropy
from rlkit.corrections.masks import (
    divergence_rejection,
    geometric_sequence_mask,
    outlier_veto,
    sequence_mask,
    token_mask,
)
from rlkit.corrections.weights import batch_normalized, clamp, icepop, sequence_tis, token_tis

__all__ = [
    "batch_normalized",
    "clamp",
    "clip_b",
    "clip_v",
    "divergence_rejection",
    "geometric_sequence_mask",
    "icepop",
    "outlier_veto",
    "sequence_mask",
    "sequence_tis",
    "token_mask",
    "token_tis",
    "top_entropy",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from
