"""From groups of trajectories to what each of their tokens is worth, by the estimator of a method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rlkit import advantages
from rlkit.critics.estimates import token_rewards
from rlkit.recipes.method import Method
from rlkit.trajectory import Group, Trajectory

__all__ = ["credited", "turn_states"]


@attrs.frozen(eq=False)
class _Batch:
    """Trajectories in their groups, what the KL penalty adds to each token's reward, and what else is known."""

    groups: Sequence[Group]
    penalty: Sequence[np.ndarray]
    given: Mapping[str, Any]
    seed: Sequence[int]

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]


def credited(
    method: Method, groups: Sequence[Group], given: Mapping[str, Any], *, seed: Sequence[int]
) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
    """One float64 [token_count] per trajectory: its tokens' advantages; and what a critic is to predict there, or None.

    Where there are values, the advantages are normalised over the batch's tokens, as PPO has them.

    Args:
        method: whose estimator it is.
        groups: every trajectory has tokens.
        given: what the loop has found out, in the order of the trajectories: "sampling_logprobs",
            "reference_logprobs", "teacher_logprobs", "values": lists of [token_count]; "baseline": one number per
            trajectory. Only what the method needs.
        seed: of estimators that draw.
    """
    penalty = [np.zeros(t.token_count) for group in groups for t in group.trajectories]
    if method.kl_penalty > 0:
        two = {name: given[name] for name in ("sampling_logprobs", "reference_logprobs")}
        penalty = advantages.kl_penalty(**two, coef=method.kl_penalty, estimator=method.penalty)
    result = _LEVELS[method.recipe.level](method, _Batch(groups, penalty, given, seed))
    returns = None
    if isinstance(result, tuple):
        result, returns = advantages.rebn(result[0]), list(result[1])
    found = list(result)
    if method.entropy > 0:
        bonus = advantages.entropy_bonus(sampling_logprobs=given["sampling_logprobs"], coef=method.entropy)
        found = [a + b for a, b in zip(found, bonus, strict=True)]
    return found, returns


def turn_states(trajectory: Trajectory) -> list[Any]:
    """What each turn was told since the one before: steps with equal states are comparable."""
    said: list[list[str]] = [[]]
    for message in trajectory.messages:
        if message.get("role") == "assistant":
            said.append([])
        else:
            said[-1].append(str(message.get("content")))
    if len(said) > len(trajectory.turns):
        return [tuple(texts) for texts in said[: len(trajectory.turns)]]
    return [turn.prompt.tobytes() for turn in trajectory.turns]


def _per_group(method: Method, batch: _Batch) -> list[np.ndarray]:
    trajectories = batch.trajectories
    flat = np.array([t.reward + p.sum() for t, p in zip(trajectories, batch.penalty, strict=True)])
    cuts = np.cumsum([len(group) for group in batch.groups])[:-1]
    extra: dict[str, Any] = {}
    if "lengths" in _parameters(method):
        extra["lengths"] = np.split(np.array([float(t.token_count) for t in trajectories]), cuts)
    if "rng" in _parameters(method) and method.recipe.advantage_args.get("drop") is not None:
        extra["rng"] = np.random.default_rng(np.random.SeedSequence(batch.seed))
    found = method.estimator(np.split(flat, cuts), **extra, **method.recipe.advantage_args)
    return [np.full(t.token_count, a) for t, a in zip(trajectories, np.concatenate(found), strict=True)]


def _per_turn(method: Method, batch: _Batch) -> list[np.ndarray]:
    rewards = [_turn_rewards(t, p) for t, p in zip(batch.trajectories, batch.penalty, strict=True)]
    ends = np.cumsum([len(group) for group in batch.groups]).tolist()
    groups = [rewards[end - len(group) : end] for group, end in zip(batch.groups, ends, strict=True)]
    args = method.recipe.advantage_args
    if "steps" in _parameters(method):  # one call, since a deviation may be that of the batch
        sums = [np.array([r.sum() for r in mine]) for mine in groups]
        per_turn = method.estimator(sums, [np.array([r.size for r in mine]) for mine in groups], **args)
    else:
        states = [[turn_states(t) for t in group.trajectories] for group in batch.groups]
        per_turn = [method.estimator(mine, said, **args) for mine, said in zip(groups, states, strict=True)]
    flat = [values for mine in per_turn for values in mine]
    return [
        np.repeat(values, [turn.tokens.size for turn in trajectory.turns])
        for trajectory, values in zip(batch.trajectories, flat, strict=True)
    ]


def _per_token(method: Method, batch: _Batch) -> Any:
    rewards = [token_rewards(t) + p for t, p in zip(batch.trajectories, batch.penalty, strict=True)]
    named = {"rewards": rewards, **batch.given}
    wanted = {name: named[name] for name in _parameters(method) if name in named}
    return method.estimator(**wanted, **method.recipe.advantage_args)


_LEVELS: Mapping[str, Callable[[Method, _Batch], Any]] = {"group": _per_group, "turn": _per_turn, "token": _per_token}


def _turn_rewards(trajectory: Trajectory, penalty: np.ndarray) -> np.ndarray:
    """float64 [turns], with the penalty of each turn's tokens."""
    flat = token_rewards(trajectory) + penalty
    return np.array([part.sum() for part in trajectory.per_turn(flat)])


def _parameters(method: Method) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method.estimator).parameters
