"""From trajectories and a critic to the datums that train policy and critic."""

from __future__ import annotations

from collections.abc import Sequence

from numpy.typing import ArrayLike

from rlkit.advantages import gae
from rlkit.backends.protocol import Critic
from rlkit.credit import assign
from rlkit.trajectory import Group, Trajectory
from rlkit.trajectory.types import token_rewards
from rlkit.types import Datum

__all__ = ["gae_datums", "token_rewards"]


def gae_datums(
    critic: Critic,
    trajectories: Sequence[Trajectory],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    rewards: Sequence[ArrayLike] | None = None,
    weights: Sequence[float] | None = None,
    normalize: bool = True,
    split: str = "raise",
) -> list[Datum]:
    """Return the datums of these trajectories with generalised advantage estimates per token, for PPO with a critic.

    This is ``rlkit.credit.assign`` with the estimator ``gae``. Each datum has ``advantages`` and ``sampling_logprobs``
    for the policy's loss, and ``returns`` and ``old_values`` for the critic's, 0 at prompts, tool replies, templates.

    Args:
        critic: asked once for the values of all of them.
        trajectories: those that are unscored or have no token give no datum.
        gamma, lam: of ``rlkit.advantages.gae``, per token.
        rewards: one [token_count] per trajectory, such as ``token_rewards`` with a KL penalty added; None:
            ``token_rewards``.
        weights: one number per trajectory, the result of ``token_weights`` for their ``token_count``; None: 1.
        normalize: advantages with mean 0 and deviation 1 over all tokens (``rebn``); the returns are as they are.
        split: as for ``rlkit.trajectory.datums``.

    Raises:
        DataError: lengths differ, or as for ``datums`` and ``gae``.
        ConfigError: a setting is out of range.

    >>> import rlkit
    >>> from rlkit.trajectory import Trajectory, Turn
    >>> value = rlkit.critic("toy", tokenizer=rlkit.connect("toy").tokenizer)  # 0 everywhere at first
    >>> played = Trajectory([Turn(rlkit.Sample([5, 6], [7, 8], [-0.5, -0.5]), reward=1.0)])
    >>> (datum,) = gae_datums(value, [played], gamma=0.5, lam=1.0, normalize=False)
    >>> datum.inputs["advantages"], datum.inputs["returns"]
    (array([0. , 0. , 0.5, 1. ], dtype=float32), array([0. , 0. , 0.5, 1. ], dtype=float32))

    Source: arXiv:1506.02438 and arXiv:1707.06347.
    """
    batch = assign(
        [Group(trajectories)],
        gae,
        level="token",
        config={"gamma": gamma, "lam": lam},
        critic=critic,
        rewards=rewards,
        weights=weights,
        normalize=normalize,
        split=split,
    )
    return batch.data
