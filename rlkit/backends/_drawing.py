"""Drawing tokens from logits: every row with its own options, all rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from rlkit.errors import ConfigError
from rlkit.types import SamplingParams

__all__ = ["BLOCK", "TokenCounts", "cut", "draw", "penalize"]

BLOCK = 64  # tokens; a row's length is a multiple of it
LARGEST = (256, 4096)  # of a row's tokens are searched for what it keeps; a row that keeps more is sorted


class TokenCounts:
    """The tokens of a prompt and its completion, and how often each occurs in the completion.

    Args:
        prompt: int [P]; its tokens begin with a count of 0.

    >>> counts = TokenCounts(np.array([7, 5, 7]))
    >>> for token in (5, 9, 9):
    ...     counts.add(token)
    >>> counts.ids.tolist(), counts.counts.tolist()
    ([5, 7, 9], [1.0, 0.0, 2.0])
    """

    def __init__(self, prompt: np.ndarray) -> None:
        self._ids = np.unique(prompt).astype(np.int64)
        self._counts = np.zeros(self._ids.size, np.float32)
        self._place = {token: i for i, token in enumerate(self._ids.tolist())}

    @classmethod
    def of(cls, params: SamplingParams, prompt: np.ndarray) -> TokenCounts | None:
        """Return the counts that ``params`` need for a new completion of ``prompt``; None without a penalty."""
        if not params.penalizes:
            return None
        return cls(prompt if params.repetition_penalty != 1.0 else prompt[:0])

    def add(self, token: int) -> None:
        """Take in the completion's next token."""
        place = self._place.setdefault(token, len(self._place))
        if place >= self._ids.size:
            more = max(place, 16)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray:
        """Return int64 [S], each once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """Return float32 [S]."""
        return self._counts[: len(self._place)]


def penalize(
    logits: torch.Tensor, params: Sequence[SamplingParams], counts: Sequence[TokenCounts | None]
) -> torch.Tensor:
    """Return logits [B, V] after the rows' penalties: the repetition penalty first, then the other two, as vLLM's.

    Args:
        logits: float32 [B, V], not written to.
        params: one per row.
        counts: one per row; None for a row without a penalty.

    Raises:
        ConfigError: a row with a penalty has no counts.
    """
    seen = []
    for row, (how, of) in enumerate(zip(params, counts, strict=True)):
        if how.penalizes and of is None:
            raise ConfigError(f"draw(counts)[{row}]", "is None", "TokenCounts", f"params[{row}] has a penalty")
        if how.penalizes and of is not None and of.ids.size:
            seen.append((row, how, of))
    if not seen:
        return logits
    rows, hows, ofs = zip(*seen, strict=True)
    penalties = [(how.repetition_penalty, how.presence_penalty, how.frequency_penalty) for how in hows]
    sizes = [of.ids.size for of in ofs]
    row, ids, times, repetition, presence, frequency = (
        torch.from_numpy(array).to(logits.device)
        for array in (
            np.repeat(rows, sizes),
            np.concatenate([of.ids for of in ofs]),
            np.concatenate([of.counts for of in ofs]),
            *np.repeat(np.array(penalties, np.float32), sizes, axis=0).T,
        )
    )
    scores = logits[row, ids]
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = scores - frequency * times - presence * (times > 0)
    return logits.index_put((row, ids), scores)


def cut(probs: torch.Tensor, logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to 0 the tokens that each row's options cut: top_k first, then top_p of the mass that is left, then min_p.

    A row's result, to the bit, depends on that row alone. Tokens as probable as the last one that is kept stay, too.

    Args:
        probs: float32 [R, V], softmax of the logits; written to.
        logits: float32 [R, V], temperature applied. V is a multiple of ``BLOCK``.
        params: one per row.
    """
    size = logits.shape[1]
    top_k = _numbers([p.top_k if p.truncates and 0 < p.top_k < size else math.inf for p in params], probs)
    top_p = _numbers([p.top_p if p.truncates and p.top_p < 1 else math.inf for p in params], probs)
    min_p = _numbers([p.min_p if p.truncates else 0.0 for p in params], probs)
    least = logits.amax(-1) + min_p.log().float()
    rest = (top_k.isfinite() | top_p.isfinite()).nonzero()[:, 0]
    for candidates in (*LARGEST, size):
        if len(rest):
            rows = rest if len(rest) < len(probs) else slice(None)  # which copies nothing
            lowest, found = _find_least(probs[rows], logits[rows], top_k[rows], top_p[rows], min(candidates, size))
            least[rest[found]] = torch.maximum(least[rest], lowest)[found]
            rest = rest[~found]
    if any(p.truncates for p in params):
        probs.masked_fill_(logits < least[:, None], 0.0)


def _numbers(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def _find_least(
    probs: torch.Tensor, logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return float32 [R], the lowest logit that each row keeps; and bool [R], whether ``size`` tokens say which it is.

    Args:
        probs, logits: float32 [R, V].
        top_k, top_p: float64 [R]; infinity where the option is off.
        size: how many of a row's largest logits are looked at.
    """
    largest = logits.topk(size, dim=-1)
    within = torch.arange(size, device=logits.device) < top_k[:, None]
    mass = probs.gather(1, largest.indices).double().where(within, 0.0)
    # Added up block by block: the sum of a whole row in float32 would depend on the number of rows.
    whole = probs.view(len(probs), -1, BLOCK).sum(-1).double().cumsum(-1)[:, -1]
    whole = whole.where(top_k.isinf(), mass.cumsum(-1)[:, -1])
    before = mass.cumsum(-1) - mass
    kept = (within & (before < (top_p * whole)[:, None])).sum(-1)
    least = largest.values.gather(1, kept[:, None] - 1)[:, 0]
    found = torch.where(top_k.isinf(), kept < size, top_k <= size)
    return least, found | (size == logits.shape[1])


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
    logits = penalize(logits, params, [None] * len(params) if counts is None else counts)
    if logits.shape[1] % BLOCK:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[1] % BLOCK), value=-torch.inf)
    if any(p.temperature not in (0, 1) for p in params):
        logits = logits / torch.tensor([[p.temperature or 1.0] for p in params], device=logits.device)
    probs = logits.softmax(-1)
    highest, peak = logits.amax(-1), probs.amax(-1)
    cut(probs, logits, params)
    tokens, mass = _draw_places(probs, torch.from_numpy(uniforms).to(logits.device))
    greedy = [b for b, p in enumerate(params) if p.temperature == 0]
    if greedy:
        tokens[greedy] = _find_largest(logits if len(greedy) == len(params) else logits[greedy])
    # The kept mass in units of the highest probability: the logits' own normalizer, of which softmax keeps no more than
    # that probability, so that no logarithm is taken of a small one.
    chosen = logits.gather(1, tokens[:, None])[:, 0] - highest - (mass / peak).log().float()
    both = torch.stack([tokens.to(torch.int32), chosen.view(torch.int32)]).cpu()  # a GPU is waited for once
    return both[0].long().numpy(), both[1].view(torch.float32).numpy()


def _draw_places(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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


def _find_largest(logits: torch.Tensor) -> torch.Tensor:
    """Return int64 [B], the first of the largest of each row [B, V]: its block's maximum is found first."""
    blocks = logits.view(len(logits), -1, BLOCK)
    block = blocks.amax(-1).argmax(-1)
    return block * BLOCK + blocks[torch.arange(len(logits), device=logits.device), block].argmax(-1)
