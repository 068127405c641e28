"""From the last hidden states to what losses read, a chunk of tokens at a time.

Logits of every token of a micro-batch would be [n, V] in memory, and their gradient once more. Where they are many, at
most ``CHUNK`` rows of them exist at once. ``read_in_chunks`` computes each chunk without keeping anything, and again in
the backward pass. Logprobs alone are cheaper: see ``Unembedding.logprobs``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

from rlkit.backends.local.products.lora_linear import LoraPair, keep_address, upcast
from rlkit.backends.local.products.prepacked import Weight, matmul, plain_matmul, prepack

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CHUNK", "KEPT", "Unembedding", "hidden_to_keep", "logits_to_keep", "read_in_chunks", "read_logits"]


@contextmanager
def _before_head(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Change the hidden states that the output embedding reads, while open."""

    def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (change(args[0]), *args[1:])

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def logits_to_keep(model: PreTrainedModel, index: torch.Tensor) -> AbstractContextManager[None]:
    """Make the model compute logits only at the flat positions ``index`` [n] of its [B, T] input, while open.

    The output embedding sees [1, n, H] instead of [B, T, H]; whatever the architecture does to logits afterwards is
    kept.
    """
    return _before_head(model, lambda hidden: _at(hidden, index)[None])


@contextmanager
def hidden_to_keep(model: PreTrainedModel, index: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Make a forward append the hidden states [n, H] at ``index`` to the list and compute one row of logits."""
    kept: list[torch.Tensor] = []

    def take(hidden: torch.Tensor) -> torch.Tensor:
        kept.append(_at(hidden, index))
        return kept[-1][:1][None].detach()

    with _before_head(model, take):
        yield kept


def _at(hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return hidden.reshape(-1, hidden.shape[-1])[index]


CHUNK = 256  # rows of logits at once
KEPT = 2**26  # numbers [n, V] that are simply kept: 256 MB in float32, cheaper than computing them twice


class Unembedding:
    """The output embedding without a bias, and its LoRA.

    Args:
        weight: [V, hidden], in float32 at least, or as ``mixed.wide_matmul`` takes it.
        pair: (A [r, hidden], B [V, r]) of its adapter, if it has one.
        scale: of the adapter.
    """

    def __init__(self, weight: torch.Tensor, pair: LoraPair | None = None, scale: float = 0.0) -> None:
        self.weight = weight
        self.a: torch.Tensor | None = None if pair is None else pair[0]
        self.b: torch.Tensor | None = None if pair is None else pair[1]
        self._scale = scale
        self._packed: Weight = weight  # what ``logits`` multiplies by, with the adapter merged into it or not
        self._merged = False
        self._buffer: torch.Tensor | None = None

    @property
    def weights(self) -> list[Weight]:
        """Return every [out, in] that ``logits`` multiplies by."""
        return [x for x in (self._packed, self.a, self.b) if x is not None]

    @torch.no_grad()
    def load(self, pair: LoraPair | None, scale: float, packed: Weight, *, merge: bool, in_place: bool) -> None:
        """Take a copy of another adapter, or of the weight with it, for ``logits`` alone.

        ``packed`` is the weight itself, prepacked where that is worth it. ``in_place``: the next merged copy, also of
        the weight alone, is written to the address of the one before.
        """
        self._scale = scale
        place = self._packed if in_place and self._merged and isinstance(self._packed, torch.Tensor) else None
        self._packed, self._merged = packed, merge and (pair is not None or place is not None)
        before, self.a, self.b = (self.a, self.b), None, None
        if self._merged:
            weight = upcast(self.weight)
            if pair is not None:
                weight = torch.addmm(weight, pair[1].float(), pair[0].float(), alpha=scale)
            self._packed = prepack(weight, place)
        elif pair is not None:
            self.a, self.b = (keep_address(new.clone(), old) for new, old in zip(pair, before, strict=True))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [n, hidden] to [n, V]."""
        y = matmul(hidden, self._packed)
        if self.a is None or self.b is None:
            return y
        return y + (hidden @ self.a.t()) @ self.b.t() * self._scale

    def logprobs(self, hidden: torch.Tensor, ids: torch.Tensor, temperatures: torch.Tensor | None) -> torch.Tensor:
        """Return the logprobs [n] of the tokens ``ids`` [n] after ``hidden`` [n, hidden].

        Its backward pass needs no logits: see ``_Logprobs``.
        """
        pair = [self.a, self.b]
        if not torch.is_grad_enabled():  # or the adapter would ask for what the backward pass needs
            pair = [None if x is None else x.detach() for x in pair]
        rows = min(CHUNK, ids.numel())
        if self._buffer is None or self._buffer.shape[0] < rows:
            self._buffer = None  # reused, as page-faulting a fresh one costs more than the softmax
            self._buffer = upcast(hidden.new_empty(rows, self.weight.shape[0]))
        rest = self.weight, self._scale, ids, temperatures, self._buffer
        out: torch.Tensor = _Logprobs.apply(hidden, *pair, *rest)
        return out


class _Logprobs(torch.autograd.Function):
    # Of one token: logits z = (W + s B A) h / T, p = softmax(z), out = log p[t]. As d out / dz = e_t - p,
    #   d out / dh = (W[t] - p W) / T + s (B[t] - p B) / T A,
    #   d out / dA = s (B[t] - p B)^T / T h^T,      d out / dB = s (e_t - p) / T (A h)^T.
    # The first two are known as soon as p is, and are [hidden] and [r] numbers instead of [V]: the forward pass keeps
    # them (``slope``, ``low_slope``; 1 / T comes with the gradient). Only dB needs p in the backward pass, where it is
    # kept if there are few numbers, else recomputed.

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: torch.Tensor,
        a: torch.Tensor | None,
        b: torch.Tensor | None,
        weight: torch.Tensor,
        scale: float,
        ids: torch.Tensor,
        temperatures: torch.Tensor | None,
        buffer: torch.Tensor,
    ) -> torch.Tensor:
        n = ids.numel()
        out, slope = hidden.new_empty(n), torch.empty_like(hidden)
        low_slope = None if a is None else hidden.new_empty(n, a.shape[0])
        kept: list[torch.Tensor] | None = [] if a is not None and n * weight.shape[0] <= KEPT else None
        for part in _chunks(n):
            out[part], p, total = _softmax(
                buffer, hidden[part], weight, a, b, scale, ids[part], _part(temperatures, part)
            )
            if not any(ctx.needs_input_grad[:3]):
                continue
            multiply = plain_matmul if p.dtype == weight.dtype else matmul
            slope[part] = weight[ids[part]] - multiply(p, weight.t()).div_(total)
            if low_slope is not None and a is not None and b is not None:
                low_slope[part] = (b[ids[part]] - (p @ b).div_(total)) * scale
                slope[part] += low_slope[part] @ a
            if kept is not None:
                kept.append(p / total)
        ctx.save_for_backward(hidden, a, b, weight, ids, temperatures, slope, low_slope)
        ctx.scale, ctx.kept, ctx.buffer = scale, kept, buffer
        return out

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
                _, p, total = _softmax(ctx.buffer, hidden[part], weight, a, b, ctx.scale, ids[part], warm)
                p.div_(total)
            db.addmm_(p.t(), low[part], alpha=-1)
        ctx.kept = None
        return slope * g, da, db, *[None] * 5


def _softmax(
    buffer: torch.Tensor,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    a: torch.Tensor | None,
    b: torch.Tensor | None,
    scale: float,
    ids: torch.Tensor,
    temperatures: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logprobs [n] of ``ids``, and in ``buffer`` the probabilities [n, V], up to their sums [n, 1]."""
    if weight.dtype == hidden.dtype:
        logits = torch.mm(hidden, weight.t(), out=buffer[: ids.numel()])
    else:
        logits = matmul(hidden, weight)
    if a is not None and b is not None:
        logits.addmm_(hidden @ a.t(), b.t(), alpha=scale)
    if temperatures is not None:
        logits.div_(temperatures[:, None])
    logits.sub_(logits.amax(1, keepdim=True))
    chosen = logits.gather(1, ids[:, None])
    total = logits.exp_().sum(1, keepdim=True)
    return (chosen - total.log())[:, 0], logits, total


def read_in_chunks(
    logits: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    wanted: Mapping[str, torch.Tensor | None],
    temperatures: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Apply ``read_logits`` to ``logits(hidden)``, ``CHUNK`` rows at a time."""
    parts = []
    for part in _chunks(hidden.shape[0]):
        ids, warm = {name: _part(x, part) for name, x in wanted.items()}, _part(temperatures, part)

        def read(
            rows: torch.Tensor, ids: Mapping[str, torch.Tensor | None] = ids, warm: torch.Tensor | None = warm
        ) -> dict[str, torch.Tensor]:
            return read_logits(logits(rows), ids, warm)

        if torch.is_grad_enabled():
            settings = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
            parts.append(checkpoint(read, hidden[part], **settings))
        else:
            parts.append(read(hidden[part]))
    return {name: torch.cat([part[name] for part in parts]) for name in wanted}


def read_logits(
    logits: torch.Tensor, wanted: Mapping[str, torch.Tensor | None], temperatures: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """Return what is wanted of each token, from logits [n, V].

    Args:
        logits: [n, V].
        wanted: "logprobs" -> ids [n], "target_logprobs" -> ids [n, K] with -1 for none; "entropy", "sum_p2" and
            "sum_p2_logp" -> None.
        temperatures: float32 [n], or None where all are 1.

    Returns:
        name -> [n] or [n, K], float32.

    >>> read_logits(torch.zeros(1, 4), {"logprobs": torch.tensor([2]), "entropy": None}, None)
    {'logprobs': tensor([-1.3863]), 'entropy': tensor([1.3863])}
    """
    logits = logits.float()
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    if wanted.keys() == {"logprobs"} and (ids := wanted["logprobs"]) is not None:
        return {"logprobs": -F.cross_entropy(logits, ids, reduction="none")}
    logprobs = torch.log_softmax(logits, dim=-1)
    return {name: _read(name, logprobs, ids) for name, ids in wanted.items()}


def _read(name: str, logprobs: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    """Read [n] or [n, K] from all logprobs [n, V]."""
    if ids is not None and ids.ndim == 1:
        return logprobs.gather(1, ids[:, None])[:, 0]
    if ids is not None:
        return logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, 0.0)
    if name == "entropy":
        return -(logprobs.exp() * logprobs).sum(-1)
    squares = (2.0 * logprobs).exp()
    return squares.sum(-1) if name == "sum_p2" else (squares * logprobs).sum(-1)


def _chunks(n: int) -> list[slice]:
    return [slice(start, start + CHUNK) for start in range(0, n, CHUNK)]


def _part(x: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return None if x is None else x[part]
