"""Ways to decode: rows in slots for the usual architectures, the library's own cache or none for every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.logits_to_keep import selected_logits
from rlkit.backends.local.model.probe import FAILURES, WHOLE, logits_at
from rlkit.backends.local.sampling.continuous_batching import SlotDecoder
from rlkit.backends.local.sampling.cuda_graphs import Graphs
from rlkit.backends.local.sampling.kv_attention import ATTENTION
from rlkit.backends.local.sampling.requests import Row, SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.snapshots import SamplingLlama, SamplingModel, Snapshot
from rlkit.backends.sampling import draw

__all__ = ["Decoder", "LibraryDecoder", "decoder_for"]


class Decoder(Protocol):
    """Rows of one snapshot, decoded a token at a time."""

    rows: list[Row]
    mixes: bool  # whether rows of several requests are decoded together

    def use(self, snapshot: Snapshot) -> None:
        """Takes the weights of ``snapshot``; there are no rows."""

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        """Begins the next ``count`` rows of each request, up to their first token."""

    def step(self) -> None:
        """One more token for every row."""

    def forget(self) -> None:
        """Lets the rows go whose request was dropped."""

    def invariant(self) -> bool:
        """Whether a row's logits have the same bits alone and beside others: made so, and shown by some tokens."""

    def score(self, request: ScoreRequest) -> np.ndarray:
        """float32 [T]."""

    def abandon(self) -> list[Row]:
        """Gives up all rows and returns them."""


def decoder_for(base: Base, merge: bool, limit: int, graphs: bool) -> Decoder:
    """A ``SlotDecoder`` where it computes what the library computes on the base's probe, else a ``LibraryDecoder``.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
        limit: bytes kept of the keys and values of earlier sequences.
        graphs: whether decoding steps are CUDA graphs, on such a device.
    """
    if base.llama:
        recorded = graphs and base.device.type == "cuda"
        return SlotDecoder(SamplingLlama(base, merge=merge), limit, Graphs if recorded else None)
    way = _way(base)
    if way == "slots":
        return SlotDecoder(SamplingModel(base, ATTENTION, merge=merge), limit)
    return LibraryDecoder(SamplingModel(base, None, merge=merge), cached=way == "cache")


class LibraryDecoder:
    """One request at a time through the model's own forward, whatever its architecture.

    Args:
        model: whose weights.
        cached: with the model's own cache; otherwise everything is computed again for each token.
    """

    mixes = False

    def __init__(self, model: SamplingModel, *, cached: bool) -> None:
        self.rows: list[Row] = []
        self._running: list[Row | None] = []
        self._model = model
        self._cached = cached
        self._device = model.base.device
        self._cache: dict[str, Any] = {}

    def use(self, snapshot: Snapshot) -> None:
        self._model.use(snapshot)

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        ((request, count),) = admitted
        self._running = [Row(request, request.started + i) for i in range(count)]
        self.rows = [row for row in self._running if row is not None]
        request.started += count
        self._cache = {}
        prompt = torch.from_numpy(np.array(request.prompt)).to(self._device)
        self._extend(self._forward(prompt.expand(count, -1)))

    def step(self) -> None:
        tokens = [[row.tokens[-1] if row is not None else 0] for row in self._running]
        if self._cache:
            self._extend(self._forward(torch.tensor(tokens, device=self._device)))
            return
        whole = [[*r.request.prompt.tolist(), *r.tokens] for r in self.rows]  # no cache: everything again
        self._running = list(self.rows)
        self._extend(self._forward(torch.tensor(whole, device=self._device)))

    def forget(self) -> None:
        if self.rows and self.rows[0].request.dropped:  # all are of one request
            self.abandon()

    def invariant(self) -> bool:
        """False: nothing runs beside a request, but how many samples it has decides how products are added."""
        return False

    def score(self, request: ScoreRequest) -> np.ndarray:
        tokens = torch.from_numpy(np.array(request.tokens)).to(self._device)
        logits = self._model.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        logprobs = torch.log_softmax(logits.float() / request.temperature, dim=-1).gather(1, tokens[1:, None])
        return np.concatenate([np.zeros(1, np.float32), logprobs[:, 0].cpu().numpy()])

    def abandon(self) -> list[Row]:
        rows, self.rows, self._running, self._cache = self.rows, [], [], {}
        return rows

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] after the last of ``tokens`` [B, T]."""
        rows, length = tokens.shape
        index = torch.arange(rows, device=self._device) * length + length - 1
        with selected_logits(self._model.model, index):
            out = self._model.model(input_ids=tokens, use_cache=self._cached, **self._cache)
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


def _way(base: Base) -> str:
    """How the library's modules are decoded: in "slots", with the model's own "cache", or "whole" for each token.

    That is the first of the three which gives the logits of the model's own forward; found once for a base.
    """
    if "way" not in base.known:
        model: Any = base.model
        rounds = not base.probe.exact and model.config.get_text_config().model_type in WHOLE
        if base.plain and _slots_agree(SlotDecoder(SamplingModel(base, ATTENTION, merge=False), 0), base):
            base.known["way"] = "slots"
        else:
            cached = LibraryDecoder(SamplingModel(base, None, merge=False), cached=True)
            base.known["way"] = "cache" if not rounds and _cache_agrees(cached, base) else "whole"
    way: str = base.known["way"]
    return way


@torch.no_grad()
def _slots_agree(decoder: SlotDecoder, base: Base) -> bool:
    """For a prompt at once and in two parts, for rows of unequal lengths, and for a token more of each of those."""
    tokens, n = base.probe.tokens, base.probe.tokens.size
    half = n // 2
    where = np.array([n - 1, n - 1, n - 3, 4, 3, n - 2, 5, 4])
    decoder._alike = 4  # noqa: SLF001  # rows are added to make multiples of that, as on some processors
    try:
        expected = logits_at(base.model, tokens[None], where)
        whole = decoder.prefill(0, [tokens], [0])
        decoder.prefill(1, [tokens[:half]], [0])
        split = decoder.prefill(1, [tokens[half:]], [half])
        starts = [n - 2, 5, 4]
        unequal = decoder.prefill(2, [tokens[:start] for start in starts], [0, 0, 0])
        longer = decoder.prefill(2, [tokens[start : start + 1] for start in starts], starts)
        return base.probe.agrees(torch.cat([whole, split, unequal, longer]), expected)
    except FAILURES:
        return False
    finally:
        decoder.abandon()


@torch.no_grad()
def _cache_agrees(decoder: LibraryDecoder, base: Base) -> bool:
    """For two rows, a token at a time."""
    tokens, n = base.probe.tokens, base.probe.tokens.size
    both = torch.from_numpy(np.stack([tokens, tokens])).to(base.device)
    try:
        for first, last in {(5, min(n, 5 + base.probe.steps)), (n - 4, n)}:
            found = [decoder._forward(both[:, :first])]  # noqa: SLF001
            found += [decoder._forward(both[:, t : t + 1]) for t in range(first, last)]  # noqa: SLF001
            decoder.abandon()
            expected = logits_at(base.model, tokens[None], np.arange(first - 1, last).repeat(2))
            if not base.probe.agrees(torch.cat(found), expected, slack=10 if base.probe.exact else 1):
                return False
    except FAILURES:
        return False
    finally:
        decoder.abandon()
    return True
