"""Which way a model is decoded: the first that computes what the library's own forward computes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import torch

from rlkit._fallback import Outcome
from rlkit.backends.local.cache.kv_cache import ATTENTION, KVCache
from rlkit.backends.local.cache.prefix_cache import Together
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.model.probe import BATCHED, LLAMA, NOT_CONTINUED, WHOLE, logits_at
from rlkit.backends.local.sampling._batching import ContinuousBatching, CudaGraphs
from rlkit.backends.local.sampling._library import LibraryBatching, LibraryDecoder
from rlkit.backends.local.sampling.scheduler import Decoder

__all__ = ["cache_agrees", "decoder_for", "parts_agree", "rows_agree"]


class _Trial:
    """Rows of the probe's tokens, whose logits are compared with those of the model's own forward."""

    def __init__(self, base: Base) -> None:
        self.base, self.tokens = base, base.probe.tokens
        self.decoder = LibraryBatching(base, 0, merge=False)
        self.cache = self.decoder.new_cache()
        self.lengths: list[int] = []
        self.logits: list[torch.Tensor] = []
        self.places: list[int] = []

    def enter(self, *ends: int, rows: int = 1) -> None:
        """Compute the first tokens, up to each of ``ends`` at once, and let that many rows of them enter."""
        cache, begin = self.decoder.new_cache(), 0
        for end in ends:
            self.logits.append(self.decoder.decode(cache, self.tokens[None, begin:end]))
            self.places.append(end - 1)
            begin = end
        self.cache.add(cache, [0] * rows)
        self.lengths += [begin] * rows

    def leave(self, slot: int) -> None:
        """Remove a row."""
        self.cache.remove(slot)
        last = self.lengths.pop()
        if slot < len(self.lengths):
            self.lengths[slot] = last

    def step(self) -> None:
        """Compute one more token of every row."""
        self.logits.append(self.decoder.decode(self.cache, self.tokens[self.lengths][:, None]))
        self.places += self.lengths
        self.lengths = [length + 1 for length in self.lengths]

    def agrees(self) -> Outcome:
        """Return whether the logits are the model's own."""
        expected = logits_at(self.base.model, self.tokens[None], np.array(self.places))
        return self.base.probe.agrees(torch.cat(self.logits), expected, slack=10 if self.base.probe.exact else 1)


@torch.no_grad()
def cache_agrees(base: Base) -> Outcome:
    """Return whether it is right for two rows of one prompt, a token at a time."""
    n, outcome = base.probe.tokens.size, Outcome(works=True)
    for first, last in {(5, min(n, 5 + base.probe.steps)), (n - 4, n)}:
        trial = _Trial(base)
        trial.enter(first, rows=2)
        for _ in range(first, last):
            trial.step()
        outcome = outcome and trial.agrees()
    return outcome


@torch.no_grad()
def rows_agree(base: Base) -> Outcome:
    """Return whether it is right for rows of unequal lengths, which enter while others run, and which leave.

    There are rows that come to each of the lengths at which something may change.
    """
    longest = base.probe.tokens.size - 5
    trial = _Trial(base)
    for length in [*sorted({2, longest, *(min(end - 2, longest) for end in base.probe.ends if end > 2)}), 3]:
        trial.enter(length, rows=2)
        trial.step()
    for slot in (0, 1):
        trial.leave(slot)
        trial.step()
    return trial.agrees()


@torch.no_grad()
def parts_agree(base: Base) -> Outcome:
    """Return whether it is right for several tokens at once that continue a cache."""
    n, trial = base.probe.tokens.size, _Trial(base)
    trial.enter(3, 5)
    trial.enter(n // 2, n - 2, n)
    return trial.agrees()


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
    known = base.known
    if known.decoding is None:
        known.decoding = _choose_decoding(base)
    if known.decoding == "slots":
        forward = SamplingForward(base, base.tree(ATTENTION))
        graphs: Callable[[KVCache], CudaGraphs] | None = None
        if cuda_graphs and base.device.type == "cuda" and base.kind in LLAMA:
            graphs = partial(CudaGraphs, forward, base)
        return ContinuousBatching(forward, base, prefix_bytes, merge=merge, beside=beside, graphs=graphs)
    if known.decoding == "whole":
        return LibraryDecoder(base, merge=merge)
    mixes, continues = known.decoding == "cache", bool(known.continues)
    return LibraryBatching(base, prefix_bytes, merge=merge, beside=beside, mixes=mixes, continues=continues)


def _choose_decoding(base: Base) -> Literal["slots", "cache", "request", "whole"]:
    """Return the first way of ``Known.decoding`` that gives the logits of the model's own forward."""
    tries, kind, exact = base.tries, base.kind, base.probe.exact
    slower = "it is decoded with the library's cache"
    if tries("decoding in slots", _slots_agree, slower, eligible=base.plain):
        return "slots"
    slower = "all tokens are computed again for each new one"
    if not tries("the library's cache", cache_agrees, slower, eligible=exact or kind not in WHOLE):
        return "whole"
    slower, eligible = "prompts do not reuse earlier computed prefixes", exact or kind in BATCHED - NOT_CONTINUED
    base.known.continues = tries("a continued cache", parts_agree, slower, eligible=eligible)
    slower, eligible = "requests are decoded one at a time", exact or kind in BATCHED
    return "cache" if tries("a cache of unequal rows", rows_agree, slower, eligible=eligible) else "request"


@torch.no_grad()
def _slots_agree(base: Base) -> Outcome:
    """Compare a prompt at once and in two parts, rows of unequal lengths, and one more token of each."""
    tokens, n = base.probe.tokens, base.probe.tokens.size
    half = n // 2
    where = np.array([n - 1, n - 1, n - 3, 4, 3, n - 2, 5, 4])
    forward = SamplingForward(base, base.trial(ATTENTION), prepack=False)
    decoder = ContinuousBatching(forward, base, 0, merge=False)
    expected = logits_at(base.trial(), tokens[None], where)
    whole = decoder.prefill(0, [tokens], [0])
    decoder.prefill(1, [tokens[:half]], [0])
    split = decoder.prefill(1, [tokens[half:]], [half])
    starts = [n - 2, 5, 4]
    unequal = decoder.prefill(2, [tokens[:start] for start in starts], [0, 0, 0])
    longer = decoder.prefill(2, [tokens[start : start + 1] for start in starts], starts)
    slack = 2 if base.wide else 1  # it rounds less often than the library does
    return base.probe.agrees(torch.cat([whole, split, unequal, longer]), expected, slack=slack)
