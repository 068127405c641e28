"""The simplest environment: a prompt, and a function that scores the answer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

import attrs

from rlkit import _check
from rlkit.envs._prompts import Rows, note_errors
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings
from rlkit.errors import DataError, EnvError

__all__ = ["function"]


def function(
    prompts: object,
    reward: Callable[..., object],
    *,
    split: str = "train",
    group: bool = False,
    name: str = "function",
    settings: TaskSettings | None = None,
) -> Tasks:
    """Return tasks of one turn each: a prompt is answered, and a function scores the answer.

    Args:
        prompts: rows: anything with a length and an index. A row is a prompt (text, chat messages, or token ids) or a
            mapping with a ``"prompt"`` and whatever the reward needs besides. Or a mapping from splits to rows.
        reward: called with the ``Action`` (a string that knows its tokens and why it ended), and by keyword with those
            of the row's fields that it names; ``async`` or not, and plain ones run in threads. Gives a finite number;
            None: it cannot tell, and the episode counts as failed.
        split: which rows to take, where ``prompts`` has several splits.
        group: the reward is called once for a group, when all its answers are there: with a list of actions, and it
            gives a list of rewards. For rewards that compare answers, and for models that score batches.
        name: for metrics.
        settings: what these tasks want to have different.

    Raises:
        DataError: there are no rows, or one has another form.
        ConfigError: the reward is not a function, or wants a field that the rows do not have.
        UnknownNameError: no such split.

    >>> rows = {"train": [{"prompt": "2 + 3 =", "answer": 5}], "test": [{"prompt": "4 + 4 =", "answer": 8}]}
    >>> tasks = function(rows, lambda text, answer: float(str(answer) in text), split="test")
    >>> env = tasks[0].make()
    >>> env.reset(0), env.step(Action("It is 8.")).reward
    ('4 + 4 =', 1.0)
    """
    rows = Rows("function", prompts, reward, split=split)
    _check.flag("group", group)

    def make(index: int) -> _Prompt:
        row = rows[index]
        scored = None if group else functools.partial(reward, **row.fields)
        return _Prompt(row.prompt, scored, row.info, row.note)

    def scores(index: int) -> Callable[[Sequence[Action]], object]:
        return lambda actions: reward(actions, **rows[index].fields)

    return Tasks(make, len(rows), name=name, split=split, settings=settings, scores=scores if group else None)


@attrs.frozen(eq=False)
class _Prompt:
    """One prompt."""

    _prompt: Observation
    _reward: Callable[[Action], object] | None
    _info: Mapping[str, object]
    _where: str

    def reset(self, seed: int) -> Observation:  # noqa: ARG002
        return self._prompt

    def step(self, action: Action) -> StepResult | Awaitable[StepResult]:
        with note_errors(self._where):
            value = None if self._reward is None else self._reward(action)  # None: the group's is to come
        return self._later(value) if inspect.isawaitable(value) else self._result(value)

    def close(self) -> None:
        pass

    def _result(self, value: object) -> StepResult:
        try:
            return StepResult("", cast("float | None", value), terminated=True, info=self._info)
        except DataError as error:  # text, say, which is told of the reward and its row
            raise EnvError(f"{self._where}: {str(error).removeprefix('StepResult.')}") from None

    async def _later(self, value: Awaitable[object]) -> StepResult:
        with note_errors(self._where):
            return self._result(await value)
