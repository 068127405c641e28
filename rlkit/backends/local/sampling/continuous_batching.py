"""Continuous batching: rows of different lengths in slots, a row's place filled when it ends."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np
import torch

from rlkit.backends.local.gemm.batch_invariance import MOST, multiple, rows_alike
from rlkit.backends.local.sampling.cuda_graphs import Graphs
from rlkit.backends.local.sampling.kv_attention import Shared
from rlkit.backends.local.sampling.kv_cache import Slots
from rlkit.backends.local.sampling.prefix_cache import BLOCK, Prefixes, block_names
from rlkit.backends.local.sampling.requests import Row, SampleRequest, ScoreRequest
from rlkit.backends.local.sampling.snapshots import SamplingLlama, SamplingModel, Snapshot
from rlkit.backends.sampling import draw, rounded_up

__all__ = ["SlotDecoder"]

TOKENS = 2048  # computed at once at most, but on a CPU


@attrs.define(eq=False)
class _Prompt:
    """A prompt that is about to be computed, for all who asked for it."""

    tokens: np.ndarray
    names: list[bytes]  # of its blocks; its last token is in none, so that there is one to compute
    rows: list[Row] = attrs.field(factory=list)
    held: int = 0  # blocks that need not be computed

    @property
    def start(self) -> int:
        return self.held * BLOCK

    @property
    def rest(self) -> np.ndarray:
        return self.tokens[self.start :]


class SlotDecoder:
    """Continuous batching: rows of different lengths in slots 0..B-1, a row's place filled when it ends.

    Args:
        model: whose weights.
        limit: bytes kept of the keys and values of earlier sequences.
        graphs: makes the graphs of decoding steps, where there are such.
    """

    mixes = True

    def __init__(
        self,
        model: SamplingModel | SamplingLlama,
        limit: int,
        graphs: Callable[[SamplingLlama, Slots], Graphs] | None = None,
    ) -> None:
        self.rows: list[Row] = []
        self._model = model
        self._base = model.base
        self._slots = Slots()
        self._graphs = graphs(model, self._slots) if graphs and isinstance(model, SamplingLlama) else None
        self._most = MOST[0] if self._base.device.type == "cpu" else TOKENS
        self._limit = limit
        self._alike = self._alike_read = 0  # rows of a product, and of the last one; 0 where nothing is promised
        self._prefixes = Prefixes(limit)
        self._end: weakref.finalize[[], Any] | None = None

    def use(self, snapshot: Snapshot) -> None:
        if not self._model.use(snapshot):
            return
        if self._end is not None:
            self._end.detach()
        self._prefixes.clear()
        self._slots.clear()
        self._prefixes = Prefixes(self._limit)
        self._end = weakref.finalize(snapshot, self._prefixes.clear)  # when its last sampler is closed
        self._end.atexit = False
        if self._base.device.type == "cpu" and self._base.model.dtype == torch.float32:
            self._measure()

    def _measure(self) -> None:
        """Finds how many rows products need here, and with how many at most they need the fewest."""
        layers, last = self._model.factors()
        found = []
        for most in MOST:
            found.append((rows_alike(layers, most), rows_alike(last, most), most))
            if found[-1][:2] == (1, 1):
                break
        self._alike, self._alike_read, self._most = min(found, key=lambda one: one[0] + one[1])

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        prompts: dict[bytes, _Prompt] = {}
        for request, count in admitted:
            tokens = request.prompt
            prompt = prompts.setdefault(tokens.tobytes(), _Prompt(tokens, self._names(tokens[:-1])))
            prompt.rows += [Row(request, request.started + i) for i in range(count)]
            request.started += count
        waiting = list(prompts.values())
        rows = len(self.rows) + sum(len(prompt.rows) for prompt in waiting)
        self._slots.reserve(rows, max(prompt.tokens.size for prompt in waiting) + 1)
        while waiting:
            chosen = self._choose(waiting)
            self._begin(chosen)
            waiting = [prompt for prompt in waiting if prompt not in chosen]
        self._tidy()

    def step(self) -> None:
        if self._graphs is not None and self._graphs.works:
            tokens = np.array([row.tokens[-1] for row in self.rows])
            positions = np.array([row.position for row in self.rows])
            self._extend(self.rows, self._graphs.logits(tokens, positions))
        else:
            self._step_in_parts()
        self._tidy()

    def _step_in_parts(self) -> None:
        logits = []
        for first in range(0, len(self.rows), self._most):
            part = self.rows[first : first + self._most]
            tokens = np.array([[row.tokens[-1]] for row in part])
            positions = np.array([[row.position] for row in part])
            shared = Shared.of([row.request.prompt for row in part])
            logits.append(self._forward(tokens, first, positions, np.arange(len(part)), shared))
        self._extend(self.rows, logits[0] if len(logits) == 1 else torch.cat(logits))

    def forget(self) -> None:
        self._leave([slot for slot, row in enumerate(self.rows) if row.request.dropped])
        self._tidy()

    @torch.no_grad()
    def invariant(self) -> bool:
        """Alone and beside shorter rows and longer ones, for a prompt and for the token behind it.

        Experts get as many tokens as are sent to them, which few tokens may hide.
        """
        if any("expert" in name for name, _ in self._base.model.named_modules()):
            return False
        first, size = len(self.rows), min(48, self._base.max_length)
        tokens = np.resize(self._base.probe.tokens, size)
        prompts = [tokens[: size // 2], tokens[:3], tokens[: size - 1], tokens[1:9], tokens[2:5]]
        found = []
        try:
            for several in (prompts[:1], prompts):
                logits = self.prefill(first, several, [0] * len(several))[:1]
                sizes = [prompt.size for prompt in several]
                following = self.prefill(first, [tokens[n : n + 1] for n in sizes], sizes)[:1]
                found.append(torch.cat([logits, following]))
        finally:
            self._tidy()
        return bool(torch.equal(*found))

    def score(self, request: ScoreRequest) -> np.ndarray:
        tokens = request.tokens
        out = np.zeros(tokens.size, np.float32)
        for start in range(0, tokens.size - 1, self._most):
            end = min(start + self._most, tokens.size - 1)
            index = np.arange(end - start)
            logits = self._forward(tokens[None, start:end], len(self.rows), start + index[None], index)
            logprobs = torch.log_softmax(logits.float() / request.temperature, dim=-1)
            targets = torch.from_numpy(np.array(tokens[start + 1 : end + 1])).to(logits.device)
            out[start + 1 : end + 1] = logprobs.gather(1, targets[:, None])[:, 0].cpu().numpy()
        self._tidy()
        return out

    def abandon(self) -> list[Row]:
        rows, self.rows = self.rows, []
        self._slots.free()  # also where graphs know their place: growing may have failed halfway
        if self._graphs is not None:
            self._graphs.clear()
        return rows

    def prefill(self, first: int, rests: Sequence[np.ndarray], starts: Sequence[int]) -> torch.Tensor:
        """Computes ``rests[b]`` at ``starts[b]``.. of slot first + b, which holds the tokens before.

        Returns:
            Logits [B, V] behind the last tokens.
        """
        begin = np.array(starts)[:, None]
        if len(rests) == 1:
            (rest,) = rests
            while rest.size > self._most:
                self._forward(rest[None, : self._most], first, begin + np.arange(self._most), np.zeros(1, np.int64))
                begin, rest = begin + self._most, rest[self._most :]
            rests = [rest]
        sizes = np.array([rest.size for rest in rests])
        tokens = np.zeros((len(rests), sizes.max()), np.int64)
        for row, rest in zip(tokens, rests, strict=True):
            row[: rest.size] = rest
        last = np.arange(len(rests)) * tokens.shape[1] + sizes - 1
        return self._forward(tokens, first, begin + np.arange(tokens.shape[1]), last)

    def _names(self, tokens: np.ndarray) -> list[bytes]:
        return block_names(tokens) if self._limit else []

    def _choose(self, waiting: list[_Prompt]) -> list[_Prompt]:
        """Those to compute together next: of prompts that begin alike only one, the others find its blocks later."""
        for prompt in waiting:
            prompt.held = self._prefixes.find(prompt.names)
        chosen: list[_Prompt] = []
        begun: set[bytes] = set()
        for prompt in sorted(waiting, key=lambda prompt: prompt.rest.size):
            missing = prompt.names[prompt.held :]
            if chosen and math.prod(_shape(len(chosen) + 1, prompt.rest.size, self._alike)) > self._most:
                break
            if not missing or missing[0] not in begun:
                chosen.append(prompt)
                begun.update(missing)
        return chosen

    def _begin(self, prompts: Sequence[_Prompt]) -> None:
        first, place = len(self.rows), len(self.rows) + len(prompts)
        rows = [prompt.rows[0] for prompt in prompts] + [row for prompt in prompts for row in prompt.rows[1:]]
        for slot, prompt in enumerate(prompts, first):
            self._prefixes.load(prompt.names[: prompt.held], self._slots, slot)
        logits = self.prefill(first, [p.rest for p in prompts], [p.start for p in prompts])
        for slot, prompt in enumerate(prompts, first):
            self._prefixes.keep(prompt.names, self._slots, slot)
            others = len(prompt.rows) - 1
            self._slots.copy(slot, place, place + others, prompt.tokens.size)
            place += others
        which = [*range(len(prompts)), *(k for k, prompt in enumerate(prompts) for _ in prompt.rows[1:])]
        self.rows += rows
        self._extend(rows, logits[which])

    def _forward(
        self,
        tokens: np.ndarray,
        first: int,
        positions: np.ndarray,
        index: np.ndarray,
        shared: Shared | None = None,
    ) -> torch.Tensor:
        """Logits [n, V] at the flat ``index`` [n] of ``tokens`` [B, T] at ``positions`` of slots first..first+B-1."""
        device = self._base.device
        rows, length = tokens.shape
        high, wide = _shape(rows, length, self._alike)
        ids = np.zeros((high, wide), np.int64)
        ids[:rows, :length] = tokens
        at = np.zeros((high, wide), np.int64)
        at[:rows] = positions[:, :1] + np.arange(wide)
        at = np.minimum(at, self._base.max_length - 1)
        self._slots.reserve(first + rows, int(at.max()) + 1)
        where = np.zeros(rounded_up(index.size, multiple(index.size, self._alike_read)), np.int64)
        where[: index.size] = index // length * wide + index % length
        places = torch.from_numpy(at).to(device)
        logits = self._model.logits(
            torch.from_numpy(ids).to(device),
            places,
            self._slots.at(first, places[:rows], int(at[:rows].max()) + 1),
            self._slots,
            torch.from_numpy(where).to(device),
            shared,
        )
        return logits[: index.size]

    def _extend(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Draws a token for each of ``rows``, the last ones in their slots, and lets those that ended go."""
        uniforms = np.array([row.uniform() for row in rows])
        tokens, logprobs = draw(logits, [row.request.params for row in rows], uniforms)
        first = len(self.rows) - len(rows)
        self._leave([first + i for i, row in enumerate(rows) if row.add(int(tokens[i]), float(logprobs[i]))])

    def _leave(self, slots: Sequence[int]) -> None:
        """Gives the places of the rows in ``slots``, in ascending order, to the last ones."""
        for slot in reversed(slots):
            self._prefixes.keep(self._names(self.rows[slot].computed), self._slots, slot)
            last = self.rows.pop()
            if slot < len(self.rows):
                self.rows[slot] = last
                self._slots.copy(len(self.rows), slot, slot + 1, last.position)

    def _tidy(self) -> None:
        recorded = self._graphs is not None and self._graphs.works  # which know where the slots are
        if not self.rows and not recorded:
            self._slots.free()


def _shape(rows: int, length: int, alike: int) -> tuple[int, int]:
    """The smallest shape around [rows, length] of a number of tokens that is alike, grown in one direction.

    >>> _shape(1, 1, 1), _shape(5, 6, 0), _shape(5, 6, 2), _shape(5, 6, 4), _shape(1, 33, 2)
    ((1, 1), (5, 6), (5, 6), (8, 6), (1, 48))
    """
    shape = _grown(rows, length, multiple(rows * length, alike))
    beyond = multiple(math.prod(shape), alike)  # more are asked for where there are more
    return shape if math.prod(shape) % beyond == 0 else _grown(rows, length, beyond)


def _grown(rows: int, length: int, unit: int) -> tuple[int, int]:
    high = rounded_up(rows, unit // math.gcd(length, unit))
    wide = rounded_up(length, unit // math.gcd(rows, unit))
    return (high, length) if high * length < rows * wide else (rows, wide)
