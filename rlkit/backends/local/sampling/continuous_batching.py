"""Continuous batching: rows of different lengths in slots, a row's place filled when it ends."""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.drawing import draw
from rlkit.backends.local.cache.kv_attention import CachedTokens, SharedPrefix
from rlkit.backends.local.cache.kv_cache import KVCache
from rlkit.backends.local.cache.prefix_cache import BLOCK, PrefixCache, block_names
from rlkit.backends.local.cache.shared_lru import Together
from rlkit.backends.local.cache.tree_cache import TreeCache
from rlkit.backends.local.gemm.batch_invariance import MAX_ROWS, invariant_row_multiple, padding_unit
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.defaults import rows_that_fit
from rlkit.backends.local.model.device import to_device
from rlkit.backends.local.model.forward import Forward
from rlkit.backends.local.sampling.cuda_graphs import CudaGraphs, key_bucket, row_bucket
from rlkit.backends.local.sampling.decoder import Decoder
from rlkit.backends.local.sampling.requests import SampleRequest, SampleRow, ScoreRequest
from rlkit.backends.local.sampling.scoring import TREE_TOKENS, score_batches, score_tree
from rlkit.backends.local.sampling.snapshots import Snapshot
from rlkit.backends.sampling import rounded_up

__all__ = ["ContinuousBatching"]

TOKENS = 2048  # computed at once at most, but on a CPU


@attrs.define(eq=False)
class _Prompt:
    """A prompt that is about to be computed, for all who asked for it."""

    tokens: np.ndarray
    names: list[bytes]  # of its blocks; its last token is in none, so that there is one to compute
    rows: list[SampleRow] = attrs.field(factory=list)
    held: int = 0  # blocks that need not be computed

    @property
    def start(self) -> int:
        return self.held * BLOCK

    @property
    def rest(self) -> np.ndarray:
        return self.tokens[self.start :]


class ContinuousBatching(Decoder):
    """Continuous batching: rows of different lengths in slots 0..B-1, a row's place filled when it ends.

    Args:
        forward: the model.
        base: what it is made of.
        prefix_bytes: bytes kept of the keys and values of earlier sequences.
        merge: whether adapters are merged into copies of its weights.
        beside: the prefix caches of other decoders, with which it shares those bytes.
        graphs: makes the graphs of decoding steps, where there are such.
        row_multiple: to what the rows of a product are padded until that is measured.
    """

    mixes = True

    def __init__(
        self,
        forward: Forward,
        base: Base,
        prefix_bytes: int,
        *,
        merge: bool,
        beside: Together | None = None,
        graphs: Callable[[KVCache], CudaGraphs] | None = None,
        row_multiple: int = 0,
    ) -> None:
        super().__init__(forward, merge=merge)
        self._base = base
        self.kv_cache = KVCache()
        self.graphs = graphs(self.kv_cache) if graphs is not None else None
        self._max_tokens = MAX_ROWS[0] if base.device.type == "cpu" else TOKENS
        # Of the layers' products, and of the output embedding's; 0 where nothing is promised.
        self._row_multiple, self._head_row_multiple = row_multiple, 0
        self._prefix_bytes = prefix_bytes
        self._beside: Together = [] if beside is None else beside
        self.prefix_cache = PrefixCache(prefix_bytes, self._beside)
        self._on_forgotten: weakref.finalize[[], Snapshot] | None = None

    def use(self, snapshot: Snapshot) -> bool:
        if not super().use(snapshot):
            return False
        self.kv_cache.clear()
        return True

    def _load(self, snapshot: Snapshot) -> None:
        super()._load(snapshot)
        if self._on_forgotten is not None:
            self._on_forgotten.detach()
        self.prefix_cache.clear()
        self.prefix_cache = PrefixCache(self._prefix_bytes, self._beside)
        self._on_forgotten = weakref.finalize(snapshot, self.prefix_cache.clear)  # when its last sampler is closed
        self._on_forgotten.atexit = False
        if self._base.device.type == "cpu" and self._base.model.dtype == torch.float32:
            self._measure()

    def _recompute(self) -> None:
        for slot, row in enumerate(self.rows):
            tokens = row.computed
            names = self._names(tokens[:-1])
            held = self.prefix_cache.find(names)  # what rows before this one began with
            self.prefix_cache.load(names[:held], self.kv_cache, slot)
            self.prefill(slot, [tokens[held * BLOCK :]], [held * BLOCK])
            self.prefix_cache.store(names, self.kv_cache, slot)

    def _measure(self) -> None:
        """Find out how many rows products need here, and with how many at most they need the fewest."""
        layers, head = self.forward.weights()
        measured = []
        for rows in MAX_ROWS:
            measured.append((invariant_row_multiple(layers, rows), invariant_row_multiple(head, rows), rows))
            if measured[-1][:2] == (1, 1):
                break
        self._row_multiple, self._head_row_multiple, self._max_tokens = min(measured, key=lambda one: one[0] + one[1])

    def capacity(self, length: int) -> int:
        return rows_that_fit(self._base, length, self)

    @property
    def held(self) -> int:
        return self.kv_cache.nbytes

    @property
    def reserved(self) -> int:
        return self.kv_cache.nbytes  # slots are as large as their rows may become

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        prompts: dict[bytes, _Prompt] = {}
        for request, count in admitted:
            tokens = request.prompt
            prompt = prompts.setdefault(tokens.tobytes(), _Prompt(tokens, self._names(tokens[:-1])))
            prompt.rows += [SampleRow(request, request.started + i) for i in range(count)]
            request.started += count
        waiting = list(prompts.values())
        rows = len(self.rows) + sum(len(prompt.rows) for prompt in waiting)
        if self.capacity(1) == sys.maxsize:
            self.kv_cache.reserve(rows, max(prompt.tokens.size for prompt in waiting) + 1)
        else:  # all that these rows will need, so that slots do not grow, and graphs are not recorded again, on the way
            ends = [row.request.end for row in [*self.rows, *(row for prompt in waiting for row in prompt.rows)]]
            self.kv_cache.resize(row_bucket(rows), key_bucket(max(ends)))
        while waiting:
            chosen = self._choose(waiting)
            self._begin(chosen)
            waiting = [prompt for prompt in waiting if prompt not in chosen]
        self._tidy()

    def step(self) -> None:
        if self.graphs is not None and self.graphs.works:
            tokens = np.array([row.tokens[-1] for row in self.rows])
            positions = np.array([row.position for row in self.rows])
            self._extend(self.rows, self.graphs.logits(tokens, positions))
        else:
            self._step_in_parts()
        self._tidy()

    def _step_in_parts(self) -> None:
        logits = []
        for first in range(0, len(self.rows), self._max_tokens):
            part = self.rows[first : first + self._max_tokens]
            tokens = np.array([[row.tokens[-1]] for row in part])
            positions = np.array([[row.position] for row in part])
            shared = SharedPrefix.of([row.request.prompt for row in part], [row.cached_version for row in part])
            logits.append(self._logits(tokens, first, positions, np.arange(len(part)), shared))
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
        logits = []
        try:
            for several in (prompts[:1], prompts):
                prompt = self.prefill(first, several, [0] * len(several))[:1]
                sizes = [prompt.size for prompt in several]
                following = self.prefill(first, [tokens[n : n + 1] for n in sizes], sizes)[:1]
                logits.append(torch.cat([prompt, following]))
        finally:
            self._tidy()
        return bool(torch.equal(*logits))

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        def compute(tokens: np.ndarray, starts: np.ndarray, index: np.ndarray, cache: TreeCache) -> torch.Tensor:
            return self._logits(tokens, 0, starts[:, None], index, kv_cache=cache)

        def shape(rows: int, length: int) -> tuple[int, int]:
            return _padded_shape(rows, length, self._row_multiple)

        for batch in score_batches(requests, TREE_TOKENS):
            yield from score_tree(batch, compute, self._max_tokens, shape)

    def abandon(self) -> list[SampleRow]:
        rows, self.rows = self.rows, []
        self.kv_cache.free()  # also where graphs know their place: growing may have failed halfway
        if self.graphs is not None:
            self.graphs.clear()
        return rows

    def prefill(self, first: int, rests: Sequence[np.ndarray], starts: Sequence[int]) -> torch.Tensor:
        """Compute ``rests[b]`` at ``starts[b]``.. of slot first + b, which holds the tokens before.

        Returns:
            Logits [B, V] behind the last tokens.
        """
        begin = np.array(starts)[:, None]
        if len(rests) == 1:
            (rest,) = rests
            while rest.size > self._max_tokens:
                part, rest = rest[: self._max_tokens], rest[self._max_tokens :]
                self._logits(part[None], first, begin + np.arange(part.size), np.zeros(1, np.int64))
                begin = begin + part.size
            rests = [rest]
        sizes = np.array([rest.size for rest in rests])
        tokens = np.zeros((len(rests), sizes.max()), np.int64)
        for row, rest in zip(tokens, rests, strict=True):
            row[: rest.size] = rest
        last = np.arange(len(rests)) * tokens.shape[1] + sizes - 1
        return self._logits(tokens, first, begin + np.arange(tokens.shape[1]), last)

    def _names(self, tokens: np.ndarray) -> list[bytes]:
        return block_names(tokens) if self._prefix_bytes else []

    def _choose(self, waiting: list[_Prompt]) -> list[_Prompt]:
        """Return those to compute next; of prompts that begin alike only one, the others find its blocks later."""
        for prompt in waiting:
            prompt.held = self.prefix_cache.find(prompt.names)
        chosen: list[_Prompt] = []
        begun: set[bytes] = set()
        for prompt in sorted(waiting, key=lambda prompt: prompt.rest.size):
            missing = prompt.names[prompt.held :]
            shape = _padded_shape(len(chosen) + 1, prompt.rest.size, self._row_multiple)
            if chosen and math.prod(shape) > self._max_tokens:
                break
            if not missing or missing[0] not in begun:
                chosen.append(prompt)
                begun.update(missing)
        return chosen

    def _begin(self, prompts: Sequence[_Prompt]) -> None:
        first, place = len(self.rows), len(self.rows) + len(prompts)
        rows = [prompt.rows[0] for prompt in prompts] + [row for prompt in prompts for row in prompt.rows[1:]]
        for slot, prompt in enumerate(prompts, first):
            self.prefix_cache.load(prompt.names[: prompt.held], self.kv_cache, slot)
        logits = self.prefill(first, [p.rest for p in prompts], [p.start for p in prompts])
        for slot, prompt in enumerate(prompts, first):
            self.prefix_cache.store(prompt.names, self.kv_cache, slot)
            others = len(prompt.rows) - 1
            self.kv_cache.copy(slot, place, place + others, prompt.tokens.size)
            place += others
        which = [*range(len(prompts)), *(k for k, prompt in enumerate(prompts) for _ in prompt.rows[1:])]
        self.rows += rows
        self._extend(rows, logits[which])

    def _logits(
        self,
        tokens: np.ndarray,
        first: int,
        positions: np.ndarray,
        index: np.ndarray,
        shared: SharedPrefix | None = None,
        kv_cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return logits [n, V] at the flat ``index`` of ``tokens`` [B, T], at ``positions`` of slots ``first``.."""
        kv_cache = self.kv_cache if kv_cache is None else kv_cache
        device = self._base.device
        rows, length = tokens.shape
        high, wide = _padded_shape(rows, length, self._row_multiple)
        ids = np.zeros((high, wide), np.int64)
        ids[:rows, :length] = tokens
        at = np.zeros((high, wide), np.int64)
        at[:rows] = positions[:, :1] + np.arange(wide)
        at = np.minimum(at, self._base.max_length - 1)
        kv_cache.reserve(first + rows, int(at.max()) + 1)
        where = np.zeros(rounded_up(index.size, padding_unit(index.size, self._head_row_multiple)), np.int64)
        where[: index.size] = index // length * wide + index % length
        places = to_device(at, device)
        mask = kv_cache.at(first, places[:rows], int(at[:rows].max()) + 1)
        padded, wanted = to_device(ids, device), to_device(where, device)
        return self.forward.logits(CachedTokens(padded, places, mask, kv_cache, wanted, shared))[: index.size]

    def _extend(self, rows: Sequence[SampleRow], logits: torch.Tensor) -> None:
        """Draw a token for each of ``rows``, the last ones in their slots, and let those that ended go."""
        uniforms = np.array([row.uniform() for row in rows])
        tokens, logprobs = draw(logits, [row.request.params for row in rows], uniforms, [row.counts for row in rows])
        first = len(self.rows) - len(rows)
        self._leave([first + i for i, row in enumerate(rows) if row.add(int(tokens[i]), float(logprobs[i]))])

    def _leave(self, slots: Sequence[int]) -> None:
        """Give the places of the rows in ``slots``, in ascending order, to the last ones."""
        for slot in reversed(slots):
            if not self.rows[slot].stale:
                self.prefix_cache.store(self._names(self.rows[slot].computed), self.kv_cache, slot)
            last = self.rows.pop()
            if slot < len(self.rows):
                self.rows[slot] = last
                self.kv_cache.copy(len(self.rows), slot, slot + 1, last.position)

    def _tidy(self) -> None:
        recorded = self.graphs is not None and self.graphs.works  # in graphs, which know its addresses
        if not self.rows and not recorded:
            self.kv_cache.free()


def _padded_shape(rows: int, length: int, multiple: int) -> tuple[int, int]:
    """Return the smallest shape around [rows, length] of an invariant number of tokens, grown in one direction.

    >>> _padded_shape(1, 1, 1), _padded_shape(5, 6, 0), _padded_shape(5, 6, 2), _padded_shape(5, 6, 4)
    ((1, 1), (5, 6), (5, 6), (8, 6))
    >>> _padded_shape(1, 33, 2)
    (1, 48)
    """
    shape = _grown(rows, length, padding_unit(rows * length, multiple))
    beyond = padding_unit(math.prod(shape), multiple)  # more are asked for where there are more
    return shape if math.prod(shape) % beyond == 0 else _grown(rows, length, beyond)


def _grown(rows: int, length: int, unit: int) -> tuple[int, int]:
    high = rounded_up(rows, unit // math.gcd(length, unit))
    wide = rounded_up(length, unit // math.gcd(rows, unit))
    return (high, length) if high * length < rows * wide else (rows, wide)
