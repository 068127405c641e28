"""What tests show of an architecture, and what a short text shows of a model when it is loaded."""

from __future__ import annotations

import re
import tomllib
from importlib import resources

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.model.output_head import logits_to_keep

__all__ = [
    "LLAMA",
    "PACKED",
    "PADDED",
    "UNCACHED",
    "is_causal",
    "logits_at",
    "padding_leaks",
    "short_text",
    "trainable_linears",
]

# Of model types of transformers; tests measure them (`make families`), and docs/models.md explains them.
_FAMILIES = tomllib.loads(resources.files(__package__).joinpath("families.toml").read_text("utf-8"))
PACKED, PADDED, UNCACHED = (frozenset[str](_FAMILIES[key]) for key in ("packed", "padded", "uncached"))
LLAMA = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # whose residual stream can be in float32 alone
_LENGTH = 24


def padding_leaks(model: nn.Module) -> bool:
    """Return whether a convolution reads what a bias makes of padding, whose hidden states the library sets to zero."""
    mixers = [m for m in model.modules() if any(isinstance(child, nn.Conv1d) for child in m.children())]
    linears = [(name, m) for x in mixers for name, m in x.named_modules() if isinstance(m, nn.Linear)]
    return any(m.bias is not None for name, m in linears if name != "dt_proj")  # which comes after


def short_text(model: PreTrainedModel, special: set[int], longest: int) -> np.ndarray:
    """Return int64 [N] of ordinary tokens, to compute a model with.

    Args:
        model: a causal language model.
        special: ids that represent no text, and perhaps an image.
        longest: tokens of its context.
    """
    size = model.get_input_embeddings().weight.shape[0]
    ordinary = np.setdiff1d(np.arange(size), np.array(sorted(special), np.int64))
    return np.random.default_rng(0).choice(ordinary if ordinary.size else np.arange(size), min(_LENGTH, longest))


def logits_at(model: PreTrainedModel, rows: np.ndarray, index: np.ndarray) -> torch.Tensor:
    """Return logits [n, V] at the flat ``index`` of ``rows`` [B, T], by the model's own forward."""
    tokens, places = (torch.from_numpy(x).to(model.device) for x in (rows, index))
    with logits_to_keep(model, places):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return logits


@torch.no_grad()
def is_causal(model: PreTrainedModel, text: np.ndarray) -> bool:
    """Return whether a row's logits depend neither on later tokens nor on another row of the batch."""
    longer, size, half = np.append(text[::-1][:-3], np.zeros(3, np.int64)), text.size, text.size // 2
    together = logits_at(model, np.stack([text, longer]), np.arange(2 * size - 3))
    alone, other, begin = (logits_at(model, x[None], np.arange(x.size)) for x in (text, longer[:-3], text[:half]))
    pairs = torch.cat([together, begin]), torch.cat([alone, other, alone[:half]])
    found, expected = (x - x.mean(-1, keepdim=True) for x in (pair.cpu().double() for pair in pairs))
    # Each row in float32; in bfloat16, which rounds to a hundredth, all of them together.
    dim, bound = (None, 0.15) if model.dtype == torch.bfloat16 else (-1, 5e-4)
    return bool(((found - expected).norm(dim=dim) <= bound * expected.norm(dim=dim)).all())


def trainable_linears(model: PreTrainedModel, text: np.ndarray) -> frozenset[str]:
    """Return the names of the linear modules on which an adapter learns: their product enters the logits.

    Others are not called for text (a vision tower), are read past the module (a state-space mixer's ``dt_proj``), give
    something else than the product (routers of some kinds, products by groups), or only choose what is computed (an
    indexer), so that no gradient comes back. An expert may be idle for a few tokens and counts as its neighbours do.
    """
    linear = {name: m for name, m in model.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and name}
    marks: dict[str, torch.Tensor] = {}  # a zero that is added to the output
    odd: set[str] = set()
    hooks = []
    for name, module in linear.items():

        def mark(module: nn.Module, args: tuple[object, ...], out: torch.Tensor, name: str = name) -> torch.Tensor:
            if not _is_product(module, args, out):
                odd.add(name)
                return out
            return out + marks.setdefault(name, out.new_zeros((), requires_grad=True))

        hooks.append(module.register_forward_hook(mark))
    try:
        with torch.enable_grad():
            tokens = torch.from_numpy(text[None, :9]).to(model.device)
            total = model(input_ids=tokens, use_cache=False).logits.float().sum()
            gradients = torch.autograd.grad(total, list(marks.values()), allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    learns = {name for name, gradient in zip(marks, gradients, strict=True) if gradient is not None} - odd
    patterns = {_pattern(name) for name in learns}
    experts = {name for name in linear.keys() - marks.keys() - odd if "expert" in name and _pattern(name) in patterns}
    return frozenset(name for name in learns | experts if linear[name].weight.is_floating_point())


@torch.no_grad()
def _is_product(module: nn.Module, args: tuple[object, ...], out: object) -> bool:
    """Return whether a linear module gave x W^T + b."""
    if not (args and isinstance(out, torch.Tensor) and out.is_floating_point()):
        return False
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    if not weight.is_floating_point():
        return False
    product = nn.functional.linear(args[0], weight, module.bias)
    return product.shape == out.shape and bool((product - out).norm() <= 1e-2 * product.norm() + 1e-30)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
