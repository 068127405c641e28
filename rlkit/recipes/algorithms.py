"""The algorithms, as a table: which estimator, which loss, how tokens are weighed, and what is needed beside.

An algorithm is nothing else than such a row. ``register`` adds one; settings change single entries of a row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import attrs
import numpy as np

from rlkit import _check, advantages
from rlkit._calls import answered
from rlkit.recipes.names import DEFAULTS, OF_ESTIMATORS
from rlkit.registry import Registry

__all__ = ["Recipe", "best_of_group", "register", "registry"]

Named: TypeAlias = str | Callable[..., object]
_NEEDS = {"values": "critic", "teacher_logprobs": "teacher", "baseline": "greedy"}


def _read_only(value: Mapping[str, object]) -> Mapping[str, object]:
    return MappingProxyType(dict(value))


@answered
@attrs.frozen
class Recipe:
    """One algorithm.

    Attributes:
        source: of the algorithm, and what is particular here.
        data: what is trained: "rollouts", "demonstrations", "texts" (all of their tokens), "pairs" (chosen, rejected),
            or "mixed" (rollouts and demonstrations).
        advantage: an estimator: a name of ``rlkit.advantages.registry`` or a function; None where the loss has none.
        level: what the estimator is given: "group": ``rewards``, one array per group, and ``lengths`` where it names
            them. "turn": per group the rewards of each trajectory's turns, and ``states`` or ``steps``. "token":
            by keyword those of ``rewards``, ``values``, ``baseline``, ``teacher_logprobs`` and ``sampling_logprobs``
            that it names, one array per trajectory.
        advantage_args: its settings.
        loss: a name of ``rlkit.losses.registry`` or a function.
        loss_args: its settings.
        weights: a mode of ``rlkit.advantages.token_weights``, taken over each optimizer step.
        repeat_times: episodes per task.
        select: which episodes train: "all", the "best" of each group, or "informative" groups, in which rewards
            differ; these are played until the step has as many as were asked for, four times at most.
        needs: what the estimator wants beside rewards: a "critic" (it names ``values``), a "teacher"
            (``teacher_logprobs``), or a "greedy" episode of each task (``baseline``).
        hint: "": a teacher is another model. "peer": it is the policy itself, which has been told a right answer of the
            same group before it scores one; what has no such answer is not trained.
    """

    source: str
    data: Literal["rollouts", "demonstrations", "texts", "pairs", "mixed"] = "rollouts"
    advantage: Named | None = "grpo"
    level: Literal["group", "turn", "token"] = "group"
    advantage_args: Mapping[str, object] = attrs.field(factory=dict, converter=_read_only)
    loss: Named = "ppo"
    loss_args: Mapping[str, object] = attrs.field(factory=dict, converter=_read_only)
    weights: str = "token-mean"
    repeat_times: int = 8
    select: Literal["all", "best", "informative"] = "all"
    hint: Literal["", "peer"] = ""

    def __attrs_post_init__(self) -> None:
        _check.choice("Recipe.data", self.data, ("rollouts", "demonstrations", "texts", "pairs", "mixed"))
        _check.choice("Recipe.level", self.level, ("group", "turn", "token"))
        _check.choice("Recipe.select", self.select, ("all", "best", "informative"))
        _check.integer("Recipe.repeat_times", self.repeat_times, low=1)
        _check.choice("Recipe.hint", self.hint, ("", "peer"))

    @property
    def needs(self) -> tuple[str, ...]:
        if self.advantage is None or self.level != "token":
            return ()
        named = inspect.signature(advantages.registry.resolve(self.advantage)).parameters
        needs = tuple(need for name, need in _NEEDS.items() if name in named)
        return tuple("itself" if need == "teacher" and self.hint else need for need in needs)

    @property
    def rolls_out(self) -> bool:
        """Whether episodes are played."""
        return self.data in ("rollouts", "mixed")


def best_of_group(rewards: Any) -> Any:
    """Return 1 for the best sample of each group, the first of several, and 0 for the others.

    >>> best_of_group([[0.1, 0.7, 0.7], [0.0, 0.0]])
    [array([0., 1., 0.]), array([1., 0.])]

    Source: RAFT, arXiv:2304.06767, which fine-tunes on the best of K.
    """
    chosen = []
    for group in rewards:
        scored = np.where(np.isnan(group), -np.inf, group)
        one = np.zeros(len(scored))
        if np.isfinite(scored).any():
            one[int(np.argmax(scored))] = 1.0
        chosen.append(one)
    return chosen


registry = Registry("algorithm")
"""Name -> ``Recipe``."""


def register(name: str, recipe: Recipe) -> Recipe:
    """Add an algorithm.

    >>> register("grpo_of_mine", Recipe("mine", advantage="maxrl", weights="seq-mean-token-sum")).loss
    'ppo'
    >>> del registry["grpo_of_mine"]

    Raises:
        ConfigError: the name is taken.
    """
    return registry.register(name)(recipe)  # type: ignore[type-var]


_SUM_NORM = "seq-mean-token-sum-norm"
_CHORD = {"mu_warmup_steps": 0, "mu_decay_steps": 100, "mu_peak": 0.9, "mu_valley": 0.05}
_ROWS = {
    "grpo": Recipe("arXiv:2402.03300"),
    "dr_grpo": Recipe("arXiv:2503.20783", advantage="dr_grpo", weights=_SUM_NORM),
    "dapo": Recipe("arXiv:2503.14476", loss_args={"clip_high_threshold": 1.28}, select="informative"),
    "rloo": Recipe("arXiv:2402.14740", advantage="rloo"),
    "reinforceplusplus": Recipe(
        "arXiv:2501.03262", advantage="reinforce_pp", level="token", advantage_args=OF_ESTIMATORS["reinforce_pp"]
    ),
    "remax": Recipe("arXiv:2310.10505", advantage="remax", level="token"),
    "opmd": Recipe("arXiv:2501.12599", advantage="opmd", loss="opmd"),
    "asymre": Recipe("arXiv:2506.20520, half the gradient", advantage="asymre", loss="opmd"),
    "topr": Recipe("arXiv:2503.14286", advantage="reinforce", loss="topr"),
    "cispo": Recipe("arXiv:2506.13585", loss="cispo", loss_args=DEFAULTS["cispo"]),
    "gspo": Recipe("arXiv:2507.18071", loss="gspo", weights="seq-mean-token-mean"),
    "sapo": Recipe("arXiv:2511.20347, the gate a constant", loss="sapo", loss_args=DEFAULTS["sapo"]),
    "sppo": Recipe("arXiv:2108.05828", advantage="opmd", loss="sppo"),
    "rec": Recipe("arXiv:2509.24203", advantage="rec", loss="rec"),
    "gigpo": Recipe("arXiv:2505.10978", advantage="gigpo", level="turn", advantage_args=OF_ESTIMATORS["gigpo"]),
    "multi_step_grpo": Recipe("GRPO's advantage at every turn", advantage="step_wise_grpo", level="turn"),
    "ppo": Recipe("arXiv:1707.06347", advantage="gae", level="token", advantage_args=OF_ESTIMATORS["gae"]),
    "on_policy_distill": Recipe("arXiv:2306.13649", advantage="on_policy_distillation", level="token"),
    "jsd": Recipe("arXiv:2306.13649", advantage="jsd_gradient", level="token"),
    "sdpo": Recipe(
        "arXiv:2601.20802, sampled tokens, a right answer of the group as the hint",
        advantage="on_policy_distillation",
        level="token",
        loss="importance_sampling",
        hint="peer",
    ),
    "sft": Recipe("likelihood", data="demonstrations", advantage=None, loss="cross_entropy"),
    "cpt": Recipe("likelihood", data="texts", advantage=None, loss="cross_entropy"),
    "raft": Recipe("arXiv:2304.06767", advantage=best_of_group, loss="reinforce", select="best"),
    "dpo": Recipe("arXiv:2305.18290", data="pairs", advantage=None, loss="dpo"),
    "mix": Recipe("arXiv:2508.11408, with a fixed mu", data="mixed", loss="mix", loss_args=DEFAULTS["mix"]),
    "chord": Recipe("arXiv:2508.11408, with its schedule of mu", data="mixed", loss="mix", loss_args=_CHORD),
    "mix_chord": Recipe("arXiv:2508.11408, with phi", data="mixed", loss="mix", loss_args=DEFAULTS["mix_chord"]),
}
registry.update(_ROWS)
registry["grpo_verl"] = registry["grpo"]
