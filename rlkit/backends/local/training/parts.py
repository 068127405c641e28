"""Where a micro-batch is cut for modules that compute some of its tokens behind what they keep of those before."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import torch
from transformers import DynamicCache

from rlkit.backends.local.model.device import to_device
from rlkit.backends.local.model.llama import Llama
from rlkit.backends.local.model.tree_attention import Segment
from rlkit.backends.local.model.windows import LayerMasks
from rlkit.backends.local.training.micro_batches import MicroBatch

__all__ = ["BLOCK", "Part", "PartInputs", "parts_of", "parts_with_states"]

BLOCK = 16
PADDING = 1.5  # times the tokens of a part at most with its padding


@attrs.frozen
class Part:
    """Tokens that are computed at once: a row, or several rows that nothing continues.

    Attributes:
        places: in the micro-batch.
        lengths: tokens of each row.
        before: for each row the part at whose end its recurrent states are known, -1 where a sequence begins.
        continued: whether another part begins at its end.
    """

    places: slice
    lengths: tuple[int, ...]
    before: tuple[int, ...] = (-1,)
    continued: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """Rows, and tokens of each with the padding on its right: two at least where a row need not end exactly."""
        return len(self.lengths), max(*self.lengths, 1 if self.continued else 2)

    @property
    def padded(self) -> np.ndarray:
        """The places of its tokens in the flattened rows."""
        return np.concatenate([r * self.shape[1] + np.arange(n) for r, n in enumerate(self.lengths)])


@attrs.frozen(eq=False)
class PartInputs:
    """``Inputs`` of a part.

    Attributes:
        batch: the micro-batch.
        part: of it.
        outputs: int64 [n], the places in the part whose logits are wanted.
        cache: what the modules keep, as it is at the part's beginning.
        takes: names of the arguments of the model's forward.
    """

    batch: MicroBatch
    part: Part
    outputs: np.ndarray
    cache: DynamicCache
    takes: Collection[str]

    def for_llama(self, _: Llama) -> Any:
        """See ``Inputs.for_llama``; a part is the library's."""
        raise NotImplementedError

    def for_library(self, device: torch.device, _: LayerMasks, *, trees: bool) -> tuple[dict[str, Any], torch.Tensor]:
        """See ``Inputs.for_library``: rows without a mask, which attention has by itself."""
        del trees
        padded, shape = self.part.padded, self.part.shape
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        tokens.flat[padded] = self.batch.tokens[self.part.places]
        positions.flat[padded] = self.batch.positions[self.part.places]
        ids, at, index = (to_device(x, device) for x in (tokens, positions, padded[self.outputs]))
        cache = "cache_params" if "cache_params" in self.takes else "past_key_values"
        where = {"position_ids": at} if "position_ids" in self.takes else {}
        return {"input_ids": ids, **where, cache: self.cache, "use_cache": True}, index


def parts_of(runs: Sequence[Segment], size: int) -> list[Part]:
    """Return parts of at most ``size`` tokens, wherever runs begin and end; all but the first have as many.

    >>> [part.places for part in parts_of([Segment(0, 3), Segment(3, 5)], 4)]
    [slice(0, 1, None), slice(1, 5, None)]
    """
    end = runs[-1].end
    cuts = [0, *range(end % size or size, end, size), end]
    return [Part(slice(a, b), (b - a,)) for a, b in pairwise(cuts)]


def parts_with_states(runs: Sequence[Segment], size: int) -> list[Part]:
    """Return parts whose rows begin at the end of an earlier part, or where a sequence begins.

    They have at most ``size`` tokens with their padding, but ``BLOCK`` at least. Runs branch off at multiples of
    ``BLOCK``; so do parts, and none that is continued has a single token, which the library computes by other code.

    >>> tree = [Segment(0, 18), Segment(18, 20, (slice(0, 16),)), Segment(20, 21, (slice(0, 16),))]
    >>> for part in parts_with_states(tree, 16):
    ...     print(part)
    Part(places=slice(0, 16, None), lengths=(16,), before=(-1,), continued=True)
    Part(places=slice(16, 21, None), lengths=(2, 2, 1), before=(0, 0, 0), continued=False)
    """
    size = max(size - size % BLOCK, BLOCK)
    pieces = _pieces(runs, size)
    continued = {front for *_, front in pieces}
    parts: list[Part] = []
    for begin, end, front in pieces:
        before = -1 if front < 0 else bisect_right(parts, front, key=lambda part: part.places.start) - 1
        last = parts[-1] if parts else None
        if last is not None and not last.continued and end - 1 not in continued:
            lengths = (*last.lengths, end - begin)
            padded = max(lengths) * len(lengths)
            if (last.before[0] < 0) == (before < 0) and padded <= min(size, PADDING * sum(lengths)):
                parts[-1] = Part(slice(last.places.start, end), lengths, (*last.before, before))
                continue
        parts.append(Part(slice(begin, end), (end - begin,), (before,), end - 1 in continued))
    return parts


def _pieces(runs: Sequence[Segment], size: int) -> list[tuple[int, int, int]]:
    """Return begins and ends of tokens in a row that no run branches off, and the place before each, or -1."""
    branches = {s.stop for run in runs for s in run.before}
    pieces: list[tuple[int, int, int]] = []
    for run in runs:
        front = run.before[-1].stop - 1 if run.before else -1
        for first, last in pairwise(sorted({run.begin, run.end, *(x for x in branches if run.begin < x < run.end)})):
            for begin in range(first, last, size):
                pieces.append((begin, min(begin + size, last), front))
                front = pieces[-1][1] - 1
    return pieces
