"""From the last hidden states to what losses read, a chunk of tokens at a time.

Logits of every token of a micro-batch would be [n, V] in memory, and their gradient once more. Where they are many, at
most ``CHUNK`` rows of them exist at once. ``read_in_chunks`` computes each chunk without keeping anything, and again in
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["CHUNK", "KEPT", "hidden_to_keep", "logits_to_keep", "read_in_chunks", "read_logits"]


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
        logits: [n, V]; they may be overwritten.
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
        return {"logprobs": _Logprobs.apply(logits, ids)}
    logprobs = torch.log_softmax(logits, dim=-1)
    return {name: _read(name, logprobs, ids) for name, ids in wanted.items()}


class _Logprobs(torch.autograd.Function):
    """Logprobs [n] of ``ids`` [n] from logits [n, V], which both passes overwrite: 200 MB of new memory take long.

    Of one row d log p[t] / dz = e_t - p.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        p = logits.detach()
        p.sub_(p.amax(1, keepdim=True))
        chosen = p.gather(1, ids[:, None])
        total = p.exp_().sum(1, keepdim=True)
        ctx.save_for_backward(p.div_(total), ids)
        return (chosen - total.log())[:, 0]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        p, ids = ctx.saved_tensors
        return p.mul_(-grad[:, None]).scatter_add_(1, ids[:, None], grad[:, None]), None


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
