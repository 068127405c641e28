"""Drawing tokens from logits: every row with its own options, all rows at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rlkit.backends.penalties import TokenCounts, penalized
from rlkit.backends.truncation import BLOCK, truncate
from rlkit.types import SamplingParams

__all__ = ["draw"]


def draw(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: np.ndarray,
    counts: Sequence[TokenCounts | None] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row, and return its logprob under the distribution that it was drawn from.

    Args:
        logits: float tensor [B, V].
        params: one per row.
        uniforms: float64 [B] in [0, 1): row b takes the first token whose cumulated probability exceeds its share.
        counts: one per row, of the tokens that are penalized; None where no row has a penalty.

    Returns:
        int64 [B], float32 [B].

    Raises:
        ConfigError: a row has a penalty and no counts.

    A row's result depends on that row alone. Penalties are applied first, then the temperature, top_k, and top_p, which
    keeps the smallest set of most probable tokens that reaches it, at least one; then min_p. That is transformers'
    order; vLLM cuts by min_p before top_k and top_p. A greedy row has penalties, but is not cut.
    """
    logits = logits.float()
    if logits.device.type == "mps":  # which has no float64, in which mass is added up
        logits = logits.cpu()
    if any(p.penalizes for p in params):
        logits = penalized(logits, params, [None] * len(params) if counts is None else counts)
    if logits.shape[1] % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf)
    if any(p.temperature not in (0, 1) for p in params):
        logits = logits / torch.tensor([[p.temperature or 1.0] for p in params], device=logits.device)
    probs = logits.softmax(-1)
    highest, peak = logits.amax(-1), probs.amax(-1)
    truncate(probs, logits, params)
    tokens, mass = _drawn(probs, torch.from_numpy(uniforms).to(logits.device))
    greedy = [b for b, p in enumerate(params) if p.temperature == 0]
    if greedy:
        tokens[greedy] = _first_largest(logits if len(greedy) == len(params) else logits[greedy])
    # The kept mass in units of the highest probability: the logits' own normalizer, of which softmax keeps no more than
    # that probability, so that no logarithm is taken of a small one.
    chosen = logits.gather(1, tokens[:, None])[:, 0] - highest - (mass / peak).log().float()
    both = torch.stack([tokens.to(torch.int32), chosen.view(torch.int32)]).cpu()  # a GPU is waited for once
    return both[0].long().numpy(), both[1].view(torch.float32).numpy()


def _drawn(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [B], the first token of each row [B, V] at which the cumulated mass exceeds u times the sum, and it.

    The block of tokens is found first, then the place in it, so that little is added up in float64.
    """
    blocks = probs.view(len(probs), -1, BLOCK)
    cumulated = blocks.sum(-1).double().cumsum(-1)
    nothing = torch.zeros_like(uniforms[:, None])
    share = torch.minimum(uniforms[:, None] * cumulated[:, -1:], torch.nextafter(cumulated[:, -1:], nothing))
    block = torch.searchsorted(cumulated, share, right=True)
    before = torch.nn.functional.pad(cumulated, (1, 0)).gather(1, block)
    within = blocks[torch.arange(len(probs), device=probs.device), block[:, 0]].double().cumsum(-1)
    below = torch.nextafter(within[:, -1:], nothing)  # the block's sum above was rounded otherwise
    place = torch.searchsorted(within, torch.minimum(share - before, below), right=True)
    return (block * BLOCK + place)[:, 0], cumulated[:, -1]


def _first_largest(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [B], the first of the largest of each row [B, V]: its block's maximum is found first."""
    blocks = logits.view(len(logits), -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    return block * BLOCK + blocks[torch.arange(len(logits), device=logits.device), block].argmax(-1)
