"""Two ways to decode: rows in slots for the usual architectures, the library's own cache for every other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlkit.backends.local.cache import ATTENTION, ROWS, Slots
from rlkit.backends.local.head import plain_attention, selected_logits
from rlkit.backends.local.requests import Row, SampleRequest, ScoreRequest
from rlkit.backends.local.weights import SamplingModel, Snapshot
from rlkit.backends.sampling import draw, rounded_up

__all__ = ["Decoder", "LibraryDecoder", "SlotDecoder", "decoder_for"]

CHUNK = 512  # tokens of a prompt computed at once
SHARED = 8  # a common prefix shorter than this is computed again


class Decoder(Protocol):
    """Rows of one snapshot, decoded a token at a time."""

    rows: list[Row]

    def room(self, max_rows: int) -> int:
        """How many rows may join."""

    def use(self, snapshot: Snapshot) -> None:
        """Takes the weights of ``snapshot``; there are no rows."""

    def start(self, request: SampleRequest, count: int) -> None:
        """Begins the next ``count`` rows of ``request``, up to their first token."""

    def step(self) -> None:
        """One more token for every row."""

    def score(self, request: ScoreRequest) -> np.ndarray:
        """float32 [T]."""

    def abandon(self) -> list[Row]:
        """Gives up all rows and returns them."""


def decoder_for(make_model: Callable[[str | None], SamplingModel]) -> Decoder:
    """A ``SlotDecoder`` if it computes what the library computes on a short probe, else a ``LibraryDecoder``."""
    model = make_model(ATTENTION)
    if plain_attention(model.base.model.config.get_text_config()) and _agrees(SlotDecoder(model)):
        return SlotDecoder(model)
    return LibraryDecoder(make_model(None))


class SlotDecoder:
    """Continuous batching: rows of different lengths in slots 0..B-1, a row's place filled when it ends."""

    def __init__(self, model: SamplingModel) -> None:
        self.rows: list[Row] = []
        self._model = model
        self._base = model.base
        self._slots = Slots()

    def room(self, max_rows: int) -> int:
        return max_rows - len(self.rows)

    def use(self, snapshot: Snapshot) -> None:
        self._model.use(snapshot)

    def start(self, request: SampleRequest, count: int) -> None:
        slot, length = len(self.rows), int(request.prompt.size)
        self._slots.reserve(slot + count, length + 1)
        shared = self._share(request, slot)
        if request.first_logits is None or shared < length:
            logits = self.prefill(request.prompt, slot, min(shared, length - 1))
            request.first_logits = logits[-1]
        self._slots.copy(slot, slot + 1, slot + count, length)
        new = [Row(request, request.started + i) for i in range(count)]
        request.started += count
        self.rows += new
        self._extend(new, request.first_logits.expand(count, -1))
        if request.started == len(request.rngs):
            request.first_logits = None

    def step(self) -> None:
        rows = self.rows
        padded = rounded_up(len(rows), ROWS)
        tokens = np.zeros(padded, np.int64)
        positions = np.zeros(padded, np.int64)
        tokens[: len(rows)] = [row.tokens[-1] for row in rows]
        positions[: len(rows)] = [row.position for row in rows]
        self._slots.reserve(padded, int(positions.max()) + 1)
        at = torch.from_numpy(positions).to(self._base.device)
        mask = self._slots.at_rows(at)
        logits = self._forward(torch.from_numpy(tokens)[:, None], at[:, None], mask, np.arange(padded))
        self._extend(rows, logits[: len(rows)])

    def score(self, request: ScoreRequest) -> np.ndarray:
        tokens = request.tokens
        out = np.zeros(tokens.size, np.float32)
        if tokens.size < 2:
            return out
        slot = len(self.rows)
        self._slots.reserve(slot + 1, tokens.size)
        for start in range(0, tokens.size - 1, CHUNK):
            part = tokens[start : min(start + CHUNK, tokens.size - 1)]
            logits = self._span(part, slot, start, np.arange(part.size))
            logprobs = torch.log_softmax(logits.float() / request.temperature, dim=-1)
            targets = torch.from_numpy(np.array(tokens[start + 1 : start + 1 + part.size])).to(logits.device)
            out[start + 1 : start + 1 + part.size] = logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()
        if not self.rows:
            self._slots.free()
        return out

    def abandon(self) -> list[Row]:
        rows, self.rows = self.rows, []
        self._slots.free()
        return rows

    def prefill(self, tokens: np.ndarray, slot: int, start: int) -> torch.Tensor:
        """Computes ``tokens[start:]`` into a slot that holds those before; returns the last one's logits [.., V]."""
        logits = None
        while start < tokens.size:
            part = tokens[start : start + CHUNK]
            # The head sees a multiple of ROWS rows too: the last position, repeated.
            logits = self._span(part, slot, start, np.full(ROWS, part.size - 1))
            start += part.size
        assert logits is not None  # noqa: S101  # start < tokens.size at first
        return logits

    def _share(self, request: SampleRequest, slot: int) -> int:
        """Copies into ``slot`` the longest prefix that a running row has in common; returns its length."""
        best, source = 0, 0
        seen: set[int] = set()
        for i, row in enumerate(self.rows):
            if id(row.request) in seen:
                continue
            seen.add(id(row.request))
            length = common_prefix(request.prompt, row.request.prompt)
            if length > best:
                best, source = length, i
        if best < SHARED and best < request.prompt.size:
            return 0
        self._slots.copy(source, slot, slot + 1, best)
        return best

    def _span(self, tokens: np.ndarray, slot: int, start: int, index: np.ndarray) -> torch.Tensor:
        """Logits at ``index`` of ``tokens``, which stand at start.. of one slot."""
        padded = rounded_up(tokens.size, ROWS)
        ids = np.zeros(padded, np.int64)
        ids[: tokens.size] = tokens
        self._slots.reserve(slot + 1, start + padded)
        mask = self._slots.at_span(slot, start, padded, self._base.device)
        positions = np.minimum(np.arange(start, start + padded), self._base.max_length - 1)
        at = torch.from_numpy(positions).to(self._base.device)
        index = np.concatenate([index, np.zeros(rounded_up(index.size, ROWS) - index.size, np.int64)])
        return self._forward(torch.from_numpy(ids)[None], at[None], mask, index)

    def _forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, index: np.ndarray
    ) -> torch.Tensor:
        device = self._base.device
        with selected_logits(self._model.model, torch.from_numpy(index).to(device)):
            logits: torch.Tensor = self._model.model(
                input_ids=tokens.to(device),
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self._slots,
                use_cache=True,
            ).logits[0]
        return logits

    def _extend(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Draws a token for each of ``rows``, the last ones in their slots, and lets those that ended go."""
        uniforms = np.array([row.uniform() for row in rows])
        tokens, logprobs = draw(logits, [row.request.params for row in rows], uniforms)
        first = len(self.rows) - len(rows)
        ended = [first + i for i, row in enumerate(rows) if row.add(int(tokens[i]), float(logprobs[i]))]
        for slot in reversed(ended):
            last = self.rows.pop()
            if slot < len(self.rows):
                self.rows[slot] = last
                self._slots.copy(len(self.rows), slot, slot + 1, last.position)
        if not self.rows:
            self._slots.free()


class LibraryDecoder:
    """One request at a time through the model's own forward and cache, whatever its architecture."""

    def __init__(self, model: SamplingModel) -> None:
        self.rows: list[Row] = []
        self._running: list[Row | None] = []
        self._model = model
        self._device = model.base.device
        self._cache: dict[str, Any] = {}

    def room(self, max_rows: int) -> int:
        return 0 if self.rows else max_rows

    def use(self, snapshot: Snapshot) -> None:
        self._model.use(snapshot)

    def start(self, request: SampleRequest, count: int) -> None:
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


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many tokens ``a`` and ``b`` begin with alike."""
    length = min(a.size, b.size)
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if differ.size else length


@torch.no_grad()
def _agrees(decoder: SlotDecoder) -> bool:
    """Whether slots give the logits that the model's own forward gives, for a prompt, a split one and a long row."""
    base = decoder._base  # noqa: SLF001
    tokens = np.random.default_rng(0).integers(0, base.tokenizer.vocab_size, 9)
    try:
        expected = base.model(input_ids=torch.from_numpy(tokens)[None].to(base.device), use_cache=False).logits[0, -1]
        decoder._slots.reserve(2, 16)  # noqa: SLF001
        whole = decoder.prefill(tokens, 0, 0)[-1]
        decoder.prefill(tokens[:5], 1, 0)
        split = decoder.prefill(tokens, 1, 5)[-1]
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, NotImplementedError):
        return False
    finally:
        decoder.abandon()
    tolerance = float(expected.abs().max()) * (1e-4 if expected.dtype == torch.float32 else 0.1)
    return bool((whole - expected).abs().max() < tolerance and (split - expected).abs().max() < tolerance)
