"""Decoding over the library's own cache, for architectures that are not decoded in slots.

Prompts that come together are a batch with a cache, in which a prompt of several rows is computed once, and from which
rows are taken out as they end. Requests that come later are a batch too: whatever keys, recurrent states and
convolutions a cache has, nothing is ever joined to it. Where tests show that an architecture is right for prompts
padded on the left, those of all lengths are in one batch. Else they are in one for each length, without a mask.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import attrs
import numpy as np
import torch
from transformers.cache_utils import Cache, DynamicCache

from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.model.memory import kv_bytes, rows_that_fit, to_device
from rlkit.backends.local.model.output_head import logits_to_keep
from rlkit.backends.local.model.probe import UNCACHED
from rlkit.backends.local.sampling._scoring import score_batches, score_rows
from rlkit.backends.local.sampling.sampler import SampleRequest, SampleRow, ScoreRequest
from rlkit.backends.local.sampling.scheduler import Decoder, begin_rows, draw_tokens

TOKENS = 8192  # of prompts in one batch at most, but for one prompt
SCORED = 2048  # computed at once at most, but for one text


@attrs.define(eq=False)
class _Batch:
    """Rows that are decoded together.

    Attributes:
        rows: in the order of the cache.
        padding: int64 [B], columns before each row's first token.
        columns: of the cache, one for each token and each place of padding.
        cache: of all their tokens but the last; None where there is none from which rows can be taken.
    """

    rows: list[SampleRow]
    padding: np.ndarray
    columns: int = 0
    cache: Cache | None = None

    def take(self, rows: Sequence[SampleRow], index: Sequence[int]) -> None:
        """Keep ``rows``, which continue those at ``index``."""
        self.rows, self.padding = list(rows), self.padding[list(index)]
        if self.cache is not None and self.rows:
            self.cache.reorder_cache(torch.tensor(index))


class PaddedDecoder(Decoder):
    """Rows of several requests, in batches of those that began together.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
    """

    def __init__(self, base: Base, *, merge: bool) -> None:
        self.forward: SamplingForward
        super().__init__(SamplingForward(base, base.tree()), merge=merge)
        taken = inspect.signature(self.forward.model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._cache_name = "cache_params" if "cache_params" in taken else "past_key_values"
        self._base, self._pads, self._batches = base, base.layout == "padded", list[_Batch]()

    def capacity(self, length: int) -> int:
        return rows_that_fit(self._base, length, self)

    @property
    def held(self) -> int:
        return sum(len(batch.rows) * batch.columns for batch in self._batches) * kv_bytes(self._base)

    @property
    def reserved(self) -> int:
        longest = max((row.request.end for row in self.rows), default=0)
        return max(self.held, len(self.rows) * longest * kv_bytes(self._base))

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        for prompts in self._grouped(begin_rows(admitted)):
            rows = [row for _, several in prompts for row in several]
            batch, logits = self._begin([tokens for tokens, _ in prompts], rows)
            self._batches.append(batch)
            self._draw(batch, logits, [i for i, (_, several) in enumerate(prompts) for _ in several])

    def step(self) -> None:
        for batch in self._batches.copy():
            if batch.cache is None:
                _, logits = self._begin([np.append(row.computed, row.tokens[-1]) for row in batch.rows], batch.rows)
            else:
                logits = self._logits(batch, np.array([[row.tokens[-1]] for row in batch.rows]))
            self._draw(batch, logits, range(len(batch.rows)))

    def leave(self, slots: Sequence[int]) -> None:
        gone = {id(self.rows[slot]) for slot in slots}
        for batch in self._batches:
            left = [i for i, row in enumerate(batch.rows) if id(row) not in gone]
            if len(left) < len(batch.rows):
                batch.take([batch.rows[i] for i in left], left)
        self._note_rows()

    def abandon(self) -> list[SampleRow]:
        self._batches.clear()
        return super().abandon()

    def invariant(self) -> bool:
        return False  # how products are added depends on how many rows there are

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        for batch in score_batches(requests, SCORED, share=False):
            yield from score_rows(batch, self.forward.logits_in_parts)

    def _recompute(self) -> None:
        for i, batch in enumerate(self._batches):
            if batch.cache is not None:  # the longest row may have left: other padding than before
                self._batches[i], _ = self._begin([row.computed for row in batch.rows], batch.rows)

    def _grouped(
        self, prompts: Sequence[tuple[np.ndarray, list[SampleRow]]]
    ) -> Iterator[list[tuple[np.ndarray, list[SampleRow]]]]:
        """Yield what is in one batch."""
        group: list[tuple[np.ndarray, list[SampleRow]]] = []
        for tokens, rows in sorted(prompts, key=lambda prompt: prompt[0].size):
            longer = bool(group) and tokens.size > group[0][0].size and not self._pads
            if group and (longer or (len(group) + 1) * tokens.size > TOKENS):
                yield group
                group = []
            group.append((tokens, rows))
        if group:
            yield group

    def _begin(self, sequences: Sequence[np.ndarray], rows: list[SampleRow]) -> tuple[_Batch, torch.Tensor]:
        """Compute sequences that follow nothing; return their batch for ``rows``, and the logits [B, V] after them."""
        sizes = np.array([tokens.size for tokens in sequences])
        padded = np.zeros((sizes.size, sizes.max()), np.int64)
        for places, tokens in zip(padded, sequences, strict=True):
            places[places.size - tokens.size :] = tokens
        batch = _Batch(rows, padded.shape[1] - sizes)
        return batch, self._logits(batch, padded)

    def _logits(self, batch: _Batch, tokens: np.ndarray) -> torch.Tensor:
        """Return logits [B, V] after ``tokens`` [B, T], which continue the batch; its cache has them then."""
        device, (rows, length) = self._base.device, tokens.shape
        cached = self._base.kind not in UNCACHED
        arguments: dict[str, object] = {"input_ids": to_device(tokens, device), "use_cache": cached}
        if batch.cache is not None:
            arguments[self._cache_name] = batch.cache
        positions = np.arange(batch.columns, batch.columns + length) - batch.padding[:, None]
        if self._takes_positions:  # some forget those of their cache
            arguments["position_ids"] = to_device(positions.clip(0), device)
        if batch.padding.any():  # else no mask, since some take one of ones for padding
            mask = np.arange(batch.columns + length) >= batch.padding[:, None]
            arguments["attention_mask"] = to_device(mask.astype(np.int64), device)
        with logits_to_keep(self.forward.model, torch.arange(1, rows + 1, device=device) * length - 1):
            out = self.forward.model(**arguments)
        batch.columns += length
        cache = out.get(self._cache_name)
        batch.cache = cache if self._pads or _is_plain(cache) else None  # the former, tests show
        logits: torch.Tensor = out.logits[0]
        return logits

    def _draw(self, batch: _Batch, logits: torch.Tensor, index: Sequence[int]) -> None:
        """Draw a token for each row from the logits at ``index``; those that ended leave."""
        ended = draw_tokens(batch.rows, logits[list(index)])
        left = [i for i, end in enumerate(ended) if not end]
        if len(left) < len(ended) or list(index) != list(range(len(logits))):
            batch.take([batch.rows[i] for i in left], [index[i] for i in left])
        self._note_rows()

    def _note_rows(self) -> None:
        self._batches = [batch for batch in self._batches if batch.rows]
        self.rows = [row for batch in self._batches for row in batch.rows]


def _is_plain(cache: Cache | None) -> bool:
    """Return whether a cache has nothing but transformers' own layers, which know all that is kept of a row.

    Others may keep more, which would stay where it is when rows are taken out.
    """
    layers = [cache] if cache is None or type(cache) is not DynamicCache else cache.layers
    return all(type(layer).__module__ == DynamicCache.__module__ for layer in layers)
