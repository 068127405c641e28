"""Drawing tokens from logits in numpy: as ``rlkit.backends.drawing.draw``, without torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.backends.penalties import TokenCounts
from rlkit.types import SamplingParams

__all__ = ["drawn"]


def drawn(
    logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray, counts: Sequence[TokenCounts | None] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """One token per row, and its logprob under the distribution that it was drawn from.

    Args:
        logits: float64 [n, V].
        params: of all rows.
        uniforms: float64 [n] in [0, 1): row i takes the first token whose cumulated probability exceeds its share.

        counts: one per row, of the tokens that are penalized; None where there is no penalty.

    Returns:
        int64 [n], float32 [n].

    >>> drawn(np.log([[0.5, 0.25, 0.25]] * 3), SamplingParams(), np.array([0.4, 0.6, 0.9]))[0]
    array([0, 1, 2])
    """
    greedy = params.temperature == 0
    if params.penalizes and counts is not None:
        logits = np.stack([_penalized(row, params, of) for row, of in zip(logits, counts, strict=True)])
    logprobs = _log_softmax(logits if greedy else logits / params.temperature)
    if params.truncates:
        logprobs = np.stack([_truncated(row, params) for row in logprobs])
    if greedy:
        tokens = logprobs.argmax(-1)
    else:
        cumulated = np.exp(logprobs).cumsum(-1)
        total = cumulated[:, -1]
        share = np.minimum(uniforms * total, np.nextafter(total, 0.0))
        tokens = (cumulated > share[:, None]).argmax(-1)
    return tokens, logprobs[np.arange(len(tokens)), tokens].astype(np.float32)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    above = logits - logits.max(-1, keepdims=True)
    logprobs: np.ndarray = above - np.log(np.exp(above).sum(-1, keepdims=True))
    return logprobs


def _penalized(logits: np.ndarray, params: SamplingParams, counts: TokenCounts | None) -> np.ndarray:
    """The repetition penalty first, then the other two."""
    if counts is None:
        return logits
    out = logits.copy()
    seen = out[counts.ids]
    seen = np.where(seen < 0, seen * params.repetition_penalty, seen / params.repetition_penalty)
    seen -= params.frequency_penalty * counts.counts + params.presence_penalty * (counts.counts > 0)
    out[counts.ids] = seen
    return out


def _truncated(logprobs: np.ndarray, params: SamplingParams) -> np.ndarray:
    """top_k first, then the smallest set of most probable tokens that reaches top_p, at least one, then min_p."""
    order = np.argsort(-logprobs, kind="stable")
    ordered = logprobs[order]
    if params.top_k > 0:
        ordered[params.top_k :] = -np.inf
    if params.top_p < 1:
        probs = np.exp(ordered)
        before = probs.cumsum() - probs
        ordered[before >= params.top_p * probs.sum()] = -np.inf
    if params.min_p > 0:
        ordered[np.exp(ordered - ordered[0]) < params.min_p] = -np.inf
    out = np.full_like(logprobs, -np.inf)
    out[order] = _log_softmax(ordered)
    return out
