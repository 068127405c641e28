"""Scoring: logprobs of many texts at once, of which what they begin with is computed once.

Texts are packed into prefix trees as in training. A tree is computed a part at a time, so that decoding and training go
on in between; what the parts so far keep are keys and values. Every row is computed as one that is sampled, so that a
text's logprobs do not depend on the texts beside it, where samples do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import numpy as np
import torch

from rlkit.backends.local.cache.tree_cache import TreeCache, parts
from rlkit.backends.local.sampling.requests import ScoreRequest
from rlkit.backends.local.training.micro_batches import MicroBatch, pack
from rlkit.types import Datum

__all__ = ["TREE_TOKENS", "ScoreBatch", "score_batches", "score_rows", "score_tree"]

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
        """Whether nobody waits for any of them."""
        return all(request.dropped for request in self.requests)

    def read(self, logits: torch.Tensor, places: np.ndarray) -> None:
        """Give every request what it asks for of the logits [n, V] behind the tokens at ``places`` [n]."""
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
        budget: a text that is longer is a batch by itself.
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
    """Score a batch whose texts are rows by themselves; yields between parts.

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
