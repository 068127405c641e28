"""Text environments in the manner of gymnasium, without importing it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar, cast

from rlkit import _check
from rlkit._calls import answered
from rlkit.envs import _splits
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings
from rlkit.errors import EnvError

_T = TypeVar("_T")
_Form: TypeAlias = Callable[..., object]  # of an action, or of an observation

__all__ = ["gymnasium"]


@answered
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
    """Tasks of an environment with gymnasium's methods, each with its own seed.

    Args:
        make: a fresh environment: ``lambda: gymnasium.make("Game-v0")``, or its class. Its ``reset(seed=...)`` gives
            (observation, info), its ``step(action)`` five values; they may be ``async``. ``close`` may be missing.
        size: how many tasks, in [1, 2^30].
        seed: >= 0; another seed, other tasks.
        split: "train", "test" or "validation": no seed is in two of them.
        name: for metrics.
        action: what the environment is given, made of what the policy said; for spaces that are not text.
        text: what the policy is told, made of an observation: text, messages or token ids. None: the observation.
        settings: what these tasks want to have different.

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
    seeds = _splits.seeds(split, seed)
    fresh = functools.partial(_fresh, make, name, action, text)
    return Tasks(fresh, size, name=name, split=split, seeds=seeds, settings=settings)


def _fresh(make: Callable[[], Any], name: str, action: _Form, text: _Form | None, _: int) -> _Env:
    return _Env(make(), name, action, text)


class _Env:
    """One environment."""

    def __init__(self, env: Any, name: str, action: _Form, text: _Form | None) -> None:
        self._env = env
        self._name = name
        self._action = action
        self._text = text

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
            raise EnvError(f"environment {self._name!r}", f"reset gave {type(answer).__name__}", "(observation, info)")
        return self._said(answer[0])

    def _next(self, answer: object) -> StepResult:
        if not isinstance(answer, tuple) or len(answer) != 5:
            what = f"step gave {type(answer).__name__}" + (f" of {len(answer)}" if isinstance(answer, tuple) else "")
            raise EnvError(f"environment {self._name!r}", what, "five values")
        observation, reward, terminated, truncated, info = answer
        return StepResult(self._said(observation), reward, terminated, truncated, info)
