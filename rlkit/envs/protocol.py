"""The protocol of environments, and sets of tasks to play in them.

An environment is any object with ``reset``, ``step`` and ``close``, plain or ``async``; plain ones run in threads. One
object plays one episode. A harness is one that drives itself: it has ``play`` in place of the first two. A ``Task``
makes such objects, all for the same problem, so that a group can be compared; a ``Tasks`` is a set of them from which
batches are drawn.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeVar, overload, runtime_checkable

import attrs

from rlkit import _check
from rlkit._check import checked
from rlkit._interaction import Action, Message, Observation, StepResult
from rlkit._seeds import epoch_places
from rlkit.errors import ConfigError

if TYPE_CHECKING:
    from rlkit.gateway import Branch, Session

__all__ = [
    "Action",
    "Credit",
    "Env",
    "Harness",
    "Message",
    "Observation",
    "StepResult",
    "Task",
    "TaskSettings",
    "TaskSource",
    "Tasks",
]

Credit: TypeAlias = Literal["every", "last"] | Callable[[Sequence["Branch"]], Sequence[float]]

Reduction: TypeAlias = Literal["sum", "mean", "max", "min", "last"]
REDUCTIONS = ("sum", "mean", "max", "min", "last")
_ENDS = ("nonterminal_reward", "nonterminal_override")
_S = TypeVar("_S", bound="TaskSettings")


@runtime_checkable
class Env(Protocol):
    """One episode: ``reset`` once, ``step`` until it says that it is over, ``close`` always.

    Each method may be ``async``. An optional attribute ``tools`` lists function schemas in the form that chat
    templates take; it is read after ``reset`` and rendered into the prompt.
    """

    def reset(self, seed: int) -> Observation | Awaitable[Observation]:
        """Begin the episode; the same seed begins the same one."""

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        """Play one action. The five values of gymnasium, as a tuple, do as well as a ``StepResult``."""

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called once, whatever happened before."""


@runtime_checkable
class Harness(Protocol):
    """One episode that drives itself: ``play`` once, ``close`` always.

    An environment waits for actions; a harness, such as an agent that was written for an API, asks for them, through
    the endpoints of a session. Each method may be ``async``. An optional attribute ``credit`` says which branches of
    the session are trained, as of ``rlkit.envs.agent``.
    """

    def play(self, session: Session, seed: int) -> StepResult | Awaitable[StepResult]:
        """Play the episode; return its reward, and whether it came to its own end."""

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called once, whatever happened before."""


@attrs.frozen(kw_only=True)
class TaskSettings:
    """How the episodes of an environment are played and scored; None leaves it to the rollout.

    Attributes:
        n: episodes per task, >= 1.
        min_n: a group that lost episodes to failures is kept from this many on, in [1, n].
        temperature: of sampling, in [0.001, 1000]; 0 is greedy.
        max_tokens: per turn, >= 1.
        max_turns: per episode, >= 1.
        max_total_tokens: the policy's own in an episode, >= 1.
        deadline: seconds from the episode's start, > 0.
        reduction: an episode's reward from all that it got: "sum", "mean", "max", "min" or "last".
        nonterminal_reward: one more reward, after those of the steps, for an episode that did not come to an end of its
            own; finite. As OpenReward's setting of that name.
        nonterminal_override: the reward of such an episode instead of all that; finite, and not with
            ``nonterminal_reward``.

    Raises:
        ConfigError: a value is out of range.

    >>> TaskSettings(n=8).over(TaskSettings(n=4, max_turns=5)).max_turns
    5
    """

    n: int | None = checked(None, _check.integer, none=True, low=1)
    min_n: int | None = checked(None, _check.integer, none=True, low=1)
    temperature: float | None = checked(None, _check.temperature, none=True, zero=True)
    max_tokens: int | None = checked(None, _check.integer, none=True, low=1)
    max_turns: int | None = checked(None, _check.integer, none=True, low=1)
    max_total_tokens: int | None = checked(None, _check.integer, none=True, low=1)
    deadline: float | None = checked(None, _check.real, none=True, above=0.0, why="seconds")
    reduction: Reduction | None = checked(None, _check.choice, none=True, options=REDUCTIONS)
    nonterminal_reward: float | None = checked(None, _check.real, none=True)
    nonterminal_override: float | None = checked(None, _check.real, none=True)

    def __attrs_post_init__(self) -> None:
        name = type(self).__name__
        if self.n is not None and self.min_n is not None:
            _check.integer(f"{name}.min_n", self.min_n, low=1, high=self.n, why="of n episodes")
        if self.nonterminal_reward is not None and self.nonterminal_override is not None:
            what = "is given with nonterminal_override"
            raise ConfigError(f"{name}.nonterminal_reward", what, "only one of the two")

    def over(self, defaults: _S) -> _S:
        """Return ``defaults`` with what these settings say in its place; ``min_n`` is then at most ``n``."""
        said = {name: getattr(self, name) for name in attrs.fields_dict(TaskSettings)}
        said = {name: value for name, value in said.items() if value is not None}
        if said.keys() & set(_ENDS):  # one of the two, so not the other of the defaults
            said = dict.fromkeys(_ENDS) | said
        n, min_n = said.get("n", defaults.n), said.get("min_n", defaults.min_n)
        if n is not None and min_n is not None:
            said["min_n"] = min(n, min_n)
        return attrs.evolve(defaults, **said)


@attrs.frozen
class Task:
    """One problem. A group is ``n`` episodes of one task.

    Attributes:
        make: a fresh environment for one episode; called once per episode.
        name: the environment's, for metrics ``env/<name>/...``.
        index: which item of its set it is.
        seed: given to ``reset`` for every member of a group; None: the rollout derives one, the same for all members.
        settings: what this environment wants to have different.
        score: for rewards that compare: called once with the last actions of a group's episodes, when all have ended.
            It gives a reward for each, which is added to that of its last step. May be ``async``. None: there is none.
    """

    make: Callable[[], Env | Harness] = attrs.field(repr=False)
    name: str = "env"
    index: int | None = None
    seed: int | None = checked(None, _check.integer, none=True, low=0)
    settings: TaskSettings = attrs.field(factory=TaskSettings)
    score: Callable[[Sequence[Action]], object] | None = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        _check.require(callable(self.make), "Task.make", self.make, "a callable")
        check_name("Task.name", self.name)
        _check.require(isinstance(self.settings, TaskSettings), "Task.settings", self.settings, "TaskSettings")


@runtime_checkable
class TaskSource(Protocol):
    """Tasks, and an endless stream of them: ``Tasks`` or a mixture."""

    def __len__(self) -> int: ...

    @overload
    def __getitem__(self, item: int) -> Task: ...
    @overload
    def __getitem__(self, item: slice) -> Sequence[Task]: ...

    def at(self, position: int, *, seed: int = 0) -> Task:
        """Return the task at this place of the stream, counted from 0."""

    def batch(self, step: int, size: int, *, seed: int = 0) -> list[Task]:
        """Return the tasks at ``step * size`` and the ``size - 1`` places after it."""


class Tasks(Sequence[Task]):
    """The tasks of one environment and split.

    Args:
        make: index -> a fresh environment for that task.
        size: how many there are, >= 1.
        name: the environment's, for metrics.
        split: "train", "test", or whatever the environment calls it.
        seeds: index -> what ``reset`` is given; None leaves it to the rollout.
        settings: what this environment wants to have different.
        scores: index -> the task's ``score``; None: there is none.

    ``tasks[i]`` is a task, ``tasks[:100]`` a smaller set. ``tasks.batch(step, size)`` depends on its arguments alone,
    so a resumed run goes on exactly where it was.

    >>> class Echo:
    ...     def __init__(self, word): self.word = word
    ...     def reset(self, seed): return f"Say {self.word}"
    ...     def step(self, action): return StepResult(reward=float(action == self.word), terminated=True)
    ...     def close(self): pass
    >>> tasks = Tasks(lambda i: Echo("abc"[i]), 3, name="echo")
    >>> [task.index for task in tasks.batch(0, 2)], [task.index for task in tasks.batch(1, 2)]
    ([1, 0], [2, 2])
    >>> tasks[1].make().reset(0)
    'Say b'
    """

    def __init__(
        self,
        make: Callable[[int], Env | Harness],
        size: int | Sequence[int],
        *,
        name: str = "env",
        split: str = "train",
        seeds: Callable[[int], int] | None = None,
        settings: TaskSettings | None = None,
        scores: Callable[[int], Callable[[Sequence[Action]], object]] | None = None,
    ) -> None:
        _check.require(callable(make), "Tasks.make", make, "a callable of an index")
        _check.require(not isinstance(size, (str, bytes)), "Tasks.size", size, "an integer, or indices")
        self._indices = size if isinstance(size, Sequence) else range(_check.integer("Tasks.size", size, low=1))
        self._make = make
        self._seeds = seeds
        self._scores = scores
        self.name = check_name("Tasks.name", name)
        self.split = check_name("Tasks.split", split)
        self.settings = TaskSettings() if settings is None else settings

    def __len__(self) -> int:
        return len(self._indices)

    @overload
    def __getitem__(self, item: int) -> Task: ...
    @overload
    def __getitem__(self, item: slice) -> Tasks: ...
    def __getitem__(self, item: int | slice) -> Task | Tasks:
        """Return one task, or the set of some."""
        if isinstance(item, slice):
            indices = self._indices[item]
            _check.integer("Tasks[...]: number of tasks", len(indices), low=1)
            part = copy.copy(self)
            part._indices = indices  # noqa: SLF001  # of the same class
            return part
        try:
            index = self._indices[item]
        except IndexError:  # which ends a for loop, so it stays one
            raise IndexError(f"tasks[{item}]: {self!r} has {len(self)} tasks") from None
        seed = None if self._seeds is None else self._seeds(index)
        score = None if self._scores is None else self._scores(index)
        return Task(functools.partial(self._make, index), self.name, index, seed, self.settings, score)

    def __iter__(self) -> Iterator[Task]:
        return (self[i] for i in range(len(self)))

    def at(self, position: int, *, seed: int = 0) -> Task:
        """Return the task at this place of the endless stream: one shuffled pass over the set after the other."""
        position, seed = _check.integer("position", position, low=0), _check.integer("seed", seed, low=0)
        return self[epoch_places(len(self), position, 1, seed, f"{self.name}/{self.split}")[0]]

    def batch(self, step: int, size: int, *, seed: int = 0) -> list[Task]:
        """Return the tasks of a step: each comes once per pass, whatever the size, and no remainder is dropped.

        Args:
            step: >= 0.
            size: >= 1; more than there are tasks repeats them.
            seed: >= 0, of the order.
        """
        step, size = _check.integer("step", step, low=0), _check.integer("size", size, low=1)
        return [self.at(position, seed=seed) for position in range(step * size, (step + 1) * size)]

    def __repr__(self) -> str:
        return f"Tasks({self.name!r}, split={self.split!r}, size={len(self)})"


def check_credit(credit: object) -> None:
    """Raise ConfigError for what does not say which branches are trained."""
    if credit not in ("every", "last") and not callable(credit):
        raise ConfigError("credit", f"got {_check.describe(credit)}", "'every', 'last', or a function of branches")


def check_name(where: str, value: object) -> str:
    """Return ``value`` as a name: a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(where, f"got {_check.describe(value)}", "a string that is not empty")
    return value
