"""Continuous batching through the library's own forward, for architectures that need its cache.

A prompt is computed once for all who ask for it, rows of several requests are decoded together, rows that end leave and
others enter. See ``RowCache`` for how caches are joined.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Sequence

import attrs
import numpy as np
import torch
from transformers import DynamicCache

from rlkit.backends.local.cache.row_cache import RowCache
from rlkit.backends.local.cache.sequence_cache import CachedSequence, SequenceCache
from rlkit.backends.local.cache.shared_lru import Together
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.sampling.library_decoder import TOKENS, LibraryDecoder
from rlkit.backends.local.sampling.requests import SampleRequest, SampleRow
from rlkit.backends.local.sampling.snapshots import Snapshot

__all__ = ["LibraryBatching"]


@attrs.define(eq=False)
class _Prompt:
    """A prompt that is about to be computed, for all who asked for it."""

    tokens: np.ndarray
    rows: list[SampleRow] = attrs.field(factory=list)
    begun: CachedSequence | None = None  # with which it begins

    @property
    def rest(self) -> np.ndarray:
        """What is to be computed."""
        return self.tokens if self.begun is None else self.tokens[self.begun.length :]

    @property
    def shape(self) -> tuple[int, int]:
        """Of prompts that are computed together: neither recurrences nor convolutions are padded."""
        return (self.tokens.size - self.rest.size, self.rest.size)


class LibraryBatching(LibraryDecoder):
    """Continuous batching through the library's own forward, with its cache.

    Args:
        base: the model.
        prefix_bytes: bytes kept of the caches of earlier sequences.
        merge: whether adapters are merged into copies of its weights.
        beside: the prefix caches of other decoders, with which it shares those bytes.
        mixes: whether rows of several requests are decoded together.

    Attributes:
        continues: whether several tokens at once may continue a cache.
    """

    def __init__(
        self,
        base: Base,
        prefix_bytes: int,
        *,
        merge: bool,
        beside: Together | None = None,
        mixes: bool = True,
        continues: bool = True,
    ) -> None:
        super().__init__(base, merge=merge)
        self.mixes, self.continues = mixes, continues
        taken = inspect.signature(self.model.forward).parameters
        self._takes_positions = "position_ids" in taken
        self._cache_name = "cache_params" if "cache_params" in taken else "past_key_values"
        self._beside: Together = [] if beside is None else beside
        self.prefix_cache = SequenceCache(prefix_bytes, self._beside)
        self._on_forgotten: weakref.finalize[[], Snapshot] | None = None
        if "cache" not in base.known:
            base.known["cache"] = self._kind()
        self.cache = self.new_cache()

    def _load(self, snapshot: Snapshot) -> None:
        super()._load(snapshot)
        if self._on_forgotten is not None:
            self._on_forgotten.detach()
        self.prefix_cache.clear()
        self.prefix_cache = SequenceCache(self.prefix_cache.limit, self._beside)
        self._on_forgotten = weakref.finalize(snapshot, self.prefix_cache.clear)  # when its last sampler is closed
        self._on_forgotten.atexit = False

    def _recompute(self) -> None:
        cache = self.new_cache()
        for row in self.rows:
            alone = self.new_cache()
            self.decode(alone, row.computed[None])
            cache.add(alone, [0])
        self.cache = cache

    @property
    def held(self) -> int:
        return self.cache.nbytes

    def start(self, admitted: Sequence[tuple[SampleRequest, int]]) -> None:
        prompts: dict[bytes, _Prompt] = {}
        for request, count in admitted:
            prompt = prompts.setdefault(request.prompt.tobytes(), _Prompt(request.prompt))
            prompt.rows += [SampleRow(request, request.started + i) for i in range(count)]
            request.started += count
        waiting = list(prompts.values())
        for prompt in waiting:
            prompt.begun = self._find(prompt.tokens)
        while waiting:
            shape = waiting[0].shape
            alike = [prompt for prompt in waiting if prompt.shape == shape][: max(1, TOKENS // max(1, shape[1]))]
            self._begin(alike)
            waiting = [prompt for prompt in waiting if prompt not in alike]

    def step(self) -> None:
        self.extend(self.rows, self.decode(self.cache, np.array([[row.tokens[-1]] for row in self.rows])))

    def abandon(self) -> list[SampleRow]:
        self.cache = self.new_cache()
        return super().abandon()

    def leave(self, slots: Sequence[int]) -> None:
        for slot in reversed(slots):
            if self.prefix_cache.limit and not self.rows[slot].stale:
                self.prefix_cache.store(self.rows[slot].computed, self.cache.take([slot]))
            self.cache.remove(slot)
        super().leave(slots)
        if not self.rows:
            self.cache = self.new_cache()

    def new_cache(self) -> RowCache:
        """Return an empty cache."""
        kind: type[DynamicCache] = self.base.known["cache"]
        configured = "config" in inspect.signature(kind).parameters
        return RowCache(kind(config=self.model.config) if configured else kind())

    def decode(self, cache: RowCache, tokens: np.ndarray) -> torch.Tensor:
        """Return logits [B, V] behind ``tokens`` [B, T], which continue the cache's rows, or begin new ones."""
        rows, length = tokens.shape
        cache.reserve(length)
        arguments: dict[str, object] = {self._cache_name: cache.library}
        if cache.starts.any() and cache.columns:
            seen = np.arange(cache.end + length) >= cache.starts[:, None]
            arguments["attention_mask"] = torch.from_numpy(seen.astype(np.int64)).to(self.base.device)
        if self._takes_positions and cache.end:
            positions = cache.end - cache.starts[:, None] + np.arange(length)
            arguments["position_ids"] = torch.from_numpy(positions).to(self.base.device)
        logits = self.logits(tokens, np.arange(rows) * length + length - 1, use_cache=True, **arguments)
        cache.advance(rows, length)
        return logits

    @torch.no_grad()
    def _kind(self) -> type[DynamicCache]:
        """Return the class of the cache that the model makes."""
        token = torch.from_numpy(self.base.probe.tokens[None, :1]).to(self.base.device)
        kind = type(self.model(input_ids=token, use_cache=True).get(self._cache_name))
        if not issubclass(kind, DynamicCache):
            raise NotImplementedError(f"a cache of the kind {kind.__name__}")
        return kind

    def _find(self, tokens: np.ndarray) -> CachedSequence | None:
        """Return what the cache knows of a prompt, as far as it may be continued."""
        sequence = self.prefix_cache.find(tokens)
        return sequence if sequence is None or self.continues or sequence.length == tokens.size else None

    def _begin(self, prompts: Sequence[_Prompt]) -> None:
        """Compute prompts of one shape and the first token of each of their rows; those that go on join the others."""
        rest = np.stack([prompt.rest for prompt in prompts])
        begun = [prompt.begun for prompt in prompts if prompt.begun is not None]
        cache = self.new_cache()
        for sequence in begun:
            cache.add(sequence.cache, [0])
        if rest.size:
            logits = self.decode(cache, rest)
            if self.prefix_cache.limit:
                for i, prompt in enumerate(prompts):
                    self.prefix_cache.store(prompt.tokens, cache.take([i]), logits[i : i + 1].clone())
        else:
            logits = torch.cat([sequence.logits for sequence in begun if sequence.logits is not None])
        which = [i for i, prompt in enumerate(prompts) for _ in prompt.rows]
        rows = [row for prompt in prompts for row in prompt.rows]
        ended = self.draw(rows, logits[which])
        self.cache.add(cache, [i for i, end in zip(which, ended, strict=True) if not end])
        self.rows += [row for row, end in zip(rows, ended, strict=True) if not end]
