"""The hint to a policy that scores its own answers: a right answer of another member of the group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlkit.backends.protocol import Sampler
from rlkit.chat import Chat
from rlkit.trajectory import Group, Trajectory

__all__ = ["HINT", "peer_hints"]

HINT = "A correct answer to the task that follows:\n\n{answer}"


def peer_hints(
    groups: Sequence[Group], *, chat: Chat, text: str = HINT, teacher: Sampler | None = None
) -> list[np.ndarray | None]:
    """Return for each trajectory the tokens of a message with the best answer that another member of its group gave.

    None where there is none: all members got the same reward, or the trajectory alone got the best one; and where hint
    and trajectory together do not fit into the teacher's context.

    Args:
        text: of the message; "{answer}" stands for the answer, the text of the last turn.

    Source: SDPO, arXiv:2601.20802. Peers: TRL's sdpo puts the answer into the task's own message, and feedback of the
    environment, too; prime-rl's opsd puts a demonstration from the data set before the task, as here.
    """
    hints: list[np.ndarray | None] = []
    for group in groups:
        rewards = np.array([t.reward if t.token_count else np.nan for t in group.trajectories], float)
        scored = bool(np.isfinite(rewards).any())
        best: list[int] = np.flatnonzero(rewards == np.nanmax(rewards)).tolist() if scored else []
        differ = scored and np.nanmin(rewards) < np.nanmax(rewards)
        for i, trajectory in enumerate(group.trajectories):
            others = [j for j in best if j != i] if differ else []
            hint = (
                chat.message(text.replace("{answer}", _answer(group.trajectories[others[0]], chat))) if others else None
            )
            fits = hint is not None and (teacher is None or hint.size + _longest(trajectory) <= teacher.max_length)
            hints.append(hint if fits else None)
    return hints


def _answer(trajectory: Trajectory, chat: Chat) -> str:
    return str(chat.action(trajectory.turns[-1].tokens)).strip()


def _longest(trajectory: Trajectory) -> int:
    return max(turn.prompt.size + turn.tokens.size for turn in trajectory.turns)
