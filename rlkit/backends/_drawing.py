"""Drawing tokens from logits: every row with its own options, all rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import numpy as np
import torch

from rlkit.backends._penalties import TokenCounts, penalized
from rlkit.types import SamplingParams

__all__ = ["BLOCK", "draw", "keep_largest", "truncate"]

BLOCK = 64  # tokens; a row's length is a multiple of it
LARGEST = 128  # blocks to search first for what is kept
BINS = 2048  # of a histogram of logits
SPAN = 64.0  # at most, from the highest logit to the last bin's beginning
ROWS = 4  # of which a CPU makes histograms at once, so that their bins are in its cache


def truncate(probs: torch.Tensor, logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set to 0 what each row's options cut: top_k first, then top_p of the mass that is left, then min_p.

    Args:
        probs: float32 [R, V], softmax of the logits; written to.
        logits: float32 [R, V], temperature applied. V is a multiple of ``BLOCK``.
        params: one per row.
    """
    top_k = [p.top_k if p.truncates and p.top_k > 0 else math.inf for p in params]
    if min(top_k) < math.inf:
        keep_largest(probs, logits, _numbers(top_k, probs), count=True)
    top_p = [p.top_p if p.truncates and p.top_p < 1 else math.inf for p in params]
    if min(top_p) < math.inf:
        mass = probs.view(len(probs), -1, BLOCK).sum(-1).double().cumsum(-1)[:, -1]
        keep_largest(probs, logits, _numbers(top_p, probs) * mass, count=False)
    min_p = [p.min_p if p.truncates else 0.0 for p in params]
    if max(min_p) > 0:
        least = _numbers(min_p, probs)[:, None].float() * probs.amax(-1, keepdim=True)
        probs.mul_(
            (probs - least).sign_().add_(1).clamp_(max=1)
        )  # 1 from the least on; comparisons take thrice as long


def _numbers(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device)


def keep_largest(probs: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *, count: bool) -> None:
    """Set ``probs`` to 0 outside of the smallest set of largest logits that reaches ``target``.

    Args:
        probs: float32 [R, V], written to.
        logits: float32 [R, V], by which tokens are ordered; of equal ones the first comes first.
        target: float64 [R], > 0: how many tokens, or their mass in ``probs``; infinity keeps all of a row.
        count: whether it is the number of tokens.

    Most rows keep few tokens: these are found among all that are as large as the 128th largest maximum of a block. Of
    the other rows histograms show in which bin the set ends, and only that one is sorted. A row's result, to the bit,
    depends on that row alone.
    """
    wanted = target.isfinite()
    candidates = _among_largest(probs, logits, target, count=count)
    keep, reached = candidates.smallest_set(target)
    few = wanted & reached
    row, token = candidates.at(keep & few[:, None])
    kept = probs[row, token]
    probs.index_fill_(0, few.nonzero()[:, 0], 0.0)
    probs[row, token] = kept
    (rest,) = (wanted & ~few).nonzero(as_tuple=True)
    for rows in rest.split(ROWS if logits.device.type == "cpu" else len(rest)) if len(rest) else ():
        part = probs.index_select(0, rows)
        inside, candidates = _last_bin(part, logits.index_select(0, rows), target[rows], count=count)
        keep, _ = candidates.smallest_set(target[rows])
        part.mul_(inside)
        part[candidates.at(~keep & candidates.exist)] = 0.0
        probs.index_copy_(0, rows, part)


@attrs.frozen(eq=False)
class _Candidates:
    """Tokens of each row, [R, C], in descending order of their logits.

    Attributes:
        tokens: ids.
        exist: whether there is one; rows have different numbers.
        weights: what each adds to the target, 0 where there is none.
        before: float64 [R], the weight of all tokens with larger logits.
    """

    tokens: torch.Tensor
    exist: torch.Tensor
    weights: torch.Tensor
    before: torch.Tensor

    def smallest_set(self, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bool [R, C], the smallest set that reaches the target; and bool [R], whether any does."""
        reached = self.before[:, None] + self.weights.double().cumsum(-1)
        before = torch.cat([self.before[:, None], reached[:, :-1]], 1)
        return (before < target[:, None]) & self.exist, reached[:, -1] >= target

    def at(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and ids of those that are True in ``mask`` [R, C]."""
        row, place = mask.nonzero(as_tuple=True)
        return row, self.tokens[row, place]


def _among_largest(probs: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *, count: bool) -> _Candidates:
    """Return all tokens that are as large as the maximum of the ``LARGEST``-th block, of rows where that may do."""
    rows, size = logits.shape
    blocks = logits.view(rows, -1, BLOCK)
    maxima = blocks.amax(-1)
    bound = maxima.topk(min(LARGEST, maxima.shape[1]), dim=-1).values[:, -1:]
    chosen = maxima >= bound
    most = chosen * BLOCK if count else chosen * probs.view(rows, -1, BLOCK).sum(-1)
    row, block = (chosen & (most.sum(-1) >= target)[:, None]).nonzero(as_tuple=True)
    several = logits.view(-1, BLOCK).index_select(0, row * (size // BLOCK) + block)
    which, place = (several >= bound[row]).nonzero(as_tuple=True)
    before = torch.zeros(rows, dtype=torch.float64, device=logits.device)
    return _sorted(probs, logits, row[which], block[which] * BLOCK + place, before, count=count)


def _last_bin(
    probs: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, *, count: bool
) -> tuple[torch.Tensor, _Candidates]:
    """Return 1 for each token up to the bin of logits in which the target is reached, else 0, and that bin's tokens."""
    highest = logits.amax(-1, keepdim=True)
    span = (highest - logits.amin(-1, keepdim=True)).clamp(1e-3, SPAN)
    bins = (highest - logits).mul_(BINS / span).clamp_(max=BINS - 1).floor_()
    weights = torch.ones_like(probs[:1, :1]).expand_as(probs) if count else probs
    histogram = torch.zeros(len(logits), BINS, device=logits.device)
    cumulated = histogram.scatter_add_(1, bins.to(torch.int64), weights).double().cumsum(-1)
    last = torch.searchsorted(cumulated, target[:, None]).clamp(max=BINS - 1)
    before = torch.nn.functional.pad(cumulated, (1, 0)).gather(1, last)[:, 0]
    row, token = (bins == last).nonzero(as_tuple=True)
    inside = bins.neg_().add_(last + 1).clamp_(0, 1)
    return inside, _sorted(probs, logits, row, token, before, count=count)


def _sorted(
    probs: torch.Tensor,
    logits: torch.Tensor,
    row: torch.Tensor,
    token: torch.Tensor,
    before: torch.Tensor,
    *,
    count: bool,
) -> _Candidates:
    """Return the candidates of the tokens [N] at ``row`` [N], which are in ascending order of both."""
    counts = torch.bincount(row, minlength=len(logits))
    place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    values = torch.full((len(logits), max(int(counts.max()), 1)), -torch.inf, device=logits.device)
    values[row, place] = logits[row, token]
    tokens = torch.zeros_like(values, dtype=torch.int64)
    tokens[row, place] = token
    weights = torch.zeros_like(values)
    weights[row, place] = 1.0 if count else probs[row, token]
    exist = torch.arange(values.shape[1], device=row.device) < counts[:, None]
    order = values.sort(dim=-1, descending=True, stable=True).indices
    return _Candidates(tokens.gather(1, order), exist, weights.gather(1, order), before)


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
