"""Tokens on which the ways to compute a model are compared with its own forward, before any of them is taken."""

from __future__ import annotations

import copy
import re
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from rlkit.backends.local.model.gathering import gathered, weights_of
from rlkit.backends.local.model.lengths import thresholds
from rlkit.backends.local.model.logits_to_keep import logits_to_keep
from rlkit.backends.local.model.windows import layer_windows, shorten

__all__ = [
    "BATCHED",
    "FAILURES",
    "NOT_CONTINUED",
    "NOT_IN_PARTS",
    "SLOTS",
    "WHOLE",
    "Probe",
    "causal",
    "logits_at",
    "probe_of",
    "trainable_linears",
]

SHORT, WINDOW = 9, 15
BUDGET = {"cpu": 10**12, "other": 10**14}  # operations of a forward at most: ten seconds of two cores
READ = {"cpu": 2 * 10**11, "other": 10**13}  # bytes of weights read at most for tokens one by one: ten seconds too
# In bfloat16 a small difference looks like rounding. Only these, which test_families.py shows to agree in float32,
# are computed in slots and as a tree there, or in batches with the library's cache; and the last ones without it.
_SLOTS = """
afmoe apertus arcee aria_text axk1 biogpt bitnet cohere cohere2 cohere2_moe ctrl cwm dbrx deepseek_v2 deepseek_v3
diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3 gemma3_text
gemma3n_text gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa
granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax
internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama4_text longcat_flash mellum mimo_v2_flash minicpm3
minimax_m2 ministral ministral3 mixtral modernbert-decoder nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon
phi phi3 phi4_multimodal phimoe qwen2_moe qwen3_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
"""
SLOTS = frozenset(_SLOTS.split())
_BATCHED = """
axk2 bailing_hybrid bamba bloom codegen deepseek_v32 doge dots3_note_text falcon falcon_h1 falcon_mamba glm_moe_dsa
gpt_neo gpt_neox_japanese gptj granitemoehybrid hy_v4 inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe lfm3
mamba mamba2 minimax mpt nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next xglm zamba zamba2 zaya
"""
BATCHED = frozenset(_BATCHED.split())
NOT_CONTINUED = frozenset({"falcon_mamba", "jamba", "mamba"})  # by several tokens at once
_NOT_IN_PARTS = """
axk2 bloom codegen deepseek_v32 deepseek_v4 doge dots3_note_text falcon falcon_mamba glm_moe_dsa gpt_neo
gpt_neox_japanese gptj hy_v4 inkling2_text inkling_text jamba mamba minimax minimax_m3_vl_text mpt
openai-gpt qwen4_exp_text recurrent_gemma rwkv xglm xlstm
"""
NOT_IN_PARTS = frozenset(_NOT_IN_PARTS.split())  # in training; see training/library_parts.py
_WHOLE = """
deepseek_v4 openai-gpt qwen4_exp_text recurrent_gemma rwkv xlstm
"""
WHOLE = frozenset(_WHOLE.split())
FAILURES = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError, AssertionError)


@attrs.frozen(eq=False)
class Probe:
    """What is computed to compare.

    Attributes:
        tokens: int64 [N], ordinary ones of the vocabulary.
        places: of logits that are compared: the first ones, those around each threshold, and the last ones.
        ends: lengths at which something may change, as far as N goes beyond them.
        beyond: whether N is beyond every length at which the config says that something may change; longer ones are
            left out where they would take more than ``BUDGET``.
        window: size that windows have in comparisons (``Base.trial``), where those of the model are too long to be
            tried; or None. Code is the same for windows of any size, and where the library has the size from
            elsewhere than rlkit, logits differ.
        steps: how many of the first tokens are decoded one by one.
        exact: whether the model is computed in float32 at least.
    """

    tokens: np.ndarray
    places: np.ndarray
    ends: list[int]
    beyond: bool
    window: int | None
    steps: int
    exact: bool

    def agrees(self, logits: torch.Tensor, expected: torch.Tensor, *, slack: float = 1.0) -> bool:
        """Return whether logits [n, V] are equal up to rounding: each row in float32, all together in bfloat16."""
        logits, expected = (_centred(x.cpu()) for x in (logits, expected))
        if self.exact:
            return bool(((logits - expected).norm(dim=-1) <= slack * 1e-4 * expected.norm(dim=-1)).all())
        return bool((logits - expected).norm() <= slack * 0.1 * expected.norm())


def _centred(logits: torch.Tensor) -> torch.Tensor:
    """Return logits [n, V] of the CPU less their means, in float64, which not every device has."""
    wide = logits.double()
    return wide - wide.mean(-1, keepdim=True)


def probe_of(model: Any, special: set[int], longest: int) -> Probe:
    """Return the probe of a model.

    Args:
        model: a causal language model.
        special: ids that stand for no text, and perhaps for an image.
        longest: tokens of its context.
    """
    size = model.get_input_embeddings().weight.shape[0]
    ordinary = np.setdiff1d(np.arange(size), np.array(sorted(special), np.int64))
    config = model.config.get_text_config()
    ends = thresholds(config, longest)
    operations = 2 * sum(p.numel() for p in model.parameters())
    size_in_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    kind = "cpu" if model.device.type == "cpu" else "other"
    budget, steps = BUDGET[kind], READ[kind] // size_in_bytes
    within = [end for end in ends if operations * (end + SHORT) <= budget]
    windows = {window.size for window in layer_windows(config) or () if window is not None}
    window, others = None, config
    if not windows <= set(within):
        window, others = WINDOW, copy.deepcopy(config)
        shorten(others, WINDOW)
    beyond = all(end in within or end == window for end in thresholds(others, longest))
    length = min(max([*within, window or 0, 0]) + SHORT, longest)
    tokens = np.random.default_rng(0).choice(ordinary if ordinary.size else np.arange(size), length)
    around = [range(end - 1, end + 3) for end in [*within, window or 0]]
    places = sorted({x for r in [range(SHORT), *around, range(length - 4, length)] for x in r if 0 <= x < length})
    steps = min(max(steps, 4), 64)
    return Probe(tokens, np.array(places), within, beyond, window, steps, model.dtype != torch.bfloat16)


def logits_at(model: Any, rows: np.ndarray, index: np.ndarray) -> torch.Tensor:
    """Return logits [n, V] at the flat ``index`` of ``rows`` [B, T], by the model's own forward."""
    tokens, places = (torch.from_numpy(x).to(model.device) for x in (rows, index))
    with logits_to_keep(model, places):
        logits: torch.Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return logits


@torch.no_grad()
def causal(model: Any, probe: Probe) -> bool:
    """Return whether a row's logits depend neither on the tokens behind nor on a longer row beside it."""
    tokens, places = probe.tokens, probe.places
    other = tokens[::-1][:-3].copy()
    few = places[places < other.size]
    rows = np.stack([tokens, np.append(other, np.zeros(3, np.int64))])
    expected = [logits_at(model, tokens[None], places), logits_at(model, other[None], few)]
    beside = [logits_at(model, rows, np.concatenate([places, tokens.size + few]))]
    for length in (tokens.size // 2, tokens.size - 3):
        begin = places[places < length]
        beside.append(logits_at(model, tokens[None, :length], begin))
        expected.append(expected[0][: begin.size])
    return probe.agrees(torch.cat(beside), torch.cat(expected), slack=5)


def trainable_linears(model: Any, probe: Probe) -> frozenset[str]:
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

        def mark(module: nn.Module, args: tuple[Any, ...], out: Any, name: str = name) -> Any:
            if not _is_product(module, args, out):
                odd.add(name)
                return out
            return out + marks.setdefault(name, out.new_zeros((), requires_grad=True))

        hooks.append(module.register_forward_hook(mark))
    try:
        with torch.enable_grad():
            tokens = torch.from_numpy(probe.tokens[None, :SHORT]).to(model.device)
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
def _is_product(module: Any, args: tuple[Any, ...], out: object) -> bool:
    """Return whether a linear module gave x W^T + b."""
    if not (args and isinstance(out, torch.Tensor) and out.is_floating_point()):
        return False
    weight = module.weight if isinstance(module, nn.Linear) else module.weight.t()
    if not weight.is_floating_point():
        return False
    with gathered(weights_of(module)):
        product = nn.functional.linear(args[0], weight, module.bias)
    return product.shape == out.shape and bool((product - out).norm() <= 1e-2 * product.norm() + 1e-30)


def _pattern(name: str) -> str:
    return re.sub(r"\d+", "*", name)
