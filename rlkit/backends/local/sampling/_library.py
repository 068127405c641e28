"""Decoding through the library's own forward: with its cache, in continuous batches, or without any cache.

A prompt is computed once for all who ask for it, rows of several requests are decoded together, rows that end leave and
others enter. See ``RowCache`` for how caches are joined.

On a CPU, one token of a gated delta rule (Gated DeltaNet, arXiv 2412.06464) has a step of rlkit's own. A recurrent
state takes as much memory as thousands of keys and is read whole for each token, so that the cost is how often it goes
through memory: the library's reference does so 14 times.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import TypeVar

import attrs
import numpy as np
import torch
from torch import nn
from transformers import DynamicCache

from rlkit._fallback import NotSupportedHere
from rlkit.backends.local.cache.library_cache import RowCache
from rlkit.backends.local.cache.prefix_cache import CachedSequence, SequenceCache, Together
from rlkit.backends.local.model.base import Base
from rlkit.backends.local.model.forward import SamplingForward
from rlkit.backends.local.model.memory import kv_bytes, rows_that_fit
from rlkit.backends.local.model.output_head import logits_to_keep
from rlkit.backends.local.sampling._scoring import score_batches, score_rows
from rlkit.backends.local.sampling.sampler import SampleRequest, SampleRow, ScoreRequest, Snapshot
from rlkit.backends.local.sampling.scheduler import Decoder, begin_rows, draw_tokens

F = TypeVar("F", bound=Callable[..., tuple[torch.Tensor, torch.Tensor]])
REFERENCE = "torch_recurrent_gated_delta_rule"  # what the modules call for one token after a state


def gated_delta_step(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of one token and its state, which is written in the place of the one before.

    With decay a = exp(g), the new state is S' = a S + k d, where d = beta (v - a S k), and the output S' q. Since
    S' q = a (S q) + (k q) d, the old state gives both S k and S q, in one product: it is read once for that, and read
    and written twice for S'.

    Args:
        query, key: [B, 1, H, K], not normalised yet.
        value: [B, 1, G H, V]; consecutive heads share a key.
        g, beta: [B, 1, G H], the logarithm of the decay, and how much of the state is overwritten.
        initial_state: float32 [B, G H, K, V], which is overwritten.

    Returns:
        [B, 1, G H, V], and ``initial_state``.
    """
    rows, _, heads, width = value.shape
    q, k = (_normalised(x[:, 0].float()).repeat_interleave(heads // x.shape[2], 1) for x in (query, key))
    q = q * query.shape[-1] ** -0.5
    decay, rate = g[:, 0].float().exp()[..., None], beta[:, 0].float()[..., None]
    state = initial_state.flatten(0, 1)
    both = torch.bmm(torch.stack([k, q], 2).flatten(0, 1), state).view(rows, heads, 2, width)
    known, read = (both * decay[..., None]).unbind(2)
    change = (value[:, 0].float() - known) * rate
    out = read + (k * q).sum(-1, keepdim=True) * change
    state.mul_(decay.flatten(0, 1)[..., None])
    state.baddbmm_(k.flatten(0, 1)[..., None], change.flatten(0, 1)[:, None])
    return out[:, None].to(query.dtype), initial_state


def take_steps(model: nn.Module) -> None:
    """Make the modules of a tree on a CPU call ``gated_delta_step`` instead of transformers' reference.

    The functions of the library stay as they are: a module gets its own forward with another global.
    """
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        reference = getattr(forward, "__globals__", {}).get(REFERENCE)
        if reference is None or REFERENCE not in forward.__code__.co_names:
            continue
        names = {**forward.__globals__, REFERENCE: _instead(reference)}
        own = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
        own.__kwdefaults__ = forward.__kwdefaults__
        module.forward = MethodType(own, module)


def _instead(reference: F) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
    def step(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **more: object,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        plain = initial_state.dtype == torch.float32 and initial_state.is_contiguous() and query.shape[1] == 1
        if plain and use_qk_l2norm_in_kernel and not torch.is_grad_enabled():
            return gated_delta_step(query, key, value, g, beta, initial_state)
        more |= {"g": g, "beta": beta, "initial_state": initial_state}
        return reference(query, key, value, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **more)

    return step


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


TOKENS = 2048  # computed at once at most, but for one row


class LibraryDecoder(Decoder):
    """Rows of several requests, each token computed with all that come before it, for models whose cache is not right.

    Args:
        base: the model.
        merge: whether adapters are merged into copies of its weights.
    """

    mixes = True

    def __init__(self, base: Base, *, merge: bool) -> None:
        self.forward: SamplingForward
        super().__init__(SamplingForward(base, base.tree()), merge=merge)
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
        rows = [row for request, count in admitted for row in request.begin(count)]
        self.rows += rows
        self.extend(rows, self._whole(rows))

    def step(self) -> None:
        self.extend(self.rows, self._whole(self.rows))

    def invariant(self) -> bool:
        return False  # how products are added depends on how many rows there are

    def score(self, requests: Sequence[ScoreRequest]) -> Iterator[None]:
        for batch in score_batches(requests, TOKENS, share=False):
            yield from score_rows(batch, self.forward.logits_in_parts)

    def _recompute(self) -> None:
        pass  # nothing is kept

    def logits(self, tokens: np.ndarray, index: np.ndarray, **arguments: object) -> torch.Tensor:
        """Return logits [n, V] at the flat ``index`` [n] of ``tokens`` [B, T]."""
        ids, places = (torch.from_numpy(x).to(self.base.device) for x in (tokens, index))
        with logits_to_keep(self.model, places):
            logits: torch.Tensor = self.model(input_ids=ids, **arguments).logits
        return logits[0]

    def _whole(self, rows: Sequence[SampleRow]) -> torch.Tensor:
        """Return logits [B, V] after the last tokens of ``rows``."""
        last = np.array([row.position for row in rows])
        longest = int(last.max()) + 1
        tokens = np.zeros((len(rows), longest), np.int64)  # tokens after a row's last one change nothing
        for padded, row in zip(tokens, rows, strict=True):
            padded[: row.position + 1] = [*row.request.prompt, *row.tokens]
        logits, at_once = [], max(1, TOKENS // longest)
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            index = np.arange(last[part].size) * longest + last[part]
            logits.append(self.logits(tokens[part], index, use_cache=False))
        return torch.cat(logits)


@attrs.frozen(eq=False)
class _Prompt:
    """A prompt that is about to be computed, for all who asked for it."""

    tokens: np.ndarray
    rows: list[SampleRow]
    begun: CachedSequence | None  # with which it begins

    @property
    def rest(self) -> np.ndarray:
        """Return the tokens to compute."""
        return self.tokens if self.begun is None else self.tokens[self.begun.length :]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of prompts that are computed together: recurrences and convolutions are not padded."""
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
        self.prefix_cache = SequenceCache(prefix_bytes, beside)
        self._kind = base.known.cache = base.known.cache or self._cache_kind()
        self.cache = self.new_cache()

    def _load(self, snapshot: Snapshot) -> None:
        super()._load(snapshot)
        self.prefix_cache = self.prefix_cache.renew(snapshot)

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
        waiting = [_Prompt(tokens, rows, self._find(tokens)) for tokens, rows in begin_rows(admitted)]
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
        configured = "config" in inspect.signature(self._kind).parameters
        return RowCache(self._kind(config=self.model.config) if configured else self._kind())

    def decode(self, cache: RowCache, tokens: np.ndarray) -> torch.Tensor:
        """Return logits [B, V] after ``tokens`` [B, T], which continue the cache's rows, or begin new ones."""
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
    def _cache_kind(self) -> type[DynamicCache]:
        """Return the class of the cache that the model makes."""
        token = torch.from_numpy(self.base.probe.tokens[None, :1]).to(self.base.device)
        kind = type(self.model(input_ids=token, use_cache=True).get(self._cache_name))
        if not issubclass(kind, DynamicCache):
            raise NotSupportedHere(f"the cache has the unsupported type {kind.__name__}")
        return kind

    def _find(self, tokens: np.ndarray) -> CachedSequence | None:
        """Return what the cache knows of a prompt, as far as it may be continued."""
        sequence = self.prefix_cache.find(tokens)
        return sequence if sequence is None or self.continues or sequence.length == tokens.size else None

    def _store(self, prompts: Sequence[_Prompt], cache: RowCache, logits: torch.Tensor) -> None:
        for i, prompt in enumerate(prompts if self.prefix_cache.limit else ()):
            self.prefix_cache.store(prompt.tokens, cache.take([i]), logits[i : i + 1].clone())

    def _begin(self, prompts: Sequence[_Prompt]) -> None:
        """Compute prompts of one shape and the first token of each of their rows; those that go on join the others."""
        rest = np.stack([prompt.rest for prompt in prompts])
        begun = [prompt.begun for prompt in prompts if prompt.begun is not None]
        cache = self.new_cache()
        for sequence in begun:
            cache.add(sequence.cache, [0])
        if rest.size:
            logits = self.decode(cache, rest)
            self._store(prompts, cache, logits)
        else:
            logits = torch.cat([sequence.logits for sequence in begun if sequence.logits is not None])
        rows = [row for prompt in prompts for row in prompt.rows]
        which = np.repeat(np.arange(len(prompts)), [len(prompt.rows) for prompt in prompts]).tolist()
        ended = draw_tokens(rows, logits[which])
        self.cache.add(cache, [i for i, end in zip(which, ended, strict=True) if not end])
        self.rows += [row for row, end in zip(rows, ended, strict=True) if not end]
