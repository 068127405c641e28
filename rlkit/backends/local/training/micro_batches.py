"""Micro-batches: which datums are computed together, with what they have in common computed once.

The tokens of a micro-batch lie one after the other. A datum that begins as another one of the batch does adds only what
comes after, a run, which sees its own sequence alone and stands at the positions that it has there; so a group reads
its prompt once, and so do the turns of an episode what they share. Batches are cut where least is computed twice.
Tokens after the last one that is scored are left out: nothing depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch

from rlkit.backends.local.model.decoder_layer import Attention
from rlkit.backends.local.model.device import to_device
from rlkit.backends.local.model.llama import Llama
from rlkit.backends.local.model.tree_attention import Segment, positions, visible
from rlkit.backends.local.model.windows import LayerMasks
from rlkit.backends.local.training.flex_attention import tree_attention
from rlkit.backends.local.training.partition import LOOK_BACK, cuts, in_common, row_costs, tree_costs
from rlkit.types import Datum

__all__ = ["MicroBatch", "pack"]

LONGER = 2.0  # a prompt is computed again for each further batch of its group: at most about half of the work then


@attrs.frozen(eq=False)
class MicroBatch:
    """One forward and backward.

    Attributes:
        members: indices of datums, in the order of the outputs.
        tokens: int64 [N].
        positions: int64 [N], of each token in its own sequence.
        runs: which tokens see which.
        index: int64 [n], the places whose logits predict the members' masked-in tokens, in order.
    """

    members: list[int]
    tokens: np.ndarray
    positions: np.ndarray
    runs: list[Segment]
    index: np.ndarray

    def for_llama(self, llama: Llama) -> tuple[torch.Tensor, torch.Tensor, Sequence[Attention], torch.Tensor]:
        """See ``Inputs.for_llama``."""
        heads, device = (llama.heads, llama.key_heads, llama.head_dim), llama.device
        by_window = {w: tree_attention(self.runs, *heads, llama.dtype, device, w) for w in set(llama.windows)}
        tokens, positions, index = (to_device(x, llama.device) for x in (self.tokens, self.positions, self.index))
        return tokens, positions, [by_window[window] for window in llama.windows], index

    def for_library(
        self, device: torch.device, masks: LayerMasks, *, trees: bool
    ) -> tuple[dict[str, Any], torch.Tensor]:
        """See ``Inputs.for_library``: one row with a mask over all pairs, or every run as a row."""
        if not (trees and len(self.runs) > 1):
            tokens, index = (to_device(x, device) for x in self.rows())
            return {"input_ids": tokens, "use_cache": False}, index
        seen = visible(self.runs, self.tokens.size)
        arrays = self.tokens[None], self.positions[None], seen[None, None], self.index
        tokens, at, mask, index = (to_device(x, device) for x in arrays)
        arguments = {"input_ids": tokens, "position_ids": at, "use_cache": False}
        return {**arguments, "attention_mask": masks.of(mask, at, at[0])}, index

    @property
    def padded(self) -> int:
        """Tokens of ``rows`` with their padding."""
        return len(self.runs) * max(run.end - run.begin for run in self.runs)

    @property
    def shares(self) -> bool:
        """Whether some tokens are of several sequences."""
        return any(run.before for run in self.runs)

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """Return every run as a row: tokens [B, L], padded on the right, and ``index`` as places of those."""
        lengths = [run.end - run.begin for run in self.runs]
        places = np.concatenate([r * max(lengths) + np.arange(n) for r, n in enumerate(lengths)])
        tokens = np.zeros(len(lengths) * max(lengths), np.int64)
        tokens[places] = self.tokens
        return tokens.reshape(len(lengths), -1), places[self.index]


def pack(
    data: Sequence[Datum], budget: int, *, pairs: bool = False, share: int = 1, chunked: bool = False
) -> list[MicroBatch]:
    """Return batches of at most ``budget`` tokens of all datums with a masked-in token.

    Args:
        data: the datums.
        budget: a unit (a datum, or a pair of them) longer than that is a batch by itself.
        pairs: datums 2k and 2k + 1 stay in one batch, in that order.
        share: compute once what sequences begin with, in blocks of so many tokens. With 0 every datum is a run by
            itself, and the padding of ``MicroBatch.rows`` counts; so it does where blocks are of several tokens and
            save less than that.
        chunked: a batch of more than the budget is computed in parts. So a unit longer than that may have others beside
            it, with which it shares tokens: ``LONGER`` times its own at most, since some is kept of every token.
    """
    if share > 1:
        options = {"pairs": pairs, "chunked": chunked}
        trees, rows = (_packed(data, budget, share=x, **options) for x in (share, 0))
        fewer = sum(batch.tokens.size for batch in trees) < sum(batch.padded for batch in rows)
        return trees if fewer else rows
    return _packed(data, budget, pairs=pairs, share=share, chunked=chunked)


def _packed(data: Sequence[Datum], budget: int, *, pairs: bool, share: int, chunked: bool) -> list[MicroBatch]:
    width = 2 if pairs else 1
    units = [range(k, min(k + width, len(data))) for k in range(0, len(data), width)]
    read = {i: datum.tokens[: np.flatnonzero(datum.mask)[-1]] for i, datum in enumerate(data) if datum.mask.any()}
    chosen = [scored for unit in units if (scored := [i for i in unit if i in read])]
    if share:
        chosen.sort(key=lambda unit: read[unit[0]].tobytes())
    else:
        chosen.sort(key=lambda unit: max(read[i].size for i in unit))
    members = [read[i] for unit in chosen for i in unit]
    firsts = np.cumsum([0, *map(len, chosen)])
    costs = tree_costs(members, firsts, share) if share else row_costs(members, firsts)
    batches = []
    for part in cuts(len(chosen), costs, budget, LONGER if chunked else 1.0):
        batch = _Filling(share)
        for i in (i for unit in chosen[part] for i in unit):
            batch.take(i, read)
        batches.append(batch.done(data))
    return batches


@attrs.define
class _Filling:
    """A batch on its way."""

    share: int
    members: list[int] = attrs.field(factory=list)
    places: dict[int, np.ndarray] = attrs.field(factory=dict)  # datum -> the places of its tokens
    parts: list[np.ndarray] = attrs.field(factory=list)
    runs: list[Segment] = attrs.field(factory=list)
    size: int = 0

    def take(self, i: int, read: dict[int, np.ndarray]) -> None:
        """Append a datum."""
        tokens = read[i]
        earlier = self.members[-LOOK_BACK:] if self.share else []
        n, like = max(((in_common(tokens, read[j], self.share), j) for j in earlier), default=(0, i))
        before = self.places[like][:n] if n else np.zeros(0, np.int64)
        end = self.size + tokens.size - n
        self.members.append(i)
        self.places[i] = np.concatenate([before, np.arange(self.size, end)])
        if end > self.size:
            self.parts.append(tokens[n:])
            self.runs.append(Segment(self.size, end, _slices(before)))
        self.size = end

    def done(self, data: Sequence[Datum]) -> MicroBatch:
        index = [self.places[i][np.flatnonzero(data[i].mask) - 1] for i in self.members]
        tokens = np.concatenate(self.parts).astype(np.int64)
        return MicroBatch(self.members, tokens, positions(self.runs), self.runs, np.concatenate(index))


def _slices(places: np.ndarray) -> tuple[slice, ...]:
    """Ascending places as slices."""
    cuts = np.flatnonzero(np.diff(places) != 1) + 1
    return tuple(slice(int(p[0]), int(p[-1]) + 1) for p in np.split(places, cuts) if p.size)
