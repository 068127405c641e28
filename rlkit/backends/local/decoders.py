"""Two ways to decode: rows in slots for the usual architectures, the library's own cache for every other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlkit.backends.local.attention import ATTENTION
from rlkit.backends.local.batching import SlotDecoder
from rlkit.backends.local.body import selected_logits
from rlkit.backends.local.graphs import Graphs
from rlkit.backends.local.llama import plain_attention
from rlkit.backends.local.model import Base
from rlkit.backends.local.requests import Row, SampleRequest, ScoreRequest
from rlkit.backends.local.weights import SamplingLlama, SamplingModel, Snapshot
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

    def score(self, request: ScoreRequest) -> np.ndarray:
        """float32 [T]."""

    def abandon(self) -> list[Row]:
        """Gives up all rows and returns them."""


def decoder_for(base: Base, merge: bool, limit: int, graphs: bool) -> Decoder:
    """A ``SlotDecoder`` where it computes what the library computes on a short probe, else a ``LibraryDecoder``.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
        limit: bytes kept of the keys and values of earlier sequences.
        graphs: whether decoding steps are CUDA graphs, on such a device.
    """
    if base.llama:
        recorded = graphs and base.device.type == "cuda"
        return SlotDecoder(SamplingLlama(base, merge=merge), limit, Graphs if recorded else None)
    if plain_attention(base.model.config.get_text_config()):
        model = SamplingModel(base, ATTENTION, merge=merge)
        if _agrees(SlotDecoder(model, 0)):
            return SlotDecoder(model, limit)
    return LibraryDecoder(SamplingModel(base, None, merge=merge))


class LibraryDecoder:
    """One request at a time through the model's own forward and cache, whatever its architecture."""

    mixes = False

    def __init__(self, model: SamplingModel) -> None:
        self.rows: list[Row] = []
        self._running: list[Row | None] = []
        self._model = model
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
            out = self._model.model(input_ids=tokens, use_cache=True, **self._cache)
        names = ("past_key_values", "cache_params")
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


@torch.no_grad()
def _agrees(decoder: SlotDecoder) -> bool:
    """Whether slots give the logits that the model's own forward gives, for a prompt, a split one and a long row."""
    base = decoder._base  # noqa: SLF001
    tokens = np.random.default_rng(0).integers(0, base.tokenizer.vocab_size, 9)
    try:
        expected = base.model(input_ids=torch.from_numpy(tokens)[None].to(base.device), use_cache=False).logits[0, -1]
        whole = decoder.prefill(0, [tokens], [0])[0]
        decoder.prefill(1, [tokens[:5]], [0])
        split = decoder.prefill(1, [tokens[5:]], [5])[0]
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError):
        return False
    finally:
        decoder.abandon()
    tolerance = float(expected.abs().max()) * (1e-4 if expected.dtype == torch.float32 else 0.1)
    return bool((whole - expected).abs().max() < tolerance and (split - expected).abs().max() < tolerance)
