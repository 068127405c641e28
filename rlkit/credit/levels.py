"""What an estimator is given and gives back: an entry per episode, per turn, or per token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import numpy as np

from rlkit import _check
from rlkit.errors import ConfigError, DataError
from rlkit.trajectory import Trajectory
from rlkit.trajectory.turns import turn_states

__all__ = ["LEVELS", "Estimator", "Known", "Played"]

Estimator: TypeAlias = Callable[..., Any]  # what comes back is checked here, level by level
Arrays: TypeAlias = list[np.ndarray]
Known: TypeAlias = dict[str, Arrays]
_ARGUMENTS = {"values": "critic", "teacher_logprobs": "teacher", "reference_logprobs": "reference"}


@attrs.frozen(eq=False)
class Played:
    """Trajectories that train, in the order of their groups.

    Attributes:
        trajectories: each with tokens.
        sizes: trajectories per group, none 0.
        totals: float64 [trajectories], the reward of each, less the penalty.
        rewards: float64 [token_count] each, less the penalty.
        known: what estimators of tokens may name.
    """

    trajectories: Sequence[Trajectory]
    sizes: Sequence[int]
    totals: np.ndarray
    rewards: Arrays
    known: Known

    def by_group(self, array: np.ndarray) -> Arrays:
        """Cut one entry per trajectory into an array per group."""
        return np.split(array, np.cumsum(self.sizes)[:-1])

    def members(self) -> list[slice]:
        """Return where each group's trajectories are."""
        ends = np.cumsum(self.sizes).tolist()
        return [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]


def _per_group(estimator: Estimator, config: Mapping[str, Any], played: Played) -> Arrays:
    lengths = {}
    if "lengths" in inspect.signature(estimator).parameters:
        lengths["lengths"] = played.by_group(np.array([float(t.token_count) for t in played.trajectories]))
    flat = _joined(_call(estimator, played.by_group(played.totals), **lengths, **config))
    sizes = [t.token_count for t in played.trajectories]
    return np.split(np.repeat(_fits(flat, len(sizes), "trajectory"), sizes), np.cumsum(sizes)[:-1])


def _per_turn(estimator: Estimator, config: Mapping[str, Any], played: Played) -> Arrays:
    pairs = zip(played.trajectories, played.rewards, strict=True)
    rewards = [np.array([part.sum() for part in t.per_turn(r)]) for t, r in pairs]
    named = inspect.signature(estimator).parameters
    if not {"steps", "states"} & named.keys():
        _refuse_groups(estimator, "turn")
    per_turn: Iterable[np.ndarray]
    if "steps" in named:  # one call, since a deviation may be that of the whole batch
        sums, steps = np.array([r.sum() for r in rewards]), np.array([r.size for r in rewards])
        groups = estimator(played.by_group(sums), played.by_group(steps), **config)
        per_turn = [turns for group in groups for turns in group]
    elif "states" in named:
        states = [turn_states(t) for t in played.trajectories]
        per_turn = [turns for part in played.members() for turns in estimator(rewards[part], states[part], **config)]
    else:
        per_turn = estimator(rewards, **config)
    flat = _fits(_joined(per_turn), sum(r.size for r in rewards), "turn")
    sizes = [turn.tokens.size for t in played.trajectories for turn in t.turns]
    return np.split(np.repeat(flat, sizes), np.cumsum([t.token_count for t in played.trajectories])[:-1])


def _per_token(estimator: Estimator, config: Mapping[str, Any], played: Played) -> Arrays | tuple[Arrays, Arrays]:
    _refuse_groups(estimator, "token")
    known = {"rewards": played.rewards, **played.known}
    wanted = {}
    for name, parameter in inspect.signature(estimator).parameters.items():
        if name in known:
            wanted[name] = known[name]
        elif (
            name not in config and parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        ):
            raise ConfigError("estimator", f"names {name!r}", f"{_ARGUMENTS.get(name, name)}=", "it cannot do without")
    estimate = estimator(**wanted, **config)
    for arrays in estimate if isinstance(estimate, tuple) else (estimate,):
        for array, trajectory in zip(arrays, played.trajectories, strict=True):
            _fits(array, trajectory.token_count, "token")
    return (list(estimate[0]), list(estimate[1])) if isinstance(estimate, tuple) else list(estimate)


LEVELS: Mapping[str, Callable[[Estimator, Mapping[str, Any], Played], Arrays | tuple[Arrays, Arrays]]] = {
    "group": _per_group,
    "turn": _per_turn,
    "token": _per_token,
}


def _call(estimator: Estimator, *groups: Arrays, **config: Any) -> object:
    """Call an estimator of groups; what it raises has a note on what it was given."""
    try:
        return estimator(*groups, **config)
    except (AttributeError, TypeError, ValueError) as error:
        error.add_note(_LISTS)
        raise


def _refuse_groups(estimator: Estimator, level: str) -> None:
    """Raise for what compares the samples of a group, which turns and tokens of one trajectory are not."""
    if "singleton" in inspect.signature(estimator).parameters:
        what = f"{getattr(estimator, '__name__', 'it')} compares the samples of a group"
        others = "step_wise_grpo, gigpo, discounted_returns" if level == "turn" else "gae, discounted_returns"
        raise ConfigError(f"level={level!r}", what, "level='group'", f"or an estimator such as {others}")


def _joined(arrays: object) -> np.ndarray:
    if isinstance(arrays, np.ndarray) and arrays.ndim == 2:
        return arrays.reshape(-1)
    if not isinstance(arrays, (list, tuple)) or not all(np.ndim(array) == 1 for array in arrays):
        raise DataError("estimator", f"gave {_check.shown(arrays)}", "a list of arrays", _LISTS)
    return np.concatenate(arrays) if arrays else np.zeros(0)


_LISTS = (
    "an estimator is given the rewards of all groups, a list of arrays, and gives such a list; "
    "rlkit.advantages.per_group makes one of a function of one group"
)


def _fits(array: np.ndarray, count: int, each: str) -> np.ndarray:
    if array.shape != (count,):
        what = f"gave an array of shape {array.shape}"
        raise DataError("estimator", what, f"({count},)", f"one advantage per {each}")
    return array
