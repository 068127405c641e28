"""What a tracker is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from rlkit.trajectory import Group

__all__ = ["Tracker"]


@runtime_checkable
class Tracker(Protocol):
    """Anything that takes a run's numbers and trajectories.

    An attribute ``inline = True`` says that its calls are quick and may be made from the training loop; ``Several``
    makes the calls of all others in a thread of their own.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the numbers of a step; may be called several times for one step, with other names."""

    def log_trajectories(
        self,
        groups: Iterable[Group],
        step: int,
        *,
        advantages: Sequence[object] | None = None,
        trainer_logprobs: Sequence[object] | None = None,
    ) -> None:
        """Take the groups of a step.

        Args:
            groups: what a rollout gave.
            step: the step that they trained, or that they were evaluated at.
            advantages: one entry per trajectory, in the order of the groups: a number, or one per token of the
                policy's, [token_count].
            trainer_logprobs: one entry per trajectory: [token_count], as ``ForwardBackwardOutput.selected`` has them.
        """

    def close(self) -> None:
        """Flush and close. Idempotent."""
