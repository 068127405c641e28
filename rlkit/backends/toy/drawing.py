"""Drawing tokens from logits in numpy: as ``rlkit.backends.drawing.draw``, without torch."""

from __future__ import annotations

import numpy as np

from rlkit.types import SamplingParams

__all__ = ["drawn"]


def drawn(logits: np.ndarray, params: SamplingParams, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token per row, and its logprob under the distribution that it was drawn from.

    Args:
        logits: float64 [n, V].
        params: of all rows.
        uniforms: float64 [n] in [0, 1): row i takes the first token whose cumulated probability exceeds its share.

    Returns:
        int64 [n], float32 [n].

    >>> drawn(np.log([[0.5, 0.25, 0.25]] * 3), SamplingParams(), np.array([0.4, 0.6, 0.9]))[0]
    array([0, 1, 2])
    """
    greedy = params.temperature == 0
    logprobs = _log_softmax(logits if greedy else logits / params.temperature)
    if params.truncates:
        logprobs = np.stack([_truncated(row, params.top_k, params.top_p) for row in logprobs])
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


def _truncated(logprobs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """top_k first, then the smallest set of most probable tokens that reaches top_p, at least one."""
    order = np.argsort(-logprobs, kind="stable")
    ordered = logprobs[order]
    if top_k > 0:
        ordered[top_k:] = -np.inf
    if top_p < 1:
        probs = np.exp(ordered)
        before = probs.cumsum() - probs
        ordered[before >= top_p * probs.sum()] = -np.inf
    out = np.full_like(logprobs, -np.inf)
    out[order] = _log_softmax(ordered)
    return out
