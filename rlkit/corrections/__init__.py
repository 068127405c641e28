"""Off-policy corrections: weights and masks from the trainer's and the sampler's logprobs of the same tokens."""

from __future__ import annotations

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
    "divergence_rejection",
    "geometric_sequence_mask",
    "icepop",
    "outlier_veto",
    "sequence_mask",
    "sequence_tis",
    "token_mask",
    "token_tis",
]

for _name in __all__:
    globals()[_name].__module__ = __name__  # where users import it from
