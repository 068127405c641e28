"""Decoding through the library's own forward alone, which computes each token with all that come before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from rlkit.backends.drawing import draw
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.defaults import kv_bytes, rows_that_fit
from rlkit.backends.local.model.forward import LibraryForward
from rlkit.backends.local.model.logits_to_keep import logits_to_keep
from rlkit.backends.local.sampling.decoder import Decoder
from rlkit.backends.local.sampling.recurrent_step import take_steps
from rlkit.backends.local.sampling.requests import SampleRequest, SampleRow, ScoreRequest
from rlkit.backends.local.sampling.scoring import score_batches, score_rows

__all__ = ["TOKENS", "LibraryDecoder"]

TOKENS = 2048  # computed at once at most, but for one row


class LibraryDecoder(Decoder):
    """Rows of several requests, each token computed with all that come before it, for models whose cache is not right.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
    """

    mixes = True

    def __init__(self, base: Base, *, merge: bool) -> None:
        self.forward: LibraryForward
        super().__init__(LibraryForward(base.tree(), packed=base.packed if base.small else None), merge=merge)
        self.base, self.model = base, self.forward.model
        if base.device.type == "cpu":
            take_steps(self.model)

    def capacity(self, length: int) -> int:
        return rows_that_fit(self.base, length, self)

    @property
    def reserved(self) -> int:
        longest = max((row.request.end for row in self.rows), default=0)
        return max(self.held, len(self.rows) * longest * kv_bytes(self.base))

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        rows = []
        for request, count in admitted:
            rows += [SampleRow(request, request.started + i) for i in range(count)]
            request.started += count
        self.rows += rows
        self.extend(rows, self._whole(rows))

    def step(self) -> None:
        self.extend(self.rows, self._whole(self.rows))

    def forget(self) -> None:
        self.leave([slot for slot, row in enumerate(self.rows) if row.request.dropped])

    def invariant(self) -> bool:
        return False  # how products are added depends on how many rows there are

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        for batch in score_batches(requests, TOKENS, share=False):
            yield from score_rows(batch, self.forward.logits_in_parts)

    def abandon(self) -> list[SampleRow]:
        rows, self.rows = self.rows, []
        return rows

    def _recompute(self) -> None:
        pass  # nothing is kept

    def extend(self, rows: Sequence[SampleRow], logits: torch.Tensor) -> None:
        """Draw a token for each of ``rows``, the last ones of all, and let those that ended go."""
        first = len(self.rows) - len(rows)
        self.leave([first + i for i, end in enumerate(self.draw(rows, logits)) if end])

    def draw(self, rows: Sequence[SampleRow], logits: torch.Tensor) -> list[bool]:
        """Draw a token for each of ``rows``, and return which of them it ended."""
        uniforms = np.array([row.uniform() for row in rows])
        tokens, logprobs = draw(logits, [row.request.params for row in rows], uniforms, [row.counts for row in rows])
        return [row.add(int(tokens[i]), float(logprobs[i])) for i, row in enumerate(rows)]

    def leave(self, slots: Sequence[int]) -> None:
        """Give the places of the rows in ``slots``, in ascending order, to the last ones."""
        for slot in reversed(slots):
            last = self.rows.pop()
            if slot < len(self.rows):
                self.rows[slot] = last

    def logits(self, tokens: np.ndarray, index: np.ndarray, **arguments: object) -> torch.Tensor:
        """Return logits [n, V] at the flat ``index`` [n] of ``tokens`` [B, T]."""
        ids, places = (torch.from_numpy(x).to(self.base.device) for x in (tokens, index))
        with logits_to_keep(self.model, places):
            logits: torch.Tensor = self.model(input_ids=ids, **arguments).logits
        return logits[0]

    def _whole(self, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Return logits [B, V] behind the last tokens of ``rows``."""
        last = np.array([row.position for row in rows])
        longest = int(last.max()) + 1
        tokens = np.zeros((len(rows), longest), np.int64)  # what stands behind a row's last token changes nothing
        for padded, row in zip(tokens, rows, strict=True):
            padded[: row.position + 1] = [*row.request.prompt, *row.tokens]
        logits, at_once = [], max(1, TOKENS // longest)
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            index = np.arange(last[part].size) * longest + last[part]
            logits.append(self.logits(tokens[part], index, use_cache=False))
        return torch.cat(logits)
