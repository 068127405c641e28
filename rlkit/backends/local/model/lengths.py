"""What a model's config says about lengths: its context, and where something changes with the number of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["context", "thresholds"]

OTHERS = re.compile(r"layer|expert|head|multiple|pattern")  # numbers of something else than tokens
UNBOUNDED = 2**20  # the context of a model whose config names none
NAMES = re.compile(r"window|chunk|block|top_?k|original_max|floor|local|segment|stride|compress|sparse|max_seq")
STATIC = {"default", "linear", "llama3", "yarn", "proportional"}  # rotary positions that are the same at any length


def context(config: object) -> int:
    """Return how many tokens a sequence that is trained or sampled may have.

    Rotary positions of the type "longrope" choose their frequencies by the longest sequence computed: beyond
    ``original_max_position_embeddings`` a token's logprob would depend on the tokens after it. So the context ends
    there. ("dynamic" ones do so beyond ``max_position_embeddings``, which is the context anyway.) Sparse attention that
    picks which tokens are seen does so by scores of which many are equal, and which of those it takes depends on the
    length of the row: its context ends where it begins to pick.
    """
    limits = (getattr(config, x, None) for x in ("max_position_embeddings", "max_seq_len", "max_sequence_length"))
    whole = next((int(x) for x in limits if isinstance(x, int) and x > 0), UNBOUNDED)
    ends = [whole]
    for rope in _ropes(config):
        if rope.get("rope_type") == "longrope":
            end = rope.get("original_max_position_embeddings")
            ends.append(int(end or getattr(config, "original_max_position_embeddings", None) or whole))
    picked = (getattr(config, name, None) for name in ("index_topk", "keep_window_size"))
    return min([*ends, *(x for x in picked if isinstance(x, int) and x > 0)])


def thresholds(config: Any, longest: int) -> list[int]:
    """Return lengths below ``longest`` at which the model may change what it does: windows, chunks, blocks, top-k, ...

    >>> from types import SimpleNamespace
    >>> thresholds(SimpleNamespace(to_dict=lambda: {"window_size": 256, "hidden_size": 64, "chunk": 4096}), 2048)
    [256]
    """
    lengths = {x for name, x in _integers(config.to_dict()) if NAMES.search(name) and not OTHERS.search(name)}
    return sorted(x for x in lengths if 1 < x < longest)


def _ropes(config: object) -> list[Mapping[str, Any]]:
    """Return the settings of its rotary positions: one, or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(x for x in rope.values() if isinstance(x, Mapping))]


def _integers(settings: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            static = value.get("rope_type") in STATIC and not any("scaling" in key for key in value)
            yield from () if static else _integers(value)
        else:
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from ((name, x) for x in values if isinstance(x, int) and not isinstance(x, bool))
