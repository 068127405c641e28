"""Batches with labels instead of groups, estimators written for one group, and credit over episodes and roles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, cast

import attrs
import numpy as np

from rlkit import _check, _rows
from rlkit._rows import Arrays, Groups, Labels, RowsLike, RowWise, row_wise, settings
from rlkit._warn import warn
from rlkit.advantages._group import asymre, dr_grpo, gpg, grpo, loo_std, maxrl, opmd, opo, rec, reinforce, rloo
from rlkit.advantages._passk import pass_at_k, pkpo
from rlkit.advantages._registry import register, registry
from rlkit.advantages._returns import Steps, discounted_returns, rebn, reverse_scan
from rlkit.advantages.tokens import reinforce_pp_baseline
from rlkit.errors import ConfigError, DataError

__all__ = ["by_group", "gigpo", "hierarchical_grpo", "per_group", "step_wise_grpo"]

P = ParamSpec("P")


def per_group(function: Callable[Concatenate[np.ndarray, P], object]) -> RowWise[P]:
    """Decorate a function of one group, so that it takes several groups, like all estimators of rlkit.

    Args:
        function: of the rewards of one group, float64 [G], NaN where unscored, and of settings; it gives G advantages.
            A setting named ``lengths``, tokens per sample, reaches it as float64 [G], too.

    Returns:
        A function of one group [G], of equal ones [B, G], or of a list of groups, which gives advantages of that form.

    Raises:
        DataError: when it is called: rewards are not numbers, or ``function`` did not return G numbers.

    >>> @per_group
    ... def above_half(rewards, *, bonus=1.0): return bonus * (rewards > rewards.max() / 2)
    >>> above_half([[1.0, 0.0], [8.0, 2.0, 5.0]], bonus=2.0)
    [array([2., 0.]), array([2., 0., 2.])]
    """
    name = getattr(function, "__name__", "estimator")

    @functools.wraps(function)
    def estimator(rewards: RowsLike, *args: P.args, **kwargs: P.kwargs) -> Arrays:
        rows = _rows.parse("rewards", rewards)
        cuts, lengths = rows.ends[:-1], None
        if "lengths" in kwargs:
            lengths = np.split(rows.like("lengths", cast("RowsLike", kwargs["lengths"])), cuts)
        parts = []
        for i, members in enumerate(np.split(rows.flat, cuts)):
            where = f"{name}({rows.row_name(i)})"
            if lengths is not None:
                kwargs["lengths"] = lengths[i]
            estimate = _check.as_array(where, function(members, *args, **kwargs), "one advantage per reward")
            if estimate.shape != members.shape:
                what = f"returned an array of shape {estimate.shape}"
                raise DataError(where, what, f"{members.shape}", "one advantage per reward")
            parts.append(estimate.astype(np.float64))
        return rows.restore(np.concatenate(parts))

    return row_wise(cast("Callable[Concatenate[RowsLike, P], Arrays]", estimator))


_FLAT = (  # these take the groups as they are stored, so that no list of them is built
    asymre,
    gpg,
    maxrl,
    opmd,
    opo,
    reinforce,
    dr_grpo,
    grpo,
    loo_std,
    rloo,
    discounted_returns,
    pass_at_k,
    pkpo,
    rebn,
    rec,
    reinforce_pp_baseline,
)
_PER_SAMPLE = ("lengths",)  # settings that hold one number per reward, and are regrouped with them


def by_group(
    estimator: str | Callable[..., object], rewards: RowsLike, groups: Labels, **settings: object
) -> np.ndarray:
    """Return the advantages of a group estimator for flat rewards with group labels.

    Args:
        estimator: a registered name, such as "grpo", or a function that takes a list of groups [G_i] and returns
            advantages of the same form.
        rewards: [N], in any order; it is fastest where each group's rewards are adjacent.
        groups: [N] labels, hashable: strings, integers, ...; equal labels make a group. An array of integers is
            quickest.
        settings: keyword arguments of the estimator; ``lengths`` [N] is regrouped with the rewards.

    Returns:
        float64 [N], in the order of ``rewards``.

    Raises:
        DataError: rewards are not 1-D numbers, labels are not as many, or the estimator returns another form.
        UnknownNameError: no estimator has that name.
        ConfigError: the estimator has no such setting, lacks one that it needs, or takes no rewards.

    >>> by_group("rloo", [1.0, 5.0, 0.0, 3.0], ["a", "b", "a", "b"])
    array([ 1.,  2., -1., -2.])
    """
    function = registry.resolve(estimator)
    _check_settings(estimator, function, settings)
    flat = _rows.vector("rewards", rewards)
    if flat.size == 0:
        raise DataError("rewards", "is empty", "at least one reward")
    codes, count = _rows.labels("groups", groups, flat.size)
    compares = function in _FLAT and "singleton" in inspect.signature(function).parameters
    if count == flat.size > 1 and compares and settings.get("singleton", "zero") == "zero":
        warn(_rows.ALONE)
    return _by_codes(estimator, function, flat, codes, count, settings)


def _by_codes(
    estimator: object,
    function: Callable[..., Any],
    flat: np.ndarray,
    codes: np.ndarray,
    count: int,
    settings: dict[str, object],
) -> np.ndarray:
    """Return the advantages [N] of checked rewards [N], whose ``count`` groups are numbered by ``codes`` [N]."""
    apart = bool((codes[1:] < codes[:-1]).any())  # usually a group's rewards are adjacent already
    order = np.argsort(codes, kind="stable") if apart else slice(None)
    lengths = np.bincount(codes, minlength=count)
    rows = _rows.Rows("rewards", flat[order], lengths, "flat" if function in _FLAT else "list")
    _rows.Rows("rewards", flat, np.array([flat.size]), "one").check_finite(flat, nan=True)
    for name in _PER_SAMPLE:
        if name in settings:
            per_sample = _rows.vector(name, settings[name], flat.size, why="one per reward")
            settings[name] = attrs.evolve(rows, flat=per_sample[order])
    result = np.empty(flat.size)
    result[order] = function(rows, **settings) if rows.form == "flat" else _by_list(estimator, function, rows, settings)
    return result


def _by_list(
    estimator: object, function: Callable[..., RowsLike], rows: _rows.Rows, settings: Mapping[str, object]
) -> np.ndarray:
    """Return the checked advantages [N] of a function that takes a list of groups."""
    settings = {name: rows.restore(x.flat) if isinstance(x, _rows.Rows) else x for name, x in settings.items()}
    advantages = _rows.parse(f"{estimator!r}(...)", function(rows.restore(rows.flat), **settings))
    if not np.array_equal(advantages.lengths, rows.lengths):
        what, expected = (f"{x.lengths.tolist()[:8]}" for x in (advantages, rows))
        raise DataError(f"{estimator!r}", f"returned rows of lengths {what}", expected, "one advantage per reward")
    return advantages.flat


def _check_settings(estimator: object, function: Callable[..., object], settings: Collection[str]) -> None:
    """Raise for settings that the estimator does not have, and for missing ones that it requires."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some callables have no signature; then the call itself raises
        return
    name = repr(estimator) if isinstance(estimator, str) else str(getattr(function, "__name__", "the estimator"))
    if not parameters or parameters[0].kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD):
        raise ConfigError("estimator", f"{name} takes no rewards", "a function of a list of groups")
    known = {p.name: p for p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    there = ", ".join(known) or "none"
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in settings:
        if key not in known and not open_ended:
            raise ConfigError(f"settings: {name} has no setting {key!r}; it has: {there}")
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in settings:
            raise ConfigError(f"settings: {name} needs {key!r}, which has no default; it has: {there}")


@register("step_wise_grpo")
def step_wise_grpo(
    rewards: RowsLike,
    steps: RowsLike,
    *,
    step_norm: bool = False,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
    singleton: str = "zero",
) -> Any:
    """Return the GRPO advantage of each trajectory's last reward, given to each of its steps.

    Args:
        rewards: the reward of each trajectory's last step, as for ``grpo``.
        steps: shaped like ``rewards``: how many steps each trajectory has, integers >= 1.
        step_norm: whether to divide by the number of steps.
        scale, ddof, eps, singleton: as for ``grpo``.

    Returns:
        For one group a list of float64 arrays, one per trajectory, as long as it has steps; for several groups a
        list of such lists.

    Raises:
        DataError: as for ``grpo``; steps are not integers >= 1 or shaped differently.
        ConfigError: as for ``grpo``.

    >>> step_wise_grpo([1.0, 3.0], [1, 2], eps=0.0, step_norm=True)[1].round(6)  # 0.707107 over two steps
    array([0.353553, 0.353553])

    Source: none of its own; the estimator of multi-step rollouts in Trinity, rllm and ROLL.
    """
    step_norm = _check.flag("step_norm", step_norm)
    settings(ddof=ddof, eps=eps, singleton=singleton)
    groups = Groups.parse(rewards)
    counts = groups.rows.like("steps", steps)
    good = (counts >= 1) & (counts == np.floor(counts)) & (counts < 2**31)
    groups.rows.require("steps", counts, good, "an integer >= 1")
    scored = grpo(rewards, scale=scale, ddof=ddof, eps=eps, singleton=singleton)
    advantages = groups.rows.like("rewards", scored)
    if step_norm:
        advantages = advantages / counts
    lengths = counts.astype(np.int64)
    trajectories = _rows.Rows("rewards", np.repeat(advantages, lengths), lengths, "list")
    arrays = trajectories.restore(trajectories.flat)
    if groups.rows.form == "one":
        return arrays
    return [arrays[a:b] for a, b in zip(groups.rows.starts.tolist(), groups.rows.ends.tolist(), strict=True)]


@register("gigpo")
@row_wise
def gigpo(
    rewards: RowsLike,
    states: object,
    *,
    omega: float = 1.0,
    gamma: float = 1.0,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> Arrays:
    """Return an episode's advantage plus omega times each step's among the steps from the same state (GiGPO).

    A_t = N(episode's summed reward, among the episodes) + omega N(discounted return from t, among the steps of all
    episodes that start in the state of t), where N centres and, with scale="group", divides by (deviation + eps)

    Args:
        rewards: per step, all episodes of one task: a list of [T_i], or [B, T].
        states: shaped like ``rewards``: hashable keys of the state before each step, such as its text.
        omega: >= 0, the weight of the step's part.
        gamma: in [0, 1], for the step's part only.
        scale: "group" or "none".
        ddof, eps: of the division.

    Returns:
        float64 in the form of ``rewards``. A state that occurs once, and a single episode, contribute 0.

    Raises:
        DataError: rewards are not finite, or states are not hashable keys or not as many.
        ConfigError: a setting is out of range.

    >>> gigpo([[0.0, 1.0], [0.0]], [["start", "end"], ["start"]], scale="none")  # episodes +-0.5, "start" +-0.5
    [array([1. , 0.5]), array([-1.])]

    Source: arXiv:2505.10978. Peers: Trinity, ROLL; Trinity's default is scale="none".
    """
    omega = _check.real("omega", omega, low=0.0)
    gamma = _check.real("gamma", gamma, low=0.0, high=1.0)
    _check.choice("scale", scale, ("group", "none"))
    steps = Steps.parse(rewards)
    keys = _states(steps.rows, states)
    episodes = grpo(steps.rows.sum(steps.rewards), scale=scale, ddof=ddof, eps=eps)
    returns = reverse_scan(steps.rewards.copy(), steps.factors(gamma), steps.starts)
    codes, count = _rows.labels("states", keys, returns.size)
    local = _by_codes("grpo", grpo, returns, codes, count, {"scale": scale, "ddof": ddof, "eps": eps})
    return steps.restore(np.repeat(episodes, steps.lengths) + omega * local)


@register("hierarchical_grpo")
def hierarchical_grpo(rewards: RowsLike, roles: Labels, groups: Labels, *, singleton: str = "zero") -> np.ndarray:
    """Return rewards minus the mean of their role in their group, for episodes that several roles play.

    Args:
        rewards: flat [N], as for ``by_group``.
        roles: [N] labels, such as "proposer" and "solver".
        groups: [N] labels, such as the prompt's.
        singleton: as for ``grpo``.

    Returns:
        float64 [N].

    Raises:
        DataError, ConfigError: as for ``by_group``.

    >>> hierarchical_grpo([1.0, 0.0, 5.0, 3.0], ["a", "a", "b", "b"], ["q", "q", "q", "q"])
    array([ 0.5, -0.5,  1. , -1. ])

    Source: none of its own; prime-rl's estimator for episodes of several agents.
    """
    flat = _rows.vector("rewards", rewards)
    role_codes, _ = _rows.labels("roles", roles, flat.size)
    group_codes, count = _rows.labels("groups", groups, flat.size)
    return by_group(grpo, flat, role_codes * count + group_codes, scale="none", singleton=singleton)


def _states(rows: _rows.Rows, states: object) -> list[Hashable]:
    expected = "one hashable state per step"
    if isinstance(states, (str, bytes)) or not hasattr(states, "__len__"):
        raise DataError("states", f"got {_check.shown(states)}", expected)
    listed = list(cast("Iterable[Sequence[Hashable]]", [states] if rows.form == "one" else states))
    if len(listed) != rows.lengths.size:
        raise DataError("states", f"has {len(listed)} episodes", f"{rows.lengths.size}", f"shaped like {rows.where}")
    keys: list[Hashable] = []
    for row, (episode, length) in enumerate(zip(listed, rows.lengths.tolist(), strict=True)):
        _rows.labels(rows.row_name(row, "states"), episode, length, why="one state per step")
        keys += np.asarray(episode).tolist() if hasattr(episode, "__array__") else list(episode)
    return keys
