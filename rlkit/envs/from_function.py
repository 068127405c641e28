"""The simplest environment: a prompt, and a function that says what the answer is worth."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import cast

import attrs
import numpy as np

from rlkit import _check
from rlkit._calls import answered
from rlkit.envs._checked import observation
from rlkit.envs.protocol import Action, Observation, StepResult, Tasks, TaskSettings
from rlkit.errors import ConfigError, DataError, EnvError, UnknownNameError

__all__ = ["function"]

_FORMS = "rows of text, messages or token ids, or mappings with a 'prompt'"


@answered
def function(
    prompts: object,
    reward: Callable[..., object],
    *,
    split: str = "train",
    group: bool = False,
    name: str = "function",
    settings: TaskSettings | None = None,
) -> Tasks:
    """Tasks of one turn each: a prompt is answered, and a function scores the answer.

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
        DataError: there are no rows, or one is of no such form.
        ConfigError: the reward is no function, or wants a field that the rows do not have.
        UnknownNameError: no such split.

    >>> rows = {"train": [{"prompt": "2 + 3 =", "answer": 5}], "test": [{"prompt": "4 + 4 =", "answer": 8}]}
    >>> tasks = function(rows, lambda text, answer: float(str(answer) in text), split="test")
    >>> env = tasks[0].make()
    >>> env.reset(0), env.step(Action("It is 8.")).reward
    ('4 + 4 =', 1.0)
    """
    if isinstance(prompts, Mapping):
        if split not in prompts:
            known = ", ".join(map(str, prompts)) or "none"
            raise UnknownNameError(f"rlkit.envs.function: no split named {split!r}. There are: {known}")
        prompts = prompts[split]
    if isinstance(prompts, str) or not (hasattr(prompts, "__len__") and hasattr(prompts, "__getitem__")):
        raise DataError("prompts", f"got {_check.shown(prompts)}", _FORMS)
    if len(prompts) == 0:
        raise DataError("prompts", "is empty", "at least one row")
    _check.require(callable(reward), "reward", reward, "a function of the answer")
    _check.flag("group", group)
    fields = _fields(reward)
    ready = isinstance(prompts, (list, tuple))  # others may read each row from a disk
    for i in range(len(prompts) if ready else 1):
        row = prompts[i]
        _prompt(f"prompts[{i}]", row)
        fields(f"prompts[{i}]", row)

    def make(index: int) -> _Prompt:
        row = prompts[index]
        where = f"prompts[{index}]"
        info = {"answer": row["answer"]} if isinstance(row, Mapping) and "answer" in row else {}
        scored = None if group else functools.partial(reward, **fields(where, row))
        return _Prompt(_prompt(where, row), scored, info, f"in the reward {_name(reward)} for {where}")

    def scores(index: int) -> Callable[[Sequence[Action]], object]:
        return lambda actions: reward(actions, **fields(f"prompts[{index}]", prompts[index]))

    return Tasks(make, len(prompts), name=name, split=split, settings=settings, scores=scores if group else None)


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
        with _noted(self._where):
            value = None if self._reward is None else self._reward(action)  # None: the group's is to come
        return self._later(value) if inspect.isawaitable(value) else self._result(value)

    def close(self) -> None:
        pass

    def _result(self, value: object) -> StepResult:
        return StepResult("", cast("float | None", value), terminated=True, info=self._info)

    async def _later(self, value: Awaitable[object]) -> StepResult:
        with _noted(self._where):
            return self._result(await value)


@contextlib.contextmanager
def _noted(where: str) -> Iterator[None]:
    """Let an error of the user's own function pass, with a note of where it was raised."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def _name(reward: Callable[..., object]) -> str:
    return repr(getattr(reward, "__name__", type(reward).__name__))


def _prompt(where: str, row: object) -> Observation:
    """Return the prompt of a row."""
    if isinstance(row, Mapping):
        if "prompt" not in row:
            raise DataError(where, f"has only {sorted(map(str, row))}", "a field 'prompt'")
        row, where = row["prompt"], f"{where}['prompt']"
    if isinstance(row, np.ndarray) and row.dtype.kind not in "iu":
        raise DataError(where, f"got {_check.shown(row)}", "text, chat messages or token ids")
    try:
        return observation(row, where=where, max_chars=10**9)
    except EnvError as error:
        raise DataError(str(error)) from error


def _fields(reward: Callable[..., object]) -> Callable[[str, object], dict[str, object]]:
    """Return a function of (where, row) that gives the fields of a row that the reward names."""
    try:
        parameters = list(inspect.signature(reward).parameters.values())[1:]
    except ValueError:  # some built-in functions do not say
        return lambda where, row: {}
    _check_form(reward)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    every = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def fields(where: str, row: object) -> dict[str, object]:
        row_fields = dict(row) if isinstance(row, Mapping) else {"prompt": row}
        for parameter in named:
            if parameter.default is parameter.empty and parameter.name not in row_fields:
                what = f"has no field {parameter.name!r}"
                raise ConfigError(where, what, "all that the reward names", ", ".join(map(str, row_fields)))
        return {str(k): v for k, v in row_fields.items() if every or k in {p.name for p in named}}

    return fields


def _check_form(reward: Callable[..., object]) -> None:
    """Raise ConfigError for a reward of another library's form, which takes all completions and gives a list."""
    names = list(inspect.signature(reward).parameters)
    why = ""
    if {"completions", "completion_ids"} & set(names):
        why = "it takes completions, and gives a list of rewards"
    elif {"solution_str", "data_source"} <= set(names):
        why = "it takes data_source and solution_str"
    if why:
        raise ConfigError(
            f"reward: {_name(reward)} is of another library's form: {why}; here it is called once for each answer: "
            "def reward(text, answer): return 1.0, with the row's fields by name (for whole groups: group=True)"
        )
