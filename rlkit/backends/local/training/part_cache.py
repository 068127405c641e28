"""transformers' cache of one part of a micro-batch: recurrent states go in and come out as autograd sees them.

The library writes a new state over the old one, which the backward pass still needs. Here every state is a new tensor.
Keys and values are not kept at all: attention over the parts before is computed elsewhere (see ``PartAttention``).
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)
from transformers.configuration_utils import PreTrainedConfig

__all__ = ["StateName", "has_states", "part_cache", "set_states", "states_of"]

StateName: TypeAlias = tuple[int, str, int]  # layer, kind, number


class _Attention(DynamicLayer):
    """Hands on the keys and values of the part itself."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class _States(LinearAttentionLayer):
    """States of recurrences and convolutions, which are replaced and not written to."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: object
    ) -> torch.Tensor:
        """Return the inputs [B, D, T] of a convolution behind those that it still sees, and keep the last ones."""
        before = self.conv_states[state_idx]
        size = conv_kernel_size or (conv_states if before is None else before).shape[-1]
        full = F.pad(conv_states, (size, 0)) if before is None else torch.cat([before, conv_states], dim=-1)
        self.conv_states[state_idx] = full[..., -size:].clone()
        self.has_previous_state[state_idx] = True
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: object) -> torch.Tensor:
        """Keep a state."""
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _Both(_States, _Attention):
    def __init__(self, number_of_states: int) -> None:
        _Attention.__init__(self)
        LinearAttentionLayer.__init__(self, number_of_states)


def part_cache(config: PreTrainedConfig) -> DynamicCache:
    """Return the cache of a part at the beginning of a sequence.

    Raises:
        NotImplementedError: the model keeps something else than keys, values and such states.
    """
    cache = DynamicCache(config=config)
    layers: list[object] = []
    for layer in cache.layers:
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            layers.append(_Attention())
        elif type(layer) is LinearAttentionLayer:
            layers.append(_States(layer.number_of_states))
        elif type(layer) in (LinearAttentionAndFullAttentionLayer, LinearAttentionAndSlidingWindowAttentionLayer):
            layers.append(_Both(layer.number_of_states))
        elif type(layer) is DummyLayer:
            layers.append(layer)
        else:
            raise NotImplementedError(f"a cache with {type(layer).__name__}")
    cache.layers = layers
    return cache


def has_states(cache: DynamicCache) -> bool:
    """Return whether any layer has a state."""
    return any(isinstance(layer, _States) for layer in cache.layers)


def states_of(cache: DynamicCache) -> dict[StateName, torch.Tensor]:
    """Return the states that a forward left, [B, ...] each."""
    states: dict[StateName, torch.Tensor] = {}
    for i, layer in enumerate(cache.layers):
        for kind in ("conv_states", "recurrent_states"):
            numbered = getattr(layer, kind, {})
            states |= {(i, kind, n): state for n, state in numbered.items() if state is not None}
    return states


def set_states(cache: DynamicCache, states: dict[StateName, torch.Tensor]) -> None:
    """Let a forward begin with such states."""
    for (i, kind, n), state in states.items():
        getattr(cache.layers[i], kind)[n] = state
        cache.layers[i].has_previous_state[n] = True
