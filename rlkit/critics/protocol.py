"""The protocol of a critic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, Self, runtime_checkable

import numpy as np

from rlkit.backends.protocol import Config, LossLike, Tokenizer
from rlkit.futures import Future
from rlkit.types import Adam, Datum, ForwardBackwardOutput

__all__ = ["Critic"]


@runtime_checkable
class Critic(Protocol):
    """A value model that can be trained. A context manager; calls return at once and take effect in their order."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's."""

    @property
    def max_length(self) -> int:
        """The longest datum, in tokens."""

    @property
    def version(self) -> int:
        """The optimizer steps that the critic has taken, as far as they have been carried out."""

    def values(self, data: Sequence[Datum]) -> Future[list[np.ndarray]]:
        """Return one float32 [T] per datum: entry i is V before token i, 0 wherever the mask is False."""

    def forward_backward(
        self, data: Sequence[Datum], loss: LossLike = "value_clipped", *, config: Config | None = None
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss of ``values`` to the accumulated gradient, all or nothing.

        ``outputs["values"]`` are the values before the update; logprobs are not computed.
        """

    def optim_step(self, params: Adam) -> Future[Mapping[str, float]]:
        """Apply the accumulated gradient and clear it."""

    def save(self, name: str, *, optimizer: bool = True) -> Future[str]:
        """Write the state; the returned path is for ``resume_from=`` or ``init_from=``."""

    def discard(self) -> Future[None]:
        """Drop the accumulated gradient, and accept calls again after a failure."""

    def close(self) -> None:
        """Finish the submitted calls, and end the critic."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
