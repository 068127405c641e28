"""Which of the tokens before it a token sees: all, those of a sliding window, or those of its own chunk.

Layers of one model differ in it. Windows go by positions in a sequence, and so they hold as well for the rows of a KV
cache, which have different lengths, and for the runs of a prefix tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import attrs
import numpy as np
import torch

from rlkit.backends.local.model.lengths import context

__all__ = ["LayerMasks", "Window", "layer_windows", "narrowed", "shorten", "window_of_each_layer"]

ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
Places = TypeVar("Places", int, np.ndarray, torch.Tensor)


@attrs.frozen
class Window:
    """The tokens that one sees of those before it, beside itself.

    Attributes:
        size: in tokens, at least 1.
        chunks: whether the window is the chunk that a token is in, counted from the sequence's beginning (Llama 4),
            and not the last ``size`` tokens.
    """

    size: int
    chunks: bool = False

    def first(self, positions: Places) -> Places:
        """Return the first position that is seen from each of ``positions``; below 0 where that is the beginning.

        >>> [Window(4).first(t) for t in (0, 3, 4, 9)], [Window(4, chunks=True).first(t) for t in (0, 3, 4, 9)]
        ([-3, 0, 1, 6], [0, 0, 4, 8])
        """
        return positions // self.size * self.size if self.chunks else positions - (self.size - 1)


def layer_windows(config: object) -> list[Window | None] | None:
    """Return the window of each layer, None for a layer without one; None if the config tells of layers of other kinds.

    A window that is not shorter than the context is none. (No config of a family without windows tells that it has
    none; whether these are all that the model does is for a comparison to show.)

    >>> from types import SimpleNamespace
    >>> layer_windows(SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=512))
    [Window(size=512, chunks=False), None]
    >>> layer_windows(SimpleNamespace(layer_types=["full_attention", "mamba"]))
    """
    return window_of_each_layer(config) if set(layer_types(config)) <= ATTENTION else None


def window_of_each_layer(config: object) -> list[Window | None]:
    """Return the window of each layer, None for a layer without one, also where it has no attention at all."""
    longest = context(config)
    sliding = getattr(config, "sliding_window", None) or 0 if getattr(config, "use_sliding_window", True) else 0
    chunk = getattr(config, "attention_chunk_size", None) or 0
    windows = {
        "sliding_attention": Window(sliding) if 0 < sliding < longest else None,
        "chunked_attention": Window(chunk, chunks=True) if 0 < chunk < longest else None,
    }
    return [windows.get(kind) for kind in layer_types(config)]


def shorten(config: object, size: int) -> None:
    """Let windows and chunks have at most ``size`` tokens."""
    for name in ("sliding_window", "attention_chunk_size"):
        if getattr(config, name, None):
            setattr(config, name, min(getattr(config, name), size))


def layer_types(config: object) -> Sequence[str]:
    """Return the type of each layer, as transformers names them."""
    every = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return getattr(config, "layer_types", None) or [every] * getattr(config, "num_hidden_layers", 1)


def narrowed(
    mask: torch.Tensor, window: Window | None, queries: torch.Tensor, keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``mask`` without the keys that lie before the window of their query.

    Args:
        mask: [B, 1, T, S], bool, True where a key is seen; or numbers that are added to the scores.
        window: of the layers that it is for; None changes nothing.
        queries: positions [B, T].
        keys: positions [S]; None is 0, 1, ...
    """
    if window is None:
        return mask
    keys = torch.arange(mask.shape[3], device=mask.device) if keys is None else keys
    hidden = keys < window.first(queries)[:, None, :, None]
    return mask.masked_fill(hidden, False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min)


class LayerMasks:
    """The attention masks of one of the library's models, in the form that its forward takes.

    Args:
        config: of its text part.
        dtype: of its weights.
    """

    def __init__(self, config: object, dtype: torch.dtype) -> None:
        windows = layer_windows(config) or [None]
        self._windows: Mapping[str, Window | None] = dict(zip(layer_types(config), windows, strict=False))
        # The library's own ("eager") attention adds the mask to the scores, whatever that is.
        self._added = dtype if getattr(config, "_attn_implementation", None) == "eager" else None

    def of(
        self, mask: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return ``narrowed`` for every type of layer; one mask where all layers have the same."""
        if self._added is not None and mask.dtype == torch.bool:
            zeros = torch.zeros(mask.shape, dtype=self._added, device=mask.device)
            mask = zeros.masked_fill_(~mask, torch.finfo(self._added).min)
        masks = {window: narrowed(mask, window, queries, keys) for window in set(self._windows.values())}
        if len(masks) == 1:
            return next(iter(masks.values()))
        return {kind: masks[window] for kind, window in self._windows.items()}
