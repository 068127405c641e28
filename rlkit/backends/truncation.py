"""What top_k, top_p and min_p keep: the largest logits of each row, found without a sort of all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch

from rlkit.types import SamplingParams

__all__ = ["BLOCK", "keep_largest", "truncate"]

BLOCK = 64  # tokens; a row's length is a multiple of it
LARGEST = 128  # blocks in which what is kept is looked for first
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
    """Return the candidates of the tokens [N] at ``row`` [N], which stand in ascending order of both."""
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
