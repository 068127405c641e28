"""How a request's completions are drawn: what the session says, what the client asks, and what there is room for."""

from __future__ import annotations

from typing import cast

import attrs
import numpy as np

from rlkit._drawn import DRAWN_WITH, DrawnWith
from rlkit.chat import Chat
from rlkit.gateway.types import Draw
from rlkit.types import SamplingParams

__all__ = ["params_for", "seed_for", "stops"]

_SEEDS = 2**31 - 2**16  # below it every backend takes a seed as it is


def params_for(chat: Chat, draw: Draw, own: SamplingParams | None, room: int) -> SamplingParams:
    """Return how to draw.

    Args:
        chat: of the conversation.
        draw: what the client asked for.
        own: the session's settings, which stand above the client's; None: the client's count.
        room: the most tokens that there is room for, >= 1.
    """
    base = own or SamplingParams(max_tokens=2**31 - 1)
    most = min(room, base.max_tokens, room if draw.max_tokens is None else draw.max_tokens)
    asked = {} if own is not None else {name: getattr(draw, name) for name in DRAWN_WITH}
    said = cast("DrawnWith", {name: value for name, value in asked.items() if value is not None})
    return chat.params(attrs.evolve(base, max_tokens=most, stop=stops(draw, own), **said))


def stops(draw: Draw, own: SamplingParams | None) -> tuple[str, ...] | tuple[int, ...] | None:
    """Return what ends a completion: what the session names and what the client names; None: the end tokens alone."""
    mine = None if own is None else own.stop
    if not draw.stop:
        return () if draw.ignore_eos and mine is None else mine
    if mine and isinstance(mine[0], str) != isinstance(draw.stop[0], str):
        return mine  # texts and ids cannot be mixed; what the session names stands above
    return cast("tuple[str, ...] | tuple[int, ...]", tuple(dict.fromkeys([*(mine or ()), *draw.stop])))


def seed_for(session_seed: int, digest: bytes, repeat: int) -> int:
    """Return the seed of a request, in [0, 2^31): a function of what is asked and how often, not of what came first."""
    words = np.frombuffer(digest, "<u4").tolist()
    state = np.random.SeedSequence(session_seed, spawn_key=(*words, repeat)).generate_state(1, np.uint64)
    return int(state[0]) % _SEEDS
