"""What an episode leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._calls import answered
from rlkit.errors import DataError
from rlkit.rewards import reduction
from rlkit.trajectory.fields import items, keep, numbers, read_only, reduced, reward, several, tags, text
from rlkit.types import Sample

__all__ = ["Failure", "Group", "Trajectory", "Turn"]

REDUCTIONS = ("sum", "mean", "max", "min", "last")


@answered
@attrs.frozen(eq=False, repr=False)
class Turn:
    """One action of the policy, with the prompt that it answered and the reward that it got.

    Args:
        sample: what the sampler returned: the prompt as it was sent, the action's tokens as they were drawn, their
            logprobs, stop_reason, how they were drawn, and the policy's version. An action may be empty.
        reward: finite, or NaN where it could not be scored.
        metrics: name -> finite number, such as what the environment said about the step.
        rewards: what the turn got one by one, where that was not one reward: several, as of several tool calls, or
            none, (). ``reward`` is their sum. None: ``reward`` alone.
        weight: finite, >= 0: the loss on its tokens is multiplied by it, as where an episode has several branches that
            are not to count alike.

    Raises:
        DataError: naming the field.

    >>> from rlkit import Sample
    >>> turn = Turn(Sample([5, 6], [7], [-0.5]), reward=1.0)
    >>> turn.prompt, turn.tokens, turn.version
    (array([5, 6]), array([7]), 0)
    """

    sample: Sample
    reward: float = attrs.field(default=0.0, converter=keep)
    metrics: Mapping[str, float] = attrs.field(factory=dict, converter=read_only)
    rewards: Sequence[float] | None = attrs.field(default=None, kw_only=True, converter=keep)
    weight: float = attrs.field(default=1.0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        _check.require(isinstance(self.sample, Sample), "Turn.sample", self.sample, "an rlkit.Sample", error=DataError)
        object.__setattr__(self, "reward", reward("Turn.reward", self.reward))
        if self.rewards is not None:
            object.__setattr__(self, "rewards", several(self.rewards, self.reward))
            object.__setattr__(self, "reward", float(sum(self.rewards)))
        numbers("Turn.metrics", self.metrics)
        object.__setattr__(self, "weight", _check.real("Turn.weight", self.weight, low=0.0, error=DataError))

    @property
    def prompt(self) -> np.ndarray:
        """int64 [P], as it was sent."""
        return self.sample.prompt

    @property
    def tokens(self) -> np.ndarray:
        """int64 [n], the action as it was drawn."""
        return self.sample.tokens

    @property
    def logprobs(self) -> np.ndarray:
        """float32 [n], of the action's tokens when they were drawn."""
        return self.sample.logprobs

    @property
    def stop_reason(self) -> str:
        """Why the action ended: "stop", or "length" where it was cut."""
        return self.sample.stop_reason

    @property
    def version(self) -> int:
        """Optimizer steps that the policy that acted had taken."""
        return self.sample.version

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return reduced(self)

    def __repr__(self) -> str:
        return f"Turn(P={self.prompt.size}, n={self.tokens.size}, reward={self.reward:g})"


@answered
@attrs.frozen(eq=False, repr=False)
class Trajectory:
    """One episode.

    Args:
        turns: in order; those that rollouts yield have at least one.
        terminated: the environment came to an end of its own.
        truncated: a limit cut it short: the environment's, or one of turns, tokens, context or time.
        ended: why it ended: "terminated", or the limit's name.
        env: name of the environment.
        index: which item of the environment's set, or None.
        seed: what the environment was reset with, or None.
        reduction: how the turns' rewards become ``reward``: "sum", "mean", "max", "min" or "last".
        nonterminal_reward: one more reward, after all others, for an episode that was not ``terminated``; None: none.
        nonterminal_override: what ``reward`` is instead for an episode that was not ``terminated``; not with
            ``nonterminal_reward``. None: it stays what it is.
        tags: name -> text, number or bool; yours.
        metrics: name -> finite number, about the whole episode.
        messages: the conversation as text, for people; not trained.

    Raises:
        DataError: naming the field.

    >>> from rlkit import Sample
    >>> first = Turn(Sample([5, 6], [7], [-0.5]), reward=0.25)
    >>> second = Turn(Sample([5, 6, 7, 1], [8, 9], [-1.0, -1.0]), reward=0.5)
    >>> trajectory = Trajectory([first, second], terminated=True, ended="terminated")
    >>> trajectory.reward, trajectory.token_count
    (0.75, 3)
    """

    turns: Sequence[Turn] = attrs.field(converter=keep)
    terminated: bool = attrs.field(default=False, kw_only=True)
    truncated: bool = attrs.field(default=False, kw_only=True)
    ended: str = attrs.field(default="", kw_only=True)
    env: str = attrs.field(default="env", kw_only=True)
    index: int | None = attrs.field(default=None, kw_only=True)
    seed: int | None = attrs.field(default=None, kw_only=True)
    reduction: str = attrs.field(default="sum", kw_only=True)
    nonterminal_reward: float | None = attrs.field(default=None, kw_only=True)
    nonterminal_override: float | None = attrs.field(default=None, kw_only=True)
    tags: Mapping[str, str | float] = attrs.field(factory=dict, kw_only=True, converter=read_only)
    metrics: Mapping[str, float] = attrs.field(factory=dict, kw_only=True, converter=read_only)
    messages: Sequence[Mapping[str, object]] = attrs.field(factory=tuple, kw_only=True, converter=keep)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "turns", items("Trajectory.turns", self.turns, Turn))
        for name in ("terminated", "truncated"):
            _check.flag(f"Trajectory.{name}", getattr(self, name), error=DataError)
        for name in ("ended", "env"):
            text(f"Trajectory.{name}", getattr(self, name))
        for name in ("index", "seed"):
            _check.optional(_check.integer, f"Trajectory.{name}", getattr(self, name), low=0, error=DataError)
        _check.choice("Trajectory.reduction", self.reduction, REDUCTIONS, error=DataError)
        for name in ("nonterminal_reward", "nonterminal_override"):
            _check.optional(_check.real, f"Trajectory.{name}", getattr(self, name), error=DataError)
        if self.nonterminal_reward is not None and self.nonterminal_override is not None:
            raise DataError("Trajectory.nonterminal_reward", "is given, and nonterminal_override too", "one of the two")
        numbers("Trajectory.metrics", self.metrics)
        tags("Trajectory.tags", self.tags)
        object.__setattr__(self, "messages", items("Trajectory.messages", self.messages, Mapping))

    @property
    def rewards(self) -> np.ndarray:
        """float64 [turns]; 0 for a turn that got none."""
        return np.array([turn.reward for turn in self.turns], np.float64)

    @property
    def all_rewards(self) -> np.ndarray:
        """float64 [R]: every reward of the episode in order, for ``reduction``; turns may have several or none.

        >>> from rlkit import Sample
        >>> look = Turn(Sample([5], [7], [-0.5]), rewards=())
        >>> act = Turn(Sample([5, 7, 1], [8], [-1.0]), rewards=(0.3, 1.0))
        >>> Trajectory([look, act], nonterminal_reward=-1.0).all_rewards
        array([ 0.3,  1. , -1. ])
        """
        rewards = [x for turn in self.turns for x in ((turn.reward,) if turn.rewards is None else turn.rewards)]
        if self.nonterminal_reward is not None and not self.terminated:
            rewards.append(self.nonterminal_reward)
        return np.array(rewards, np.float64)

    @property
    def reward(self) -> float:
        """All rewards, reduced; NaN where one is unscored or turns got none at all, 0 where there are no turns."""
        if self.nonterminal_override is not None and not self.terminated:
            return float(self.nonterminal_override)
        rewards = self.all_rewards
        if not rewards.size:
            return float("nan") if self.turns else 0.0
        return float(reduction(rewards, self.reduction))

    @property
    def token_count(self) -> int:
        """Tokens that the policy chose, over all turns: the length that ``token_weights`` takes."""
        return sum(turn.tokens.size for turn in self.turns)

    @property
    def version(self) -> int:
        """The oldest policy version among the turns; 0 where there are none."""
        return min((turn.version for turn in self.turns), default=0)

    def per_turn(self, values: ArrayLike) -> list[np.ndarray]:
        """Cut [token_count, ...] into one array [n_i, ...] per turn, as ``datums`` takes what is given per token."""
        array = _check.as_array("per_turn(values)", values, "one entry per action token")
        if array.ndim == 0 or array.shape[0] != self.token_count:
            expected = f"length {self.token_count}"
            raise DataError("per_turn(values)", _check.shown(array), expected, "one per action token")
        return np.split(array, np.cumsum([turn.tokens.size for turn in self.turns])[:-1])

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return reduced(self)

    def __repr__(self) -> str:
        text = f"Trajectory({self.env!r}, {len(self.turns)} turns, {self.token_count} tokens"
        return f"{text}, reward={self.reward:g}, ended={self.ended!r})"


@answered
@attrs.frozen
class Failure:
    """An episode that could not be carried through, for reasons that are not the policy's.

    Attributes:
        env: name of the environment.
        kind: the exception's class name, "timeout", "context" where the first prompt already did not fit, "no_reward"
            where the environment gave none in the whole episode, or "no_turns" where an agent asked for nothing.
        message: what it said, shortened.
        where: "make", "reset", "step", "play" (of an agent), "score", "chat" or "sampler".
        turns: how many turns had been made.
        member: which member of its group.
    """

    env: str
    kind: str
    message: str = ""
    where: str = ""
    turns: int = 0
    member: int = 0


@answered
@attrs.frozen(eq=False, repr=False)
class Group:
    """Episodes of one task by one policy: what an estimator compares.

    Args:
        trajectories: those that were carried through, in the order of their members.
        failures: those that were not; they are in no loss and no baseline.
        env: name of the environment.
        index: which item of the environment's set, or None.
        number: which group of the step, counted from 0.
        step: the step that it was sampled for.

    >>> from rlkit import Sample
    >>> group = Group([Trajectory([Turn(Sample([5], [7], [-0.5]), reward=r)]) for r in (0.0, 1.0)])
    >>> group.rewards
    array([0., 1.])
    """

    trajectories: Sequence[Trajectory] = attrs.field(converter=keep)
    failures: Sequence[Failure] = attrs.field(factory=tuple, kw_only=True, converter=keep)
    env: str = attrs.field(default="env", kw_only=True)
    index: int | None = attrs.field(default=None, kw_only=True)
    number: int = attrs.field(default=0, kw_only=True)
    step: int = attrs.field(default=0, kw_only=True)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "trajectories", items("Group.trajectories", self.trajectories, Trajectory))
        object.__setattr__(self, "failures", items("Group.failures", self.failures, Failure))
        text("Group.env", self.env)
        for name in ("index", "number", "step"):
            if name != "index" or self.index is not None:
                _check.integer(f"Group.{name}", getattr(self, name), low=0, error=DataError)

    @classmethod
    def of_samples(cls, samples: Sequence[Sample], rewards: Sequence[float] | np.ndarray) -> Group:
        """Make a group of single turns from the samples of one prompt and their rewards.

        >>> from rlkit import Sample
        >>> Group.of_samples([Sample([5], [7], [-0.5]), Sample([5], [8], [-1.0])], [0.0, 1.0]).rewards
        array([0., 1.])
        """
        samples = items("Group.of_samples(samples)", samples, Sample)
        if len(rewards) != len(samples):
            what = f"has {len(rewards)} entries"
            raise DataError("Group.of_samples(rewards)", what, f"{len(samples)}", "one per sample")
        return cls([Trajectory([Turn(s, r)], terminated=True) for s, r in zip(samples, rewards, strict=True)])

    @property
    def rewards(self) -> np.ndarray:
        """float64 [trajectories], what an estimator takes as one group."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)

    @property
    def same_start(self) -> bool:
        """Whether all members answered the same first prompt; if not, comparing them means little."""
        starts = {t.turns[0].prompt.tobytes() for t in self.trajectories if t.turns}
        return len(starts) <= 1

    @property
    def version(self) -> int:
        """The oldest policy version among the trajectories; 0 where there are none."""
        return min((t.version for t in self.trajectories), default=0)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __repr__(self) -> str:
        return f"Group({self.env!r}, rewards={self.rewards.round(4).tolist()}, {len(self.failures)} failed)"


def checked_groups(groups: object) -> list[Group]:
    """Return the groups as a list; one group is a list of one. Raises DataError: something else than groups."""
    groups = [groups] if isinstance(groups, Group) else groups
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Iterable):
        raise DataError("groups", f"got {_check.shown(groups)}", "groups")
    listed = list(groups)
    for i, group in enumerate(listed):
        _check.require(isinstance(group, Group), f"groups[{i}]", group, "a Group", error=DataError)
    return listed
