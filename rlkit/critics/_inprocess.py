"""The base of the critics: the order of calls, failures and saving of the backends, with values instead of logprobs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from rlkit.backends.checking import checked_data, output
from rlkit.backends.inprocess import InProcessTrainer
from rlkit.backends.protocol import Config, LossLike, Tokenizer
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.errors import ConfigError
from rlkit.futures import Future
from rlkit.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import LossGradient, PreparedLoss

__all__ = ["InProcessCritic", "check_tokenizer"]


class InProcessCritic(InProcessTrainer):
    """``Critic`` over the hooks of ``InProcessTrainer``; ``_values_and_parts`` replaces ``_run``."""

    _drivers = ("values",)
    _wanted = ()

    @abstractmethod
    def _values_and_parts(
        self, data: Sequence[Datum], loss: PreparedLoss | None, *, backward: bool
    ) -> Generator[None, None, tuple[Sequence[np.ndarray], Sequence[LossGradient]]]:
        """Return values [n] of every datum and the parts of the loss; with ``backward`` the gradient is added."""

    def values(self, data: Sequence[Datum]) -> Future[list[np.ndarray]]:
        """Compute V before each of the policy's tokens. See ``Critic.values``."""
        data = checked_data(data, self.tokenizer.vocab_size, self.max_length)

        def job() -> Generator[None, None, list[np.ndarray]]:
            arrays, _ = yield from self._values_and_parts(data, None, backward=False)
            return [datum.expand(np.asarray(v, np.float32)) for datum, v in zip(data, arrays, strict=True)]

        return self._queue.submit("values", job)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossLike = "value_clipped",
        *,
        config: Config | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Add the gradient of a loss of ``values``, all or nothing. See ``Critic.forward_backward``."""
        return super().forward_backward(data, loss, config=config, want=want)

    def _run(
        self,
        data: Sequence[Datum],
        loss: PreparedLoss | None,
        want: Sequence[str],  # noqa: ARG002  # values are the only output
        *,
        backward: bool,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        arrays, parts = yield from self._values_and_parts(data, loss, backward=backward)
        made = output(data, arrays, {"values": arrays}, parts)
        return attrs.evolve(made, logprobs=())


def check_tokenizer(given: object, own: Tokenizer | None) -> Tokenizer:
    """Return the policy's tokenizer, if it is one and reads text as the critic's model does.

    Raises:
        ConfigError: it is not a tokenizer, or gives other ids.
    """
    if not isinstance(given, Tokenizer):
        raise ConfigError(f"critic(tokenizer): got {type(given).__name__}; expected the policy's, policy.tokenizer")
    if own is not None and (problem := same_tokenizer(given, own, ends=False)):
        raise ConfigError(
            f"critic(tokenizer): the critic's tokenizer differs from the policy's: it {problem}; its values would "
            "belong to other texts, so choose model= from the policy's family"
        )
    return given
