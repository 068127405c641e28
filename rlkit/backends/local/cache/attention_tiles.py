"""How attention's products are tiled to be batch-invariant: no token depends on what is computed beside it."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import torch

from rlkit.backends.sampling import rounded_up

__all__ = ["KEYS", "LENGTHS", "Tile", "tile_of"]

LENGTHS = 16  # the number of keys looked at is a multiple of it
KEYS = 256  # summed at once at most; beyond some hundreds more gain nothing
QUERIES = 64  # a unit of that size is the largest that is tried

_tiles: dict[tuple[int, int, int, int], Tile] = {}


@attrs.frozen
class Tile:
    """The tiling of one attention.

    Attributes:
        queries: their number is padded to a multiple of it.
        keys: summed at once; a divisor of ``KEYS`` and a multiple of ``LENGTHS``.
    """

    queries: int = 4
    keys: int = KEYS


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Tile], torch.Tensor]


@torch.no_grad()
def tile_of(attend: Attend, heads: int, width: int, value_width: int) -> Tile:
    """Return the cheapest tiling with which a token has the same bits in any batch; measured once in a process.

    A library chooses by shapes, processor and number of threads how a product is summed: for few queries otherwise
    than for many, and a long sum in parts whose size follows from its length, so that masked keys at its end move
    them. With ``LENGTHS`` keys at once there is no such choice.

    Args:
        attend: from queries [B, H, C, D], keys, values [B, H, S, D] and a mask [B, 1, C, S] that is added, to
            [B, H, C, D], tiled as said; the same function for all calls.
        heads: H of keys and values; fewer products than threads are divided among these.
        width: D of queries and keys.
        value_width: D of values.
    """
    threads = torch.get_num_threads()
    heads = min(heads, max(threads, 4))  # more are more of the same, and take longer to try
    key = (heads, width, value_width, threads)
    if key not in _tiles:
        trials = _Trials(attend, heads, width, value_width)
        queries, keys = 1, KEYS
        while queries < QUERIES and not trials.invariant(Tile(queries, LENGTHS)):
            queries *= 2
        while keys > LENGTHS and not trials.invariant(Tile(queries, keys)):
            keys //= 2
        _tiles[key] = Tile(queries, keys)
    return _tiles[key]


class _Trials:
    """One sequence, whose tokens are computed all at once, and some of them alone and in other company."""

    SIZE = 2 * KEYS + 112
    # (first token, how many): near and between the edges, few queries and many
    PARTS = (
        *((place, 1) for place in (0, 17, 63, 106, 130, 199, 255, 300, 510, 610)),
        *((0, 2), (101, 3), (4, 4), (180, 6), (250, 9), (290, 16), (100, 33), (150, 96), (310, 200)),
    )

    def __init__(self, attend: Attend, heads: int, width: int, value_width: int) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, size: int) -> torch.Tensor:
            return torch.rand(rows, heads, self.SIZE, size, generator=generator) - 0.5

        self._attend = attend
        self._queries = random(1, width) * (8 * width**-0.5)  # scores of some units, as models have them
        self._keys, self._values = random(5, width), random(5, value_width)

    def invariant(self, tile: Tile) -> bool:
        """Return whether every token comes out the same however many keys, queries and rows there are."""
        whole = self._compute(tile, 0, self.SIZE, self.SIZE, 1)
        for first, count in self.PARTS:
            least = rounded_up(first + count, LENGTHS)
            for longest, rows in ((least, 1), (least + 3 * LENGTHS, 5), (self.SIZE, 2)):
                part = self._compute(tile, first, count, min(longest, self.SIZE), rows)
                if not torch.equal(part, whole[:, first : first + count]):
                    return False
        return True

    def _compute(self, tile: Tile, first: int, count: int, longest: int, rows: int) -> torch.Tensor:
        """Compute ``count`` tokens from ``first`` on, in ``rows`` rows with ``longest`` keys; return the first row."""
        hidden = torch.arange(longest) > torch.arange(first, first + count)[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
        query = self._queries[:, :, first : first + count].expand(rows, -1, -1, -1)
        return self._attend(query, self._keys[:rows, :, :longest], self._values[:rows, :, :longest], mask, tile)[0]
