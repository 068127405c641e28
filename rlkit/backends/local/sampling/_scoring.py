"""Scoring: logprobs of many texts at once; what texts share at their beginning is computed once.

Texts are packed into prefix trees as in training. A tree is computed a part at a time, so that decoding and training go
on in between; what the parts so far keep are keys and values. Every row is computed as one that is sampled, so that a
text's logprobs do not depend on the texts in its batch, where samples do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.local.attention.tree import Segment
from rlkit.backends.local.cache.kv_cache import LENGTHS, KVCache, causal_mask
from rlkit.backends.local.sampling.sampler import ScoreRequest
from rlkit.backends.local.training.micro_batches import MicroBatch, pack
from rlkit.backends.requests import round_up
from rlkit.types import Datum

TREE_TOKENS = 4096  # of a tree at most, but for one text: their keys and values are kept until it is done
ROWS = 64  # of logprobs [n, V] at once: less memory than what is asked of the system anew every time


@attrs.frozen(eq=False)
class ScoreBatch:
    """Texts that are scored together.

    Attributes:
        requests: what is asked for.
        tree: their tokens.
        places: in the tree, of the tokens whose logits each request asks for.
    """

    requests: Sequence[ScoreRequest]
    tree: MicroBatch
    places: Sequence[np.ndarray]

    @property
    def dropped(self) -> bool:
        """Return whether no one waits for any of them."""
        return all(request.dropped for request in self.requests)

    def read(self, logits: torch.Tensor, places: np.ndarray) -> None:
        """Fill in what every request asks for from the logits [n, V] after the tokens at ``places`` [n]."""
        row_of = np.full(self.tree.tokens.size, -1)
        for first in range(0, places.size, ROWS):
            part = slice(first, first + ROWS)
            row_of[places[part]] = np.arange(places[part].size)
            warm: dict[float, torch.Tensor] = {}  # logprobs at each temperature
            for request, own in zip(self.requests, self.places, strict=True):
                rows = row_of[own]
                here = np.flatnonzero(rows >= 0)
                if here.size == 0 or request.dropped:
                    continue
                if request.temperature not in warm:
                    scaled = logits[part] if request.temperature == 1.0 else logits[part] / request.temperature
                    warm[request.temperature] = torch.log_softmax(scaled, dim=-1, dtype=torch.float32)
                request.read(np.flatnonzero(request.mask)[here], warm[request.temperature], rows[here])
            row_of[places[part]] = -1

    def finish(self) -> None:
        """Complete the requests."""
        for request in self.requests:
            request.finish()


def score_batches(requests: Sequence[ScoreRequest], budget: int, *, share: bool = True) -> Iterator[ScoreBatch]:
    """Yield the requests in batches of at most ``budget`` tokens; those that ask for nothing are completed.

    Args:
        requests: of one snapshot.
        budget: a longer text is a batch alone.
        share: whether texts may share what they begin with.
    """
    asking = []
    for request in requests:
        if request.mask.any():
            asking.append(request)
        else:
            request.finish()
    data = [Datum(request.tokens, request.mask) for request in asking]
    for tree in pack(data, budget, share=share):
        members = [asking[i] for i in tree.members]
        ends = np.cumsum([data[i].mask.sum() for i in tree.members])
        yield ScoreBatch(members, tree, np.split(tree.index, ends[:-1]))


@attrs.frozen(eq=False)
class Branch:
    """Some tokens of a tree in a row, and all that come before them.

    Attributes:
        places: int64 [S], of the whole sequence in the tree, the first token first.
        start: where the tokens to compute begin in it.
    """

    places: np.ndarray
    start: int

    @property
    def new(self) -> np.ndarray:
        """Return the places of the tokens to compute."""
        return self.places[self.start :]


def parts(runs: Sequence[Segment], limit: int, shape: Callable[[int, int], tuple[int, int]]) -> Iterator[list[Branch]]:
    """Yield what is computed at once: rows of at most ``limit`` tokens, each after what comes before it.

    Args:
        runs: of the tree.
        limit: of a part's padded shape; a run that is longer is cut.
        shape: pads rows and their length.

    >>> tree = [Segment(0, 5), Segment(5, 7, (slice(0, 4),)), Segment(7, 10, (slice(0, 4),))]
    >>> for part in parts(tree, 6, lambda rows, length: (rows, length)):
    ...     print([(branch.start, branch.new.tolist()) for branch in part])
    [(0, [0, 1, 2, 3, 4])]
    [(4, [5, 6]), (4, [7, 8, 9])]
    """
    computed = np.zeros(runs[-1].end if runs else 0, bool)
    left = {i: run.begin for i, run in enumerate(runs)}  # run -> its first token that is not computed
    while left:
        ready = [i for i in left if not runs[i].before or computed[runs[i].before[-1].stop - 1]]
        ready.sort(key=lambda i: runs[i].end - left[i])
        chosen: list[Branch] = []
        for i in ready:
            run, begin = runs[i], left[i]
            end = min(run.end, begin + limit)
            if chosen and int(np.prod(shape(len(chosen) + 1, end - begin))) > limit:
                break
            before = [np.arange(s.start, s.stop) for s in (*run.before, slice(run.begin, begin))]
            start = sum(x.size for x in before)
            chosen.append(Branch(np.concatenate([*before, np.arange(begin, end)]), start))
            left[i] = end
        yield chosen
        for branch in chosen:
            computed[branch.new] = True
        left = {i: begin for i, begin in left.items() if begin < runs[i].end}


class TreeCache(KVCache):
    """The KV cache of a prefix tree, of which a row reads the tokens of its own sequence.

    Args:
        size: tokens of the tree.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._branches: Sequence[Branch] = ()

    def choose(self, branches: Sequence[Branch]) -> None:
        """Choose the rows of the next forward."""
        self._branches = branches

    def reserve(self, rows: int, length: int) -> None:
        """Do nothing: there is room for the tree."""

    def at(self, first: int, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """See ``KVCache.at``; the rows are those of ``choose``."""
        del first
        device, width = positions.device, positions.shape[1]
        self._read = round_up(longest, LENGTHS)
        seen = np.zeros((len(self._branches), self._read), np.int64)  # after a row's end any token, which is masked
        for row, branch in zip(seen, self._branches, strict=True):
            row[: branch.places.size] = branch.places
        given = [b * width + np.arange(branch.new.size) for b, branch in enumerate(self._branches)]
        new = [branch.new for branch in self._branches]
        self._seen, self._given, self._new = (
            torch.from_numpy(x).to(device) for x in (seen.ravel(), np.concatenate(given), np.concatenate(new))
        )
        return causal_mask(positions, self._read)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KVCache.update``."""
        states = key_states.to(value_states.dtype), value_states
        while len(self.store) <= layer_idx:
            keys, values = (x.new_zeros(x.shape[1], self._size, x.shape[3]) for x in states)
            self.store.append((keys, values))
        out = []
        for stored, new in zip(self.store[layer_idx], states, strict=True):
            flat = new.transpose(0, 1).flatten(1, 2)  # [H, P T, D]
            stored.index_copy_(1, self._new, flat.index_select(1, self._given))
            read = stored.index_select(1, self._seen)
            out.append(read.unflatten(1, (len(self._branches), self._read)).transpose(0, 1))
        return out[0], out[1]


Compute = Callable[[np.ndarray, np.ndarray, np.ndarray, TreeCache], torch.Tensor]


def score_tree(
    batch: ScoreBatch, compute: Compute, limit: int, shape: Callable[[int, int], tuple[int, int]]
) -> Iterator[None]:
    """Score a batch whose texts share what they begin with; yields between parts.

    Args:
        batch: the texts.
        compute: logits [n, V] at the flat ``index`` [n] of tokens [B, T], which begin at ``starts`` [B] in the rows of
            a cache: compute(tokens, starts, index, cache).
        limit: tokens of a part at most.
        shape: pads rows and their length.
    """
    cache = TreeCache(batch.tree.tokens.size)
    wanted = np.zeros(batch.tree.tokens.size, bool)
    wanted[batch.tree.index] = True
    for part in parts(batch.tree.runs, limit, shape):
        if batch.dropped:
            return
        width = max(branch.new.size for branch in part)
        tokens = np.zeros((len(part), width), np.int64)
        for row, branch in zip(tokens, part, strict=True):
            row[: branch.new.size] = batch.tree.tokens[branch.new]
        places = np.concatenate([branch.new for branch in part])
        index = np.concatenate([b * width + np.arange(branch.new.size) for b, branch in enumerate(part)])
        asked = np.flatnonzero(wanted[places])
        asked = asked if asked.size else np.zeros(1, np.int64)  # a forward reads one token's logits at least
        cache.choose(part)
        logits = compute(tokens, np.array([branch.start for branch in part]), index[asked], cache)
        batch.read(logits, places[asked])
        yield
    batch.finish()


def score_rows(batch: ScoreBatch, logits: Callable[[MicroBatch], Iterator[torch.Tensor]]) -> Iterator[None]:
    """Score a batch in which each text is a row; yields between parts.

    Args:
        batch: the texts, which share nothing.
        logits: [n, V] of the tokens of ``MicroBatch.index``, some at a time.
    """
    first = 0
    for part in logits(batch.tree):
        if batch.dropped:
            return
        batch.read(part, batch.tree.index[first : first + len(part)])
        first += len(part)
        yield
    batch.finish()
