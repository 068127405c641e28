"""Keys and values of a prefix tree, each token's once, and in which parts a tree is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.local.cache.attention_tiles import LENGTHS
from rlkit.backends.local.cache.kv_cache import KVCache, causal_mask
from rlkit.backends.local.model.tree_attention import Segment
from rlkit.backends.sampling import rounded_up

__all__ = ["Branch", "TreeCache", "parts"]


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
        """The places of the tokens to compute."""
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
        """Say which rows the next forward has."""
        self._branches = branches

    def reserve(self, rows: int, length: int) -> None:
        """Do nothing: there is room for the tree."""

    def at(self, first: int, positions: torch.Tensor, longest: int) -> torch.Tensor:
        """See ``KVCache.at``; the rows are those of ``choose``."""
        del first
        device, width = positions.device, positions.shape[1]
        self._read = rounded_up(longest, LENGTHS)
        seen = np.zeros((len(self._branches), self._read), np.int64)  # behind a row's end any token, which is masked
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
        states = (key_states, value_states)
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
