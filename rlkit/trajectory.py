"""Turns, trajectories and groups: what rollouts yield, and the datums that train them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import attrs
import numpy as np
from numpy.typing import ArrayLike

from rlkit import _check
from rlkit._check import checked
from rlkit.errors import DataError
from rlkit.rewards import reduction
from rlkit.types import Datum, Sample

__all__ = ["Failure", "Group", "Trajectory", "Turn", "datums"]

T = TypeVar("T")


def reduced(record: attrs.AttrsInstance) -> tuple[Callable[[], object], tuple[()]]:
    """Return what ``__reduce__`` gives, since pickle cannot take read-only mappings."""
    kind = type(record)
    fields = {field.name: getattr(record, field.name) for field in attrs.fields(kind)}
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in fields.items()}
    return functools.partial(kind, **plain), ()


def items(where: str, value: object, kind: type[T], what: str = "") -> tuple[T, ...]:
    """Return a sequence of one class as a tuple."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        raise DataError(where, f"got {_check.describe(value)}", f"a sequence of {what or kind.__name__}")
    listed = tuple(value)
    for i, item in enumerate(listed):
        _check.require(isinstance(item, kind), f"{where}[{i}]", item, f"a {kind.__name__}", error=DataError)
    return listed


def reward(where: str, value: object) -> float:
    """Return a finite number, or NaN."""
    if isinstance(value, (float, np.floating)) and np.isnan(value):
        return float("nan")
    return _check.real(where, value, error=DataError, why="or NaN for unscored")


def _rewards(value: object) -> tuple[float, ...] | None:
    """Return the rewards of a turn as a tuple; None where it has one alone."""
    if value is None:
        return None
    listed = items("Turn.rewards", value, object, "numbers")
    return tuple(reward(f"Turn.rewards[{i}]", each) for i, each in enumerate(listed))


def text(where: str, value: object) -> object:
    """Return a text as it is."""
    _check.require(isinstance(value, str), where, value, "text", error=DataError)
    return value


def numbers(where: str, value: object) -> Mapping[str, float]:
    """Return names and finite numbers as a read-only mapping."""
    for name, number in _named(where, value).items():
        _check.real(f"{where}[{name!r}]", number, error=DataError)
    return _named(where, value)


def tags(where: str, value: object) -> Mapping[str, str | float]:
    """Return names and texts, numbers or bools as a read-only mapping."""
    for name, tag in _named(where, value).items():
        if not isinstance(tag, (str, bool, int, float)):
            raise DataError(f"{where}[{name!r}]", f"got {_check.describe(tag)}", "text, a number or a bool")
    return _named(where, value)


def _named(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise DataError(where, f"got {_check.describe(value)}", "a mapping with names as keys")
    return MappingProxyType(dict(value))


REDUCTIONS = ("sum", "mean", "max", "min", "last")


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
    reward: float = checked(0.0, reward)
    metrics: Mapping[str, float] = checked(attrs.Factory(dict), numbers)
    rewards: Sequence[float] | None = attrs.field(default=None, kw_only=True, converter=_rewards)
    weight: float = checked(1.0, _check.real, kw_only=True, low=0.0, error=DataError)

    def __attrs_post_init__(self) -> None:
        _check.require(isinstance(self.sample, Sample), "Turn.sample", self.sample, "an rlkit.Sample", error=DataError)
        if self.rewards is not None:
            total = float(sum(self.rewards))
            if self.reward != 0.0 and not np.isclose(self.reward, total, equal_nan=True):
                what = f"is {self.reward:g}, but the sum of rewards is {total:g}"
                raise DataError("Turn.reward", what, "their sum", "give only rewards")
            object.__setattr__(self, "reward", total)

    @property
    def prompt(self) -> np.ndarray:
        """Return int64 [P], as it was sent."""
        return self.sample.prompt

    @property
    def tokens(self) -> np.ndarray:
        """Return int64 [n], the action as it was drawn."""
        return self.sample.tokens

    @property
    def logprobs(self) -> np.ndarray:
        """Return float32 [n], the logprobs of the action's tokens when they were drawn."""
        return self.sample.logprobs

    @property
    def stop_reason(self) -> str:
        """Return why the action ended: "stop", or "length" where it was cut."""
        return self.sample.stop_reason

    @property
    def version(self) -> int:
        """Return the optimizer steps that the policy that acted had taken."""
        return self.sample.version

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return reduced(self)

    def __repr__(self) -> str:
        return f"Turn(P={self.prompt.size}, n={self.tokens.size}, reward={self.reward:g})"


@attrs.frozen(eq=False, repr=False)
class Trajectory:
    """One episode.

    Args:
        turns: in order; those that rollouts yield have at least one.
        terminated: the environment came to its own end.
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

    turns: Sequence[Turn] = checked(attrs.NOTHING, items, kind=Turn)
    terminated: bool = checked(False, _check.flag, kw_only=True, error=DataError)
    truncated: bool = checked(False, _check.flag, kw_only=True, error=DataError)
    ended: str = checked("", text, kw_only=True)
    env: str = checked("env", text, kw_only=True)
    index: int | None = checked(None, _check.integer, none=True, kw_only=True, low=0, error=DataError)
    seed: int | None = checked(None, _check.integer, none=True, kw_only=True, low=0, error=DataError)
    reduction: str = checked("sum", _check.choice, kw_only=True, options=REDUCTIONS, error=DataError)
    nonterminal_reward: float | None = checked(None, _check.real, none=True, kw_only=True, error=DataError)
    nonterminal_override: float | None = checked(None, _check.real, none=True, kw_only=True, error=DataError)
    tags: Mapping[str, str | float] = checked(attrs.Factory(dict), tags, kw_only=True)
    metrics: Mapping[str, float] = checked(attrs.Factory(dict), numbers, kw_only=True)
    messages: Sequence[Mapping[str, object]] = checked((), items, kw_only=True, kind=Mapping)

    def __attrs_post_init__(self) -> None:
        if self.nonterminal_reward is not None and self.nonterminal_override is not None:
            raise DataError("Trajectory.nonterminal_reward", "is given with nonterminal_override", "one of the two")

    @property
    def rewards(self) -> np.ndarray:
        """Return float64 [turns]; 0 for a turn that got none."""
        return np.array([turn.reward for turn in self.turns], np.float64)

    @property
    def all_rewards(self) -> np.ndarray:
        """Return float64 [R]: every reward of the episode in order, for ``reduction``; turns may have several or none.

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
        """Return all rewards reduced; NaN if one is unscored or turns got none at all, 0 if there are no turns."""
        if self.nonterminal_override is not None and not self.terminated:
            return float(self.nonterminal_override)
        rewards = self.all_rewards
        if not rewards.size:
            return float("nan") if self.turns else 0.0
        return float(reduction(rewards, self.reduction))

    @property
    def token_count(self) -> int:
        """Return how many tokens the policy chose, over all turns: the length that ``token_weights`` takes."""
        return sum(turn.tokens.size for turn in self.turns)

    @property
    def version(self) -> int:
        """Return the oldest policy version among the turns; 0 where there are none."""
        return min((turn.version for turn in self.turns), default=0)

    def per_turn(self, values: ArrayLike) -> list[np.ndarray]:
        """Cut [token_count, ...] into one array [n_i, ...] per turn, as ``datums`` takes what is given per token."""
        array = _check.as_array("per_turn(values)", values, "one entry per action token")
        if array.ndim == 0 or array.shape[0] != self.token_count:
            expected = f"length {self.token_count}"
            raise DataError("per_turn(values)", _check.describe(array), expected, "one per action token")
        return np.split(array, np.cumsum([turn.tokens.size for turn in self.turns])[:-1])

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return reduced(self)

    def __repr__(self) -> str:
        text = f"Trajectory({self.env!r}, {len(self.turns)} turns, {self.token_count} tokens"
        return f"{text}, reward={self.reward:g}, ended={self.ended!r})"


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

    trajectories: Sequence[Trajectory] = checked(attrs.NOTHING, items, kind=Trajectory)
    failures: Sequence[Failure] = checked((), items, kw_only=True, kind=Failure)
    env: str = checked("env", text, kw_only=True)
    index: int | None = checked(None, _check.integer, none=True, kw_only=True, low=0, error=DataError)
    number: int = checked(0, _check.integer, kw_only=True, low=0, error=DataError)
    step: int = checked(0, _check.integer, kw_only=True, low=0, error=DataError)

    @classmethod
    def of_samples(cls, samples: Sequence[Sample], rewards: Sequence[float] | np.ndarray) -> Group:
        """Make a group of single turns from the samples of one prompt and their rewards.

        >>> from rlkit import Sample
        >>> Group.of_samples([Sample([5], [7], [-0.5]), Sample([5], [8], [-1.0])], [0.0, 1.0]).rewards
        array([0., 1.])
        """
        samples = items("Group.of_samples(samples)", samples, Sample)
        where = "Group.of_samples(rewards)"
        _check.entries(where, rewards, len(samples), "one per sample")
        numbers = [reward(f"{where}[{i}]", each) for i, each in enumerate(rewards)]
        return cls([Trajectory([Turn(s, r)], terminated=True) for s, r in zip(samples, numbers, strict=True)])

    @property
    def rewards(self) -> np.ndarray:
        """Return float64 [trajectories], what an estimator takes as one group."""
        return np.array([trajectory.reward for trajectory in self.trajectories], np.float64)

    @property
    def same_start(self) -> bool:
        """Return whether all members answered the same first prompt; if not, comparing them means little."""
        starts = {t.turns[0].prompt.tobytes() for t in self.trajectories if t.turns}
        return len(starts) <= 1

    @property
    def version(self) -> int:
        """Return the oldest policy version among the trajectories; 0 where there are none."""
        return min((t.version for t in self.trajectories), default=0)

    def __len__(self) -> int:
        return len(self.trajectories)

    def __repr__(self) -> str:
        return f"Group({self.env!r}, rewards={self.rewards.round(4).tolist()}, {len(self.failures)} failed)"


def checked_groups(groups: object) -> list[Group]:
    """Return the groups as a list; one group is a list of one. Raises DataError: something else than groups."""
    groups = [groups] if isinstance(groups, Group) else groups
    if isinstance(groups, (str, bytes)) or not isinstance(groups, Iterable) or getattr(groups, "ndim", 1) == 0:
        raise DataError("groups", f"got {_check.describe(groups)}", "groups")
    listed = list(groups)
    for i, group in enumerate(listed):
        _check.require(isinstance(group, Group), f"groups[{i}]", group, "a Group", error=DataError)
    return listed


def token_rewards(trajectory: Trajectory) -> np.ndarray:
    """Return float64 [token_count]: each turn's reward at its last token, NaN where it is unscored.

    A nonterminal reward is added to the last token of all. Where the episode's reward is not the sum of what it got
    (another reduction, or a nonterminal override), it is there alone. The reward of a turn without tokens goes to
    the token before it.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Trajectory, Turn
    >>> first, second = Sample([5], [7, 8], [-0.5, -0.5]), Sample([5, 7, 8, 1], [9], [-1.0])
    >>> turns = [Turn(first, reward=0.25), Turn(second, reward=1.0)]
    >>> token_rewards(Trajectory(turns)), token_rewards(Trajectory(turns, reduction="max"))
    (array([0.  , 0.25, 1.  ]), array([0., 0., 1.]))
    """
    rewards = np.zeros(trajectory.token_count)
    if not rewards.size:
        return rewards
    cut = not trajectory.terminated
    if trajectory.reduction != "sum" or (cut and trajectory.nonterminal_override is not None):
        rewards[-1] = trajectory.reward
        return rewards
    ends = np.cumsum([turn.tokens.size for turn in trajectory.turns]) - 1
    np.add.at(rewards, np.maximum(ends, 0), trajectory.rewards)
    if cut and trajectory.nonterminal_reward is not None:
        rewards[-1] += trajectory.nonterminal_reward
    return rewards


def turn_states(trajectory: Trajectory) -> list[Hashable]:
    """Return what each turn was told since the one before: turns with equal states are comparable."""
    said: list[list[str]] = [[]]
    for message in trajectory.messages:
        if message.get("role") == "assistant":
            said.append([])
        else:
            said[-1].append(str(message.get("content")))
    if len(said) == len(trajectory.turns) + 1:  # each of the policy's messages is a turn, and there is one branch
        return [tuple(texts) for texts in said[:-1]]
    return [turn.prompt.tobytes() for turn in trajectory.turns]


def datums(trajectory: Trajectory, advantages: object = None, *, split: str = "raise", **inputs: object) -> list[Datum]:
    """Return the datums that train a trajectory: its tokens exactly as they were sent and sampled.

    Turns whose prompt begins with the previous prompt and action are merged into one datum, so the cost is linear in
    the length of the conversation. A turn whose prompt does not (a template rewrote the history, or the environment
    replaced it), or that was drawn at another temperature, or otherwise than the policy would (top_p, a penalty, ...),
    starts a new one. The mask is True at the actions' tokens and nowhere else; a datum without any is left out.

    Args:
        trajectory: T turns with n_1 ... n_T action tokens.
        advantages: one number for the trajectory; or [T], one per turn; or a sequence of T arrays [n_i], one number
            per action token (``trajectory.per_turn`` cuts a flat array).
        split: "raise": a DataError where more than one datum is needed, because losses on sequences, such as gspo, act
            per datum and would see parts; "allow".
        inputs: further inputs in the same forms, ``weights=`` for example: what ``token_weights`` gives for
            ``trajectory.token_count`` goes to every datum of the trajectory. Per token also [n_i, K]. A single
            number other than an advantage stays one number per datum. An explicit ``sampling_logprobs=`` takes the
            place of the recorded ones and says that truncation and penalties have been corrected for. ``weights`` are
            multiplied by those of the turns, and are there without being given where a turn has one other than 1.

    Returns:
        One datum or, with split="allow", as many as needed, none where no action has a token. Each has
        ``sampling_logprobs`` and what was given, and ``versions`` where several policies drew its tokens.

    Raises:
        DataError: what was given has none of the forms, or a split is needed.
        ConfigError: split is unknown.

    >>> from rlkit import Sample
    >>> from rlkit.trajectory import Trajectory, Turn, datums
    >>> first = Turn(Sample([5, 6], [7], [-0.5]))
    >>> second = Turn(Sample([5, 6, 7, 1], [8, 9], [-1.0, -2.0]))  # begins with 5 6 7
    >>> (datum,) = datums(Trajectory([first, second]), [0.5, -1.0], weights=0.25)
    >>> datum.tokens, datum.mask.astype(int), datum.inputs["advantages"]
    (array([5, 6, 7, 1, 8, 9]), array([0, 0, 1, 0, 1, 1]), array([ 0. ,  0. ,  0.5,  0. , -1. , -1. ], dtype=float32))

    Peers: one datum per turn, quadratic in the length of the conversation, is what several libraries train; others put
    advantages on the last tokens, tool replies included.
    """
    _check.choice("split", split, ("raise", "allow"))
    _check.require(isinstance(trajectory, Trajectory), "trajectory", trajectory, "an rlkit Trajectory", error=DataError)
    taken = {"tokens", "mask", "inputs", "temperature", "truncated"} & inputs.keys()
    if taken:
        raise DataError(f"datums: {min(taken)!r} comes from the trajectory and cannot be given")
    if advantages is not None:
        inputs["advantages"] = advantages
    turns = trajectory.turns
    weighted = any(turn.weight != 1.0 for turn in turns)
    if weighted:
        inputs.setdefault("weights", 1.0)
    forms = {name: _per_token(name, value, turns) for name, value in inputs.items()}
    if weighted:
        forms["weights"] = _scale_by_turn(forms["weights"], turns)
    runs = _group_turns(turns)
    if len(runs) > 1 and split == "raise":
        raise DataError(
            f"datums: turn {runs[1][0]} {_difference(turns, runs[1][0])}, so this trajectory needs"
            f' {len(runs)} datums, and losses on sequences would see parts; split="allow" accepts that'
        )
    return [_merge_turns([turns[i] for i in run], run, forms) for run in runs]


def _group_turns(turns: Sequence[Turn]) -> list[list[int]]:
    """Return indices of turns, cut where one cannot share a datum with the one before; each run ends with a token."""
    runs: list[list[int]] = []
    for i, turn in enumerate(turns):
        if i and _continues(turns[i - 1], turn):
            runs[-1].append(i)
        else:
            runs.append([i])
    for run in runs:
        while run and not turns[run[-1]].tokens.size:
            run.pop()
    return [run for run in runs if run]


def _continues(before: Turn, turn: Turn) -> bool:
    drawn_alike = (
        turn.sample.temperature == before.sample.temperature and turn.sample.reshapes == before.sample.reshapes
    )
    return drawn_alike and _same_tokens(before, turn)


def _same_tokens(before: Turn, turn: Turn) -> bool:
    """Return whether the turn's prompt begins with the prompt and the action of the one before."""
    p, n = before.prompt.size, before.tokens.size
    return (
        turn.prompt.size >= p + n
        and np.array_equal(turn.prompt[:p], before.prompt)
        and np.array_equal(turn.prompt[p : p + n], before.tokens)
    )


def _difference(turns: Sequence[Turn], index: int) -> str:
    """Return for a message why a turn cannot share a datum with the one before it."""
    before, turn = turns[index - 1], turns[index]
    if not _same_tokens(before, turn):
        return "does not continue the tokens of the turn before it"
    if turn.sample.temperature != before.sample.temperature:
        how = f"temperature {turn.sample.temperature:g}, the turn before it at {before.sample.temperature:g}"
        return f"was drawn at {how}"
    names = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    pairs = [(name, getattr(turn.sample, name), getattr(before.sample, name)) for name in names]
    what = ", ".join(f"{name} {value:g} (before: {other:g})" for name, value, other in pairs if value != other)
    return f"was drawn with {what}"


def _merge_turns(
    turns: Sequence[Turn], run: Sequence[int], forms: Mapping[str, np.ndarray | list[np.ndarray]]
) -> Datum:
    last = turns[-1]
    tokens = np.concatenate([last.prompt, last.tokens])
    mask = np.zeros(tokens.size, bool)
    for turn in turns:
        mask[turn.prompt.size : turn.prompt.size + turn.tokens.size] = True
    inputs: dict[str, np.ndarray] = {}
    for name, parts in forms.items():
        inputs[name] = np.concatenate([parts[i] for i in run]) if isinstance(parts, list) else parts
    truncated = last.sample.reshapes and "sampling_logprobs" not in inputs
    inputs.setdefault("sampling_logprobs", np.concatenate([turn.logprobs for turn in turns]))
    versions = np.concatenate([turn.sample.token_versions for turn in turns])
    if (versions != versions[0]).any():
        inputs.setdefault("versions", versions)
    return Datum(tokens, mask, inputs, temperature=last.sample.temperature, truncated=truncated)


def _tokens_of_turns(where: str, values: Sequence[object] | np.ndarray, turns: Sequence[Turn]) -> list[np.ndarray]:
    return [_tokens_of(f"{where}[{i}]", x, turn) for i, (x, turn) in enumerate(zip(values, turns, strict=True))]


def _per_token(name: str, value: object, turns: Sequence[Turn]) -> np.ndarray | list[np.ndarray]:
    """Return a number as a rank-0 array; everything else as one array [n_i] or [n_i, K] per turn."""
    where = f"datums({name})"
    count = len(turns)
    expected = f"a number, [{count}] (one per turn), or {count} arrays (one entry per action token)"
    _check.require(not isinstance(value, (str, bytes, Mapping)), where, value, expected, error=DataError)
    if isinstance(value, (list, tuple)) and any(isinstance(x, (list, tuple)) or getattr(x, "ndim", 0) for x in value):
        if len(value) != count:
            raise DataError(where, f"has {len(value)} arrays", f"{count}", "one per turn")
        return _tokens_of_turns(where, value, turns)
    array = _check.as_array(where, value, expected)
    if array.ndim >= 2 and array.shape[0] == count:
        return _tokens_of_turns(where, array, turns)
    if array.ndim == 1 and array.size == count:
        _finite(where, array)
        return [np.full(turn.tokens.size, x) for x, turn in zip(array, turns, strict=True)]
    if array.ndim:
        hint = "split a flat array of tokens with trajectory.per_turn(x)"
        raise DataError(where, f"has shape {array.shape}", expected, hint)
    _finite(where, array)
    return [np.full(turn.tokens.size, array) for turn in turns] if name == "advantages" else array


def _scale_by_turn(weights: np.ndarray | list[np.ndarray], turns: Sequence[Turn]) -> list[np.ndarray]:
    """Return the weights, one for all or one array [n_i] per turn, times those of the turns."""
    parts = weights if isinstance(weights, list) else [np.full(turn.tokens.size, weights) for turn in turns]
    return [part * turn.weight for part, turn in zip(parts, turns, strict=True)]


def _tokens_of(where: str, value: object, turn: Turn) -> np.ndarray:
    array = _check.as_array(where, value, f"[{turn.tokens.size}]")
    if array.ndim not in (1, 2) or array.shape[0] != turn.tokens.size:
        what, expected = f"has shape {array.shape}", f"({turn.tokens.size},)"
        raise DataError(where, what, expected, "one entry per token of this turn's action")
    _finite(where, array)
    return array


def _finite(where: str, array: np.ndarray) -> None:
    bad = np.argwhere(~np.isfinite(array))
    if bad.size or (array.ndim == 0 and not np.isfinite(array)):
        index = "".join(f"[{i}]" for i in bad[0])
        raise DataError(where + index, f"is {array[tuple(bad[0])]}", "a finite number")
