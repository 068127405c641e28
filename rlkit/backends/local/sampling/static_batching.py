"""Static batching: one request at a time through the library's own forward, whatever the architecture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rlkit.backends.drawing import draw
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import LibraryForward
from rlkit.backends.local.model.logits_to_keep import logits_to_keep
from rlkit.backends.local.sampling.decoder import Decoder
from rlkit.backends.local.sampling.requests import SampleRequest, SampleRow, ScoreRequest

__all__ = ["StaticBatching"]


class StaticBatching(Decoder):
    """One request at a time, with the model's own cache.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
        cached: False computes everything again for each token.
    """

    mixes = False

    def __init__(self, base: Base, *, merge: bool, cached: bool) -> None:
        forward = LibraryForward(base.tree())
        super().__init__(forward, merge=merge)
        self._model = forward.model
        self._running: list[SampleRow | None] = []  # a row that ended leaves its place in the cache empty
        self._cached, self._device = cached, base.device
        self._cache: dict[str, Any] = {}

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        ((request, count),) = admitted
        self.rows = [SampleRow(request, request.started + i) for i in range(count)]
        self._running = list(self.rows)
        request.started += count
        self._cache = {}
        prompt = torch.from_numpy(np.array(request.prompt)).to(self._device)
        self._extend(self.logits(prompt.expand(count, -1)))

    def step(self) -> None:
        tokens = [[row.tokens[-1] if row is not None else 0] for row in self._running]
        if self._cache:
            self._extend(self.logits(torch.tensor(tokens, device=self._device)))
            return
        whole = [[*r.request.prompt.tolist(), *r.tokens] for r in self.rows]
        self._running = list(self.rows)
        self._extend(self.logits(torch.tensor(whole, device=self._device)))

    def forget(self) -> None:
        if self.rows and self.rows[0].request.dropped:  # all are of one request
            self.abandon()

    def invariant(self) -> bool:
        return False  # nothing runs beside a request, but how many samples it has decides how products are added

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        for request in requests:
            tokens = torch.from_numpy(np.array(request.tokens)).to(self._device)
            request.read(1, self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1])
            request.finish()
            yield

    def abandon(self) -> list[SampleRow]:
        rows, self.rows, self._running, self._cache = self.rows, [], [], {}
        return rows

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits [B, V] after the last of ``tokens`` [B, T], which continue what is in the cache."""
        rows, length = tokens.shape
        index = torch.arange(rows, device=self._device) * length + length - 1
        with logits_to_keep(self._model, index):
            out = self._model(input_ids=tokens, use_cache=self._cached, **self._cache)
        names = ("past_key_values", "cache_params")
        if self._cached:
            self._cache = {name: out[name] for name in names if out.get(name) is not None}
        logits: torch.Tensor = out.logits[0]
        return logits

    def _extend(self, logits: torch.Tensor) -> None:
        running = [(i, row) for i, row in enumerate(self._running) if row is not None]
        uniforms = np.array([row.uniform() for _, row in running])
        params = [row.request.params for _, row in running]
        tokens, logprobs = draw(logits[[i for i, _ in running]], params, uniforms)
        for k, (i, row) in enumerate(running):
            if row.add(int(tokens[k]), float(logprobs[k])):
                self._running[i] = None
        self.rows = [row for row in self._running if row is not None]
        if not self.rows:
            self._cache = {}
