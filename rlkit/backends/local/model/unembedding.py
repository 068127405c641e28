"""Logprobs of given tokens from hidden states, whose backward pass needs no logits.

The gradient of a token's logprob by its hidden state is W[t] - p W, known as soon as its logits are: so it is computed
at once, [hidden] numbers a token instead of [V]. Only an adapter on the head needs the probabilities later; they are
kept while they are few, else computed again.
"""

from __future__ import annotations

from typing import Any

import torch

from rlkit.backends.local.gemm.lora_linear import in_place
from rlkit.backends.local.gemm.prepacked import Product, packed, product

__all__ = ["Unembedding"]

CHUNK = 256  # rows of logits at once
KEPT = 2**26  # probabilities kept for an adapter's gradient: 256 MB in float32, cheaper than computing them twice


class Unembedding:
    """The output embedding without a bias, and its adapter.

    Args:
        weight: [V, hidden], in float32 at least.
        pair: (A [r, hidden], B [V, r]) of its adapter, if it has one.
        scale: of the adapter.
    """

    def __init__(
        self, weight: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor] | None = None, scale: float = 0.0
    ) -> None:
        self.weight = weight
        self.a: torch.Tensor | None = None if pair is None else pair[0]
        self.b: torch.Tensor | None = None if pair is None else pair[1]
        self._scale = scale
        self.merged: Product | None = None
        self._plain = False  # whether that is a copy of the weight alone
        self._space: torch.Tensor | None = None

    @property
    def factors(self) -> list[Product]:
        """Every [out, in] that ``logits`` multiplies by."""
        return [x for x in (self.weight if self.merged is None else self.merged, self.a, self.b) if x is not None]

    @torch.no_grad()
    def adapt(self, pair: tuple[torch.Tensor, torch.Tensor] | None, scale: float, *, merge: bool) -> None:
        """Takes a copy of another adapter, or of the weight with it, for ``logits`` alone."""
        self._scale = scale
        if not merge:
            a, b = pair or (None, None)
            self.a = None if a is None else in_place(a.clone(), self.a)
            self.b = None if b is None else in_place(b.clone(), self.b)
            return
        if self._plain and pair is None:
            return  # the copy of the weight alone is there already
        own = isinstance(self.merged, torch.Tensor) and self.merged is not self.weight
        place, self.merged = self.merged if own else None, None
        merged = self.weight
        if pair is not None:
            merged = torch.addmm(merged, pair[1].float(), pair[0].float(), alpha=scale)
        self.merged, self._plain = packed(merged, place), pair is None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, V]."""
        if self.merged is not None:
            return product(hidden, self.merged)
        y = product(hidden, self.weight)
        if self.a is None or self.b is None:
            return y
        return y + (hidden @ self.a.t()) @ self.b.t() * self._scale

    def logprobs(self, hidden: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
        """[n] of the tokens ``ids`` [n], after [n, hidden]."""
        pair = [self.a, self.b]
        if not torch.is_grad_enabled():  # or the adapter would ask for what the backward pass needs
            pair = [None if x is None else x.detach() for x in pair]
        space = self._reused(min(CHUNK, ids.numel()))
        found: torch.Tensor = _Logprobs.apply(hidden, *pair, self.weight, self._scale, ids, temperatures, space)
        return found

    def _reused(self, rows: int) -> torch.Tensor:
        """Room for logits, [rows, V] at least; the system takes longer to give new memory than softmax takes."""
        if self._space is None or self._space.shape[0] < rows:
            self._space = None
            self._space = self.weight.new_empty(rows, self.weight.shape[0])
        return self._space


class _Logprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        weight: torch.Tensor,
        scale: float,
        ids: torch.Tensor,
        temperatures: torch.Tensor | None,
        space: torch.Tensor,
    ) -> torch.Tensor:
        n = ids.numel()
        out, slope = hidden.new_empty(n), torch.empty_like(hidden)
        low_slope = None if a is None else hidden.new_empty(n, a.shape[0])
        kept: list[torch.Tensor] | None = [] if a is not None and n * weight.shape[0] <= KEPT else None
        for part in _chunks(n):
            out[part], p, total = _read(space, hidden[part], weight, a, b, scale, ids[part], _part(temperatures, part))
            if not any(ctx.needs_input_grad[:3]):
                continue
            slope[part] = weight[ids[part]] - (p @ weight).div_(total)
            if low_slope is not None and a is not None and b is not None:
                low_slope[part] = (b[ids[part]] - (p @ b).div_(total)) * scale
                slope[part] += low_slope[part] @ a
            if kept is not None:
                kept.append(p / total)
        ctx.save_for_backward(hidden, a, b, weight, ids, temperatures, slope, low_slope)
        ctx.scale, ctx.kept, ctx.space = scale, kept, space
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, a, b, weight, ids, temperatures, slope, low_slope = ctx.saved_tensors
        g = (grad if temperatures is None else grad / temperatures)[:, None]
        if a is None:
            return slope * g, *[None] * 7
        da = (low_slope * g).t() @ hidden
        low = (hidden @ a.t()).mul_(g).mul_(ctx.scale)
        db = torch.zeros_like(b).index_add_(0, ids, low)
        for k, part in enumerate(_chunks(ids.numel())):
            if ctx.kept is not None:
                p = ctx.kept[k]
            else:
                warm = _part(temperatures, part)
                _, p, total = _read(ctx.space, hidden[part], weight, a, b, ctx.scale, ids[part], warm)
                p.div_(total)
            db.addmm_(p.t(), low[part], alpha=-1)
        ctx.kept = None
        return slope * g, da, db, *[None] * 5


def _read(
    space: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ids: torch.Tensor,
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logprobs [n] of ``ids``, and in ``space`` the probabilities [n, V], up to their sums [n, 1]."""
    logits = torch.mm(hidden, weight.t(), out=space[: ids.numel()])
    if a is not None and b is not None:
        logits.addmm_(hidden @ a.t(), b.t(), alpha=scale)
    if temperatures is not None:
        logits.div_(temperatures[:, None])
    logits.sub_(logits.amax(1, keepdim=True))
    chosen = logits.gather(1, ids[:, None])
    total = logits.exp_().sum(1, keepdim=True)
    return (chosen - total.log())[:, 0], logits, total


def _chunks(n: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, n, CHUNK)]


def _part(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if x is None else x[part]
