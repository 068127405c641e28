"""Penalties on tokens that were there before: which those are, and what becomes of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlkit.errors import ConfigError
from rlkit.types import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["TokenCounts", "penalized"]


class TokenCounts:
    """The tokens of a prompt and its completion, and how often the completion has each.

    Args:
        prompt: int [P], of which the completion has none yet.

    >>> counts = TokenCounts(np.array([7, 5, 7]))
    >>> for token in (5, 9, 9):
    ...     counts.add(token)
    >>> counts.ids.tolist(), counts.counts.tolist()
    ([5, 7, 9], [1.0, 0.0, 2.0])
    """

    def __init__(self, prompt: np.ndarray) -> None:
        self._ids = np.unique(prompt).astype(np.int64)
        self._counts = np.zeros(self._ids.size, np.float32)
        self._place = {token: i for i, token in enumerate(self._ids.tolist())}

    @classmethod
    def of(cls, params: SamplingParams, prompt: np.ndarray) -> TokenCounts | None:
        """Return what ``params`` need of a new completion of ``prompt``: None where they have no penalty."""
        if not params.penalizes:
            return None
        return cls(prompt if params.repetition_penalty != 1.0 else prompt[:0])

    def add(self, token: int) -> None:
        """Take in the completion's next token."""
        place = self._place.setdefault(token, len(self._place))
        if place >= self._ids.size:
            more = max(place, 16)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> np.ndarray:
        """Return int64 [S], each once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> np.ndarray:
        """Return float32 [S]."""
        return self._counts[: len(self._place)]


def penalized(
    logits: torch.Tensor, params: Sequence[SamplingParams], counts: Sequence[TokenCounts | None]
) -> torch.Tensor:
    """Return logits [B, V] after the rows' penalties: the repetition penalty first, then the other two, as vLLM's.

    Args:
        logits: float32 [B, V], not written to.
        params: one per row.
        counts: one per row; None for a row without a penalty.

    Raises:
        ConfigError: a row with a penalty has no counts.
    """
    import torch

    seen = []
    for row, (how, of) in enumerate(zip(params, counts, strict=True)):
        if how.penalizes and of is None:
            raise ConfigError(f"draw(counts)[{row}]", "is None", "TokenCounts", f"params[{row}] has a penalty")
        if how.penalizes and of is not None and of.ids.size:
            seen.append((row, how, of))
    if not seen:
        return logits
    sizes = [of.ids.size for _, _, of in seen]
    row, ids, times, repetition, presence, frequency = (
        torch.from_numpy(array).to(logits.device)
        for array in (
            np.repeat([row for row, _, _ in seen], sizes),
            np.concatenate([of.ids for _, _, of in seen]),
            np.concatenate([of.counts for _, _, of in seen]),
            *(
                np.repeat(np.array([getattr(how, name) for _, how, _ in seen], np.float32), sizes)
                for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
            ),
        )
    )
    scores = logits[row, ids]
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = scores - frequency * times - presence * (times > 0)
    return logits.index_put((row, ids), scores)
