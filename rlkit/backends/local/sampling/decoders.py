"""Which way a model is decoded: the first that computes what the library's own forward computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from rlkit.backends.local.cache.kv_attention import ATTENTION
from rlkit.backends.local.cache.kv_cache import KVCache
from rlkit.backends.local.cache.shared_lru import Together
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import LibraryForward, LlamaForward
from rlkit.backends.local.model.probe import BATCHED, FAILURES, NOT_CONTINUED, WHOLE, logits_at
from rlkit.backends.local.sampling.cache_probe import cache_agrees, parts_agree, rows_agree
from rlkit.backends.local.sampling.continuous_batching import ContinuousBatching
from rlkit.backends.local.sampling.cuda_graphs import CudaGraphs
from rlkit.backends.local.sampling.decoder import Decoder
from rlkit.backends.local.sampling.library_batching import LibraryBatching
from rlkit.backends.local.sampling.library_decoder import LibraryDecoder

__all__ = ["decoder_for"]

_log = logging.getLogger(__name__)


def decoder_for(
    base: Base, merge: bool, prefix_bytes: int, cuda_graphs: bool, beside: Together | None = None
) -> Decoder:
    """Return ``ContinuousBatching`` where it computes what the library computes on the base's probe.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
        prefix_bytes: bytes kept of the keys and values of earlier sequences.
        cuda_graphs: whether decoding steps are CUDA graphs, on such a device.
        beside: the prefix caches of other decoders, with which it shares those bytes.
    """
    decoder = _decoder_for(base, merge, prefix_bytes, cuda_graphs, beside)
    base.kv_account.add(decoder)
    graphs = isinstance(decoder, ContinuousBatching) and decoder.graphs is not None
    how = "CUDA graphs once a replay equals the step" if graphs else "steps"
    _log.info("decoding on %s: %s, %s", base.device, type(decoder).__name__, how)
    return decoder


def _decoder_for(base: Base, merge: bool, prefix_bytes: int, cuda_graphs: bool, beside: Together | None) -> Decoder:
    if base.llama:
        forward = LlamaForward(base)
        graphs: Callable[[KVCache], CudaGraphs] | None = None
        if cuda_graphs and base.device.type == "cuda":
            graphs = partial(CudaGraphs, forward, base)
        return ContinuousBatching(forward, base, prefix_bytes, merge=merge, beside=beside, graphs=graphs)
    if "way" not in base.known:
        base.known["way"] = _way(base)
    if base.known["way"] == "slots":
        modules = LibraryForward(base.tree(ATTENTION), packed=base.packed if base.small else None)
        return ContinuousBatching(modules, base, prefix_bytes, merge=merge, beside=beside)
    if base.known["way"] == "whole":
        return LibraryDecoder(base, merge=merge)
    mixes, continues = base.known["way"] == "cache", base.known["continues"]
    return LibraryBatching(base, prefix_bytes, merge=merge, beside=beside, mixes=mixes, continues=continues)


def _way(base: Base) -> str:
    """How the library's modules are decoded: the first of these which gives the logits of the model's own forward.

    In "slots"; with the library's "cache"; with that, one "request" at a time; or "whole" for each token.
    """
    if base.plain and _slots_agree(base):
        return "slots"
    model: Any = base.model
    kind, exact = model.config.get_text_config().model_type, base.probe.exact
    if (kind in WHOLE and not exact) or not cache_agrees(base):
        return "whole"
    base.known["continues"] = (exact or kind in BATCHED - NOT_CONTINUED) and parts_agree(base)
    return "cache" if (exact or kind in BATCHED) and rows_agree(base) else "request"


@torch.no_grad()
def _slots_agree(base: Base) -> bool:
    """For a prompt at once and in two parts, for rows of unequal lengths, and for a token more of each of those."""
    tokens, n = base.probe.tokens, base.probe.tokens.size
    half = n // 2
    where = np.array([n - 1, n - 1, n - 3, 4, 3, n - 2, 5, 4])
    # Rows are padded to multiples of 4, as on some processors.
    decoder = ContinuousBatching(LibraryForward(base.trial(ATTENTION)), base, 0, merge=False, row_multiple=4)
    try:
        expected = logits_at(base.trial(), tokens[None], where)
        whole = decoder.prefill(0, [tokens], [0])
        decoder.prefill(1, [tokens[:half]], [0])
        split = decoder.prefill(1, [tokens[half:]], [half])
        starts = [n - 2, 5, 4]
        unequal = decoder.prefill(2, [tokens[:start] for start in starts], [0, 0, 0])
        longer = decoder.prefill(2, [tokens[start : start + 1] for start in starts], starts)
        return base.probe.agrees(torch.cat([whole, split, unequal, longer]), expected)
    except FAILURES:
        return False
