"""Continuous batching over the KV cache, with decoding steps as CUDA graphs where there is such a device.

Rows of different lengths are in slots; one that ends makes room for the next. Prompts are computed together where they
fit, what they share at their beginning once.

A CUDA graph is a step whose kernels, the same for every token, are recorded once and launched together. It reads and
writes fixed addresses and has fixed shapes. So there is one for each number of rows and of keys, both rounded up, and
all are recorded again when what they read has moved: the KV cache as it grows, weights if a sampler's first snapshot
had another adapter's shape (``keep_address`` keeps them where they are). Norms and biases belong to the sampler's
forward, which lives as long as its graphs, and all logits go to one buffer.

No graph is taken unseen: each is recorded with other tokens at other positions than those that it is first replayed
for, and the replay is compared with the step itself. Where they differ, decoding goes on without graphs, with a
warning.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

import attrs
import numpy as np
import torch

from rlkit._runtime import warn
from rlkit.backends.local.cache.kv_cache import TERMS, KVCache, SharedPrefix, sharing
from rlkit.backends.local.cache.prefix_cache import BLOCK, PrefixCache, Together, block_names
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.model.memory import rows_that_fit, to_device
from rlkit.backends.local.products.prepacked import ROW_UNIT, upcast
from rlkit.backends.local.sampling._scoring import TREE_TOKENS, TreeCache, score_batches, score_tree
from rlkit.backends.local.sampling.sampler import SampleRequest, SampleRow, ScoreRequest, Snapshot
from rlkit.backends.local.sampling.scheduler import Decoder, begin_rows, draw_tokens
from rlkit.backends.requests import round_up

FEW = 32  # up to here rows are rounded up to a power of 2, beyond it to a multiple of this
LIKE, LIKE_BFLOAT16 = 1e-4, 0.03  # how far a replay may be off the step, as part of the logits' norm
KEYS = 128  # keys are rounded up to multiples of this, beyond 1024 to eighths of a power of 2

_log = logging.getLogger(__name__)

Step: TypeAlias = Callable[[], None]
Recorder: TypeAlias = Callable[[Step], Callable[[], object]]


def recorder(device: torch.device) -> Recorder:
    """Return what records steps on a GPU, and gives of each what computes it anew; all share their memory."""
    pool = torch.cuda.graph_pool_handle()

    def record(step: Step) -> Callable[[], object]:
        with torch.cuda.device(device):
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):  # libraries allocate at their first use, which must not be recorded
                step()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
                step()
        replay: Callable[[], object] = graph.replay
        return replay

    return record


@attrs.frozen(eq=False)
class _Graph:
    inputs: torch.Tensor  # int64 [2, rows]: tokens and positions
    replay: Callable[[], object]


class CudaGraphs:
    """CUDA graphs that decode one more token for the rows in slots 0, 1, ...

    Args:
        forward: whose weights stay at their addresses from snapshot to snapshot.
        base: its model.
        kv_cache: nothing else uses it beyond the rows while a step runs.
        record: makes what records; ``recorder`` by default. It is called again when all graphs are dropped.
    """

    def __init__(
        self, forward: SamplingForward, base: Base, kv_cache: KVCache, record: Callable[[], Recorder] | None = None
    ) -> None:
        self._forward, self._base, self._kv_cache = forward, base, kv_cache
        self._make = record or partial(recorder, base.device)
        self._record: Recorder | None = None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._addresses: tuple[tuple[int, ...], ...] = ()
        self._out = torch.empty(0)
        self.works = True  # False from the first step that could not be recorded

    def clear(self) -> None:
        """Drop all graphs, and the memory that they shared."""
        self._graphs.clear()
        self._record, self._out, self._addresses = None, torch.empty(0), ()

    @torch.no_grad()
    def logits(self, tokens: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Return [n, V] after ``tokens`` [n] at ``positions`` [n] of slots 0..n-1; good until the next call."""
        n = tokens.size
        rows, keys = row_bucket(n), key_bucket(int(positions.max()) + 1)
        self._kv_cache.reserve(rows, keys)
        addresses = (self._forward.addresses, self._kv_cache.addresses)
        if addresses != self._addresses or rows > self._out.shape[0]:
            self.clear()
            head = self._base.head
            self._out, self._addresses = upcast(head.new_empty(rows, head.shape[0])), addresses
        values = np.zeros((2, rows), np.int64)  # the rows that are added write to the first key of free slots
        values[:, :n] = tokens, positions
        graph = self._graphs.get((rows, keys))
        if graph is None:
            self._record_first(rows, keys, values)
        else:
            graph.inputs.copy_(to_device(values, graph.inputs.device))
            graph.replay()
        return self._out[:n]

    def _record_first(self, rows: int, keys: int, values: np.ndarray) -> None:
        # Recorded with other tokens at the next place, which is not read before the real token is written there.
        others = np.stack([(values[0] + 1) % self._out.shape[1], np.minimum(values[1] + 1, keys - 1)])
        inputs, out = to_device(others, self._base.device), self._out[:rows]

        def step() -> None:
            tokens, positions = inputs[0][:, None], inputs[1][:, None]
            mask = self._kv_cache.at(0, positions, keys)
            index = torch.arange(rows, device=inputs.device)
            out.copy_(self._forward.logits(tokens, positions, mask, self._kv_cache, index))

        self._record = self._record or self._make()
        try:
            replay = self._record(step)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._give_up(f"because they could not be recorded: {error}")
            inputs.copy_(to_device(values, inputs.device))
            step()
            return
        inputs.copy_(to_device(values, inputs.device))
        replay()
        replayed = out.clone()
        step()
        difference = float((replayed - out).norm() / out.norm())
        if difference <= (LIKE_BFLOAT16 if self._base.model.dtype == torch.bfloat16 else LIKE):
            _log.info("a CUDA graph decodes %d rows up to %d tokens, off the step by %.1g", rows, keys, difference)
            self._graphs[rows, keys] = _Graph(inputs, replay)
        else:
            self._give_up(f"because the replay for {rows} rows differs from the step by {difference:.2g} of its logits")

    def _give_up(self, reason: str) -> None:
        self._graphs.clear()
        self.works, self._record = False, None
        warn(f"decoding continues without CUDA graphs, {reason}")


def row_bucket(rows: int) -> int:
    """Return the number of rows of the graph for ``rows`` rows.

    >>> [row_bucket(n) for n in (1, 3, 8, 9, 33, 65)]
    [1, 4, 8, 16, 64, 96]
    """
    return 1 << (rows - 1).bit_length() if rows <= FEW else round_up(rows, FEW)


def key_bucket(longest: int) -> int:
    """Return how many keys of each row are read.

    >>> [key_bucket(n) for n in (1, 129, 1024, 1025, 5000)]
    [128, 256, 1024, 1280, 5120]
    """
    return round_up(longest, max(KEYS, (1 << (longest - 1).bit_length()) // 8))


TOKENS, CPU_TOKENS = 2048, 256  # computed at once at most; more gain nothing


@attrs.define(eq=False)
class _Prompt:
    """A prompt that is about to be computed, for all who asked for it."""

    tokens: np.ndarray
    names: list[bytes]  # of its blocks; its last token is in none, so that there is one to compute
    rows: list[SampleRow]
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
    """

    def __init__(
        self,
        forward: SamplingForward,
        base: Base,
        prefix_bytes: int,
        *,
        merge: bool,
        beside: Together | None = None,
        graphs: Callable[[KVCache], CudaGraphs] | None = None,
    ) -> None:
        super().__init__(forward, merge=merge)
        self._base = base
        self.kv_cache = KVCache()
        self.graphs = graphs(self.kv_cache) if graphs is not None else None
        on_cpu = base.device.type == "cpu"
        self._max_tokens = CPU_TOKENS if on_cpu else TOKENS
        self._unit = ROW_UNIT if on_cpu and base.model.dtype == torch.float32 else 1  # of the rows of products
        self.prefix_cache = PrefixCache(prefix_bytes, beside)

    def use(self, snapshot: Snapshot) -> bool:
        if not super().use(snapshot):
            return False
        self.kv_cache.clear()
        return True

    def _load(self, snapshot: Snapshot) -> None:
        super()._load(snapshot)
        self.prefix_cache = self.prefix_cache.renew(snapshot)

    def _recompute(self) -> None:
        for slot, row in enumerate(self.rows):
            tokens = row.computed
            names = self._names(tokens[:-1])
            held = self.prefix_cache.find(names)  # what rows before this one began with
            self.prefix_cache.load(names[:held], self.kv_cache, slot)
            self.prefill(slot, [tokens[held * BLOCK :]], [held * BLOCK])
            self.prefix_cache.store([(names, slot)], self.kv_cache)

    def capacity(self, length: int) -> int:
        return rows_that_fit(self._base, length, self)

    @property
    def held(self) -> int:
        return self.kv_cache.nbytes

    @property
    def reserved(self) -> int:
        return self.kv_cache.nbytes  # slots are as large as their rows may become

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        waiting = [_Prompt(tokens, self._names(tokens[:-1]), rows) for tokens, rows in begin_rows(admitted)]
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
            self.extend(self.rows, self.graphs.logits(tokens, positions))
        else:
            self._step_in_parts()
        self._tidy()

    def _step_in_parts(self) -> None:
        logits = []
        for first in range(0, len(self.rows), self._max_tokens):
            part = self.rows[first : first + self._max_tokens]
            tokens = np.array([[row.tokens[-1]] for row in part])
            starts = np.array([row.position for row in part])
            shared = SharedPrefix.of([row.request.prompt for row in part], [row.cached_version for row in part])
            logits.append(self._logits(tokens, first, starts, np.arange(len(part)), shared))
        self.extend(self.rows, logits[0] if len(logits) == 1 else torch.cat(logits))

    def forget(self) -> None:
        super().forget()
        self._tidy()

    @torch.no_grad()
    def invariant(self) -> bool:
        """Return whether a text is the same at once and in parts, alone and with others.

        Experts get as many tokens as are sent to them, which few tokens may hide.
        """
        if any("expert" in name for name, _ in self._base.model.named_modules()):
            return False
        first, tokens = len(self.rows), np.resize(self._base.text, min(3 * TERMS, self._base.max_length))
        ends = [end for end in np.cumsum([1, 1, 2, 3, 4, 6, 8, 11, 16, 24, 32]) if end < tokens.size]
        try:
            found = expected = self.prefill(first, [tokens], [0])
            for begin, end in itertools.pairwise([0, *ends, tokens.size]):
                found = self.prefill(first, [tokens[begin:end], tokens[:3], tokens[1:9]], [begin, 0, 0])
        finally:
            self._tidy()
        return bool(torch.equal(found[0], expected[0]))

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        def compute(tokens: np.ndarray, starts: np.ndarray, index: np.ndarray, cache: TreeCache) -> torch.Tensor:
            return self._logits(tokens, 0, starts, index, kv_cache=cache)

        def shape(rows: int, length: int) -> tuple[int, int]:
            return _padded_shape(rows, length, self._unit)

        for batch in score_batches(requests, TREE_TOKENS):
            yield from score_tree(batch, compute, self._max_tokens, shape)

    def abandon(self) -> list[SampleRow]:
        self.kv_cache.free()  # also where graphs know their place: growing may have failed halfway
        if self.graphs is not None:
            self.graphs.clear()
        return super().abandon()

    def prefill(self, first: int, rests: Sequence[np.ndarray], starts: Sequence[int]) -> torch.Tensor:
        """Compute ``rests[b]`` at ``starts[b]``.. of slot first + b, which holds the tokens before.

        Returns:
            Logits [B, V] after the last tokens.
        """
        begin = np.array(starts)
        if len(rests) == 1:
            (rest,) = rests
            while rest.size > self._max_tokens:
                part, rest = rest[: self._max_tokens], rest[self._max_tokens :]
                self._logits(part[None], first, begin, np.zeros(1, np.int64))
                begin = begin + part.size
            rests = [rest]
        sizes = np.array([rest.size for rest in rests])
        tokens = np.zeros((len(rests), sizes.max()), np.int64)
        for row, rest in zip(tokens, rests, strict=True):
            row[: rest.size] = rest
        last = np.arange(len(rests)) * tokens.shape[1] + sizes - 1
        return self._logits(tokens, first, begin, last)

    def _names(self, tokens: np.ndarray) -> list[bytes]:
        return block_names(tokens) if self.prefix_cache.limit else []

    def _choose(self, waiting: list[_Prompt]) -> list[_Prompt]:
        """Return those to compute next; of prompts that begin alike only one, the others find its blocks later."""
        for prompt in waiting:
            prompt.held = self.prefix_cache.find(prompt.names)
        chosen: list[_Prompt] = []
        begun: set[bytes] = set()
        for prompt in sorted(waiting, key=lambda prompt: prompt.rest.size):
            missing = prompt.names[prompt.held :]
            shape = _padded_shape(len(chosen) + 1, prompt.rest.size, self._unit)
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
        self.prefix_cache.store([(prompt.names, slot) for slot, prompt in enumerate(prompts, first)], self.kv_cache)
        for slot, prompt in enumerate(prompts, first):
            others = len(prompt.rows) - 1
            self.kv_cache.copy(slot, place, place + others, prompt.tokens.size)
            place += others
        # A prompt's first row has its slot. The others are after all prompts, so that these are computed side by side.
        which = [*range(len(prompts)), *(k for k, prompt in enumerate(prompts) for _ in prompt.rows[1:])]
        self.rows += rows
        self.extend(rows, logits[which])

    def _logits(
        self,
        tokens: np.ndarray,
        first: int,
        starts: np.ndarray,
        index: np.ndarray,
        shared: SharedPrefix | None = None,
        kv_cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return logits [n, V] at the flat ``index`` of ``tokens`` [B, T].

        They begin at position ``starts`` [B] of the slots from ``first`` on.
        """
        kv_cache = self.kv_cache if kv_cache is None else kv_cache
        device = self._base.device
        rows, length = tokens.shape
        high, wide = _padded_shape(rows, length, self._unit)
        ids = np.zeros((high, wide), np.int64)
        ids[:rows, :length] = tokens
        at = np.zeros((high, wide), np.int64)
        at[:rows] = starts[:, None] + np.arange(wide)
        at = np.minimum(at, self._base.max_length - 1)
        kv_cache.reserve(first + rows, int(at.max()) + 1)
        where = np.zeros(round_up(index.size, self._unit), np.int64)
        where[: index.size] = index // length * wide + index % length
        places = to_device(at, device)
        mask = kv_cache.at(first, places[:rows], int(at[:rows].max()) + 1)
        padded, wanted = to_device(ids, device), to_device(where, device)
        with sharing(shared):
            return self.forward.logits(padded, places, mask, kv_cache, wanted)[: index.size]

    def extend(self, rows: Sequence[SampleRow], logits: torch.Tensor) -> None:
        """Draw a token for each of ``rows``, the last ones of all, and let those that ended go."""
        first = len(self.rows) - len(rows)
        self.leave([first + i for i, end in enumerate(draw_tokens(rows, logits)) if end])

    def leave(self, slots: Sequence[int]) -> None:
        ended = [slot for slot in reversed(slots) if not self.rows[slot].stale]
        self.prefix_cache.store([(self._names(self.rows[slot].computed), slot) for slot in ended], self.kv_cache)
        for slot in reversed(slots):  # the last row takes the place
            last = self.rows.pop()
            if slot < len(self.rows):
                self.rows[slot] = last
                self.kv_cache.copy(len(self.rows), slot, slot + 1, last.position)

    def _tidy(self) -> None:
        recorded = self.graphs is not None and self.graphs.works  # in graphs, which know its addresses
        if not self.rows and not recorded:
            self.kv_cache.free()


def _padded_shape(rows: int, length: int, unit: int) -> tuple[int, int]:
    """Return the smallest shape around [rows, length] of a multiple of ``unit`` tokens, grown in one direction.

    >>> _padded_shape(5, 6, 1), _padded_shape(5, 6, 2), _padded_shape(5, 6, 4), _padded_shape(1, 33, 4)
    ((5, 6), (5, 6), (6, 6), (1, 36))
    """
    high = round_up(rows, unit // math.gcd(length, unit))
    wide = round_up(length, unit // math.gcd(rows, unit))
    return (high, length) if high * length < rows * wide else (rows, wide)
