"""Text environments in the manner of gymnasium, without importing it."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeAlias, TypeVar, cast

import attrs

from rlkit import _check
from rlkit.envs import _adapters
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings
from rlkit.errors import EnvError

__all__ = ["gymnasium"]

_T = TypeVar("_T")
_Form: TypeAlias = Callable[..., object]  # of an action, or of an observation


def gymnasium(
    make: Callable[[], object],
    *,
    size: int = 1024,
    seed: int = 0,
    split: str = "train",
    name: str = "gymnasium",
    action: Callable[[Action], object] = str,
    text: Callable[[object], object] | None = None,
    settings: TaskSettings | None = None,
) -> Tasks:
    """Return tasks of an environment with gymnasium's methods, each with its own seed.

    Args:
        make: a fresh environment: ``lambda: gymnasium.make("Game-v0")``, or its class. Its ``reset(seed=...)`` gives
            (observation, info), its ``step(action)`` five values; they may be ``async``. ``close`` may be missing.
        size: how many tasks, in [1, 2^30].
        seed: >= 0; another seed, other tasks.
        split: "train", "test" or "validation": no seed is in two of them.
        name: for metrics.
        action: makes the environment's action of the policy's text; for spaces that are not text.
        text: makes the policy's message of an observation: text, messages or token ids. None: the observation.
        settings: where these tasks differ from the rollout's settings.

    An action that ``action`` refuses with a ``ValueError`` is the policy's mistake, and ends the episode with reward 0
    and ``info["invalid_action"]``.

    Raises:
        ConfigError: an argument is not what it should be.

    >>> class Parity:
    ...     def reset(self, *, seed=None, options=None): self.odd = seed % 2; return f"Is {seed} odd?", {}
    ...     def step(self, action): return "", float(action == ("yes" if self.odd else "no")), True, False, {}
    >>> task = gymnasium(Parity, split="test")[0]
    >>> env = task.make()
    >>> env.reset(task.seed), env.step(Action("yes")).reward
    ('Is 3285312249 odd?', 1.0)
    """
    for label, value in (("make", make), ("action", action), ("text", text)):
        _check.require(callable(value) or (label == "text" and value is None), label, value, "a function")
    _check.integer("size", size, low=1, high=2**30)
    seeds = _adapters.seeds(split, seed)
    fresh = cast("Callable[[], _Gym]", make)

    def made(_: int) -> _Env:
        return _Env(fresh(), name, action, text)

    return Tasks(made, size, name=name, split=split, seeds=seeds, settings=settings)


class _Gym(Protocol):
    """What is used of an environment; both methods may be ``async``, and there may be a ``close``."""

    def reset(self, *, seed: int) -> object: ...
    def step(self, action: object, /) -> object: ...


@attrs.define(eq=False, repr=False)
class _Env:
    """One environment."""

    _env: _Gym
    _name: str
    _action: _Form
    _text: _Form | None

    def reset(self, seed: int) -> Observation | Awaitable[Observation]:
        answer = self._env.reset(seed=seed)
        return self._awaited(answer, self._first) if inspect.isawaitable(answer) else self._first(answer)

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        try:
            move = self._action(action)
        except ValueError as error:
            return StepResult("", 0.0, terminated=True, info={"invalid_action": str(error)[:200]})
        answer = self._env.step(move)
        return self._awaited(answer, self._next) if inspect.isawaitable(answer) else self._next(answer)

    def close(self) -> Awaitable[None] | None:
        close: Callable[[], Awaitable[None] | None] | None = getattr(self._env, "close", None)
        return None if close is None else close()

    def _said(self, observation: Observation) -> Observation:
        return observation if self._text is None else cast("Observation", self._text(observation))

    async def _awaited(self, answer: Awaitable[object], form: Callable[[object], _T]) -> _T:
        return form(await answer)

    def _first(self, answer: object) -> Observation:
        if not isinstance(answer, tuple) or len(answer) != 2:
            what = f"reset returned {type(answer).__name__}"
            raise EnvError(f"environment {self._name!r}", what, "(observation, info)")
        return self._said(answer[0])

    def _next(self, answer: object) -> StepResult:
        if not isinstance(answer, tuple) or len(answer) != 5:
            size = f" of {len(answer)}" if isinstance(answer, tuple) else ""
            what = f"step returned {type(answer).__name__}{size}"
            raise EnvError(f"environment {self._name!r}", what, "five values")
        observation, reward, terminated, truncated, info = answer
        return StepResult(self._said(observation), reward, terminated, truncated, info)
