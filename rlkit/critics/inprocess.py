"""What the critics share: the order of calls, failures and saving of the backends, with values instead of logprobs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import attrs
import numpy as np

from rlkit.backends.checking import checked_call, checked_data
from rlkit.backends.inprocess import InProcessBackend
from rlkit.backends.outputs import output
from rlkit.backends.protocol import LossLike, Tokenizer
from rlkit.backends.tokenizers import same_tokenizer
from rlkit.errors import ConfigError, UnsupportedError
from rlkit.futures import Future
from rlkit.types import Datum, ForwardBackwardOutput

if TYPE_CHECKING:
    from rlkit.losses.prepare import PreparedLoss

__all__ = ["InProcessCritic", "check_tokenizer"]


class InProcessCritic(InProcessBackend):
    """``Critic`` over the hooks of ``InProcessBackend``; ``_run`` gives way to ``_values_and_parts``."""

    @abstractmethod
    def _values_and_parts(
        self, data: Sequence[Datum], loss: Any, *, backward: bool
    ) -> Generator[None, None, tuple[Sequence[np.ndarray], Sequence[Any]]]:
        """Values [n] of every datum and the parts of the loss; with ``backward`` the gradient is added."""

    def values(self, data: Sequence[Datum]) -> Future[list[np.ndarray]]:
        """V before each of the policy's tokens. See ``Critic.values``."""
        data = checked_data(data, self.tokenizer.vocab_size, self.max_length)

        def job() -> Generator[None, None, list[np.ndarray]]:
            found, _ = yield from self._values_and_parts(data, None, backward=False)
            return [datum.expand(np.asarray(v, np.float32)) for datum, v in zip(data, found, strict=True)]

        return self._submit("values", job, trains=False)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: LossLike = "value_clipped",
        *,
        config: Mapping[str, Any] | None = None,
        want: Sequence[str] = (),
    ) -> Future[ForwardBackwardOutput]:
        """Adds the gradient of a loss of ``values``, all or nothing. See ``Critic.forward_backward``."""
        return super().forward_backward(data, loss, config=config, want=want)

    def sampler(self) -> NoReturn:
        """Raises UnsupportedError: a critic does not sample."""
        raise UnsupportedError("a critic has values and no sampler; sample from the policy")

    base_sampler = _snapshot = _base = sampler

    def _run(
        self,
        data: Sequence[Datum],
        loss: Any,
        want: Sequence[str],  # noqa: ARG002  # values are all there is
        *,
        backward: bool,
    ) -> Generator[None, None, ForwardBackwardOutput]:
        found, parts = yield from self._values_and_parts(data, loss, backward=backward)
        made = output(data, found, {"values": found}, parts)
        return attrs.evolve(made, logprobs=())

    def _checked(
        self, data: Sequence[Datum], loss: LossLike | None, config: Mapping[str, Any] | None, want: Sequence[str]
    ) -> tuple[list[Datum], PreparedLoss | None, tuple[str, ...]]:
        size, longest = self.tokenizer.vocab_size, self.max_length
        return checked_call(
            self._name, data, loss, config, want, (), vocab_size=size, max_length=longest, drivers=("values",)
        )


def check_tokenizer(given: Any, own: Tokenizer | None) -> Tokenizer:
    """The policy's tokenizer, if it is one and reads text as the critic's model does.

    Raises:
        ConfigError: it is none, or gives other ids.
    """
    if not isinstance(given, Tokenizer):
        raise ConfigError(f"critic(tokenizer): got {type(given).__name__}; expected the policy's, policy.tokenizer")
    if own is not None and (problem := same_tokenizer(given, own, ends=False)):
        raise ConfigError(
            f"critic(tokenizer): the critic's model has another tokenizer than the policy: it {problem}; its values "
            "would be those of other texts, so give model= of the policy's family"
        )
    return given
